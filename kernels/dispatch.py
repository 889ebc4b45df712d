"""When the Triton kernels are used (CUDA tensors, no autograd), and helpers for their launches."""

from functools import lru_cache

import torch
from torch import Tensor


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
