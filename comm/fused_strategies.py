"""Strategies of all-reduces that are fused with the GEMMs around them (`comm/fused.py`): which there are, and which is the fastest.

A row-parallel layer, the all-reduce of its partial sums, residual addition, norm, and the next column-parallel layer become
GEMM + reduce-scatter over token rows, addition and norm of this rank's rows, and all-gather + GEMM (Chang et al., Flux,
arXiv:2406.06858).

Scatter (GEMM + reduce-scatter):
  owners  one GEMM for each rank's rows, this rank's last; it writes into the owner's buffer
  spans   one GEMM for all ranks before this one, one for all behind; copy engines copy the rows to their owners meanwhile
  tilesI  one kernel that announces each block of rows when it is written (the paper's algorithm 1), with the I-th likeliest tiling
Gather (all-gather + GEMM):
  owners  this rank's rows first, then those of each other rank when they have arrived
  spans   this rank's rows first, then all before them and all behind
  tilesI  one kernel whose tiles wait for their rows (algorithm 2)

Rows of a gather are pushed by their owner into all buffers, or pulled by each reader out of the owner's buffer (section 4.3, algorithm 3).
A rank's rows may travel in several chunks, the paper's communication tiles. `owners` and `spans` wait for all chunks of a rank, so
chunks are measured with `tiles` only.
"""

from typing import NamedTuple

from comm.fused_table import UNFUSED, Pair, PairTimes, bucket
from kernels.fused_rows import BLOCK_ROWS
from kernels.tile_gemm import Tiling, candidates

Split = str  # of a GEMM: owners, spans, or tilesI
UNTILED: tuple[Split, ...] = ("spans", "owners")
TILED: tuple[Split, ...] = ("tiles0", "tiles1")


class Gather(NamedTuple):
    """All-gather + GEMM. chunks: copies of a rank's rows; fewer if there are few rows."""

    split: Split = "spans"
    pull: bool = False
    chunks: int = 1

    def __str__(self) -> str:
        return f"{self.split}{'-pull' if self.pull else ''}{f'/{self.chunks}' if self.chunks > 1 else ''}"


class Strategy(NamedTuple):
    """How two layers and the all-reduce between them are computed."""

    scatter: Split = "spans"
    gather: Gather = Gather()

    def __str__(self) -> str:
        return f"{self.scatter}+{self.gather}"


# what is measured for each pair of layers; another tiling costs seconds of compiling
SCATTERS: tuple[Split, ...] = (*UNTILED, TILED[0])
GATHERS: dict[str, Gather] = {
    str(gather): gather
    for gather in (
        *(Gather(split, pull) for split in SCATTERS for pull in (False, True)),
        Gather(TILED[0], chunks=2),
        Gather(TILED[0], chunks=4),
        Gather(TILED[0], pull=True, chunks=4),
    )
}


def scatters(pair: Pair) -> list[Split]:
    """The scatters to measure."""
    tiled = pair.dtype.itemsize == 2 and all(size % 8 == 0 for size in (pair.k, pair.c, pair.m))
    return [split for split in SCATTERS if tiled or split in UNTILED]


def gathers(pair: Pair) -> list[Gather]:
    """The gathers to measure, with no more chunks than two ranks' shares have blocks."""
    blocks = bucket(pair.rows) // 2 // BLOCK_ROWS
    return [gather for gather in GATHERS.values() if gather.split in scatters(pair) and gather.chunks <= max(1, blocks)]


def strategies(pair: Pair) -> list[Strategy]:
    """What is measured for a pair of layers: each scatter with the default gather, and each gather with the default scatter."""
    default = Strategy()
    ends = [Strategy(scatter=split) for split in scatters(pair)] + [Strategy(gather=gather) for gather in gathers(pair)]
    return [default, *(strategy for strategy in ends if strategy != default)]


def best_strategy(times: PairTimes) -> tuple[Strategy, float]:
    """The fastest scatter with the fastest gather, and the µs that a pair should take with both."""
    default = Strategy()
    first = {name.partition("+")[0]: t for name, t in times.items() if name.endswith(f"+{default.gather}")}
    second = {name.partition("+")[2]: t for name, t in times.items() if name.startswith(f"{default.scatter}+")}
    scatter, gather = min(first, key=lambda name: first[name]), min(second, key=lambda name: second[name])
    return Strategy(scatter, GATHERS[gather]), first[scatter] + second[gather] - times[str(default)]


def tiling_of(split: Split, m: int, n: int, k: int, world_size: int) -> Tiling:
    """The tiling that one of TILED means for (m, k) x (n, k)."""
    found = candidates(m, n, k, world_size)
    return found[min(TILED.index(split), len(found) - 1)]


def names_of(pair: Pair) -> set[str]:
    """The names for which a valid entry of the table has times."""
    return {str(strategy) for strategy in strategies(pair)} | {UNFUSED}
