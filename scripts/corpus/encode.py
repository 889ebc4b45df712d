"""Token ids of the synthetic corpus, encoded by several processes. Imports no torch, so that these start fast."""

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from errors import UserError
from scripts.corpus.documents import documents, render
from scripts.corpus.tokenizer import load_tokenizer

CHUNK = 512  # documents per work item


@dataclass(frozen=True)
class _Range:
    """One work item: `count` documents from `start`."""

    seed: int
    start: int
    count: int
    split: str


_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer_path: Path) -> None:
    """Load the tokenizer once per process. Its own threads stay off, because the processes run in parallel already."""
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = load_tokenizer(tokenizer_path)


def _encode_range(work: _Range) -> tuple[int, np.ndarray]:
    """The number of documents in a range, and their token ids."""
    assert _worker_tokenizer is not None
    texts = [render(document) for document in documents(work.seed, work.count, work.split, start=work.start)]
    encodings = _worker_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = [token for encoding in encodings for token in encoding.ids]
    return work.count, np.array(ids, dtype=np.uint16)


def encode_corpus(tokenizer_path: Path, seed: int, count: int, processes: int, split: str = "train") -> np.ndarray:
    """Token ids (uint16) of the first `count` documents of a split, rendered and concatenated. They are the same for any number of processes.

    Raises UserError for a missing tokenizer, a vocabulary too large for uint16, and as `documents` does.
    """
    documents(seed, count, split)
    if load_tokenizer(tokenizer_path).get_vocab_size() > 1 << 16:
        raise UserError(f"the tokenizer at {tokenizer_path} has more than 65536 tokens; ids are stored as uint16")
    ranges = [_Range(seed, first, min(CHUNK, count - first), split) for first in range(0, count, CHUNK)]
    pieces = [np.empty(0, dtype=np.uint16)]
    with tqdm(total=count, unit="doc", desc="encode", disable=None) as bar:
        for done, ids in _encoded(tokenizer_path, ranges, processes):
            pieces.append(ids)
            bar.update(done)
    return np.concatenate(pieces)


def _encoded(tokenizer_path: Path, ranges: Sequence[_Range], processes: int) -> Iterator[tuple[int, np.ndarray]]:
    """The encoded ranges in order, computed in this process or in a pool."""
    if processes <= 1 or len(ranges) <= 1:
        _start_worker(tokenizer_path)
        yield from map(_encode_range, ranges)
        return
    context, program = multiprocessing.get_context("spawn"), sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules[__name__]  # a new process imports it; the program may import torch
    try:
        pool = context.Pool(min(processes, len(ranges)), _start_worker, (tokenizer_path,))
    finally:
        sys.modules["__main__"] = program
    with pool:
        yield from pool.imap(_encode_range, ranges)
