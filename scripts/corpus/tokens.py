"""The synthetic corpus as a token file for training."""

import os
from pathlib import Path

from scripts.corpus.encode import encode_corpus
from tokenizer_files import load_tokenizer
from training.token_file import tokenizer_fingerprint, write_tokens

TOKENS_PER_DOCUMENT = 90  # on average


def write_corpus(path: Path, tokenizer: Path, seed: int, documents: int) -> None:
    """Write the first `documents` documents of the corpus with this seed as a token file, with the tokenizer in the folder
    `tokenizer`. Raises UserError as `encode_corpus` does."""
    ids = encode_corpus(tokenizer, seed, documents, processes=os.cpu_count() or 1)
    write_tokens(path, ids, load_tokenizer(tokenizer).vocab_size, tokenizer_fingerprint(tokenizer))
