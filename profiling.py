"""Profiler traces with named modules, so that a reader sees which computation overlaps which all-reduce."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from errors import UserError
from model import MLP, Attention, ParallelBlock, Transformer
from tp import ShardedLinear


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
def profiled(path: Path | None, rank: int) -> Iterator[None]:
    """Write a Chrome trace of the `with` block to `path`; None: do nothing. Rank r > 0 adds `.rankr` before the suffix.

    Raises UserError if the folder does not exist. Open the trace at ui.perfetto.dev or chrome://tracing.
    """
    if path is None:
        yield
        return
    if not path.parent.is_dir():
        raise UserError(f"--profile {path}: the folder {path.parent} does not exist; create it or name another")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(str(path if rank == 0 else path.with_suffix(f".rank{rank}{path.suffix}")))
