"""Layers that push their partial sums give the same bits as the layer followed by the one-shot all-reduce, in Triton's
interpreter and on GPUs. The kernels of quantized layers run in the simulator of Gluon, whose stores the interpreted kernels of other
processes receive."""

import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from config import ModelConfig
from kernels.linear_config import Config, Gemv, Mma, QuantizedConfig, QuantizedGemv, QuantizedStream
from kernels.linear_quantized import Packed
from layers.linear import ShardedLinear
from quantized.scheme import on_load
from quantized.weight import dequantize, quantize
from tests.comm.test_symmetric import run_programs_in_threads
from tests.kernels.test_linear_quantized import (
    GEMV,
    GEMV_NEEDS,
    MODULE,
    NEEDS,
    SCHEMES,
    Case,
    operands,
    random_case,
    random_gemv_case,
)
from tests.support import gluon
from tests.support.gpus import gpu_report, needs_two
from tests.support.ranks import Ranks
from tests.support.sums import CPU, same_on_all_ranks, symmetric
from tp import Shard, World

pytest.importorskip("triton", reason="Triton is not installed; pip install triton")

BF16, FP16 = torch.bfloat16, torch.float16


def layer(world: World, seed: int, rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This rank's input, with gaps between rows, and its weight."""
    generator = torch.Generator().manual_seed(seed * 8 + world.rank)
    x = torch.randn(rows, k + 8, generator=generator).to(dtype)[:, :-8]
    return x, (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)


def stream(seed: int, rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A residual stream and the weight of a norm, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, n, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)


def far_from_exact(total: Tensor, x: Tensor, weight: Tensor, residual: Tensor) -> bool:
    """Whether the error of the sum is larger than that of rounding the sum and each rank's partial sum to the dtype.

    The interpreter truncates where a GPU rounds, so a whole unit in the last place is allowed for each.
    """
    partial = x.double() @ weight.double().T
    by_rank = [torch.zeros_like(partial) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, partial)
    exact, scale = sum(by_rank, residual.double()), sum((part.abs() for part in by_rank), residual.double().abs())
    return bool(((total.double() - exact).abs() > 2 * torch.finfo(total.dtype).eps * scale + 1e-4).any())


def wrong_sums(world: World, cases: list[tuple[int, int, int, torch.dtype, Config | None]], seed: int) -> list[str]:
    """Pushed all-reduces, with and without a norm, and one-shot all-reduces between them on the same workspace."""
    from comms.workspace import open_workspace
    from kernels.all_reduce import one_shot, one_shot_add_norm, one_shot_bytes
    from kernels.linear import linear_with
    from kernels.linear_push import linear_push, push_config, receive, receive_add_norm

    workspaces = [open_workspace(one_shot_bytes, 8192, CPU) for _ in range(2)]  # the mappings last as long as these objects
    ours, other = (workspace.exchange for workspace in workspaces)
    draw, found = random.Random(seed), []
    for i, (rows, n, k, dtype, chosen) in enumerate(cases):
        (x, weight), (residual, scale) = layer(world, seed + i, rows, n, k, dtype), stream(seed + i, rows, n, dtype)
        config = chosen or push_config(rows, n, k, dtype)
        assert config is not None
        partial = linear_with(x, weight, None, config, False)
        expected = *one_shot_add_norm(partial, residual, scale, 1e-5, other), one_shot(partial, other)
        linear_push(x, weight, ours, chosen)
        total, normed = receive_add_norm(residual, scale, 1e-5, ours)
        if draw.random() < 0.5 and not torch.equal(one_shot(partial, ours), expected[2]):
            found.append(f"{rows} {n} {k} {config}: one-shot all-reduce after it")
        linear_push(x[None], weight, ours, chosen)
        got = total, normed, receive((rows, n), dtype, ours)
        if not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
            found.append(f"{rows} {n} {k} {config}: other bits")
        if far_from_exact(total, x, weight, residual) or not same_on_all_ranks(torch.stack(got)):
            found.append(f"{rows} {n} {k} {config}: not the sum")
    return found + ([f"fault {int(ours.fault)}"] if int(ours.fault) else [])


def test_what_is_pushed_is_summed_as_one_shot_sums_it(interpreters: Ranks, in_turn: Callable[..., int], seed: int) -> None:
    """Blocks that divide the shape or do not, both kernels, K split over programs, default configs and given ones."""
    n = in_turn((1, 2, 4), 0)
    # The Mma cases use fp16: the interpreter multiplies bf16 matrices wrongly, as if their bits were integers.
    cases: list[tuple[int, int, int, torch.dtype, Config | None]] = [
        (1, 8, 256, BF16, Gemv(4, 256, 1)),
        (3, 18, 200, BF16, Gemv(8, 128, 1)),
        (2, 6, 72, FP16, Gemv(2, 256, 2)),
        (1, 10, 128, BF16, None),
        (4, 12, 64, FP16, None),
        (5, 70, 136, FP16, Mma(64, 64, 2, 3)),
        (16, 64, 128, FP16, Mma(32, 64, 1, 3)),
        (7, 40, 200, FP16, Mma(32, 32, 3, 2, early=False)),
        (9, 250, 136, FP16, None),
    ]
    some = random.sample(cases, 3 if n == 4 else 5)  # all ranks interpret all programs
    assert interpreters.run(n, wrong_sums, some, seed) == [[]] * n, f"seed {seed}"


# --- quantized layers ---------------------------------------------------------------------------------------------------------


@contextmanager
def simulated(seed: int, memory: Tensor) -> Iterator[list[gluon.Simulator]]:
    """In this context, the kernels of quantized layers run in the simulator. memory: bytes that they address by numbers."""
    loaded = {name: gluon.load(name, seed, needs=needs) for name, needs in ((MODULE, NEEDS), (GEMV, GEMV_NEEDS))}
    with pytest.MonkeyPatch.context() as patch:
        for name, (module, simulator) in loaded.items():
            module.SMS = 1
            simulator.mapped = [memory]
            patch.setitem(sys.modules, name, module)
        yield [simulator for _, simulator in loaded.values()]


def alone(x: Tensor, weight: Tensor | Packed, chosen: Any) -> Tensor:
    """The layer by itself."""
    from kernels.linear import linear_with
    from kernels.linear_quantized import linear_with as quantized_linear_with

    if isinstance(weight, Packed):
        return quantized_linear_with(x if weight.columns is None else x[:, weight.columns], weight, None, chosen, False)
    return linear_with(x, weight, None, chosen, False)


def quantized_case(dice: random.Random, scheme: str) -> Case:
    """Few rows, an even number of features, and a config of either kernel."""
    case = dice.choice([random_case, random_gemv_case])(dice, scheme)
    most = 8 if scheme == "fp8 by token" else 16  # with more, the inputs of that scheme are rounded
    return case._replace(rows=min(case.rows, most), n=case.n + case.n % 2, swiglu=False, biased=False)


def wrong_quantized_sums(world: World, cases: list[Case], seed: int) -> list[str]:
    """As `wrong_sums`, also by the config that a layer takes by default; and whether the receiver may start only after the wait for
    what came before the push."""
    from comms.workspace import open_workspace
    from kernels.all_reduce import one_shot, one_shot_add_norm, one_shot_bytes
    from kernels.linear_push import linear_push, quantized_push_config, receive, receive_add_norm

    most = math.ceil(max(2 * case.rows * case.n for case in cases) / 64) * 64  # bytes of a message
    workspaces = [open_workspace(one_shot_bytes, most, CPU) for _ in range(2)]  # the mappings last as long as these objects
    ours, other = (workspace.exchange for workspace in workspaces)
    draw, found = random.Random(seed), []
    with simulated(seed, workspaces[0].owner) as simulators:
        for i, case in enumerate(cases):
            torch.manual_seed((seed + i) * 8 + world.rank)
            x, quantized, weight, *_ = operands(case)
            residual, scale = stream(seed + i, case.rows, case.n, case.dtype)
            for simulator in simulators:
                simulator.early = [t for t in (weight.codes, weight.scales, weight.zeros) if t is not None]
            for chosen in (case.chosen, None):
                used = chosen or quantized_push_config(case.rows, weight, case.dtype)
                simulator = simulators[isinstance(used, QuantizedGemv)]
                what = f"{case._replace(chosen=used)}"
                partial = alone(x, weight, used)
                early = [simulator.released_early]
                expected = *one_shot_add_norm(partial, residual, scale, 1e-5, other), one_shot(partial, other)
                linear_push(x, weight, ours, chosen)
                early.append(simulator.released_early)
                total, normed = receive_add_norm(residual, scale, 1e-5, ours)
                if draw.random() < 0.5 and not torch.equal(one_shot(partial, ours), expected[2]):
                    found.append(f"{what}: one-shot all-reduce after it")
                linear_push(x[None], weight, ours, chosen)
                got = total, normed, receive((case.rows, case.n), case.dtype, ours)
                if not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
                    found.append(f"{what}: other bits")
                if far_from_exact(total, x, dequantize(quantized), residual):
                    found.append(f"{what}: not the sum")
                if not same_on_all_ranks(torch.stack(got)) or early != [True, False]:
                    found.append(f"{what}: ranks differ, or {early}")
    return found + ([f"fault {int(ours.fault)}"] if int(ours.fault) else [])


def test_what_quantized_layers_push_is_summed_as_one_shot_sums_it(
    interpreters: Ranks, in_turn: Callable[..., int], seed: int
) -> None:
    """fp8, int8 and int4, with scales of rows and of groups, with and without zero points, in one order or scattered."""
    dice, n = random.Random(seed), in_turn((1, 2, 4), 0)
    cases = [quantized_case(dice, scheme) for scheme in dice.sample(list(SCHEMES), 2 if n == 4 else 4)]
    assert interpreters.run(n, wrong_quantized_sums, cases, seed) == [[]] * n, f"seed {seed}"


class Layer(NamedTuple):
    """A quantized layer as a communicator sees it."""

    multiplied: Packed | None
    values: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.values, self.bias).to(x.dtype)


