"""Copies between the host and a GPU for which neither waits: PyTorch's own, from and to memory that is not pinned, wait until
the device has finished all steps in flight."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of the (nested) `values`. The copy is queued on the current stream."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """A copy of x in host memory. It is valid when the device has reached this point of the current stream."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=True)
