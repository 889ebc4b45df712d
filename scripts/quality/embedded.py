"""The quality of a variant's embedded model, as measured by `scripts/quality/accuracy.py`, for the tables of a sweep.

A sweep measures speed with random weights, whose text has no meaning. Its tables therefore show the quality of the small model
that was trained with the same residual variant (`models/tiny-*`), with the same quantized all-reduces.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from comm.quantize import WIDTHS
from scripts.lib.results import RESULTS
from scripts.quality.heldout import TASKS
from scripts.sweep.rows import Setting

EXACT = "gloo"  # the exact communicator, with which the others are compared


@dataclass(frozen=True)
class Quality:
    """The quality of one embedded model: held-out perplexity, and the share of exact answers (0 to 1, mean over tasks)."""

    model: str
    perplexity: float
    exact_match: float


@cache
def measured() -> list[dict[str, Any]]:
    """The rows of accuracy.json and accuracy-quantized.json in docs/results. Missing files are skipped."""
    paths = [RESULTS / "accuracy.json", RESULTS / "accuracy-quantized.json"]
    return [row for path in paths if path.exists() for row in json.loads(path.read_text())["rows"]]


def quality(setting: Setting) -> Quality | None:
    """The quality of the embedded model with the setting's variant and communicator, at the nearest measured number of ranks.

    With exact all-reduces the number of ranks makes no difference. None for a variant without an embedded model (upper-bound),
    and for quantized all-reduces that were not measured.
    """
    model = f"tiny-{setting.variant.partition(':')[0]}"
    comm = setting.comm if setting.comm and setting.comm.startswith(tuple(WIDTHS)) and setting.tp > 1 else EXACT
    found = [row for row in measured() if row["model"] == model and row.get("comm", EXACT) == comm]
    if not found:
        return None
    row = min(found, key=lambda row: abs(row["tp"] - setting.tp))
    return Quality(model, row["perplexity"], sum(row[task] for task in TASKS) / len(TASKS))
