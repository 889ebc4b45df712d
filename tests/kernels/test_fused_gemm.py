"""GEMMs that exchange rows tile by tile: N ranks in one process against fp64, flags, and the order of tiles."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.device import MAX_POLLS
from kernels.tile_gemm import (
    BLOCK,
    SHARED_BYTES,
    TILINGS,
    GemmTiling,
    all_gather_gemm,
    candidates,
    default_tiling,
    gemm_reduce_scatter,
)
from tests.kernels.test_linear import too_far
from tests.support.ranks import Ranks

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# ranks, rows of each rank, K, features, dtype, tiling. Tiles divide some sizes evenly and others not. In some cases ranks share
# tiles, or have several blocks of rows.
Case = tuple[int, int, int, int, torch.dtype, GemmTiling]
SMALL = GemmTiling(64, 32, 32, stages=2, warps=4, group=2)
CPU_CASES: list[Case] = [
    (1, 70, 72, 40, torch.float16, SMALL),
    (2, 130, 64, 72, torch.float32, GemmTiling(128, 32, 32, group=1)),
    (2, 200, 40, 32, torch.float16, SMALL),
    (4, 64, 32, 96, torch.float32, SMALL),
    (4, 16, 96, 64, torch.float16, SMALL),
    (3, 24, 64, 48, torch.float32, SMALL),
    (4, 150, 32, 64, torch.float16, GemmTiling(128, 64, 32, group=8, specialized=True)),
]
GPU_CASES: list[Case] = [
    (ranks, rank_rows, k, features, dtype, tiling)
    for ranks, rank_rows, k, features in [
        (4, 256, 512, 1024),
        (4, 300, 264, 776),
        (2, 16, 1024, 512),
        (1, 130, 256, 256),
        (8, 48, 192, 264),
    ]
    for dtype in (torch.bfloat16, torch.float16)
    for tiling in TILINGS
]


class RankMemory:
    """The memory of N ranks in one process: for each owner, a buffer and flags for each source."""

    def __init__(self, ranks: int, rank_rows: int, features: int, dtype: torch.dtype, device: str) -> None:
        self.blocks = -(-rank_rows // BLOCK)
        self.areas = torch.full((ranks, ranks, rank_rows, features), torch.nan, dtype=dtype, device=device)  # [owner, source]
        self.flags = torch.zeros(ranks, ranks, self.blocks, dtype=torch.int64, device=device)

    def scatter(self, source: int, x: Tensor, weight: Tensor, epoch: Tensor, tiling: GemmTiling) -> None:
        destinations = tuple(area[source].data_ptr() for area in self.areas)
        flags = tuple(flags[source].data_ptr() for flags in self.flags)
        gemm_reduce_scatter(x, weight, destinations, flags, epoch, source, tiling)


def operands(case: Case, generator: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    ranks, rank_rows, k, features, dtype, _ = case
    x = torch.randn(ranks * rank_rows, k, generator=generator).to(device, dtype)
    return x, torch.randn(features, k, generator=generator).to(device, dtype) / k**0.5


def scatter_mismatches(cases: list[Case], seed: int, device: str) -> list[str]:
    """Check each rank's product. It runs twice: the counters must have been zeroed, and the flags must follow the epoch."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for case in cases:
        ranks, rank_rows, _, features, dtype, tiling = case
        memory = RankMemory(ranks, rank_rows, features, dtype, device)
        for number in (1, 2):
            epoch = torch.tensor([number], dtype=torch.int64, device=device)
            memory.areas.fill_(torch.nan)
            for source in range(ranks):
                x, weight = operands(case, generator, device)
                memory.scatter(source, x, weight, epoch, tiling)
                got = memory.areas[:, source].reshape(ranks * rank_rows, features)
                if complaint := too_far(got, x.double() @ weight.double().T, x @ weight.T):
                    found.append(f"{case} source {source}: {complaint}")
            if not torch.equal(memory.flags, torch.full_like(memory.flags, number)):
                found.append(f"{case}: flags {memory.flags.tolist()} at {number}")
    return found


