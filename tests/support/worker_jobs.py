"""Jobs for worker processes. They are in their own file so that workers do not import the libraries of the tests."""

import os
import sys
import time

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split

from errors import UserError
from server.errors import ApiError
from server.workers import worker_tokenizer


def encode(text: str) -> list[int]:
    return worker_tokenizer().encode(text)


def hold_memory(size: int) -> int:
    return len(bytearray(size))


def endless_in_c() -> int:
    return (7**9_000_000 % 10) ** 20_000_000 % 3 + sum(10**10_000_000 // 7 for _ in range(100))


def until_there(path: str, data: bytes = b"") -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def count_runs(log: str, gate: str) -> int:
    """Runs until file `gate` exists. Returns how often it has begun."""
    with open(log, "a") as file:
        file.write("x")
    until_there(gate)
    return os.path.getsize(log)


def refuse(kind: str) -> None:
    raise {"api": ApiError(400, "no", "prompt", "bad"), "user": UserError("mend it"), "bug": KeyError("bug")}[kind]


def limited() -> tuple[bool, int]:
    return "torch" in sys.modules, os.getpid()


def panic() -> None:
    """A library written in Rust fails: its exception is no `Exception`, and it prints a message."""
    library = Tokenizer(BPE(vocab={"x": 0}, merges=[]))
    library.pre_tokenizer = Split(Regex("(?:x+x+)+y"), "isolated")
    library.encode("x" * 60)
