"""When the Triton kernels are used (CUDA tensors, no autograd), helpers for their launches, and the times of these.

`tl` and `triton` are Triton's if it is installed, else placeholders: a module that defines kernels can then be imported, but not launch them.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["tl", "triton"]  # for other modules; the functions below are, too

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Missing:
        """Replaces each module, decorator, type and kernel. Launching it raises ImportError."""

        def __getattr__(self, name: str) -> "_Missing":
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *args: object, **options: object) -> "_Missing":
            return self

        def __getitem__(self, grid: object) -> "_Missing":
            raise ImportError("GPU kernels need Triton; pip install triton")

    triton = tl = _Missing()


def on_gpu(x: Tensor) -> bool:
    """Whether a kernel of this package may be used instead of PyTorch's: on CUDA without autograd, as it has no backward."""
    return x.is_cuda and not torch.is_grad_enabled()


def as_rows(x: Tensor) -> Tensor:
    """(..., n) as (R, n) with contiguous rows, which may have gaps between them. A view if possible, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rejoin(x: Tensor) -> None:
    """Call after the current stream of `x`'s device has joined another stream: later kernels start after the join.

    A kernel that starts early (programmatic dependent launch) can occupy the SM that a kernel of the other stream needs, while
    it waits for that kernel: a deadlock. This function launches an ordinary kernel, which starts only when all earlier work of
    the stream, the join included, has finished.
    """
    if x.is_cuda:
        _scratch(x.device).zero_()


@lru_cache
def _scratch(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device)


@lru_cache
def pdl_supported(device: torch.device) -> bool:
    """Whether kernels on `device` may start before the previous one has finished (programmatic dependent launch: Hopper and
    later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """Launch options for programmatic dependent launch: the kernel's constant PDL, and Triton's `launch_pdl`."""
    pdl = wanted and pdl_supported(device)
    return {"PDL": pdl, "launch_pdl": pdl}


# --- times -----------------------------------------------------------------------------------------------------------------


def replay_seconds(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Seconds of each of `replays` replays of a CUDA graph, measured by CUDA events."""
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return times


def successive_seconds(call: Callable[[], object], calls: int) -> list[float]:
    """Seconds on the device of each of `calls` calls in a row, after one that is not timed. The host does not wait between them,
    so that a rank whose host is late does not delay the others."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    for event in events:
        call()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
