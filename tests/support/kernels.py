"""Triton kernels behind the public functions of `kernels/`, also on CPU tensors: in the interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch


@contextmanager
def kernels_always(*modules: ModuleType) -> Iterator[None]:
    """Make the functions of these modules launch their kernels, whatever the device of the tensors."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for module in modules:
            patch.setattr(module, "on_gpu", lambda x: True)
        yield
