"""Quality beside speed: how well the embedded model of a variant writes and answers, as `scripts/accuracy.py` measured it.

A sweep runs shapes with random weights, whose text says nothing; its tables show what the small model that was trained with the
same residual variant (`models/tiny-*`), and the same quantized sums, reaches.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from scripts.results import RESULTS
from scripts.sweep_rows import Setting

TASKS = ("question", "arithmetic", "sorting", "counting", "copying")
EXACT = "gloo"  # the communicator that the others are compared with
QUANTIZED = ("int8", "int6", "int4", "fp8")


@dataclass(frozen=True)
class Quality:
    """Of one embedded model: held-out perplexity, and the share of exact answers from 0 to 1, the mean over tasks."""

    model: str
    perplexity: float
    exact_match: float


@cache
def measured() -> list[dict[str, Any]]:
    """The rows of accuracy.json and accuracy-quantized.json; none if they are not there."""
    paths = [RESULTS / "accuracy.json", RESULTS / "accuracy-quantized.json"]
    return [row for path in paths if path.exists() for row in json.loads(path.read_text())["rows"]]


def quality(setting: Setting) -> Quality | None:
    """Of the embedded twin at as many ranks, or, since exact sums give the same on any number, at those nearest. None for a
    variant without one (upper-bound), and for quantized sums that were not measured."""
    model = f"tiny-{setting.variant.partition(':')[0]}"
    comm = setting.comm if setting.comm and setting.comm.startswith(QUANTIZED) and setting.tp > 1 else EXACT
    found = [row for row in measured() if row["model"] == model and row.get("comm", EXACT) == comm]
    if not found:
        return None
    row = min(found, key=lambda row: abs(row["tp"] - setting.tp))
    return Quality(model, row["perplexity"], sum(row[task] for task in TASKS) / len(TASKS))
