"""GEMMs that exchange rows with other GPUs (Chang et al., *Flux: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion*,
arXiv:2406.06858, sections 3.1 and 3.2), and their tilings.

GEMM + reduce-scatter, without the addition: the epilogue stores to other GPUs, so that tiles are sent while later ones are multiplied.
All-gather + GEMM: the prologue of a tile waits for the flags of its rows. The kernel copies no rows.

Each of N ranks owns `rank_rows` consecutive token rows. One int64 flag signals that BLOCK rows of a rank have arrived: coarser
than a flag for each tile (Flux, section 4.3, decouples the two) and finer than one for each rank.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

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


# --- the GEMMs -------------------------------------------------------------------------------------------------------------


def gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    destinations: tuple[int, ...],
    flags: tuple[int, ...],
    epoch: Tensor,
    rank: int,
    tiling: GemmTiling,
) -> None:
    """Store (x @ weight.T)[o * T / N : (o + 1) * T / N] at destinations[o], for each of N owners.

    x (T, K) and weight (C, K): contiguous, bf16 or fp16; T a multiple of N. destinations: addresses, as this GPU sees them, of
    contiguous (T / N, C) buffers of x's dtype in the owners' memory, multiples of 16 bytes. flags: addresses of int64. When
    rows 128 b to 128 (b + 1) of owner o (fewer at the end) are stored, the int64 at flags[o] + 8 b is set to `epoch` (1,) int64
    by a release: a GPU that acquires it sees the rows. epoch is on the device; earlier kernels, also those of the same CUDA
    graph, may advance it. rank: of this GPU among the owners. The rows of rank + 1 are computed first, its own last.

    Sums are in fp32 and rounded once, so the bits do not depend on N. Calls on one device must run one after another, and the
    first must be outside a CUDA graph's capture. Raises ValueError for unsupported operands.
    """
    check_operands(x, weight, len(destinations))
    if len(flags) != len(destinations) or not 0 <= rank < len(destinations):
        raise ValueError(f"rank {rank} of {len(destinations)} destinations and {len(flags)} flags")
    if epoch.dtype != torch.int64 or any(address % 16 for address in destinations) or any(address % 8 for address in flags):
        raise ValueError("epoch must be int64, destinations multiples of 16 bytes, flags of 8")
    kernels = _implementation(tiling, len(x), len(destinations), x.device)
    kernels.gemm_reduce_scatter(x, weight, destinations, flags, epoch, rank, tiling)


def all_gather_gemm(
    rows: Tensor,
    weight: Tensor,
    flags: Tensor,
    epoch: Tensor,
    rank: int,
    fault: Tensor,
    tiling: GemmTiling,
    max_polls: int,
) -> Tensor:
    """rows @ weight.T, (T, M) of the same dtype. Rows s * T / N to (s + 1) * T / N may arrive from rank s during the launch.

    rows (T, K) and weight (M, K): contiguous, bf16 or fp16; T a multiple of N. flags (N, blocks) int64, its rows contiguous:
    flags[s, b] is at least `epoch` (1,) int64 once rows 128 b to 128 (b + 1) of rank s have arrived: it is stored after them, by
    a release at system scope or by a copy engine in stream order. rank: of this GPU. Its own rows must be present before the
    launch and need no flags. They are multiplied first, then those of rank - 1, rank - 2, …. fault (1,) int32 is set to 5 if a
    block has not arrived after `max_polls` polls; the result is then wrong. epoch, flags and fault are on the device. If a
    kernel of this GPU transfers rows, the tiling's `free_sms` must leave SMs for it.

    Sums are in fp32 and rounded once, so the bits do not depend on N. Raises ValueError for unsupported operands.
    """
    check_operands(rows, weight, len(flags))
    rank_rows = len(rows) // len(flags)
    if flags.dim() != 2 or flags.stride(1) != 1 or flags.shape[1] * BLOCK < rank_rows or not 0 <= rank < len(flags):
        raise ValueError(f"flags {tuple(flags.shape)} for {rank_rows} rows per rank in blocks of {BLOCK}, rank {rank}")
    if flags.dtype != torch.int64 or epoch.dtype != torch.int64 or fault.dtype != torch.int32:
        raise ValueError("flags and epoch must be int64, fault int32")
    kernels = _implementation(tiling, len(rows), len(flags), rows.device)
    product: Tensor = kernels.all_gather_gemm(rows, weight, flags, epoch, rank, fault, tiling, max_polls)
    return product


def _implementation(tiling: GemmTiling, rows: int, world_size: int, device: torch.device) -> ModuleType:
    """With specialized warps, if the tiling asks for them, and the rows per rank, the ranks and the GPU support them."""
    fits = tiling.specialized and tiling.block_m <= rows // world_size and world_size <= MAX_SPECIALIZED
    hopper = fits and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return import_module(
        "kernels.tile_gemm_hopper" if hopper else "kernels.tile_gemm_triton"
    )  # a CPU machine may have no Triton
