"""What takes a GPU's time in a step: a table of the profiled runs of sweeps (`make sweep ARGS="… --profile"`)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.lib.machine import describe
from scripts.lib.markdown import captioned
from scripts.sweep.rows import Row, finished, read_rows

FILES = "sweep*.jsonl profile*.jsonl"
SHOWN = 4  # kernels of a phase
NAME = 36  # characters of a kernel's name


def swept(folder: Path, patterns: str) -> list[Row]:
    """The finished rows of the folder's sweeps. patterns: the glob patterns of their files, separated by spaces."""
    paths = (path for pattern in patterns.split() for path in sorted(folder.glob(pattern)))
    return [row for path in paths for row in finished(read_rows(path))]


def table(folder: Path) -> str | None:
    """A line for each profiled phase in the folder's FILES: ms by kind, and the longest kernels. None if no row was profiled."""
    profiles = [(row, row.split["gpu"]) for row in swept(folder, FILES) if row.split and "gpu" in row.split]
    if not profiles:
        return None
    first, phases = profiles[0]
    kinds = list(phases["decode"]["by_kind_us"])
    head = ["model", "tp", "variant", "batch", "tokens", "phase", "step, ms", *kinds, "longest kernels, ms a step"]
    caption = (
        "ms of a profiled prefill and of the mean of some profiled decode steps of rank 0; while several kernels run, the time counts "
        "for the one that began first. A profiler makes short steps longer, because the host launches later: read times where no profiler "
        f"ran. Made on {describe(first.machine, 'cuda')}."
    )
    return captioned(head, _lines(profiles, kinds), caption)


def _lines(profiles: Sequence[tuple[Row, dict[str, Any]]], kinds: Sequence[str]) -> Iterator[list[str]]:
    for row, phases in profiles:
        s = row.setting
        for phase, time in phases.items():
            by_kind = (f"{time['by_kind_us'][kind] / 1e3:.3f}" for kind in kinds)
            longest = "; ".join(map(_kernel, time["kernels"][:SHOWN]))
            where = [s.model_and_widths, str(s.tp), s.variant, str(s.batch), f"{s.prompt_length} + {s.new_tokens}", phase]
            yield [*where, f"{time['step_us'] / 1e3:.3f}", *by_kind, longest]


def _kernel(kernel: dict[str, Any]) -> str:
    name = kernel["name"].replace("|", " ").removeprefix("void ")[:NAME]
    return f"`{name}` {kernel['own_us'] / 1e3:.3f} in {kernel['launches']:.0f}"
