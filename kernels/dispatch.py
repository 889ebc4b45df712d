"""When the Triton kernels are used (CUDA tensors, no autograd), and what their launches have in common."""

from functools import lru_cache

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Whether a kernel of this package may replace PyTorch's: they have no backward."""
    return x.is_cuda and not torch.is_grad_enabled()


def as_rows(x: Tensor) -> Tensor:
    """(..., n) as (R, n) with consecutive columns; rows may lie apart. A copy only if no view will do."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rejoin(x: Tensor) -> None:
    """Delay what follows on `x`'s current stream until the other streams that it waits for have finished.

    A kernel that may start early (programmatic dependent launch) can occupy the place on the GPU that a kernel of another
    stream needs, while it waits for that kernel: a deadlock. An ordinary launch in between starts only when all before it has
    finished.
    """
    if x.is_cuda:
        _spot(x.device).zero_()


@lru_cache
def _spot(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device)


@lru_cache
def pdl_supported(device: torch.device) -> bool:
    """Whether kernels on `device` may start before the previous one has finished (programmatic dependent launch: Hopper and
    later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """A launch's options for programmatic dependent launch: the kernel's constant PDL, and Triton's own."""
    pdl = wanted and pdl_supported(device)
    return {"PDL": pdl, "launch_pdl": pdl}
