"""How much memory a model needs and how much is free. A model that does not fit is refused before its weights are allocated.

Without this check, a CPU process that allocates too much gets no error: the kernel kills it later, when it writes to the pages.
"""

import os
from pathlib import Path

import torch

from config import ModelConfig
from errors import UserError
from kernels import determinism
from quantized.scheme import ON_LOAD
from quantized.weight import rounding_bytes
from tp import SPLITS, Shard, World, checkpoint_name, stream_shards, together

SHORT = "GB a rank for its weights"  # every message about a model that does not fit contains this
SCALE_BYTES = 4  # of a scale: a quantized layer's, with its zero point, at most; or that of a head of a token in an fp8 cache
CGROUPS = (  # version 2, then 1: limit, use, and the key of `memory.stat` for file pages that the kernel can reclaim
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file",
    ),
)


def weight_bytes(config: ModelConfig, world_size: int, dtype: torch.dtype) -> int:
    """Bytes of one rank's matrices, with replicated KV heads and the vocabulary's padding. Norms and biases do not count.
    `dtype`: of the matrices that are not quantized.

    Raises UserError if the model cannot be split over `world_size` ranks.
    """
    shards, size, total = stream_shards(config, 0, world_size), config.hidden_size, 0
    for part, split in SPLITS.items():
        if part == "lm_head" and config.tie_embeddings:
            continue
        is_table, quantization = split.axis == "vocab", None if part == "embed_tokens" else config.quantization
        features = sum(len(shard.range(config, split.axis)) for shard in ([Shard(0, world_size)] if is_table else shards))
        experts = config.experts.count if config.experts and split.axis == "intermediate" else 1
        for layer in (None,) if is_table else range(config.n_layers):
            name = checkpoint_name(layer, part if experts == 1 else f"experts.0.{part}")
            scheme = quantization.scheme(name) if quantization else None
            if scheme is None:
                total += experts * features * size * dtype.itemsize
            else:
                total += experts * (
                    features * size * scheme.bits // 8 + features * size // (scheme.group or size) * SCALE_BYTES
                )
    return total


def loading_bytes(config: ModelConfig, world_size: int) -> int:
    """Bytes at most that a rank needs beside its weights while it rounds them for --quantize, one after the other; else 0."""
    most = 0
    for part, split in SPLITS.items():
        is_table = split.axis == "vocab"
        scheme = config.quantization and config.quantization.scheme(checkpoint_name(None if is_table else 0, part))
        if scheme and scheme.format == ON_LOAD:
            whole = determinism.enabled() and split.dim == 1  # all input features are rounded then, see `formats.OnLoad`
            shard = Shard(0, 1) if whole else Shard(0, world_size) if is_table else stream_shards(config, 0, world_size)[0]
            most = max(most, rounding_bytes(len(shard.range(config, split.axis)), config.hidden_size))
    return most


def cache_bytes(config: ModelConfig, world_size: int, dtype: torch.dtype, tokens: int, kv_dtype: str = "auto") -> int:
    """Bytes of one rank's keys and values for `tokens` tokens. dtype: the model's. kv_dtype: one of `options.KV_DTYPES`."""
    features = sum(len(shard.range(config, "kv_heads")) for shard in stream_shards(config, 0, world_size))
    of_head = config.head_dim + SCALE_BYTES if kv_dtype == "fp8" else config.head_dim * dtype.itemsize
    return 2 * config.n_layers * tokens * features // config.head_dim * of_head


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still allocate: on its GPU, or this rank's equal share of the host's free memory."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # unused memory in PyTorch's allocator
        return int(torch.cuda.mem_get_info(device)[0] + held)
    return host_free_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def host_free_bytes() -> int:
    """Bytes that processes of this host can allocate without swapping, within the container's limit if there is one."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # if /proc is missing; does not count the file cache
    available = _field(Path("/proc/meminfo"), "MemAvailable:")
    limits = [free if available is None else available * 1024]
    for limit, use, stat, inactive in CGROUPS:
        most, used = _number(Path(limit)), _number(Path(use))
        if most is not None and used is not None:
            limits.append(max(0, most - used + (_field(Path(stat), inactive) or 0)))
    return min(limits)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or `max`: no limit
        return None


def _field(path: Path, name: str) -> int | None:
    """The number after `name` in a file whose lines have a name and a number each."""
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        return next((int(words[1]) for words in lines if words[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None


def check_memory(
    name: str, config: ModelConfig, world: World, dtype: torch.dtype, tokens: int = 0, kv_dtype: str = "auto", more: int = 0
) -> None:
    """Raise UserError on every rank if any rank lacks the memory for its weights, a cache of `tokens` tokens, and `more` bytes.

    Collective: no rank starts to allocate before all ranks have measured the free memory.
    """

    def check() -> None:
        weights = weight_bytes(config, world.world_size, dtype) + more
        cache = cache_bytes(config, world.world_size, dtype, tokens, kv_dtype)
        weights += max(0, loading_bytes(config, world.world_size) - cache)  # the cache is allocated after the weights
        free = free_bytes(world.device)
        if weights + cache > free:
            raise UserError(shortage(name, world, weights, cache, free))

    together(world, check)


def shortage(name: str, world: World, weights: int, cache: int, free: int) -> str:
    """The message for a model that does not fit. weights, cache and free: bytes of one rank."""
    also = f" and {cache / 1e9:.1f} for its cache" if cache >= 5e7 else ""
    need = f"{name} needs about {weights / 1e9:.1f} {SHORT}{also}"
    if world.device.type == "cuda":
        return f"{need}, and {free / 1e9:.1f} GB of {world.device} are free; start more ranks or choose a smaller model"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    sums = f", {(weights + cache) * ranks / 1e9:.1f} GB for the {ranks} ranks of this host" if ranks > 1 else ""
    return (
        f"{need}{sums}, and {free * ranks / 1e9:.1f} GB are free; choose a smaller model (of a preset fewer layers: "
        "llama-3-70b:2), or --dtype bfloat16"
    )