@torch.no_grad()
def wrong_choices(world: World, seed: int) -> list[str]:
    """What a communicator pushes although it should not, or does not although it should, or sums wrongly."""
    import comms.symmetric as module

    comm, found = symmetric("one-shot"), []
    torch.manual_seed(seed * 8 + world.rank)
    case = Case(16, 40, 128, "int4 group 64 asymmetric", QuantizedStream(64, 128, 2, 4, 3, 64), FP16)
    x, quantized, packed, *_ = operands(case)
    values = dequantize(quantized)
    plain, biased, adapted = Layer(packed, values), Layer(packed, values, torch.zeros(40)), Layer(None, values)
    with simulated(seed, comm.blocking.workspace.owner) as simulators, pytest.MonkeyPatch.context() as patch:
        for simulator in simulators:
            simulator.early = [t for t in (packed.codes, packed.scales, packed.zeros) if t is not None]
        patch.setattr(module, "on_gpu", lambda x: True)
        for rows, layer, overlap, deterministic, expected in (
            (3, plain, False, False, True),
            (16, plain, False, False, True),
            (2, plain, False, False, False),
            (8, plain, True, False, False),
            (8, biased, False, False, False),
            (8, adapted, False, False, False),
            (8, plain, False, True, False),
        ):
            with pytest.MonkeyPatch.context() as exact:
                exact.setattr(module.determinism, "enabled", lambda exact=deterministic: exact)
                pending = comm.begin_linear_all_reduce(x[:rows], layer, overlap)
            what = f"{rows} {overlap} {deterministic} {layer.bias is None} {layer.multiplied is None}"
            if isinstance(pending, module._PushedAllReduce) != expected:
                found.append(f"{what}: not {expected}")
            if far_from_exact(pending.wait(), x[:rows], values, torch.zeros(rows, 40)):
                found.append(f"{what}: not the sum")
    comm.check()
    return found


