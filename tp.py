"""Tensor parallelism: the table `SPLITS` that says how each weight is split, and the process group of the ranks.

Weights are sharded from the start: a `ShardedLinear` (`layers/linear.py`) allocates only its shard, and `checkpoints/weights.py` reads only
that shard from disk.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from comms import Communicator, Local
from comms.private_gloo import PRIVATE_GLOO
from comms.process_group import SHARE_GPUS, may_share_gpus, prepare_shared_gpus
from comms.registry import choose
from config import FAMILIES, ModelConfig, require_dense
from errors import UserError
from kernels import determinism
from ranks import hosts
from ranks.processes import MEETING, listen_on_loopback, several_hosts, shared_folder

PATIENCE = timedelta(minutes=10)  # of ranks for each other
T = TypeVar("T")


@dataclass(frozen=True)
class Split:
    dim: int  # of the (out_features, in_features) weight
    axis: str  # what the dim counts, which determines where it may be cut


# The names are those of the HF checkpoint. Weights that are not in the table (the norms) are replicated.
SPLITS: dict[str, Split] = {
    "embed_tokens": Split(0, "vocab"),
    "lm_head": Split(0, "vocab"),
    "q_proj": Split(0, "heads"),
    "k_proj": Split(0, "kv_heads"),
    "v_proj": Split(0, "kv_heads"),
    "o_proj": Split(1, "heads"),
    "gate_proj": Split(0, "intermediate"),
    "up_proj": Split(0, "intermediate"),
    "down_proj": Split(1, "intermediate"),
}


def split_of(part: str) -> Split:
    """How a linear layer is split, also that of an expert: `experts.3.up_proj`."""
    return SPLITS[part.rpartition(".")[2]]


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "sinks")


def checkpoint_name(layer: int | None, part: str) -> str:
    """The name in the checkpoint of a linear layer or a norm: `model.layers.3.mlp.up_proj`; without a layer `lm_head`, `model.norm`."""
    if layer is None:
        return part if part == "lm_head" else f"model.{part}"
    group = "self_attn." if part in ATTENTION else "" if part.endswith("norm") else "mlp."
    return f"model.layers.{layer}.{group}{part}"


def biased_parts(config: ModelConfig) -> frozenset[str]:
    """The linear layers that have a bias in the checkpoint."""
    qkv = ("q_proj", "k_proj", "v_proj") if config.qkv_bias else ()
    mlp = ("gate_proj", "up_proj", "down_proj") if config.mlp_bias else ()
    return frozenset((*qkv, *(("o_proj",) if config.o_bias else ()), *mlp))


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` equal parts."""

    index: int
    count: int

    def range(self, config: ModelConfig, axis: str) -> range:
        """The features of `axis` that this shard holds, in rows or columns of the full weight.

        KV heads are replicated when there are more shards than heads. The vocabulary is cut into equal parts, rounded up, so
        the last shards' ranges may reach beyond the vocabulary; those rows are padding.
        """
        if axis == "vocab":
            size = -(-config.vocab_size // self.count)
            return range(self.index * size, (self.index + 1) * size)
        if axis == "intermediate":
            size = config.intermediate_size // self.count
            return range(self.index * size, (self.index + 1) * size)
        heads = {"heads": config.n_heads, "kv_heads": config.n_kv_heads}[axis]
        size = max(1, heads // self.count)
        first = self.index * heads // self.count
        return range(first * config.head_dim, (first + size) * config.head_dim)


def stream_shards(config: ModelConfig, rank: int, world_size: int) -> list[Shard]:
    """The shards that one rank holds: one, or S / N of them for a desync checkpoint with S streams on N ranks.

    Raises UserError if the model cannot be split this way.
    """
    streams = config.kind.streams
    count = config.desync_streams if streams else world_size
    if determinism.enabled() and config.kind.speed_limit and world_size > 1:
        raise UserError(
            f"{config.variant} adds nothing over ranks, so --deterministic cannot make {world_size} of them agree with one"
        )
    if determinism.enabled():
        require_dense(config, "--deterministic")
        if FAMILIES[config.family].norms[1]:
            raise UserError(f"--deterministic does not support {config.family} models, which have norms behind modules")
    if count % world_size:
        raise UserError(
            f"this desync checkpoint has {count} streams, which {world_size} ranks cannot share; "
            f"start a number of ranks that divides {count}"
        )
    what = f"{count} desync streams" if streams else f"{world_size} ranks"
    determinism.check_split(count, what)
    for name, size in (("attention heads", config.n_heads), ("intermediate features", config.intermediate_size)):
        if size % count:
            raise UserError(f"{size} {name} cannot be divided by {what}; {_instead(config)}")
    if config.n_kv_heads % count and count % config.n_kv_heads:
        raise UserError(f"{config.n_kv_heads} KV heads cannot be divided by or replicated over {what}; {_instead(config)}")
    per_rank = count // world_size
    return [Shard(rank * per_rank + i, count) for i in range(per_rank)]


def _instead(config: ModelConfig) -> str:
    """The numbers of shards that a model can be cut into, for messages."""
    heads, kv_heads = config.n_heads, config.n_kv_heads
    counts = [
        n for n in range(1, heads + 1) if not (heads % n or config.intermediate_size % n or (kv_heads % n and n % kv_heads))
    ]
    counts = [n for n in counts if not (determinism.enabled() and determinism.PARTS % n)]
    return f"use {' or '.join(filter(None, (', '.join(map(str, counts[:-1])), str(counts[-1]))))}"


# --- the process group -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """This process's rank, its device, and how it communicates with the other ranks."""

    rank: int
    world_size: int
    device: torch.device
    comm: Communicator
    control: dist.ProcessGroup | None = None  # gloo, for data in host memory; None on a single rank
    overlap: str = "auto"  # how a ladder's all-reduces are computed: one of `options.OVERLAPS`

    def smallest(self, values: Sequence[int]) -> list[int]:
        """The smallest of all ranks, of each value. Collective."""
        return self._reduced(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.MIN)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks, of each value. Collective."""
        return self._reduced(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX)

    def _reduced(self, values: Tensor, operation: Any) -> list[Any]:
        if self.world_size > 1:
            dist.all_reduce(values, operation, group=self.control)
        return values.tolist()


def init_world(
    device: str | None = None,
    comm: str | None = None,
    simulate_link: str | None = None,
    comm_error_budget: float = 0.0,
    overlap: str = "auto",
    deterministic: bool = False,
    facts: Mapping[str, str] | None = None,
    error: UserError | None = None,
) -> World:
    """Join the ranks that a launcher started, or be the only rank. Collective.

    device: `cpu` or `cuda`; None takes CUDA if there is a GPU. comm: a name that `communicators.choose` accepts; None takes the
    device's default. simulate_link: a latency and a bandwidth, `10us,100GB/s`; all-reduces of CPU ranks then take as long as on
    such a link. comm_error_budget: the relative error that `auto` may accept in an all-reduce to make it faster. overlap: see
    `World`. deterministic: from now on, this process computes as `--deterministic` says. All of these are the options of these names
    (`options.rank_options`).

    facts: what must be the same on all hosts, by name; see `hosts.join`. error: of this rank, so that on several hosts no other waits.
    Raises UserError for a device that does not exist or a communicator that does not support it, after which it may be called again;
    if the ranks are connected already; and as `hosts.join`.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if world_size > 1 and dist.is_initialized():
        raise UserError(
            "the ranks are connected already; reuse the world of the first model, such as LLM(…, world=first.world)"
        )
    if deterministic:
        determinism.enable()
    try:
        if kind not in ("cpu", "cuda"):
            raise UserError(f"unknown device {kind!r}; known: cpu, cuda")
        choice, torch_device = choose(kind, comm, simulate_link, comm_error_budget), _own_device(kind, rank)
    except UserError as e:
        if several_hosts():
            hosts.join({}, error or e)  # raises the first error of all hosts on all of them
        raise
    if world_size == 1:
        return World(0, 1, torch_device, Local())
    store = hosts.join(facts or {}, error) if several_hosts() else _store_of_host()
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")  # NCCL's port for questions about its state answers any user
    dist.init_process_group(
        choice.backend,
        timeout=PATIENCE,
        device_id=torch_device if kind == "cuda" else None,
        store=store,
        rank=rank,
        world_size=world_size,
    )
    control = dist.group.WORLD if kind == "cpu" else dist.new_group(backend=PRIVATE_GLOO)
    try:
        communicator = choice.build()
    except UserError:
        dist.destroy_process_group()  # so that another communicator may be tried
        raise
    return World(rank, world_size, torch_device, communicator, control, overlap)


def _store_of_host() -> Store:
    """A store for ranks that are all on this host: a file that only this user can open. No port listens, since anybody of the host
    could connect. Raises UserError if it is unknown which ranks are on this host."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise UserError(
            "WORLD_SIZE is set, but not LOCAL_WORLD_SIZE, the number of ranks on this host; start the ranks with launch.py or torchrun"
        )
    listen_on_loopback()
    folder = os.environ.get(MEETING) or shared_folder(f"{os.environ.get('MASTER_ADDR')} {os.environ.get('MASTER_PORT')}")
    store = FileStore(str(Path(folder, f"ranks-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}")), -1)
    store.set_timeout(PATIENCE)
    return PrefixStore(hosts.store_prefix(), store)


def _own_device(kind: str, rank: int) -> torch.device:
    """This rank's device, which is made the current one. Raises UserError if the host has too few GPUs."""
    if kind == "cuda":
        local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if gpus == 0:
            raise UserError("--device cuda, but this machine shows no GPU; use --device cpu")
        if local_ranks > gpus:  # all ranks of the host compare the same two numbers, so all of them stop
            if not may_share_gpus():
                raise UserError(
                    f"{local_ranks} ranks need a GPU each, but this host has {gpus}; start at most {gpus} ranks a host, "
                    f"or set {SHARE_GPUS}=1 to try them on fewer GPUs, slowly"
                )
            prepare_shared_gpus(rank)
        _check_orders(min(local_ranks, gpus))
        torch.cuda.set_device(local_rank % gpus)
        return torch.device("cuda", local_rank % gpus)
    return torch.device(kind)


def _check_orders(gpus: int) -> None:
    """Raises UserError if the tensor cores of one of this host's first `gpus` GPUs add in orders that --deterministic does not know."""
    for index in range(gpus) if determinism.enabled() else ():
        if torch.cuda.get_device_capability(index)[0] != 9:
            name = torch.cuda.get_device_name(index)
            raise UserError(
                f"--deterministic runs on CPUs and on Hopper GPUs, not on {name}; leave it out, or use --device cpu"
            )


def agree_on_error(world: World, error: UserError | None) -> None:
    """If any rank has an error, raise that of the lowest such rank on every rank. So no rank waits for one that stopped.

    Collective.
    """
    errors: list[str | None] = [str(error) if error else None]
    if world.world_size > 1:
        errors = [None] * world.world_size
        dist.all_gather_object(errors, str(error) if error else None, group=world.control)
    first = next((e for e in errors if e), None)
    if first:
        raise UserError(first)


def together(world: World, work: Callable[[], T]) -> T:
    """What `work()` returns. A UserError on one rank is raised on all ranks. Collective."""
    error = result = None
    try:
        result = work()
    except UserError as e:
        error = e
    agree_on_error(world, error)
    return result  # type: ignore[return-value]
