"""Quantized linear layers on GPUs: packing, the gemv, stream and tiles kernels in a simulator and on a GPU, and the kernels for many
rows."""

import importlib
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear_config as config_module
from kernels import linear_quantized as kernel
from kernels import linear_tuning as tuning
from kernels.linear import counters
from kernels.linear_config import (
    COLUMNS,
    STREAM_ROWS,
    Format,
    QuantizedConfig,
    QuantizedGemv,
    QuantizedStream,
    QuantizedTiles,
    quantized_candidates,
)
from kernels.linear_quantized import Packed, linear, linear_with, pack
from kernels.row_codes import quantize_rows
from quantized.scheme import Scheme
from quantized.weight import Quantized, QuantizedWeight, dequantize, merged, quantize, quantized_input
from tests.kernels.test_linear import swiglu_of, too_far
from tests.support import gluon
from tests.support.gpus import needs_hopper
from tests.support.kernels import compile_only
from tests.support.ranks import Ranks
from tests.support.replays import wrong_replays

SCHEMES = {
    "fp8": Scheme("on-load", 8, is_float=True),
    "fp8 by token": Scheme("on-load", 8, is_float=True, activations="token"),
    "fp8 by block": Scheme("on-load", 8, is_float=True, group=128),
    "int8": Scheme("on-load", 8),
    "int8 by token": Scheme("on-load", 8, activations="token"),
    "int8 group 16": Scheme("on-load", 8, group=16),
    "int8 group 64 asymmetric": Scheme("on-load", 8, group=64, symmetric=False),
    "int4": Scheme("on-load", 4),
    "int4 asymmetric": Scheme("on-load", 4, symmetric=False),
    "int4 group 32": Scheme("on-load", 4, group=32),
    "int4 group 64 asymmetric": Scheme("on-load", 4, group=64, symmetric=False),
    "int4 group 128": Scheme("on-load", 4, group=128),
    "int4 group 128 asymmetric": Scheme("on-load", 4, group=128, symmetric=False),
}
MODULE, NEEDS = "kernels.linear_quantized_stream", ("kernels.linear_stream", "kernels.device")
GEMV, GEMV_NEEDS = "kernels.linear_quantized_gemv", (*NEEDS, MODULE)
TILES, TILES_NEEDS = "kernels.linear_quantized_tiles", (*NEEDS, MODULE)


class Case(NamedTuple):
    rows: int
    n: int
    k: int
    scheme: str
    chosen: QuantizedConfig
    dtype: torch.dtype = torch.bfloat16
    swiglu: bool = False
    biased: bool = False
    scattered: bool = False  # the groups are not neighbouring input features


class Operands(NamedTuple):
    x: Tensor  # with gaps between its rows
    weight: Quantized
    packed: Packed
    bias: Tensor | None
    exact: Tensor
    plain: Tensor  # by PyTorch, in the data type of x


def operands(case: Case, device: str = "cpu") -> Operands:
    scheme = SCHEMES[case.scheme]
    x = torch.randn(case.rows, case.k + 8, device=device).to(case.dtype)[:, :-8]
    weight = quantize((torch.randn(case.n, case.k, device=device) / case.k**0.5).to(case.dtype), scheme, "layer")
    if case.scattered:
        groups = torch.arange(case.k, device=device) // (case.k // weight.scales.shape[1])
        weight = weight._replace(groups=groups[torch.randperm(case.k, device=device)].int())
    packed = pack(*weight[:4], scaled=scheme.activations == "token")
    assert packed is not None
    bias = torch.randn(case.n, device=device).to(case.dtype) if case.biased else None
    full = dequantize(weight, torch.float32)
    exact = F.linear(x.double(), full.double(), None if bias is None else bias.double())
    plain = F.linear(x, full.to(case.dtype), bias)
    return Operands(x, weight, packed, bias, *((swiglu_of(exact), swiglu_of(plain)) if case.swiglu else (exact, plain)))