def test_a_communicator_pushes_what_few_rows_of_quantized_layers_sum(interpreters: Ranks, seed: int) -> None:
    """But not with a bias, adapters, an overlapped all-reduce, or --deterministic."""
    assert interpreters.run(2, wrong_choices, seed) == [[], []], f"seed {seed}"


def test_what_a_kernel_may_multiply_instead_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layers.linear.packs_on_gpu", lambda device, dtype: True)
    config = ModelConfig(
        vocab_size=96, hidden_size=64, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=16, intermediate_size=256, max_seq_len=64
    )
    shard = Shard(0, 2)
    plain = ShardedLinear(config, shard, ("down_proj",), 0, dtype=BF16)
    assert plain.multiplied is plain.weight
    layer = ShardedLinear(replace(config, quantization=on_load("int4")), shard, ("down_proj",), 0, dtype=BF16)
    assert layer.quantized is not None and layer.multiplied is None
    layer.quantized[0].fill(quantize(torch.randn(64, 128), on_load("int4").rules[0].scheme, "layer"))  # type: ignore[operator]
    layer.pack(BF16)
    assert isinstance(layer.multiplied, Packed) and layer.multiplied.k == 128
    layer.adapters = object()  # type: ignore[assignment]
    assert layer.multiplied is None


# --- the protocol -------------------------------------------------------------------------------------------------------------


