"""The stream kernel: its source in a simulator of Gluon and on a GPU against fp64, seeded faults, resources, and its configs."""

import importlib
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear_config, linear_tuning
from kernels.linear import counters, linear_with
from kernels.linear_config import (
    MAX_ROWS,
    PROMPT_ROWS,
    SMS,
    STREAM_BYTES,
    Gemv,
    Shape,
    Stream,
    config,
    stream_candidates,
    whole_programs,
)
from kernels.linear_tuning import ROWS
from tests.kernels.test_linear import swiglu_of, too_far
from tests.support import gluon
from tests.support.gpus import needs_hopper
from tests.support.kernels import compile_only
from tests.support.replays import wrong_replays

SHAPES = [Shape(6144, 4096), Shape(4096, 14336), Shape(28672, 4096, True), Shape(192, 64), Shape(128256, 8192), Shape(1000, 72)]

# rows, N, K, dtype, whether with SwiGLU, whether with a bias, config
Case = tuple[int, int, int, torch.dtype, bool, bool, Stream]


def random_case(dice: random.Random) -> Case:
    """Small layers of many kinds: programs with part of a tile, with several tiles, and with several tiles of rows."""
    swiglu = dice.random() < 0.4
    warps = dice.choice([4, 4, 8])
    block_n = max(dice.choice([64, 128, 256]), 16 * warps * (1 + swiglu))
    n, k = dice.randint(1, 400), 8 * dice.randint(1, 60)
    n += n % 2 if swiglu else 0
    rows = dice.choice([1, 2, 3, 4, 7, 8, 9, 16, 17, 40, 64, 65, 100, 256, 300])
    chosen = Stream(block_n, dice.choice([64, 128]), 2, warps, dice.randint(1, 9))
    if not chosen.sharers(rows):  # fewer programs than tiles of rows
        chosen = replace(chosen, programs=chosen.programs + 5)
    chosen = replace(chosen, stages=min(dice.randint(2, 4), STREAM_BYTES * 2 // chosen.shared_bytes(rows)))
    return rows, n, k, dice.choice([torch.bfloat16, torch.float16]), swiglu, dice.random() < 0.5, chosen


def operands(case: Case, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """x with gaps between its rows, weight, bias, the exact result, and PyTorch's."""
    rows, n, k, dtype, swiglu, biased, _ = case
    x = torch.randn(rows, k + 8, device=device).to(dtype)[:, :-8]
    weight = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
    bias = torch.randn(n, device=device).to(dtype) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    plain = F.linear(x, weight, bias)
    return x, weight, bias, *((swiglu_of(exact), swiglu_of(plain)) if swiglu else (exact, plain))


def simulated(module: Any, simulator: gluon.Simulator, case: Case) -> str | None:
    """What is wrong with a case: its result, that of a second run in another order, or the counters."""
    *_, swiglu, _, chosen = case
    x, weight, bias, exact, plain = operands(case)
    simulator.early = [weight]
    counts = torch.zeros(2 * chosen.programs, dtype=torch.int32)
    results = []
    for _ in range(2):
        with gluon.poisoned():
            out = torch.empty_like(plain)
            module.stream(x, weight, bias, out, counts, chosen, swiglu)
        results.append(out)
        if counts.any():
            return "a counter is not zero"
    if not torch.equal(*results):
        return "other bits the second time"
    return too_far(results[0], exact, plain)


def test_the_kernel_in_the_simulator(seed: int) -> None:
    dice = random.Random(seed)
    module, simulator = gluon.load("kernels.linear_stream", seed)
    for _ in range(12):
        case = random_case(dice)
        assert simulated(module, simulator, case) is None, case


def fault_of_codes(case: Case, stream: Callable[..., None], counts: Tensor, early: list[Tensor]) -> str | None:
    """What is wrong with a product of fp8 codes with scales. Adds what may be loaded early to `early`."""
    rows, n, k, dtype, _, biased, chosen = case
    device = counts.device
    x, weight = (torch.randn(m, k, device=device).to(torch.float8_e4m3fn) for m in (rows, n))
    scales = torch.rand(rows, 1, device=device) / k**0.5, torch.rand(n, device=device)
    bias = torch.randn(n, device=device).to(dtype) if biased else None
    early[:] = [weight]
    exact = F.linear(x.double(), weight.double()) * scales[0].double() * scales[1].double() + (0 if bias is None else bias)
    with gluon.poisoned():
        out = torch.empty(rows, n, dtype=dtype, device=device)
        stream(x, weight, bias, out, counts, chosen, False, scales)
    if counts.any():
        return "a counter is not zero"
    return too_far(out, exact, exact.to(dtype), 4)  # a tensor core keeps few more bits of these sums than bf16 has


def test_products_of_codes_in_the_simulator(seed: int) -> None:
    dice = random.Random(seed)
    module, simulator = gluon.load("kernels.linear_stream", seed)
    for _ in range(6):
        rows, n, k, dtype, _, biased, chosen = random_case(dice)
        case = (rows, n, 2 * k, dtype, False, biased, chosen)
        counts = torch.zeros(2 * chosen.programs, dtype=torch.int32)
        assert fault_of_codes(case, module.stream, counts, simulator.early) is None, case


FAULTS = {  # one of each kind
    "the loader takes buffers that are in use": ("(nth // STAGES & 1) ^ 1", "nth // STAGES & 1"),
    "no wait for a load": ("mbarrier.wait(full.index(slot), nth // STAGES & 1)", "pass"),
    "the first step of a tile frees a buffer twice": ("pred=step > first", "pred=True"),
    "wgmmas end late": ("warpgroup_mma_wait(PARTS", "warpgroup_mma_wait(2 * PARTS"),
    "too few bytes are expected": ("2 * weight.block_type.nbytes + X_BYTES", "weight.block_type.nbytes + X_BYTES"),
    "the input is read early": ("0, ahead, SWIGLU, True, False)", "0, ahead, SWIGLU, True, True)"),
    "pieces of two tiles in one place": ("(_begin(share, nth) < shared * steps).to(gl.int32)", "0"),
    "a counter is not reset": ("gl.store(_counter(counters, share, shared), 0)", "pass"),
    "stores beyond the tensor": ("(m < rows) & (feature < features)", "feature < features"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_finds_faults(fault: str, seed: int) -> None:
    """Each in cases with several tiles a program and several programs a tile, without and with SwiGLU."""
    module, simulator = gluon.load("kernels.linear_stream", seed, FAULTS[fault])
    for (rows, programs), swiglu in product([(5, 2), (200, 14), (5, 7), (5, 25)], (False, True)):
        case = (rows, 500, 448, torch.float16, swiglu, True, Stream(128, 64, 2, 4, programs))
        try:
            if simulated(module, simulator, case):
                return
        except gluon.Fault:
            return
    pytest.fail(f"not found: {fault}")


# --- configs ------------------------------------------------------------------------------------------------------------------


def test_candidates_fit_an_sm() -> None:
    """Every layer and number of rows has candidates. Buffers fit, and each warp multiplies other rows of the weight."""
    for rows in (*ROWS, *PROMPT_ROWS):
        for shape in SHAPES if rows <= MAX_ROWS else [Shape(28672, 4096, True)]:
            found = stream_candidates(rows, shape)
            assert found, (rows, shape)
            for chosen in found:
                tile_rows = chosen.tile_rows(rows)
                buffers = 2 * chosen.block_k * (chosen.block_n + tile_rows) * chosen.stages
                assert buffers <= STREAM_BYTES and chosen.stages >= 2, (rows, chosen)
                assert chosen.block_n >= 16 * chosen.warps * (1 + shape.swiglu)
                assert chosen.block_n * tile_rows <= 128 * 32 * chosen.warps
                assert 0.9 * SMS - 1 < chosen.programs <= SMS
                assert chosen.registers(rows) * 32 * (chosen.warps + 4) <= 65536


def test_whole_programs() -> None:
    assert whole_programs(64) == 128
    assert whole_programs(96) == whole_programs(1) == SMS == 132
    assert whole_programs(120 * 7) == 120


def test_what_the_kernel_does_not_support() -> None:
    chosen = Stream(64, 128, 12)
    assert chosen.supports(8, 6144, 4096, False)
    assert not chosen.supports(8, 6144, 4096, True)  # 32 rows of the gate are fewer than four warps multiply
    assert not chosen.supports(16, 6144, 4096, False)  # too much shared memory
    assert not Stream(64, 128, 1).supports(8, 6144, 4096, False)  # a buffer is free when the next step has begun
    assert Stream(256, 64, 2, 8, 5).supports(5 * 128, 6144, 4096, True)
    assert not Stream(256, 64, 2, 8, 5).supports(5 * 128 + 1, 6144, 4096, True)  # fewer programs than tiles of rows
    assert not Stream(64, 64, 2).supports(8, 1 << 20, 1 << 16, False)  # numbers of steps beyond 32 bits


def test_it_is_only_chosen_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Stream(128, 64, 2, 8)
    try:
        for supported in (False, True):
            monkeypatch.setattr(linear_config, "_tuned", {"128,48,96": chosen})
            monkeypatch.setattr(linear_config, "has_stream", lambda supported=supported: supported)
            config.cache_clear()
            assert config(100, 48, 96, torch.bfloat16) == (chosen if supported else None)
            found = linear_config.candidates(4, Shape(6144, 4096))
            assert any(isinstance(candidate, Stream) for candidate in found) == supported
            assert isinstance(found[0], Gemv)
    finally:
        config.cache_clear()


def test_kernels_that_are_compiled_once() -> None:
    shape, chosen = Shape(6144, 4096), Stream(64, 128, 12)
    keys = {linear_tuning.Problem(rows, shape, []).kernel_key(chosen) for rows in (1, 2, 4, 8)}
    assert len(keys) == 1


COMPILED = [  # rows, SwiGLU, config, dtype
    (1, False, Stream(64, 128, 12), torch.bfloat16),
    (100, True, Stream(256, 64, 4, 8), torch.bfloat16),
    (64, False, Stream(64, 128, 6), torch.float8_e4m3fn),
    (128, False, Stream(256, 64, 4, 8), torch.bfloat16),
]


def test_it_compiles_for_hopper_and_fits_an_sm(in_turn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton's compiler, for Hopper. The buffers and what else Triton needs take at most 227 KB."""
    rows, swiglu, chosen, dtype = in_turn(COMPILED, 0)
    stream = importlib.import_module("kernels.linear_stream")
    compiled = compile_only(stream, "_stream", monkeypatch)
    x, weight = torch.empty(rows, 1040, dtype=dtype), torch.empty(1024, 1040, dtype=dtype)
    out = torch.empty(rows, 512 if swiglu else 1024, dtype=torch.bfloat16)
    scales = (torch.empty(rows, 1), torch.empty(1024)) if dtype.itemsize == 1 else None
    stream.stream(x, weight, None, out, torch.empty(0, dtype=torch.int32), chosen, swiglu, scales)
    assert chosen.shared_bytes(rows) <= compiled[0].metadata.shared <= 227 << 10
    operands = "e4m3.e4m3" if scales else "bf16.bf16"
    assert f"f32.{operands}" in compiled[0].asm["ptx"]


# --- GPU ----------------------------------------------------------------------------------------------------------------------

GPU_CASES: list[tuple[int, int, torch.dtype, bool, bool]] = [  # N, K, dtype, SwiGLU, bias
    (6144, 4096, torch.bfloat16, False, False),
    (1000, 1032, torch.bfloat16, False, True),
    (2 * 1336, 584, torch.float16, True, True),
    (77, 64, torch.float16, False, False),
]


@needs_hopper
@pytest.mark.parametrize(("n", "k", "dtype", "swiglu", "biased"), GPU_CASES)
def test_all_rows_on_a_gpu(n: int, k: int, dtype: torch.dtype, swiglu: bool, biased: bool, seed: int) -> None:
    """1 to 256 rows into memory of NaN, by one of the candidates for each size of tiles."""
    x, weight, bias, exact, plain = operands((MAX_ROWS, n, k, dtype, swiglu, biased, Stream(64, 64, 2)), "cuda")
    chosen = {}
    for rows in range(1, MAX_ROWS + 1):
        size = max(8, 1 << (rows - 1).bit_length())
        if size not in chosen:
            chosen[size] = random.choice(stream_candidates(size, Shape(n, k, swiglu)))
        with gluon.poisoned():
            got = linear_with(x[:rows], weight, bias, chosen[size], swiglu)
        assert too_far(got, exact[:rows], plain[:rows]) is None, (rows, chosen, seed)
    assert not counters(x.device).any()


@needs_hopper
@pytest.mark.parametrize("rows", [17, 64, 100, 256])
@pytest.mark.parametrize(("n", "k", "biased"), [(6144, 4096, False), (1000, 1056, True)])
def test_products_of_codes_on_a_gpu(rows: int, n: int, k: int, biased: bool, seed: int) -> None:
    stream, counts = importlib.import_module("kernels.linear_stream").stream, counters(torch.device("cuda"))
    for chosen in stream_candidates(rows, Shape(n, k // 2)):
        assert fault_of_codes((rows, n, k, torch.bfloat16, False, biased, chosen), stream, counts, []) is None, (chosen, seed)


@needs_hopper
@pytest.mark.parametrize("rows", [257, 1000, 2048, 8000])
def test_prompts_with_swiglu_on_a_gpu(rows: int, seed: int) -> None:
    x, weight, _, exact, plain = operands((rows, 5000, 1032, torch.bfloat16, True, False, Stream(256, 64, 4, 8)), "cuda")
    for chosen in stream_candidates(rows, Shape(5000, 1032, True)):
        with gluon.poisoned():
            got = linear_with(x, weight, None, chosen, True)
        assert too_far(got, exact, plain) is None, (chosen, seed)


@needs_hopper
@pytest.mark.parametrize(("rows", "chosen"), [(1, Stream(64, 128, 12)), (8, Stream(64, 128, 5)), (128, Stream(128, 64, 6))])
def test_replays_on_a_gpu_repeat_their_bits(rows: int, chosen: Stream, seed: int) -> None:
    """Of a chain of layers."""
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5 for n, k in [(1536, 2048), (2048, 1536)] * 4]
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)

    def chain() -> Tensor:
        y = x
        for weight in weights:
            y = linear_with(y, weight, None, chosen, False)
        return y

    plain = x
    for weight in weights:
        plain = F.linear(plain, weight)
    assert (chain().float() - plain.float()).norm() < 0.05 * plain.float().norm(), seed
    assert wrong_replays(chain, x.normal_) == 0, seed
