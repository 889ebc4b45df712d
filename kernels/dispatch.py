"""When the Triton kernels serve: CUDA tensors, and no autograd."""

from functools import lru_cache

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Whether a kernel of this package may stand in for PyTorch's: they have no backward."""
    return x.is_cuda and not torch.is_grad_enabled()


def rejoin(x: Tensor) -> None:
    """Make what follows on `x`'s current stream begin only when the other streams that it waits for are through.

    A kernel that may start early (programmatic dependent launch) takes the place on the GPU that a kernel of another stream still
    needs, and waits there for it: for ever. An ordinary launch in between starts when all before it is over.
    """
    if x.is_cuda:
        _spot(x.device).zero_()


@lru_cache
def _spot(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device)


@lru_cache
def pdl_supported(device: torch.device) -> bool:
    """Whether kernels on `device` may start while the one before drains (programmatic dependent launch: Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
