"""When the Triton kernels serve: CUDA tensors, and no autograd."""

from functools import lru_cache

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Whether a kernel of this package may stand in for PyTorch's: they have no backward."""
    return x.is_cuda and not torch.is_grad_enabled()


@lru_cache
def pdl_supported(device: torch.device) -> bool:
    """Whether kernels on `device` may start while the one before drains (programmatic dependent launch: Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
