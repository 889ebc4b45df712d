"""How fast quantized linear layers of few rows read their weights: a table of what `make bench-linear-quantized` measured."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.lib.machine import describe
from scripts.lib.markdown import captioned

FILES = "linear-quantized*.json"


def table(folder: Path) -> str | None:
    """A table for each of the folder's FILES: a line for each layer and kind of weight, µs and TB/s by rows. None without any."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob(FILES))]
    return "\n".join(_table(found) for found in files if found["rows"]) or None


def _table(found: dict[str, Any]) -> str:
    counts = sorted({row["rows"] for row in found["rows"]})
    head = ["model", "tp", "layer", "weight", "stored as", "MB", "at the ceiling, µs"]
    head += [f"{count} row{'s' * (count > 1)}, µs (TB/s)" for count in counts]
    ceiling = found["read_bytes_per_second"]
    late = found["unmeasured"]  # also numbers of rows of prompts
    untuned = f"; {late} cases, some of them of prompts, were not tuned for lack of time" if late else ""
    caption = (
        "Chains of layers in CUDA graphs with weights that no cache holds; MB of weights and scales. At the ceiling they would take as "
        f"long as this GPU needs to read so many bytes, at {ceiling / 1e12:.2f} TB/s. Inputs are bf16{untuned}. "
        f"Made on {describe(found['machine'], 'cuda')}."
    )
    return captioned(head, _lines(found["rows"], counts, ceiling), caption)


def _lines(rows: list[dict[str, Any]], counts: list[int], ceiling: float) -> Iterator[list[str]]:
    cases: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in rows:
        key = row["model"], row["ranks"], row["layer"], row["n"], row["k"], row["quantize"], row["bytes"]
        cases.setdefault(key, {})[row["rows"]] = row
    for (model, ranks, layer, n, k, stored, size), by_count in cases.items():
        cells = (by_count.get(count) for count in counts)
        times = (f"{row['us']:.1f} ({row['tb_per_s']:.2f})" if row else "" for row in cells)
        where = [model, str(ranks), layer, f"{n} x {k}", stored]
        yield [*where, f"{size / 1e6:.1f}", f"{1e6 * size / ceiling:.1f}", *times]