def gather_mismatches(cases: list[Case], seed: int, device: str) -> list[str]:
    """Check the products if all rows are there: flags have this epoch or a later one, and this rank's own flags are not set.
    Then check that a missing block sets the fault."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for case in cases:
        ranks, rank_rows, *_, tiling = case
        rows, weight = operands(case, generator, device)
        epoch = torch.tensor([7], dtype=torch.int64, device=device)
        fault = torch.zeros(1, dtype=torch.int32, device=device)
        for rank in range(ranks):
            flags = torch.full((ranks, -(-rank_rows // BLOCK) + 1), 7 + rank % 2, dtype=torch.int64, device=device)
            flags[rank] = 0
            got = all_gather_gemm(rows, weight, flags, epoch, rank, fault, tiling, MAX_POLLS)
            if complaint := too_far(got, rows.double() @ weight.double().T, rows @ weight.T):
                found.append(f"{case} rank {rank}: {complaint}")
        if int(fault):
            found.append(f"{case}: fault {int(fault)}")
        if ranks > 1:
            flags[0, (rank_rows - 1) // BLOCK] = 6
            all_gather_gemm(rows, weight, flags, epoch, ranks - 1, fault, tiling, max_polls=3)
            if int(fault) != 5:
                found.append(f"{case}: fault {int(fault)} though a block is missing")
    return found


def late_rows_mismatches(tiling: GemmTiling, seed: int) -> list[str]:
    """Check a product that runs while a second stream copies the rows of each source and then sets their flags. The tiling must
    leave SMs to these copies."""
    case = (4, 384, 2048, 4096, torch.bfloat16, tiling)
    source, weight = operands(case, torch.Generator().manual_seed(seed), "cuda")
    rows, flags = torch.full_like(source, torch.nan), torch.zeros(4, 3, dtype=torch.int64, device="cuda")
    epoch, fault = torch.ones(1, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    rows[384:768] = source[384:768]
    all_gather_gemm(rows, weight, torch.ones_like(flags), epoch, 1, fault, tiling, MAX_POLLS)  # compiles the kernel
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    got = all_gather_gemm(rows, weight, flags, epoch, 1, fault, tiling, MAX_POLLS)
    with torch.cuda.stream(side):
        for other in (0, 3, 2):
            time.sleep(0.01)
            for block in range(3):
                part = slice(other * 384 + block * 128, other * 384 + (block + 1) * 128)
                rows[part] = source[part]
                flags[other, block] = 1
    torch.cuda.synchronize()
    complaint = too_far(got, source.double() @ weight.double().T, source @ weight.T)
    return [found for found in (complaint, f"fault {int(fault)}" if int(fault) else "") if found]


def replay_mismatches(seed: int) -> list[str]:
    """Check replays of a CUDA graph that advances the epoch and multiplies. Every replay must set the flags to its own epoch."""
    generator = torch.Generator().manual_seed(seed)
    case = (4, 144, 512, 768, torch.bfloat16, default_tiling(576, 768, 512, 4))
    x, weight = operands(case, generator, "cuda")
    memory = RankMemory(4, 144, 768, torch.bfloat16, "cuda")
    epoch = torch.zeros(1, dtype=torch.int64, device="cuda")
    memory.scatter(2, x, weight, epoch, case[-1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        epoch.add_(1)
        memory.scatter(2, x, weight, epoch, case[-1])
    found = []
    for number in range(1, 101):
        memory.areas.fill_(torch.nan)
        x.copy_(torch.randn(x.shape, generator=generator))
        graph.replay()
        if complaint := too_far(memory.areas[:, 2].reshape(len(x), 768), x.double() @ weight.double().T, x @ weight.T):
            found.append(f"replay {number}: {complaint}")
        if not bool((memory.flags[:, 2] == number).all()):
            found.append(f"replay {number}: flags {memory.flags[:, 2].tolist()}")
    return found


# --- in the interpreter ------------------------------------------------------------------------------------------------------


def scattered_here(seed: int) -> list[str]:
    return scatter_mismatches(CPU_CASES, seed, "cpu")


def gathered_here(seed: int) -> list[str]:
    return gather_mismatches(CPU_CASES, seed, "cpu")


def order_here(seed: int) -> list[str]:
    """Check the order of tiles when one program computes all: each tile once, owner by owner, in groups of row tiles."""
    from kernels import tile_gemm_triton as kernels

    product, rows = kernels._product, []

    def record(x: Any, weight: Any, row: Any, *rest: Any) -> Any:
        rows.append(int(row.handle.data.item()))
        return product(x, weight, row, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_product", record)
        return wrong_orders(seed, rows)


def wrong_orders(seed: int, rows: list[int]) -> list[str]:
    """`rows`: the list to which the first row of each computed tile is appended."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    alone = GemmTiling(64, 32, 32, stages=2, group=2, free_sms=2)  # one program: of 3 SMs in the interpreter, 2 are left free
    for ranks, rank_rows, expected in [
        (4, 144, (turns(144, (2, 3, 0, 1)), turns(144, (1, 0, 3, 2)))),
        (2, 80, (turns(80, (0, 1)), turns(80, (1, 0)))),
        (4, 32, ([64, 0, 64, 0], [0, 64, 0, 64])),  # two owners share a tile
    ]:
        case = (ranks, rank_rows, 32, 64, torch.float32, alone)
        memory, (x, weight) = RankMemory(ranks, rank_rows, 64, torch.float32, "cpu"), operands(case, generator, "cpu")
        epoch, fault = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        memory.scatter(1, x, weight, epoch, alone)
        all_gather_gemm(x, weight, torch.ones(ranks, 2, dtype=torch.int64), epoch, 1, fault, alone, MAX_POLLS)
        if rows != [*expected[0], *expected[1]]:
            found.append(f"{ranks} x {rank_rows}: the order {rows}, not {expected}")
        rows.clear()
    return found


