"""How large an engine is: its limits, and the KV cache that fits beside the weights."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from checkpoints.memory import free_bytes
from comm.table import from_rank_0
from config import ModelConfig
from engine.argument_types import check_types
from engine.head_model import HeadModel
from engine.paged_cache import CODES, PagedCache
from errors import UserError
from model import Transformer
from options import KV_DTYPES
from tp import World

DEFAULT_CPU_CACHE = 1 << 30  # bytes
GPU_SHARE = 0.9  # share of the free memory for the cache
GRAPHS = 2 << 30  # bytes that stay free for the graphs and the steps of the model, and as many for those of its draft
MOST_DRAFTED = 256  # tokens of a step; with more rows a step takes longer, and each row's logits take memory


@dataclass(frozen=True)
class EngineLimits:
    """What an engine may hold and compute at once. Raises UserError for a value of another type."""

    max_model_len: int | None = None  # tokens; None: the model's context
    max_num_seqs: int = 64
    max_batch_tokens: int | None = None  # of one step; None: as `engine/limits.py` says
    block_size: int = 16  # tokens
    # per rank; up to 1: share of the free memory; else bytes; None: 1 GiB on a CPU, `default_memory` on a GPU
    kv_memory: float | None = None
    kv_dtype: str = "auto"  # of the KV cache, one of `options.KV_DTYPES`
    whole_sequences: bool = False  # a sequence gets all blocks that it may need when it starts, and shares none: no preemption
    draft_tokens: int = 0  # most drafted tokens of a sequence in a step; 0: no speculation
    accept_rate: float | None = None  # for benchmarks, see `Speculation`
    ngram_prompts: int = 0  # newest tokens of all requests' prompts from which text may be drafted

    def __post_init__(self) -> None:
        check_types(EngineLimits, vars(self))

    @property
    def drafted(self) -> int:
        """The most drafted tokens of a step."""
        return min(self.draft_tokens * self.max_num_seqs, MOST_DRAFTED)

    def context(self, config: ModelConfig) -> int:
        """The most tokens of a sequence of the model."""
        return min(self.max_model_len or config.max_seq_len, config.max_seq_len)


def cache_memory(limits: EngineLimits, device: torch.device, models: int = 1) -> float:
    """Bytes that this rank may give to the KV caches of so many models."""
    cuda, wanted = device.type == "cuda", limits.kv_memory
    if cuda:
        torch.cuda.empty_cache()  # what an earlier engine's cache left in PyTorch's allocator is free, too
    free = torch.cuda.mem_get_info(device)[0] if cuda else free_bytes(device)
    if wanted is None:
        return default_memory(free, models) if cuda else DEFAULT_CPU_CACHE
    return wanted if wanted > 1 else wanted * free


def default_memory(free: float, models: int = 1) -> float:
    """Bytes that the KV caches of so many models get by default of a GPU's free ones."""
    return max(min(GPU_SHARE * free, free - models * GRAPHS), free / 2)


def cache_dtype(model: Transformer | HeadModel, limits: EngineLimits) -> torch.dtype:
    """Raises UserError for an unknown kv_dtype, and for fp8 if the GPU cannot convert it."""
    weight = model.norm.weight
    if limits.kv_dtype not in KV_DTYPES:
        raise UserError(f"unknown kv_dtype {limits.kv_dtype!r}; known: {', '.join(KV_DTYPES)}")
    if limits.kv_dtype == "fp8" and weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 9):
        raise UserError("--kv-dtype fp8 needs a GPU of compute capability 8.9 or newer, such as an H100; leave it out")
    return CODES if limits.kv_dtype == "fp8" else weight.dtype


def count_blocks(model: Transformer, draft: Transformer | HeadModel | None, limits: EngineLimits, world: World) -> int:
    """How many KV-cache blocks fit, the same number on all ranks. Collective. Raises UserError if none fits. draft: a model that
    has a cache of as many blocks."""
    dtype, models = cache_dtype(model, limits), [model] if draft is None else [model, draft]
    size = sum(
        PagedCache.bytes_per_block(m.attention_slots, limits.block_size, m.n_kv_heads, m.config.head_dim, dtype) for m in models
    )
    [blocks] = world.smallest([int(cache_memory(limits, world.device, len(models))) // size])
    # all sequences at full length can use at most this many blocks
    useful = limits.max_num_seqs * -(-limits.context(model.config) // limits.block_size)
    found = min(blocks, useful)
    if found < 1:
        raise UserError(f"--kv-memory leaves room for no KV-cache block of {size / 1e6:.1f} MB; give more")
    return found


def new_cache(model: Transformer | HeadModel, n_blocks: int, limits: EngineLimits, device: torch.device) -> PagedCache:
    """The KV cache of a model or a draft head on this rank."""
    shape = model.attention_slots, n_blocks, limits.block_size, model.n_kv_heads, model.config.head_dim
    return PagedCache(*shape, device, cache_dtype(model, limits))


# --- the tokens of a step, if nobody says so with --max-batch-tokens ---------------------------------------------------------
#
# How many tokens a step computes at most if nobody says so with `--max-batch-tokens`.
#
# A running sequence waits for each step, so few tokens keep streams smooth, and many give more tokens/s, up to a point. The default
# is the fewest with which a GPU reached ENOUGH of its best. `step_tokens.json` has what was measured, by the kind of GPU and the size of a
# rank's layers, which says from how many rows on a GPU is busy. `scripts/bench/serving/step_tokens.py` of commit
# 4a2e01f measured them, as `make bench-offline` does for one value of `--max-batch-tokens`.


TABLE = Path(__file__).with_name("step_tokens.json")
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
