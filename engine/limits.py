"""How large an engine is: its limits, and the KV cache that fits beside the weights."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from checkpoints.memory import free_bytes
from config import ModelConfig
from engine.head_model import HeadModel
from engine.paged_cache import CODES, PagedCache
from engine.protocol import check_types
from errors import UserError
from model import Transformer
from options import KV_DTYPES, draft_limit
from tp import World

DEFAULT_CPU_CACHE = 1 << 30  # bytes
GPU_SHARE = 0.9  # share of the free memory for the cache
GRAPHS = 2 << 30  # bytes that stay free for the graphs and the steps of the model, and as many for those of its draft
# A running sequence waits for each step, so few tokens keep streams smooth, and many give more tokens/s, up to a point. H100 and H200
# reach 98 % of their most with these, of 8B on one GPU.
STEP_TOKENS = 2048  # of a step at most, unless --max-batch-tokens says so
MOST_DRAFTED = 256  # tokens of a step; with more rows a step takes longer, and each row's logits take memory


@dataclass(frozen=True)
class EngineLimits:
    """What an engine may hold and compute at once. Raises UserError for a value of another type."""

    max_model_len: int | None = None  # tokens; None: the model's context
    max_num_seqs: int = 64
    max_batch_tokens: int | None = None  # of one step; None: STEP_TOKENS
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

    @classmethod
    def of(cls, options: Any) -> "EngineLimits":
        """The limits among a program's options, which have the same names."""
        given = {one.name: getattr(options, one.name) for one in fields(cls) if hasattr(options, one.name)}
        return cls(**given | {"draft_tokens": draft_limit(options.speculate, options.draft_tokens)})

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