def has_old_words(workspace: Any, epoch: int) -> bool:
    """Whether a launch that must zero the other slot has left words there that are not of the next launch."""
    exchange = workspace.exchange
    slot, begin = exchange.world_size * exchange.capacity // 4, (exchange.peers[-1] - workspace.owner.data_ptr()) // 8
    words = workspace.owner.view(torch.int64)[begin:][(epoch + 1) % 2 * slot :][:slot]
    flags = words >> 32 & 0xFFFFFFFF
    old = (flags != 0) & (flags != ((epoch + 1) & 0x7FFFFFFF | 0x80000000))
    return epoch % 2**30 >= 2**30 - 2 and bool(old.any())


def sums_around(world: World, epoch: int, seed: int) -> list[str]:
    """Check all-reduces while the epoch passes `epoch`. The buffers contain old words with the flags of later launches."""
    from comms.workspace import open_workspace
    from kernels.all_reduce import one_shot, one_shot_bytes
    from kernels.linear_push import linear_push, receive

    workspaces = [open_workspace(one_shot_bytes, 4096, CPU) for _ in range(2)]  # the mappings last as long as these objects
    ours, other = (workspace.exchange for workspace in workspaces)
    before, found = epoch - 2**31, []
    if before > 0:
        # 2^31 launches earlier, a longer message left words. Their flags repeat after they must have been zeroed.
        for stale in (before + 1, before + 2):
            ours.epochs.fill_(stale - 1)
            one_shot(torch.full((1000,), 1e6), ours)
    ours.epochs.fill_(epoch - 3)
    configs: list[Config | QuantizedConfig] = [Gemv(32, 64, 1), Mma(64, 32, 2, 2)]
    configs += [QuantizedGemv(16, 1, 1), QuantizedStream(64, 128, 2, 4, 3)]
    with simulated(seed, workspaces[0].owner) as simulators:
        for i, chosen in enumerate(random.Random(seed).choices(configs, k=5)):
            n, weight = 300 if i > 2 else 10, None
            if isinstance(chosen, QuantizedGemv | QuantizedStream):
                torch.manual_seed((seed + i) * 8 + world.rank)
                x, _, weight, *_ = operands(Case(3, n, 64, "int4", chosen, FP16))
                for simulator in simulators:
                    simulator.early = [weight.codes, weight.scales]
            else:
                x, weight = layer(world, seed + i, 3, n, 64, FP16)
            linear_push(x, weight, ours, chosen)
            if has_old_words(workspaces[0], int(ours.epochs[0]) + 1):
                found.append(f"launch {int(ours.epochs[0])} by {chosen} leaves old words")
            if not torch.equal(receive((3, n), FP16, ours), one_shot(alone(x, weight, chosen), other)):
                found.append(f"launch {int(ours.epochs[0])} by {chosen}")
    if set(ours.epochs.tolist()) != {epoch + 2}:
        found.append(f"counters {set(ours.epochs.tolist())}")
    return found


def test_flags_wrap_around(interpreters: Ranks, in_turn: Callable[..., int], seed: int) -> None:
    epoch = in_turn((2**30, 2**31, 2**32), 0)
    assert interpreters.run(2, sums_around, epoch, seed) == [[], []], f"epoch {epoch}, seed {seed}"


def lone_wait(world: World) -> list[int]:
    """Rank 1 does not take part. Rank 0 stops waiting and sets the fault."""
    from comms.workspace import open_workspace
    from kernels.all_reduce import one_shot_bytes
    from kernels.linear_push import linear_push, receive

    workspace = open_workspace(one_shot_bytes, 4096, CPU)
    exchange = replace(workspace.exchange, max_polls=20)
    if world.rank == 0:
        linear_push(*layer(world, 0, 1, 64, 64, FP16), exchange)
        receive((1, 64), FP16, exchange)
    found = int(exchange.fault)
    exchange.fault.zero_()  # all workspaces of a process share it
    return [found]


