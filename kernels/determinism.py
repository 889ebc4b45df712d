"""The switch of `--deterministic`, and what is computed in this mode. docs/determinism.md says what it promises. Needs no torch.

A row-parallel layer sums over its input features, which ranks share. In this mode the sum is a binary tree over PARTS equal parts of
the features, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). Part sums and the tree's nodes are rounded to the model's data type. 1, 2, 4 or
8 ranks, or streams of a desync model, each hold a whole subtree, so the sum has the same bits on all of them
(Zhang et al., "Deterministic inference across tensor parallel sizes", arXiv:2511.17826).
"""

import math
from collections.abc import Sequence
from typing import Any

from errors import UserError

PARTS = 8
_enabled = False


def enable(on: bool = True) -> None:
    """Turn the mode on, or off, for this process. To be called before a model is built."""
    global _enabled
    _enabled = on


def enabled() -> bool:
    return _enabled


def parts(in_features: int) -> int:
    """Into how many parts a row-parallel layer with so many input features, over all ranks, is cut."""
    return math.gcd(PARTS, in_features)


def tree_sum(values: Sequence[Any]) -> Any:
    """The sum of tensors, whose number is a power of two, as a binary tree. Each node is rounded to their data type."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def refuse(on: bool, *, compiled: object = None, adapters: object = None) -> None:
    """Raises UserError if the mode is on, or will be, and one of these is asked for. To be called before a model is read."""
    if on and compiled:
        raise UserError("--compile chooses the order of sums itself; leave it or --deterministic out")
    if on and adapters:
        raise UserError("--deterministic does not compute adapters; leave it or the adapters out")


def check_split(count: int, what: str) -> None:
    """Raises UserError unless a model that `what` (`2 ranks`) hold in `count` shards has the same bits as a whole one."""
    if _enabled and PARTS % count:
        raise UserError(f"--deterministic sums over 1, 2, 4 or {PARTS} shards, not over {what}; use one of these numbers")
