"""The synthetic corpus as a token file for training."""

import fcntl
import os
from pathlib import Path

from errors import UserError
from files import writing
from hf_config import read_config
from scripts.corpus.encode import encode_corpus
from tokenizer_files import load_tokenizer
from training.token_file import open_tokens, tokenizer_fingerprint, write_tokens

TOKENS_PER_DOCUMENT = 80  # on average


def write_corpus(path: Path, tokenizer: Path, seed: int, tokens: int, split: str = "train", most: int | None = None) -> None:
    """Write the first documents of a split of the corpus with this seed as a token file of about so many tokens, and at most `most`, with
    the tokenizer in the folder `tokenizer`, unless the file exists. Of several commands at once the first writes it, and the others wait. Raises UserError as
    `encode_corpus` does, and if the file cannot be written."""
    if path.with_suffix(".json").exists():
        return
    with writing(path):
        lock = path.with_suffix(".lock").open("w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.with_suffix(".json").exists():
            return
        ids = encode_corpus(tokenizer, seed, tokens // TOKENS_PER_DOCUMENT, os.cpu_count() or 1, split)
        write_tokens(path, ids[:most], load_tokenizer(tokenizer).vocab_size, tokenizer_fingerprint(tokenizer))


def write_enough(path: Path, model: Path, seed: int, tokens: int, split: str = "train") -> None:
    """The same with the tokenizer of `model` and exactly so many tokens. Raises UserError if the file exists and has fewer."""
    write_corpus(path, model, seed, int(1.05 * tokens) + 100 * TOKENS_PER_DOCUMENT, split, tokens)
    count = len(open_tokens(path, read_config(model / "config.json").vocab_size).tokens)
    if count < tokens:
        raise UserError(f"{path} has {count:,} tokens of {tokens:,}, so some would repeat; remove it, to have it written again")
