"""Markdown tables of a sweep's rows."""

from collections.abc import Sequence

from scripts.lib.markdown import cell, table_lines
from scripts.sweep.rows import Row, finished, ratio


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with one line per configuration and variant. Ratios are relative to the standard model. Runs of all seeds
    are pooled."""
    head = ["model", "tp", "batch", "tokens", "all-reduce", "variant", "prefill, ms", "decode, ms a token", "tokens/s"]
    head += ["over standard", "weights, GB/s", "memory, GB", "runs"]
    lines: list[list[str]] = []
    done = finished(rows)
    for row in done:
        s, gain = row.setting, ratio(row, done, "throughput")
        figures = [("prefill_ms", ".2f"), ("decode_ms_per_token", ".3f"), ("throughput", ".1f")]
        shown = [cell(row.median(name), form) for name, form in figures]
        shown += [
            cell(gain, ".2f"),
            cell(row.median("weight_gb_per_second"), ".1f"),
            cell(row.median("peak_memory_gb"), ".2f"),
            str(len(row.samples)),
        ]
        all_reduce = (
            row.communicator
            if s.interconnect == "default" or s.interconnect in row.communicator
            else f"{row.communicator}, {s.interconnect}"
        )
        where = [s.model_and_widths, str(s.tp), str(s.batch), f"{s.prompt_length} + {s.new_tokens}", all_reduce, row.variant]
        lines.append(where + shown)
    return "\n".join(table_lines(head, lines))


def latency_table(rows: Sequence[Row]) -> str | None:
    """A Markdown table for batch 1: one line per configuration, one column per variant, in ms per decode step.

    Cells hold the median run and, in parentheses, the lowest and highest run. None if there are no rows with batch 1.
    """
    single = [r for r in finished(rows) if r.setting.batch == 1 and r.values("decode_ms_per_token")]
    if not single:
        return None
    names = list(dict.fromkeys(r.setting.variant for r in single))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in single:
        s, values = row.setting, row.values("decode_ms_per_token")
        where = (s.model_and_widths, str(s.tp), f"{s.prompt_length} + {s.new_tokens}", s.comm or "default", s.interconnect)
        text = f"{row.median('decode_ms_per_token'):.2f} ({min(values):.2f} to {max(values):.2f})"
        cells.setdefault(where, {})[s.variant] = text
    lines = [[*where, *(by.get(name, "") for name in names)] for where, by in cells.items()]
    return "\n".join(table_lines(["model", "tp", "tokens", "all-reduce", "interconnect", *names], lines))
