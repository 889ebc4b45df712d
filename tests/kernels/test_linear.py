"""Linear layers of few rows: the Triton kernels against fp64, the choice of a kernel, and the shapes that PyTorch computes."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear_config as kernel
from kernels.linear import linear, linear_swiglu, linear_with
from kernels.linear_config import MAX_ROWS, MMA_ROWS, Config, Gemv, Mma, Stream, config, format_config, parse_config
from scripts.bench.kernels import linear as bench
from tests.support.ranks import Ranks
from tests.support.replays import wrong_replays

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def swiglu_of(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def too_far(got: Tensor, exact: Tensor, plain: Tensor, times: float = 2, least: float = 0) -> str | None:
    """A message if the error of `got` is more than `times` that of PyTorch's result `plain` in the same dtype, and more than
    `least`, else None."""
    if got.shape != exact.shape or got.dtype != plain.dtype:
        return f"{got.shape} {got.dtype} instead of {exact.shape} {plain.dtype}"
    error, allowed = ((t.double() - exact).norm() / exact.norm() for t in (got, plain))
    allowed = max(times * allowed, least) + 4 * torch.finfo(torch.float32).eps
    return None if error <= allowed else f"error {error:.2e}, allowed {allowed:.2e}"


def mismatches(seed: int, device: str) -> list[str]:
    """The cases in which `linear_with` has more than twice PyTorch's error against fp64, or other bits in a second run.

    The interpreter truncates fp32 to bf16, where a GPU rounds. So a result of bf16 may be off by a unit in its last place, whatever
    PyTorch's error is, which is small by chance if there are few values.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rows, n, k, dtype, swiglu, biased, chosen in cases(device):
        x = torch.randn(rows, k + 8, generator=generator).to(device, dtype)[:, :-8]  # with gaps between rows
        weight = torch.randn(n, k, generator=generator).to(device, dtype) / k**0.5
        bias = torch.randn(n, generator=generator).to(device, dtype) if biased else None
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        plain = F.linear(x, weight, bias)
        exact, plain = (swiglu_of(exact), swiglu_of(plain)) if swiglu else (exact, plain)
        got = linear_with(x, weight, bias, chosen, swiglu)
        name = f"{rows} x {n} x {k} {dtype} swiglu={swiglu} bias={biased} {chosen}"
        truncated = device == "cpu" and dtype == torch.bfloat16
        if complaint := too_far(got, exact, plain, least=torch.finfo(dtype).eps if truncated else 0):
            found.append(f"{name}: {complaint}")
        if not torch.equal(linear_with(x, weight, bias, chosen, swiglu), got):
            found.append(f"{name}: other bits the second time")
    return found


def cases(device: str) -> list[tuple[int, int, int, torch.dtype, bool, bool, Config]]:
    """Rows, N, K, dtype, whether with SwiGLU, whether with a bias, config. Some blocks divide the shape, others do not."""
    bf16, fp16, fp32 = DTYPES
    mma = fp16 if device == "cpu" else bf16  # the interpreter multiplies bf16 matrices wrongly, as if their bits were integers
    return [
        (1, 24, 256, bf16, False, False, Gemv(4, 256, 1)),
        (1, 9, 520, bf16, False, True, Gemv(2, 256, 2)),
        (3, 14, 328, bf16, True, True, Gemv(4, 128, 1)),
        (4, 8, 192, fp16, True, False, Gemv(2, 256, 1)),
        (2, 30, 512, fp16, False, True, Gemv(8, 512, 2)),
        (2, 11, 100, fp32, False, True, Gemv(4, 64, 1)),
        (1, 26, 384, fp32, True, False, Gemv(8, 128, 1)),
        (1, 80, 256, mma, False, False, Mma(64, 64, 1, 3)),
        (5, 70, 328, mma, False, True, Mma(64, 64, 4, 3)),
        (16, 128, 512, mma, True, False, Mma(64, 128, 2, 3)),
        (7, 40, 200, fp16, True, True, Mma(32, 32, 3, 2, early=False)),
        (33, 96, 448, fp16, False, True, Mma(64, 64, 5, 3)),
        (8, 90, 256, mma, True, False, Mma(64, 64, 1, 3)),
        (64, 100, 256, mma, False, False, Mma(32, 128, 2, 2)),
        (2, 64, 384, mma, False, False, Mma(64, 128, 2, 3, early=False)),
    ]


