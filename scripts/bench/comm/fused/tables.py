"""The measured times of layers, the paper's metrics of overlap, and the tables of both."""

from dataclasses import dataclass
from typing import Any

from scripts.lib.markdown import table_lines

UNFUSED, GEMM, TORCH = "unfused", "GEMM", "torch"  # names of algorithms; those of GEMMs alone begin with GEMM


@dataclass(frozen=True)
class Row:
    """The time of a layer with m rows by one algorithm, and the paper's two metrics.

    way: the algorithm's name. overall: µs of the algorithm; gemm: µs of the best GEMM alone; unfused: µs of GEMM and NCCL without
    overlap.
    """

    layer: str
    scatter: bool
    m: int
    n: int
    k: int
    way: str
    overall: float
    gemm: float
    unfused: float

    @property
    def ect(self) -> float:
        """Effective communication time, µs."""
        return self.overall - self.gemm

    @property
    def efficiency(self) -> float | None:
        """Overlap efficiency. None if there is nothing to hide: the unfused algorithm takes no longer than the GEMM."""
        exposed = self.unfused - self.gemm
        return 1 - self.ect / exposed if exposed > 0 else None


def rows_of(report: dict[str, Any]) -> tuple[list[Row], str]:
    """A report's rows, and the ranks, dtype and machine that it was made with."""
    rows = [Row(*(row[name] for name in Row.__dataclass_fields__)) for row in report["rows"]]
    return rows, f"{report['ranks']} ranks, {report['dtype']}; {report['where']}"


def markdown(rows: list[Row], title: str) -> str:
    """A Markdown table of the layers that gather, and one of those that scatter."""
    tables = [table([row for row in rows if row.scatter is scatter]) for scatter in sorted({row.scatter for row in rows})]
    return "\n".join([f"µs, and overlap efficiency; {title}\n", *tables])


def table(rows: list[Row]) -> str:
    """One line per layer and m: µs of the GEMM, and µs of each algorithm with its overlap efficiency."""
    ways = list(dict.fromkeys(row.way for row in rows))
    head = ["GEMM + reduce-scatter" if rows[0].scatter else "all-gather + GEMM", "n", "k", "m", "GEMM", *ways]
    lines = []
    for (layer, m), group in by_shape(rows).items():
        cells = {row.way: f"{row.overall:.1f}{percent(row)}" for row in group}
        first = group[0]
        lines.append([layer, first.n, first.k, m, f"{first.gemm:.1f}", *(cells.get(way, "–") for way in ways)])
    return "\n".join(table_lines(head, lines)) + "\n"


def percent(row: Row) -> str:
    return "" if row.way == UNFUSED or row.efficiency is None else f" ({row.efficiency:.0%})"


def by_shape(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    found: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.layer, row.m)):
        found.setdefault((row.layer, row.m), []).append(row)
    return found
