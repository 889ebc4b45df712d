"""Tilings of the GEMMs that exchange rows with other GPUs: the host code that `kernels/gemm_reduce_scatter.py` and
`kernels/all_gather_gemm.py` share.

Each of N ranks owns `rank_rows` consecutive token rows. One int64 flag signals that BLOCK rows of a rank have arrived: coarser
than a flag for each tile (Flux, section 4.3, decouples the two) and finer than one for each rank.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK = 128  # rows of one flag; no tile has more rows
MAX_SPECIALIZED = 8  # ranks of a GEMM with specialized warps, at most
COUNTERS = 1 << 14  # blocks of one GEMM, at most
SHARED_BYTES = 227 << 10  # of an SM of Hopper
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GemmTiling:
    """Tiles of block_m rows by block_n columns, summed block_k columns of the operands at a time.

    stages: pipeline stages, which are steps of operands in shared memory. group: row tiles that are computed before the next
    column of tiles, so that concurrent tiles share operands in L2. specialized: whether to use warp specialization, so that
    loads and stores continue while a tile begins or ends (`kernels/tile_gemm_hopper.py`: needs Hopper and at least block_m rows
    per rank; otherwise the same tiles are computed without it). free_sms: SMs left to kernels that transfer rows.
    """

    block_m: int
    block_n: int
    block_k: int = 64
    stages: int = 4
    warps: int = 8
    group: int = 8
    specialized: bool = False
    free_sms: int = 0

    def step_bytes(self, itemsize: int = 2) -> int:
        """Bytes of the operands of one step."""
        return (self.block_m + self.block_n) * self.block_k * itemsize

    def result_bytes(self, itemsize: int = 2) -> int:
        """Bytes of a tile of results."""
        return self.block_m * self.block_n * itemsize

    def stages_with(self, bytes: int) -> int:
        """The number of stages, at most `stages`, that fit an SM's shared memory in addition to `bytes`."""
        return min(self.stages, (SHARED_BYTES - 2048 - bytes) // self.step_bytes())

    def programs_per_sm(self) -> int:
        """Programs that fit on an SM, limited by shared memory and by registers, of which 4 warps take half."""
        shared = max(self.stages * self.step_bytes(), self.result_bytes()) + 2048
        return max(1, min(8 // self.warps, SHARED_BYTES // shared))


TILINGS = (
    GemmTiling(128, 256, stages=4, specialized=True),
    GemmTiling(128, 256, stages=4),
    GemmTiling(128, 128, stages=6, specialized=True),
    GemmTiling(128, 128, stages=3, warps=4),
    GemmTiling(64, 256, stages=4, warps=4),
    GemmTiling(64, 128, stages=4, warps=4),
    GemmTiling(64, 64, block_k=128, stages=3, warps=4),
)
# relative speed of an SM by the results of a tile: larger tiles reuse their operands more often
RATES = {128 * 256: 1.0, 128 * 128: 0.85, 64 * 256: 0.8, 64 * 128: 0.65, 64 * 64: 0.45}
TILE_OVERHEAD = 256  # time for a tile's begin and end, in columns of K that could be multiplied in that time


@cache
def candidates(m: int, n: int, k: int, world_size: int, sms: int = 132) -> tuple[GemmTiling, ...]:
    """All tilings for (m, k) x (n, k) with m rows split over `world_size` ranks, by increasing estimated time."""
    return tuple(sorted(TILINGS, key=lambda tiling: _cost(tiling, m, n, k, world_size, sms)))


def default_tiling(m: int, n: int, k: int, world_size: int, sms: int = 132) -> GemmTiling:
    """The first of the `candidates`."""
    return candidates(m, n, k, world_size, sms)[0]


def row_tiles(rank_rows: int, world_size: int, block_m: int) -> int:
    """Number of row tiles. If a rank has fewer rows than a tile, a tile has rows of several ranks; otherwise of one rank."""
    if rank_rows < block_m:
        return -(-rank_rows * world_size // block_m)
    return world_size * -(-rank_rows // block_m)


def specialized(tiling: GemmTiling, rows: int, world_size: int, device: torch.device) -> bool:
    """Whether to use specialized warps: the tiling asks for them, and the rows per rank, the ranks and the GPU support them."""
    fits = tiling.specialized and tiling.block_m <= rows // world_size and world_size <= MAX_SPECIALIZED
    return fits and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _cost(tiling: GemmTiling, m: int, n: int, k: int, world_size: int, sms: int) -> float:
    """The estimated time of a GEMM, in arbitrary units: that of the SM with the most tiles."""
    tiles = row_tiles(m // world_size, world_size, tiling.block_m) * -(-n // tiling.block_n)
    per_sm = tiling.programs_per_sm()
    busiest = -(-tiles // (sms * per_sm)) * min(per_sm, -(-tiles // sms))
    results = tiling.block_m * tiling.block_n
    overhead = TILE_OVERHEAD / 4 if tiling.specialized else TILE_OVERHEAD / per_sm
    return busiest * results * (k + overhead) / RATES[results]


def check_operands(x: Tensor, weight: Tensor, world_size: int) -> None:
    """Raise ValueError unless the kernels support x (T, K) and weight (C, K): one dtype, bf16 or fp16 (on CPU also fp32),
    contiguous, T a multiple of `world_size`, rows a multiple of 16 bytes."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"cannot multiply rows {tuple(x.shape)} with a weight {tuple(weight.shape)}: they must be (T, K) and (C, K)"
        )
    if x.dtype != weight.dtype or x.dtype not in (*DTYPES, *(() if x.is_cuda else (torch.float32,))):
        raise ValueError(f"operands of {x.dtype} and {weight.dtype}: both must be bf16 or fp16")
    if not len(x) or len(x) % world_size:
        raise ValueError(f"{len(x)} rows cannot be split over {world_size} ranks; use a multiple of {world_size}")
    if not (x.is_contiguous() and weight.is_contiguous()) or x.data_ptr() % 16 or weight.data_ptr() % 16:
        raise ValueError("the operands must be contiguous and begin at multiples of 16 bytes")
    if x.shape[1] * x.element_size() % 16 or len(weight) * x.element_size() % 16:
        raise ValueError(f"input rows of {x.shape[1]} values, output rows of {len(weight)}: both must be multiples of 16 bytes")
    if world_size * -(-len(x) // world_size // BLOCK) > COUNTERS:
        raise ValueError(f"{len(x)} rows are more than {COUNTERS} blocks of {BLOCK}")