def test_a_rank_that_times_out_says_so(interpreters: Ranks) -> None:
    assert interpreters.run(2, lone_wait) == [[1], [0]]


def wrong_split_rows(world: World, seed: int) -> list[str]:
    """Check rows that several programs share. The programs exchange their sums of squares."""
    from comms.workspace import open_workspace
    from kernels.all_reduce import Tiling, one_shot_add_norm, one_shot_bytes
    from kernels.linear import linear_with
    from kernels.linear_push import linear_push, receive_add_norm

    run_programs_in_threads()
    workspaces = [open_workspace(one_shot_bytes, 8192, CPU) for _ in range(2)]  # the mappings last as long as these objects
    ours, other = (workspace.exchange for workspace in workspaces)
    found, chosen = [], Gemv(32, 64, 1)
    for i, (rows, n, block) in enumerate(((1, 400, 64), (3, 256, 64), (2, 90, 32))):
        (x, weight), (residual, scale) = layer(world, seed + i, rows, n, 64, FP16), stream(seed + i, rows, n, FP16)
        linear_push(x, weight, ours, chosen)
        got = receive_add_norm(residual, scale, 1e-5, ours, Tiling(block, 4))
        expected = one_shot_add_norm(
            linear_with(x, weight, None, chosen, False), residual, scale, 1e-5, other, Tiling(block, 4)
        )
        if not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
            found.append(f"{rows} {n} {block}")
    return found + ([f"fault {int(ours.fault)}"] if int(ours.fault) else [])


def test_programs_that_share_a_row(interpreters: Ranks, seed: int) -> None:
    try:
        assert interpreters.run(2, wrong_split_rows, seed) == [[], []], f"seed {seed}"
    finally:
        interpreters.end()  # because `run_programs_in_threads` has changed their interpreter


def refusals(world: World) -> int:
    from comms.workspace import open_workspace
    from kernels.all_reduce import one_shot_bytes
    from kernels.linear_push import fits, linear_push

    workspace = open_workspace(one_shot_bytes, 4096, CPU)
    exchange = workspace.exchange
    x, weight = torch.ones(2, 64).half(), torch.ones(1024, 64).half()
    assert fits(x, weight, exchange) and fits(x[None], weight, exchange)
    for bad in (
        (x, torch.ones(1026, 64).half()),  # a message of 4,104 bytes
        (x[:1], weight[:63]),  # an odd number of features
        (x.float(), weight.float()),
        (x, weight.bfloat16()),
        (torch.ones(17, 64).half(), weight[:64]),
        (x[:0], weight),
        (x, weight.repeat(1, 2)),
        (x, weight.repeat(1, 2)[:, :64]),  # not contiguous
        (x[:, :60], weight[:, :60].contiguous()),  # rows of 120 bytes
    ):
        assert not fits(*bad, exchange)
        with pytest.raises(ValueError, match="no kernel"):
            linear_push(*bad, exchange)
    return int(exchange.epochs[0])


def test_what_does_not_fit_is_refused(interpreters: Ranks) -> None:
    assert interpreters.run(1, refusals) == [0]


def test_every_program_of_a_chosen_config_has_pairs() -> None:
    from kernels.linear_push import MAX_ROWS, push_config

    for n, k in [(8192, 1024), (8192, 2048), (8192, 7168), (4096, 512), (4096, 14336), (192, 64), (18, 8), (576, 192)]:
        for rows in range(1, MAX_ROWS + 1):
            chosen = push_config(rows, n, k, BF16)
            assert chosen is not None and chosen.block_n % 2 == 0, (rows, n, k, chosen)
            assert isinstance(chosen, Gemv) or chosen.split <= -(-k // chosen.block_k), (rows, n, k, chosen)
    assert push_config(1, 17, 64, BF16) is push_config(MAX_ROWS + 1, 8192, 2048, BF16) is None


@needs_two
def test_on_gpus(tmp_path: Path) -> None:
    """The bits are those of the layer and the one-shot all-reduce, also in thousands of graph replays, of layers in 16, 8 and 4 bits."""
    report = gpu_report("tests.kernels.gpu_push_rank", tmp_path, timeout=1200)
    assert len([name for name in report["found"] if "correct" in name]) == 9
    assert all(report["found"][f"replays {kind}"] >= 2000 for kind in (None, "fp8", "int8", "int4"))
