"""Strategies of all-reduces that are fused with the GEMMs around them (`comm/fused.py`), and the choice of the fastest.

Sections and algorithms are those of Flux (Chang et al., arXiv:2406.06858).

Scatter (GEMM + reduce-scatter):
  owners  one GEMM for the rows of each rank, this rank's last; it writes to the owner's buffer
  spans   one GEMM for the rows of later ranks, one for earlier ranks; copy engines send them during the next GEMM
  tilesI  one kernel that sets the flag of each block of rows when it is written (algorithm 1), with tiling I of the candidates
Gather (all-gather + GEMM):
  owners  this rank's rows first, then those of each other rank when they have arrived
  spans   this rank's rows first, then those of later ranks, then those of earlier ranks
  tilesI  one kernel whose tiles wait for their rows (algorithm 2)

In a gather, rows are pushed by their owner to all buffers, or pulled by each reader from the owner's buffer (section 4.3,
algorithm 3). A rank's rows may be sent in several chunks, the paper's communication tiles. `owners` and `spans` wait for
all chunks of a rank, so chunks are measured with `tiles` only.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from comm.fused_buckets import bucket
from kernels.fused_rows import BLOCK_ROWS
from kernels.tile_gemm import GemmTiling, candidates

UNFUSED = "unfused"


@dataclass(frozen=True)
class Pair:
    """Two layers with an all-reduce between them, on one rank: (rows, k) x (c, k), the all-reduce, then (rows, c) x (m, c)."""

    rows: int
    k: int
    c: int
    m: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        return f"{bucket(self.rows)},{self.k},{self.c},{self.m},{str(self.dtype).removeprefix('torch.')}"

    @classmethod
    def parse(cls, key: str) -> "Pair":
        """A pair with that key. Raises ValueError, or AttributeError for an unknown dtype."""
        *sizes, dtype = key.split(",")
        rows, k, c, m = map(int, sizes)
        return cls(rows, k, c, m, getattr(torch, dtype))


# --- strategies -----------------------------------------------------------------------------------------------------------

Split = str  # how a GEMM is split: owners, spans, or tilesI
UNTILED: tuple[Split, ...] = ("spans", "owners")
TILED: tuple[Split, ...] = ("tiles0", "tiles1")


class Gather(NamedTuple):
    """All-gather + GEMM. chunks: number of copies of a rank's rows, at most."""

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


# what is measured for each pair of layers; each tiling takes seconds to compile
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
    """The gathers to measure. With two ranks, a rank has at least as many blocks of rows as chunks."""
    blocks = bucket(pair.rows) // 2 // BLOCK_ROWS
    return [gather for gather in GATHERS.values() if gather.split in scatters(pair) and gather.chunks <= max(1, blocks)]


def strategies(pair: Pair) -> list[Strategy]:
    """The strategies to measure: each scatter with the default gather, and each gather with the default scatter."""
    default = Strategy()
    ends = [Strategy(scatter=split) for split in scatters(pair)] + [Strategy(gather=gather) for gather in gathers(pair)]
    return [default, *(strategy for strategy in ends if strategy != default)]


def best_strategy(times: dict[str, float]) -> tuple[Strategy, float]:
    """The fastest scatter combined with the fastest gather, and the expected µs of a pair with both."""
    default = Strategy()
    first = {name.partition("+")[0]: t for name, t in times.items() if name.endswith(f"+{default.gather}")}
    second = {name.partition("+")[2]: t for name, t in times.items() if name.startswith(f"{default.scatter}+")}
    scatter, gather = min(first, key=lambda name: first[name]), min(second, key=lambda name: second[name])
    return Strategy(scatter, GATHERS[gather]), first[scatter] + second[gather] - times[str(default)]


def tiling_of(split: Split, m: int, n: int, k: int, world_size: int) -> GemmTiling:
    """The tiling of one of TILED for (m, k) x (n, k)."""
    tilings = candidates(m, n, k, world_size)
    return tilings[min(TILED.index(split), len(tilings) - 1)]


def names_of(key: str) -> set[str]:
    """The names in the table for pairs with this key. Raises ValueError or AttributeError as `Pair.parse`."""
    return {str(strategy) for strategy in strategies(Pair.parse(key))} | {UNFUSED}