def turns(rank_rows: int, owners: tuple[int, ...]) -> list[int]:
    """The first rows of the tiles in order, for tiles of 64 rows and two columns of tiles. In each group of two row tiles, both
    are computed for one column before the next column."""
    tiles = list(range(0, rank_rows, 64))
    order = [row for i in range(0, len(tiles), 2) for _ in range(2) for row in tiles[i : i + 2]]
    return [owner * rank_rows + row for owner in owners for row in order]


@pytest.mark.parametrize("wrong", [scattered_here, gathered_here, order_here])
def test_in_the_interpreter(wrong: Any, interpreters: Ranks, seed: int) -> None:
    assert interpreters.call(wrong, seed) == []


# --- on the host -------------------------------------------------------------------------------------------------------------


def test_tilings_fit_an_sm_and_the_flags() -> None:
    for tiling in TILINGS:
        assert tiling.stages * tiling.step_bytes() < SHARED_BYTES, tiling
        assert BLOCK % tiling.block_m == 0, tiling
        assert tiling.programs_per_sm() * tiling.warps <= 8, tiling
        if tiling.specialized:
            assert tiling.stages_with(tiling.result_bytes()) >= 3, tiling
            assert tiling.block_m == 16 * tiling.warps, tiling  # each warp of the tensor cores has 16 rows


def test_candidates_are_all_tilings_and_small_products_get_small_tiles() -> None:
    for m, n, k in [(8192, 8192, 7168), (1024, 14336, 8192), (64, 8192, 2048)]:
        assert set(candidates(m, n, k, 4)) == set(TILINGS)
    large, small = default_tiling(8192, 14336, 8192, 4), default_tiling(64, 8192, 7168, 4)
    assert large.block_m * large.block_n == 128 * 256, large
    assert small.block_m == 64 and small.block_n < 256, small


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        (((6, 16), (8, 16)), "split over"),
        (((8, 12), (8, 12)), "multiples of 16 bytes"),
        (((8, 16), (8, 24)), "cannot multiply"),
        (((8, 16), (12, 16)), "multiples of 16 bytes"),
    ],
)
def test_operands_that_do_not_fit_are_refused(shapes: tuple[tuple[int, int], ...], complaint: str) -> None:
    x, weight = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    epoch = torch.ones(1, dtype=torch.int64)
    fault = torch.zeros(1, dtype=torch.int32)
    flags = torch.zeros(4, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=complaint):
        gemm_reduce_scatter(x, weight, (16,) * 4, (8,) * 4, epoch, 0, SMALL)
    with pytest.raises(ValueError, match=complaint):
        all_gather_gemm(x, weight, flags, epoch, 0, fault, SMALL, MAX_POLLS)


# --- on a GPU ----------------------------------------------------------------------------------------------------------------


@GPU
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_reduce_scatter_on_a_gpu(tiling: GemmTiling, seed: int) -> None:
    assert scatter_mismatches([case for case in GPU_CASES if case[-1] == tiling], seed, "cuda") == [], seed


@GPU
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_all_gather_on_a_gpu(tiling: GemmTiling, seed: int) -> None:
    assert gather_mismatches([case for case in GPU_CASES if case[-1] == tiling], seed, "cuda") == [], seed


@GPU
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_rows_that_arrive_late(tiling: GemmTiling, seed: int) -> None:
    assert late_rows_mismatches(replace(tiling, free_sms=16), seed) == [], seed


@GPU
def test_replays_announce_their_own_epoch(seed: int) -> None:
    assert replay_mismatches(seed) == [], seed