# --- packing and the kernels for many rows ------------------------------------------------------------------------------------


def differences(device: str) -> list[str]:
    """The cases in which a packed weight, read by the Triton kernel, is not bit by bit that of PyTorch."""
    found = []
    for name, scattered in product(SCHEMES, (False, True)):
        if scattered and not SCHEMES[name].group:
            continue
        weight = operands(Case(1, 3, 256, name, ANY, torch.float32, scattered=scattered), device)
        want = dequantize(weight.weight, torch.float16)
        columns = weight.packed.columns
        want = want if columns is None else want[:, columns]
        if not torch.equal(kernel.dequantize(weight.packed, torch.float16), want):
            found.append(f"{name} {scattered}")
    return found


ANY = QuantizedStream(64, 128, 2)


def wrong_references(device: str, names: list[str]) -> list[str]:
    """The cases in which what tuned kernels are compared with is not the product of the dequantized weight's first features."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "CHECKED", 24)
        for name, swiglu, scaled in product(names, (False, True), (False, True)):
            if scaled and name != "fp8 by token":
                continue
            case = operands(Case(16, 96, 256, name, ANY, torch.float32, swiglu), device)
            shape = tuning.QuantizedShape(96, 256, swiglu, format=case.packed.format, scaled=scaled)
            problem = tuning.QuantizedProblem(16, shape, [case.packed], torch.float32)
            x = problem.input()
            codes, columns = (x.codes.float() * x.scales if scaled else x), 48 if swiglu and not scaled else 96
            weight = kernel.dequantize(case.packed, torch.float32)
            if scaled:
                weight = case.packed.codes.view(torch.float8_e4m3fn).float() * case.packed.scales[:, None]
            want = F.linear(codes.double(), weight.double())
            want = swiglu_of(want) if columns == 48 else want
            got = problem.exact(x, case.packed)
            if got.shape != (16, 24) or (got - want[:, :24]).abs().max() > 1e-4:
                found.append(f"{name} {swiglu} {scaled}")
    return found


def test_triton_kernels_and_what_tuned_ones_are_compared_with(interpreters: Ranks, in_turn: Callable[..., int]) -> None:
    assert interpreters.call(differences, "cpu") == []
    assert interpreters.call(wrong_references, "cpu", list(SCHEMES)[in_turn(range(3), 0) :: 3]) == []


def wrong_int8_products(seed: int, device: str) -> list[str]:
    """Inputs whose int8 codes are not those of the definition, and products that are not those of the codes.

    A row's largest value lies in the middle of two codes, and so do others of 16 bits. A GPU's division may round them to either."""
    torch.manual_seed(seed)
    found, scheme = [], SCHEMES["int8 by token"]
    large = [(2100, 4096, 1024, True)] if device == "cuda" else []
    for rows, n, k, biased in [(3, 40, 48, True), (70, 300, 272, False), *large]:
        x, weight, packed, bias, _, _ = operands(Case(rows, n, k, "int8 by token", ANY, torch.float16, biased=biased), device)
        codes = quantize_rows(x, torch.int8)
        held = kernel.Packed(packed.format, rows, k, codes.codes.view(torch.int16), torch.ones_like(codes.scales[:, 0]))
        rounded = kernel.dequantize(held, torch.float32).double() * codes.scales.double()
        defined = quantized_input(x.float(), scheme, weight).double()
        exact = x.double() / x.double().abs().amax(1, keepdim=True) * 127.5
        is_tie = ((exact - exact.floor()) - 0.5).abs() < 1e-4
        if is_tie.double().mean() > 0.1 or not ((rounded - defined).abs() <= codes.scales * (1e-4 + is_tie)).all():
            found.append(f"codes of {rows} {k}")
        got = kernel.scaled_linear(codes, packed, bias).double()
        expected = F.linear(rounded, dequantize(weight).double(), None if bias is None else bias.double())
        if not (got - expected).norm() < 1e-3 * expected.norm():  # rounded to fp16
            found.append(f"{rows} {n} {k}: {(got - expected).norm() / expected.norm()}")
    return found


def test_products_of_int8_codes(interpreters: Ranks, seed: int) -> None:
    assert interpreters.call(wrong_int8_products, seed, "cpu") == []


def test_what_cannot_be_packed() -> None:
    """Too few input features, and groups that are smaller than the kernels' or the words of codes."""
    codes, scales = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 1)
    assert pack(codes, scales, None, None) is not None
    assert pack(codes[:, :24].contiguous(), scales, None, None) is None
    assert pack(codes, scales.expand(4, 4), None, None) is None  # groups of 16 features of 4 bits
    assert pack(codes, scales.expand(4, 2), None, torch.arange(64, dtype=torch.int32) % 16 // 15) is None
    assert pack(codes.view(torch.int8), scales.expand(4, 2), None, None) is not None
    assert pack(codes.view(torch.int8), scales.expand(4, 4), None, None) is None


@pytest.mark.parametrize("name", ["fp8", "int8 group 64 asymmetric", "int4 group 32"])
def test_parts_of_a_fused_layer_become_one_weight(name: str) -> None:
    """If they have the same scheme and the same groups."""
    scheme, sizes, k = SCHEMES[name], (24, 8, 16), 128
    parts, weights = [QuantizedWeight(scheme, n, k, None) for n in sizes], [torch.randn(n, k) for n in sizes]
    for part, weight in zip(parts, weights, strict=True):
        part.fill(quantize(weight, scheme, "layer"))
    whole = merged(parts)
    assert whole is not None
    assert torch.equal(dequantize(whole.tensors), torch.cat([dequantize(part.tensors) for part in parts]))
    parts[1].fill(parts[1].tensors._replace(groups=torch.arange(k, dtype=torch.int32) // 64))
    assert merged(parts) is None
    other = QuantizedWeight(replace(scheme, activations="group"), 8, k, None)
    other.fill(quantize(weights[1], scheme, "layer"))
    assert merged([parts[0], other]) is None
    static = [QuantizedWeight(replace(scheme, activations="static"), n, k, None) for n in sizes]
    for i, (part, weight) in enumerate(zip(static, weights, strict=True)):
        part.fill(quantize(weight, part.scheme, "layer")._replace(input_scale=torch.tensor([2.0, 5.0, 3.0][i])))
    whole = merged(static)
    assert whole is not None and whole.tensors.input_scale == 5.0, "no part's inputs are clipped"


# --- the simulator ------------------------------------------------------------------------------------------------------------


def random_case(dice: random.Random, scheme: str) -> Case:
    swiglu, warps = dice.random() < 0.4, dice.choice([4, 4, 8])
    block_n = max(dice.choice([64, 128]), 16 * warps * (1 + swiglu))
    k = 128 * dice.randint(1, 4) if SCHEMES[scheme].group or not SCHEMES[scheme].symmetric else 32 * dice.randint(1, 15)
    rows = dice.choice([1, 2, 3, 4, 8, 9, 16, 17, 40, 130])
    sums = 64 if SCHEMES[scheme].group or not SCHEMES[scheme].symmetric else 128
    chosen = QuantizedStream(block_n, dice.choice([128, 256]), 2, warps, dice.randint(1, 6), sums)
    if not chosen.sharers(rows):  # fewer programs than tiles of rows
        chosen = replace(chosen, programs=chosen.programs + 3)
    if rows > 64:  # less room
        chosen = replace(chosen, block_k=128)
    dtype = dice.choice([torch.bfloat16, torch.float16])
    n = dice.randint(1, 140) * (1 + swiglu)
    scattered = "group" in scheme and dice.random() < 0.5
    return Case(rows, n, k, scheme, chosen, dtype, swiglu, dice.random() < 0.5, scattered)


def random_gemv_case(dice: random.Random, scheme: str) -> Case:
    """Small layers: rows of codes that warps load at once or in turns, or that end within their chunks."""
    swiglu, grouped = dice.random() < 0.4, bool(SCHEMES[scheme].group) or not SCHEMES[scheme].symmetric
    chosen = QuantizedGemv(dice.choice([16, 32]), dice.choice([1, 2, 4]), dice.choice([1, 2, 4]), dice.choice([0, 1, 2]))
    k = 128 * dice.randint(1, 8) if grouped else 32 * dice.randint(1, 40)
    of_a_group = COLUMNS // chosen.groups(operands(Case(1, 1, k, scheme, chosen)).packed.format)
    n, dtype = dice.randint(1, 70) * (1 + swiglu), dice.choice([torch.bfloat16, torch.float16])
    scattered = "group" in scheme and dice.random() < 0.5
    return Case(dice.randint(1, of_a_group), n, k, scheme, chosen, dtype, swiglu, dice.random() < 0.5, scattered)


def random_tiles_case(dice: random.Random, scheme: str) -> Case:
    """Several launches, tiles of rows and of features, tiles that programs share, and more steps than buffers."""
    tile_rows = dice.choice([64, 128])
    tile_k = dice.choice([128, 256]) if tile_rows == 64 and SCHEMES[scheme].bits == 4 else 128
    chosen = QuantizedTiles(256, tile_k, 2, programs=dice.choice([8, 16]), rows=tile_rows)
    grouped, swiglu = bool(SCHEMES[scheme].group) or not SCHEMES[scheme].symmetric, dice.random() < 0.4
    k = 128 * dice.choice([1, 5, 24, 32]) if grouped else 32 * dice.choice([1, 21, 100, 128])
    n, dtype = dice.choice([dice.randint(1, 300), 256, 320]) * (1 + swiglu), dice.choice([torch.bfloat16, torch.float16])
    scattered = "group" in scheme and dice.random() < 0.5
    return Case(dice.randint(1, 140), n, k, scheme, chosen, dtype, swiglu, dice.random() < 0.5, scattered)


def simulated(module: Any, simulator: gluon.Simulator, case: Case) -> str | None:
    """What is wrong with a case: its result, that of a second run in another order, or the counters."""
    x, _, packed, bias, exact, plain = operands(case)
    if packed.columns is not None:
        x = x[:, packed.columns]
    simulator.early = [t for t in (packed.codes, packed.scales, packed.zeros) if t is not None]
    counts = torch.zeros(0 if isinstance(case.chosen, QuantizedGemv) else 4 * case.chosen.programs, dtype=torch.int32)
    results = []
    for _ in range(2):
        with gluon.poisoned():
            out = torch.empty_like(plain)
            if isinstance(case.chosen, QuantizedGemv):
                module.gemv(x, packed, bias, out, case.chosen, case.swiglu)
            elif isinstance(case.chosen, QuantizedTiles):
                module.tiles(x, packed, bias, out, counts, case.chosen, case.swiglu)
            else:
                module.stream(x, packed, bias, out, counts, case.chosen, case.swiglu)
        results.append(out)
        if counts.any():
            return "a counter is not zero"
    if not torch.equal(*results):
        return "other bits the second time"
    return too_far(results[0], exact, plain)


@pytest.mark.parametrize(
    ("name", "needs", "case_of", "count"),
    [(MODULE, NEEDS, random_case, 5), (TILES, TILES_NEEDS, random_tiles_case, 2), (GEMV, GEMV_NEEDS, random_gemv_case, None)],
)
def test_in_the_simulator(name: str, needs: Any, case_of: Any, count: int | None, seed: int) -> None:
    dice = random.Random(seed)
    module, simulator = gluon.load(name, seed, needs=needs)
    module.SMS = 1  # of a GEMV
    schemes = [scheme for scheme in SCHEMES if name != TILES or scheme != "fp8 by block"]  # whose scales are fp32
    for scheme in dice.sample(schemes, count or len(schemes)):
        case = case_of(dice, scheme)
        assert simulated(module, simulator, case) is None, case


def test_a_gemv_does_not_take_more_rows_than_it_has_columns() -> None:
    one = QuantizedGemv(16, 8, 4)
    assert [one.fits(rows, 64, 256, False, Format("int4", 32)) for rows in (2, 3)] == [True, False]
    assert [one.fits(rows, 64, 256, False, Format("int8")) for rows in (8, 9)] == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_codes_are_converted_exactly(dtype: torch.dtype, seed: int) -> None:
    """Every code of every format, the subnormal ones of fp8 included: products with ones of 0 and 1."""
    module, simulator = gluon.load(MODULE, seed, needs=NEEDS)
    every = torch.arange(256).view(4, 64).to(torch.uint8)
    finite = torch.where(every & 127 == 127, torch.tensor(0, dtype=torch.uint8), every)
    for codes in (finite.view(torch.float8_e4m3fn), every.view(torch.int8), every):
        packed = pack(codes, torch.ones(4, 1), None, None)
        assert packed is not None
        x = torch.eye(packed.k, dtype=dtype)
        out = torch.empty(packed.k, 4, dtype=dtype)
        simulator.early = [packed.codes]
        counts = torch.zeros(64, dtype=torch.int32)
        module.stream(x, packed, None, out, counts, QuantizedStream(64, 128, 2, 4, 2), False)
        assert torch.equal(out.T, dequantize(Quantized(codes, torch.ones(4, 1)), dtype))


def test_many_rows_use_the_kernel_that_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only if the scales are as exact in the input's data type."""
    chosen, used = QuantizedTiles(256, 128, 4), []
    _, weight, packed, *_ = operands(Case(1, 32, 256, "int4 group 128", ANY))
    assert packed.scales.dtype == torch.bfloat16
    monkeypatch.setattr(config_module, "_tuned", {config_module.table_key(2048, 32, 256, kind=packed.format.name): chosen})
    monkeypatch.setattr(kernel, "linear_with", lambda x, *rest: used.append(rest[2]) or torch.empty(len(x), 32))
    monkeypatch.setattr(kernel, "dequantize", lambda _, dtype: used.append(None) or dequantize(weight, dtype))
    config_module.quantized_config.cache_clear()
    cases = [(2000, torch.bfloat16), (9000, torch.bfloat16), (1000, torch.bfloat16), (2000, torch.float16)]
    for rows, dtype in cases:
        linear(torch.zeros(rows, 256, dtype=dtype), packed)
    config_module.quantized_config.cache_clear()
    assert used == [chosen, chosen, None, None]
    shape = tuning.QuantizedShape(32, 256, format=packed.format)
    asked = [(256, torch.bfloat16), (256, torch.float16), (128, torch.float16)]
    assert [tuning.QuantizedProblem(rows, shape, [packed], dtype).is_used for rows, dtype in asked] == [True, False, True]


def test_many_rows_without_a_measurement_use_tiles_for_large_layers_of_4_bits() -> None:
    def tiled(rows: int, n: int, k: int, scheme: str) -> bool:
        found = config_module.quantized_config(rows, n, k, config_module.Format.parse(scheme), False)
        assert found is None or (isinstance(found, QuantizedTiles) and found.fits(n, k, config_module.Format.parse(scheme)))
        return found is not None

    config_module.quantized_config.cache_clear()
    assert tiled(1024, 4096, 4096, "int4-128") and tiled(256, 4096, 14336, "int4-32-zeros")
    assert not tiled(256, 4096, 4096, "int4-128")
    assert not tiled(4096, 28672, 8192, "int8-0") and not tiled(4096, 28672, 8192, "int4-128-wide")


# --- compiling ----------------------------------------------------------------------------------------------------------------

COMPILED = [  # by kernel; a run takes one of each
    [
        Case(17, 1024, 1024, "fp8", QuantizedStream(128, 128, 9)),
        Case(32, 1024, 1024, "int4 group 128 asymmetric", QuantizedStream(128, 256, 3, 4, 264, 64), swiglu=True),
        Case(16, 1024, 1024, "int4 group 128 asymmetric", QuantizedStream(128, 256, 2, 4, 396, 64), swiglu=True),
        Case(8, 1024, 1024, "fp8", QuantizedStream(256, 128, 6, 8), swiglu=True),
    ],
    [
        Case(2, 1024, 4096, "int4 group 128", QuantizedGemv(16, 8, 4), swiglu=True),
        Case(1, 1024, 6144, "fp8", QuantizedGemv(16, 4, 8)),
    ],
    [
        Case(300, 1024, 1024, "int4 group 128", QuantizedTiles(256, 128, 4)),
        Case(300, 1024, 1024, "int4 group 64 asymmetric", QuantizedTiles(256, 128, 4), swiglu=True),
    ],
]
PUSHED = [
    Case(4, 1024, 2048, "fp8", QuantizedGemv(16, 4, 8)),
    Case(16, 1024, 1024, "int8 group 64 asymmetric", QuantizedStream(128, 256, 2, 4, 264, 64)),
    Case(2, 1024, 2048, "int4 group 32", QuantizedGemv(32, 4, 4)),
]
KERNELS = {QuantizedGemv: (GEMV, "_gemv"), QuantizedStream: (MODULE, "_stream"), QuantizedTiles: (TILES, "_tiles")}


def compiling(chosen: QuantizedConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """The module of this config's kernel, whose launches now only compile it for Hopper, and what they have compiled."""
    name, kernel = KERNELS[type(chosen)]
    module = importlib.import_module(name)
    return module, compile_only(module, kernel, monkeypatch)


@pytest.mark.parametrize("cases", COMPILED)
def test_it_compiles_for_hopper_and_fits_an_sm(
    cases: list[Case], in_turn: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Triton's compiler, for Hopper. Buffers suffice, registers do for few rows, and the weight comes from registers."""
    case = in_turn(cases, 0)
    module, compiled = compiling(case.chosen, monkeypatch)
    x, _, packed, bias, _, plain = operands(case)
    out = torch.empty_like(plain)
    if isinstance(case.chosen, QuantizedGemv):
        module.gemv(x, packed, bias, out, case.chosen, case.swiglu)
        assert compiled[0].metadata.shared <= 32 * case.chosen.block_n * case.chosen.warps  # only for the sums of warps
    elif isinstance(case.chosen, QuantizedTiles):
        module.tiles(x, packed, bias, out, torch.empty(0, dtype=torch.int32), case.chosen, case.swiglu)
        assert case.chosen.ring_bytes(packed.format) <= compiled[0].metadata.shared <= 227 << 10
    else:
        module.stream(x, packed, bias, out, torch.empty(0, dtype=torch.int32), case.chosen, case.swiglu)
        ring = case.chosen.ring_bytes(case.rows, packed.format)
        assert ring <= compiled[0].metadata.shared <= (227 << 10) // case.chosen.on_an_sm
    is_mma = isinstance(case.chosen, QuantizedGemv) or (
        isinstance(case.chosen, QuantizedStream) and case.chosen.is_mma(case.rows)
    )
    assert ("mma.sync" if is_mma else "wgmma.mma_async") in compiled[0].asm["ptx"]
    assert compiled[0].asm["ptx"].count(".local") == 0


def test_a_pushed_result_takes_no_more_shared_memory(in_turn: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers have what there is."""
    from kernels.all_reduce import Exchange

    case = in_turn(PUSHED, 0)
    module, compiled = compiling(case.chosen, monkeypatch)
    x, _, packed, _, _, plain = operands(case)
    state = [torch.zeros(1, dtype=dtype) for dtype in (torch.int64, torch.int64, torch.int32)]
    exchange = Exchange(1, (1 << 40, 1 << 41), *state, capacity=256 << 10)
    for out, to in ((torch.empty_like(plain), None), (None, exchange)):
        if isinstance(case.chosen, QuantizedGemv):
            module.gemv(x, packed, None, out, case.chosen, False, to)
        else:
            module.stream(x, packed, None, out, torch.empty(0, dtype=torch.int32), case.chosen, False, to)
    stored, pushed = compiled
    assert pushed.metadata.shared == stored.metadata.shared
    assert pushed.asm["ptx"].count(".local") == 0


# --- GPU ----------------------------------------------------------------------------------------------------------------------

ROWS = ((1, 2), (3, 4), (5, 8), (16,), (17,), (64,), (128,))  # those of a tile of one size
MANY = (40, 64, 256, 300)  # by `linear`: products of codes, and what is beyond the stream kernels
TILED = (129, 300, 2100)  # by the tiles kernel: one launch, and two
SHAPES = [(6144, 4096, False, False), (1000, 1152, False, True), (2 * 1336, 640, True, True)]  # N, K, SwiGLU, bias


@needs_hopper
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_rows_on_a_gpu(scheme: str, seed: int) -> None:
    """Into memory of NaN: some candidates of the kernels, because each takes seconds to compile, and what many rows use."""
    dice = random.Random(seed)
    for sizes in (*ROWS[:2], *dice.sample(ROWS, 3), MANY, TILED):
        n, k, swiglu, biased = dice.choice(SHAPES)
        dtype = dice.choice([torch.bfloat16, torch.float16])
        given = operands(Case(max(sizes), n, k, scheme, ANY, dtype, swiglu, biased, "group" in scheme and biased), "cuda")
        ordered = given.x if given.packed.columns is None else given.x[:, given.packed.columns]
        # rows of 8 bits, as the scheme asks
        times = 40 if sizes == MANY and given.packed.scaled else 2
        found = quantized_candidates(
            max(sizes) if sizes == TILED else min(STREAM_ROWS, max(sizes)), n, k, given.packed.format, swiglu
        )
        chosen = dice.choice(found) if found else None  # with fp32 scales of groups the tiles kernel has none
        for rows in sizes if chosen else ():
            exact, plain = given.exact[:rows], given.plain[:rows]
            with gluon.poisoned():
                if sizes == MANY:
                    got = linear(given.x[:rows], given.packed, given.bias, swiglu)
                else:
                    got = linear_with(ordered[None, :rows], given.packed, given.bias, chosen, swiglu)[0]
            used = "linear" if sizes == MANY else chosen
            assert too_far(got, exact, plain, times) is None, (rows, n, k, dtype, swiglu, used, seed)
    assert not counters(given.x.device).any()


@needs_hopper
def test_triton_kernels_on_a_gpu(seed: int) -> None:
    assert differences("cuda") + wrong_int8_products(seed, "cuda") == []


@needs_hopper
@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4 group 128", "int4 group 32"])
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_replays_on_a_gpu_repeat_their_bits(rows: int, scheme: str, seed: int) -> None:
    """Of a chain of layers."""
    given = [operands(Case(rows, n, k, scheme, ANY), "cuda") for n, k in [(1536, 2048), (2048, 1536)] * 4]
    x = given[0].x

    def chain() -> Tensor:
        y = x
        for layer in given:
            y = linear(y, layer.packed)
        return y

    plain = x
    for layer in given:
        plain = F.linear(plain, dequantize(layer.weight, plain.dtype))
    assert (chain().float() - plain.float()).norm() < 0.05 * plain.float().norm(), seed
    assert wrong_replays(chain, x.normal_) == 0, seed
