"""How many tokens a step computes at most if nobody says so with `--max-batch-tokens`.

A running sequence waits for each step, so few tokens keep streams smooth, and many give more tokens/s, up to a point. The default
is the fewest with which a GPU reached ENOUGH of its best. `step_tokens.json` has what was measured, by the kind of GPU and the size of a
rank's layers, which says from how many rows on a GPU is busy. `scripts/bench/serving/step_tokens.py` of commit
4a2e01f measured them, as `make bench-offline` does for one value of `--max-batch-tokens`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from comm.table import from_rank_0
from config import ModelConfig
from tp import World

TABLE = Path(__file__).with_suffix(".json")
USUAL = 2048  # where nothing similar was measured
ENOUGH = 0.98  # of the most tokens/s
SIMILAR = 2.0  # times as many weights, or as few, at most


@dataclass(frozen=True)
class Entry:
    gpu: str  # as `kind` says
    model: str
    ranks: int
    layer_weights: int  # of a rank
    tokens_per_second: Mapping[int, float]  # generated, by the most tokens of a step

    @property
    def tokens(self) -> int:
        """The fewest that are enough."""
        most = max(self.tokens_per_second.values())
        return min(tokens for tokens, rate in self.tokens_per_second.items() if rate >= ENOUGH * most)


@cache
def entries() -> list[Entry]:
    return [
        Entry(**line | {"tokens_per_second": {int(tokens): rate for tokens, rate in line["tokens_per_second"].items()}})
        for line in json.loads(TABLE.read_text())
    ]


def kind(gpu: str) -> str:
    """H100 of "NVIDIA H100 80GB HBM3"."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]


def default_tokens(gpu: str, weights: int, ranks: int, known: Sequence[Entry]) -> int:
    """Those of the entry with the most similar layers, of the same kind of GPU, with all-reduces if there are several ranks.

    gpu: its name, empty for a CPU. weights: of a rank's layer."""

    def distance(entry: Entry) -> float:
        return abs(math.log(entry.layer_weights / weights))

    same = [entry for entry in known if entry.gpu == kind(gpu) and (entry.ranks > 1) == (ranks > 1)]
    nearest = min(same, key=distance, default=None)
    return nearest.tokens if nearest and distance(nearest) <= math.log(SIMILAR) else USUAL


def step_tokens(config: ModelConfig, world: World) -> int:
    """The same on all ranks, for rank 0's GPU. Collective."""
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    tokens = default_tokens(gpu, config.layer_parameter_count() // world.world_size, world.world_size, entries())
    return int(from_rank_0(tokens, world.control)) if world.world_size > 1 else tokens
