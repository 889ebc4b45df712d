"""The synthetic corpus as a token file for training."""

import fcntl
import os
from pathlib import Path

from files import writing
from scripts.corpus.encode import encode_corpus
from text.tokenizer_files import load_tokenizer
from training.token_file import tokenizer_fingerprint, write_tokens

TOKENS_PER_DOCUMENT = 80  # on average


def write_corpus(path: Path, tokenizer: Path, seed: int, tokens: int, split: str = "train") -> None:
    """Write the first documents of a split of the corpus with this seed as a token file of about so many tokens, with
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
        write_tokens(path, ids, load_tokenizer(tokenizer).vocab_size, tokenizer_fingerprint(tokenizer))