def test_kernels_in_the_interpreter(interpreters: Ranks, seed: int) -> None:
    assert interpreters.call(mismatches, seed, "cpu") == [], seed


@GPU
def test_kernels_on_a_gpu(seed: int) -> None:
    assert mismatches(seed, "cuda") == [], seed


def test_on_the_cpu_it_is_pytorch(seed: int) -> None:
    x, weight, bias = torch.randn(2, 3, 64), torch.randn(20, 64), torch.randn(20)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias)), seed
    assert torch.equal(linear_swiglu(x, weight, bias), swiglu_of(F.linear(x, weight, bias))), seed


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape_has_a_config_that_fits(dtype: torch.dtype) -> None:
    """Blocks are powers of two, every program has columns, and each config fits the 227 KB of shared memory of an SM."""
    for n, k in [(1280, 8192), (8192, 1024), (8192, 3584), (32064, 8192), (192, 64), (17, 8), (128256, 4096), (576, 192)]:
        for rows, swiglu in product((1, 3, 4, 5, 17, 64), (False, True)):
            chosen = config(rows, n, k, dtype, swiglu)
            if chosen is None:
                assert dtype == torch.float32 or kernel.table_key(rows, n, k) in kernel.measured()
                continue
            assert chosen.block_n > 1 or not swiglu, (rows, n, k)
            assert (chosen.block_n & (chosen.block_n - 1)) == (chosen.block_k & (chosen.block_k - 1)) == 0, (rows, n, k)
            assert not isinstance(chosen, Stream)  # this GPU may be older than Hopper
            if isinstance(chosen, Mma):
                assert rows <= MMA_ROWS and dtype != torch.float32 and 1 <= chosen.split <= -(-k // chosen.block_k)
                stage = 2 * chosen.block_k * (chosen.block_n + max(16, 1 << (rows - 1).bit_length()))
                assert chosen.stages * stage <= 227 * 1024, (rows, n, k, chosen)
            else:
                assert chosen.block_k >= 4 * chosen.warps, (rows, n, k, chosen)
    assert config(MAX_ROWS + 1, 1280, 8192, dtype) is None


def test_the_measured_table_goes_before_the_heuristic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best: dict[str, Config | None] = {"1,48,96": Gemv(2, 64, 1, prefetch=False), "8,48,96": Mma(64, 32, 2, 3), "4,48,96": None}
    best |= {"8,48,96,swiglu": None, "2,48,96": Gemv(1, 512, 1)}
    table = json.dumps({"configs": {key: format_config(value) for key, value in best.items()}})
    (tmp_path / f"{kernel.SIMILAR.replace(' ', '-')}.json").write_text(table)
    monkeypatch.setattr(kernel, "CONFIGS", tmp_path)
    monkeypatch.setattr(kernel, "_tuned", {})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    try:
        for cached in (kernel._shipped, config):
            cached.cache_clear()
        assert config(1, 48, 96, torch.float16) == best["1,48,96"]
        assert config(5, 48, 96, torch.bfloat16) == best["8,48,96"]
        assert config(3, 48, 96, torch.bfloat16) is None
        assert config(3, 48, 96, torch.float32) is not None
        assert config(8, 48, 96, torch.float16, swiglu=True) is None
        assert config(1, 48, 96, torch.float16, swiglu=True) == best["1,48,96"]
        assert config(2, 48, 96, torch.float16, swiglu=True) == Gemv(2, 256, 1)
        kernel.use({"8,48,96": None, "16,48,96": Mma(32, 32, 1, 2)})  # measured here: before the shipped table
        assert config(5, 48, 96, torch.bfloat16) is None
        assert config(16, 48, 96, torch.bfloat16) == Mma(32, 32, 1, 2)
        assert config(1, 48, 96, torch.float16) == best["1,48,96"]
    finally:
        monkeypatch.undo()
        for cached in (kernel._shipped, config):
            cached.cache_clear()


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of tables."""
    monkeypatch.setattr(kernel, "CONFIGS", tmp_path)
    monkeypatch.setattr(bench, "CONFIGS", tmp_path)
    kernel._shipped.cache_clear()
    yield tmp_path
    kernel._shipped.cache_clear()


def test_older_tables_are_used_until_measured_again(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Gemv(4, 512, 2), Stream(64, 128, 12)
    old = {"1,8,8": format_config(first), "2,8,8": None, "4,8,8": {"kind": "gone"}, "8,8,8": {"kind": "mma", "blocks": 3}}
    (tables / "A-GPU.json").write_text(json.dumps({"configs": old}))  # as before there were versions
    assert kernel.shipped("A GPU") == {"1,8,8": first, "2,8,8": None}
    assert kernel.shipped_now("A GPU") == {}
    assert capsys.readouterr().err == "A-GPU.json: 2 configs of other kernels ignored; measure with make tune\n"
    run = {
        "machine": {},
        "gpu": "A GPU",
        "version": kernel.VERSION,
        "configs": {"2,8,8": format_config(second), "16,8,8": None},
    }
    (tables / "run.json").write_text(json.dumps(run))
    bench.merge([tables / "run.json"])
    kernel._shipped.cache_clear()
    assert kernel.shipped("A GPU") == {"1,8,8": first, "2,8,8": second, "16,8,8": None}
    assert kernel.shipped_now("A GPU") == {"2,8,8": second, "16,8,8": None}


def test_a_config_survives_json() -> None:
    for chosen in (None, Gemv(4, 1024, 4), Mma(64, 128, 3, 5, warps=8, early=False), Stream(128, 64, 5, 8, 131)):
        assert parse_config(json.loads(json.dumps(format_config(chosen)))) == chosen


@GPU
@pytest.mark.parametrize(("n", "k"), [(1280, 8192), (8192, 1024), (8192, 3584), (576, 192), (100, 100)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16, 24, 64, 65, 128, 256, 257])
def test_entry_points_on_a_gpu(n: int, k: int, rows: int, seed: int) -> None:
    x, weight = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((rows, 1, k), (n, k)))
    weight /= k**0.5
    exact, plain = F.linear(x.double(), weight.double()), F.linear(x, weight)
    with torch.inference_mode():
        assert too_far(linear(x, weight), exact, plain) is None, seed
        assert too_far(linear_swiglu(x, weight), swiglu_of(exact), swiglu_of(plain)) is None, seed


@GPU
@pytest.mark.parametrize("chosen", [Gemv(4, 1024, 4), Mma(64, 128, 7, 4), Mma(64, 128, 1, 4), Mma(64, 128, 3, 3, early=False)])
def test_replays_of_a_cuda_graph_see_their_inputs_and_repeat_their_bits(chosen: Config, seed: int) -> None:
    """A chain of layers, each of which starts before the previous one ends. A stale read or a counter that is not reset would
    change the result."""
    k = 2048
    weights = [torch.randn(k, k, device="cuda", dtype=torch.bfloat16) / k**0.5 for _ in range(12)]
    x = torch.randn(2, k, device="cuda", dtype=torch.bfloat16)

    def chain() -> Tensor:
        y = x
        for weight in weights:
            y = linear_with(y, weight, None, chosen, False)
        return y

    y = x
    for weight in weights:
        y = F.linear(y, weight)
    assert (chain().float() - y.float()).norm() < 0.05 * y.float().norm(), seed
    assert wrong_replays(chain, x.normal_) == 0, seed
