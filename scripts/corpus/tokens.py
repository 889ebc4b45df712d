"""The synthetic corpus as a token file for training."""

from pathlib import Path

import numpy as np
from tqdm import tqdm

from scripts.corpus.documents import documents, render
from scripts.corpus.tokenizer import load_tokenizer
from training.token_file import TokenWriter, tokenizer_fingerprint

TOKENS_PER_DOCUMENT = 80  # on average
CHUNK = 4096  # documents that the tokenizer's threads encode together


def write_corpus(path: Path, folder: Path, seed: int, tokens: int) -> None:
    """Write the first documents of the corpus with this seed as a token file of about so many tokens, unless the file exists.

    folder: of the tokenizer. Raises UserError if it has none, and if the file cannot be written.
    """
    if path.with_suffix(".json").exists():
        return
    tokenizer, count = load_tokenizer(folder), tokens // TOKENS_PER_DOCUMENT
    with (
        TokenWriter(path, tokenizer.get_vocab_size(), tokenizer_fingerprint(folder)) as writer,
        tqdm(total=count, unit="doc", desc="encode", disable=None) as bar,
    ):
        for first in range(0, count, CHUNK):
            texts = [render(document) for document in documents(seed, min(CHUNK, count - first), start=first)]
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            writer.append(np.array([token for encoding in encodings for token in encoding.ids]))
            bar.update(len(texts))
