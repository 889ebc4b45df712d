"""Profiler traces: recorded with named modules, so that a reader sees which computation overlaps which all-reduce, and read."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from errors import UserError
from layers.linear import ShardedLinear
from model import MLP, Attention, ParallelBlock, Transformer

Span = tuple[float, float]  # begin and end, µs
Event = dict[str, Any]  # of the Chrome trace format

COMMUNICATES = r"nccl|one_?shot|two_?shot|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|multimem|symm_mem|PtoP"
# Kinds of GPU kernels by their names: the first that matches. Attention includes RoPE and the writes to the cache. A linear layer
# that is fused with its all-reduce is a GEMM.
KINDS = {
    "attention": r"attention|flash|fmha|sdpa|^_(paged_\w+|prefill|prefill_schedule|combine_splits|merge_pieces|pieces|spans|rope_store)$",
    "GEMM": r"gemm|gemv|cutlass|cublas|nvjet|xmma|split_?k|^_(mma\w*|stream|tiles|linear_tree|int8_linear|dequantize|expand|shrink)$",
    "norm and all-reduce": r"rms_?norm|layer_?norm|^_(receive|add|quantize|quantized_sum|dequantize_sum|reduce|wait|wait_rows|advance|ready_barrier)$|"
    + COMMUNICATES,
}
OTHER, IDLE = "other", "idle"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events on a GPU


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


def intersection(a: list[Span], b: list[Span]) -> list[Span]:
    """The intersection of two lists of disjoint, ordered spans."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            common.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(a: list[Span], b: list[Span]) -> list[Span]:
    """The parts of `a` that are not in `b`. Both are disjoint and ordered."""
    edges = [float("-inf"), *(edge for span in b for edge in span), float("inf")]
    return intersection(a, list(zip(edges[::2], edges[1::2], strict=True)))


def length(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def kernel_idle_share(events: Sequence[Event]) -> float | None:
    """The share of the time from the first kernel's begin to the last one's end in which no kernel runs on any stream. None for a
    trace without GPU kernels."""
    busy = union([span_of(e) for e in events if e.get("ph") == "X" and e.get("cat") == "kernel"])
    return 1 - length(busy) / (busy[-1][1] - busy[0][0]) if busy else None


# --- what takes a GPU's time -------------------------------------------------------------------------------------------------


def kind_of(kernel: str) -> str:
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel, re.IGNORECASE)), OTHER)


@dataclass(frozen=True)
class KernelTime:
    """A kernel, or a copy, in a mean step."""

    name: str
    kind: str
    launches: float
    span_us: float  # the median from its begin to its end; a kernel that is launched early also waits in that time
    own_us: float  # of a step; the time in which an earlier kernel still ran counts for that one


@dataclass(frozen=True)
class GpuTime:
    """What a GPU does in a mean step."""

    step_us: float
    kernels: list[KernelTime]  # the longest first

    @property
    def by_kind(self) -> dict[str, float]:
        """µs of a step by kind, and `IDLE`. They add up to the step."""
        found = dict.fromkeys([*KINDS, OTHER], 0.0)
        for kernel in self.kernels:
            found[kernel.kind] += kernel.own_us
        return found | {IDLE: self.step_us - sum(found.values())}


def gpu_time(events: Sequence[Event], windows: Sequence[Span] = ()) -> GpuTime | None:
    """The GPU's time in a mean step. windows: the steps' times, disjoint; without any, from the first kernel to the end of the last.
    None for a trace without GPU kernels.

    A launch is counted in the window in which it began. With CUDA graphs that can be another step than its own, which averages
    out over many steps."""
    device = sorted((e for e in events if e.get("ph") == "X" and e.get("cat") in DEVICE), key=lambda e: e["ts"])
    if not device:
        return None
    windows = windows or [(span_of(device[0])[0], max(end for _, end in map(span_of, device)))]
    spans, own = defaultdict[str, list[float]](list), defaultdict[str, float](float)
    until = float("-inf")
    for event in device:
        name, (begin, end) = str(event["name"]), span_of(event)
        if any(first <= begin < last for first, last in windows):
            spans[name].append(end - begin)
        for first, last in windows:
            own[name] += max(0.0, min(end, last) - max(begin, until, first))
        until = max(until, end)
    steps = len(windows)
    kernels = [
        KernelTime(name, kind_of(name), len(spans[name]) / steps, median(spans[name] or [0.0]), us / steps)
        for name, us in own.items()
        if us or spans[name]
    ]
    return GpuTime(sum(last - first for first, last in windows) / steps, sorted(kernels, key=lambda k: -k.own_us))
