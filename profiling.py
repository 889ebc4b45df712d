"""Profiler traces: recorded with named modules, so that a reader sees which computation overlaps which all-reduce, and read."""

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from errors import UserError
from model import MLP, Attention, ParallelBlock, Transformer
from tp import ShardedLinear

Span = tuple[float, float]  # begin and end, µs
Event = dict[str, Any]  # of the Chrome trace format


# --- recording ---------------------------------------------------------------------------------------------------------------


def annotate(model: Transformer) -> None:
    """Name each module's computation in traces: `layer 3 attention`, `layer 3 mlp`.

    A name spans a module's linear layers and what lies between them, but no wait for an all-reduce. A layer that is fused with an
    all-reduce is not called: without the first one there is no name, without the last one the name ends with the module.
    """
    for path, module in model.named_modules():
        if isinstance(module, (Attention, MLP, ParallelBlock)):
            _, layer, *rest = path.split(".")
            first, *_, last = (child for child in module.children() if isinstance(child, ShardedLinear))
            _annotate(module, first, last, " ".join(["layer", layer, *rest]))


def _annotate(module: nn.Module, first: nn.Module, last: nn.Module, name: str) -> None:
    spans: list[Any] = []

    def enter(*_: object) -> None:
        span = record_function(name)
        span.__enter__()
        spans.append(span)

    def leave(*_: object) -> None:
        while spans:
            spans.pop().__exit__(None, None, None)

    first.register_forward_pre_hook(enter)
    last.register_forward_hook(leave)
    module.register_forward_hook(leave)


@contextmanager
def profiled(path: Path | None, rank: int, host: bool = True) -> Iterator[None]:
    """Write a Chrome trace of the `with` block to `path`; None: do nothing. Rank r > 0 adds `.rankr` before the suffix. host:
    also record PyTorch's operators, which makes the host slower.

    Raises UserError if the folder does not exist. Open the trace at ui.perfetto.dev or chrome://tracing.
    """
    if path is None:
        yield
        return
    if not path.parent.is_dir():
        raise UserError(f"--profile {path}: the folder {path.parent} does not exist; create it or name another")
    activities = [ProfilerActivity.CPU] if host else []
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(str(path if rank == 0 else path.with_suffix(f".rank{rank}{path.suffix}")))


# --- reading -----------------------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> dict[str, Any]:
    """Read a Chrome trace, plain or gzipped. Raises UserError."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        trace = json.loads(raw)
        assert isinstance(trace["traceEvents"], list)
    except (OSError, ValueError, KeyError, TypeError, AssertionError, EOFError) as e:
        raise UserError(
            f"{path} is no profiler trace ({e or type(e).__name__}); name a file that --profile or --out wrote"
        ) from None
    return dict(trace)


def span_of(event: Event) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))


def union(spans: Sequence[Span]) -> list[Span]:
    """The union of the spans as disjoint, ordered spans."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def kernel_idle_share(events: Sequence[Event]) -> float | None:
    """The share of the time from the first kernel's begin to the last one's end in which no kernel runs on any stream. None for a
    trace without GPU kernels."""
    busy = union([span_of(e) for e in events if e.get("ph") == "X" and e.get("cat") == "kernel"])
    return 1 - length(busy) / (busy[-1][1] - busy[0][0]) if busy else None
