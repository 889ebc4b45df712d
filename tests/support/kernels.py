"""Triton kernels behind the public functions of `kernels/`, also on CPU tensors: in the interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


@contextmanager
def kernels_always(*modules: ModuleType) -> Iterator[None]:
    """Make the functions of these modules launch their kernels, whatever the device of the tensors."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for module in modules:
            patch.setattr(module, "on_gpu", lambda x: True)
        yield


@contextmanager
def codes_as_on_a_gpu() -> Iterator[None]:
    """Let Triton's interpreter round to e4m3 as a GPU does: its own rounding loses the carry into the exponent."""
    from triton.runtime import interpreter

    usual = interpreter._convert_float

    def convert(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if target.name != "fp8e4nv":
            return usual(x, source, target, rounding)
        return torch.from_numpy(x.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield


@contextmanager
def ordered_dots() -> Iterator[None]:
    """Let Triton's interpreter add a dot's products in the order of the columns, in fp32, as tensor cores do with steps of columns.
    NumPy's order depends on the shapes."""
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, sums: Any, precision: Any, imprecise: Any) -> Any:
        total = sums.data
        for column, row in zip(a.data.astype(np.float32).T, b.data.astype(np.float32), strict=True):
            total = total + column[:, None] * row
        return interpreter.TensorHandle(total, sums.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield


def worse(name: str, got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, factor: float = 2) -> list[str]:
    """A message if a kernel's error is more than `factor` times that of plain PyTorch in the same dtype, plus 2e-6 of the largest value
    (at least of 1)."""
    error, allowed = ((x.double() - exact).abs().max().item() for x in (got, plain))
    allowed = factor * allowed + 2e-6 * max(1.0, exact.abs().max().item())
    return [] if error <= allowed else [f"{name}: error {error:.3g}, allowed {allowed:.3g}"]


def compile_only(module: ModuleType, kernel: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From now on, launches of this kernel only compile it, for Hopper. Returns the list of what they have compiled."""
    triton = pytest.importorskip("triton")
    target = SimpleNamespace(
        get_current_target=lambda: triton.backends.compiler.GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
    )
    jitted, compiled = getattr(module, kernel), list[Any]()
    run = jitted.run
    monkeypatch.setattr(triton.runtime.driver, "_active", target)
    monkeypatch.setattr(jitted, "run", lambda *a, **options: compiled.append(run(*a, **options | {"warmup": True})))
    monkeypatch.setattr(module, "pdl_options", lambda _device: {"PDL": True, "launch_pdl": True})
    return compiled
