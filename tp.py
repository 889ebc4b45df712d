"""Tensor parallelism: the process group, and the table `SPLITS` that says how each weight is split.

Weights are sharded from the start: a `ShardedLinear` allocates only its shard, and `checkpoint.py` reads only that shard from
disk.
"""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

import determinism
import hosts
import shared_gpus
from comm import Communicator, Local
from communicators import choose
from config import ModelConfig
from errors import UserError
from kernels.activation import swiglu, swiglu_codes
from kernels.dispatch import on_gpu
from kernels.linear import linear, linear_swiglu
from kernels.linear_quantized import Packed, reads_codes
from kernels.linear_quantized import linear as quantized_linear
from kernels.linear_quantized import supports as quantized_supports
from kernels.lora import Groups, LowRank, add_low_rank
from kernels.row_codes import RowCodes
from processes import listen_on_loopback
from quantized.weight import PlainWeight, QuantizedWeight, merged


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


def checkpoint_name(layer: int | None, part: str) -> str:
    """A linear layer's name in the checkpoint: `model.layers.3.mlp.up_proj`; without a layer `lm_head`."""
    if layer is None:
        return "model." * (part == "embed_tokens") + part
    group = "self_attn" if part in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return f"model.layers.{layer}.{group}.{part}"


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
    if count % world_size:
        raise UserError(
            f"this desync checkpoint has {count} streams, which {world_size} ranks cannot share; "
            f"start a number of ranks that divides {count}"
        )
    what = f"{count} desync streams" if streams else f"{world_size} ranks"
    determinism.check_split(count, what)
    for name, size in (("attention heads", config.n_heads), ("intermediate features", config.intermediate_size)):
        if size % count:
            raise UserError(f"{size} {name} cannot be divided by {what}; use a divisor of {size}")
    if config.n_kv_heads % count and count % config.n_kv_heads:
        raise UserError(
            f"{config.n_kv_heads} KV heads cannot be divided by or replicated over {what}; use a multiple or divisor"
        )
    per_rank = count // world_size
    return [Shard(rank * per_rank + i, count) for i in range(per_rank)]


class StepAdapters:
    """Which rows of the present step have an adapter. All adapted layers of a model share it; `Transformer` sets it."""

    groups: Groups | None = None


class LayerAdapters(NamedTuple):
    """The adapters of one `ShardedLinear`. A column-parallel layer holds all of A and its features' rows of B, a row-parallel one its
    features' columns of A and all of B, so that its product is a part of the partial sum."""

    weights: LowRank
    step: StepAdapters

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """y, the layer's product of x, with the adapters' products."""
        return y if self.step.groups is None else add_low_rank(y, x, self.weights, self.step.groups)


class ShardedLinear(nn.Module):
    """This shard's part of one linear layer, or of several layers with the same input, fused into one weight.

    layer: the number of the block, which is part of the layer's name; None for the embedding and the head.

    `weight` (sum of the parts' local out_features, local in_features). A column-parallel layer has some out_features and returns
    them; a row-parallel one has some in_features and returns a partial sum over shards (Megatron-LM, arXiv:1909.08053).
    gated: the parts are (gate, up), and the layer returns silu(gate) * up.

    `bias` is None unless a part has a bias. A column-parallel layer holds the entries of its features, for the parts with a
    bias. A row-parallel layer holds all entries, and each of the S shards adds 1 / S of them: the sum over shards then has the
    bias once, and the streams of a desync model have equal shares of it.

    If the config says that a part is quantized, `weight` is None, and `quantized` has one module for each part.

    reader: the layer that reads a gated layer's result. It is kept in a tuple, because it is not a part of this module.

    adapters: None, or low-rank adapters, which `engine/adapters.py` sets before the first step. The layer is then computed by itself,
    without the layers and all-reduces around it in the same kernel.
    """

    weight: nn.Parameter

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        parts: tuple[str, ...],
        layer: int | None = None,
        gated: bool = False,
        reader: "ShardedLinear | None" = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        inputs: int | None = None,
    ) -> None:
        """inputs: in_features of a column-parallel layer; None: hidden_size."""
        super().__init__()
        self.config, self.parts, self.shard, self.layer, self.gated = config, parts, shard, layer, gated
        self.readers = (reader,) if reader else ()
        self.sizes = [len(shard.range(config, SPLITS[p].axis)) for p in parts]
        if SPLITS[parts[0]].dim == 0:
            shape = (sum(self.sizes), inputs or config.hidden_size)
        else:
            shape = (config.hidden_size, self.sizes[0])
        self.out_features, self.in_features = shape
        self.quantized = self._quantized(config, shape, device, dtype)
        weight = None if self.quantized else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_parameter("weight", weight)
        # in a fused layer, either all parts have a bias, or the first ones, or the last ones
        has = [part in biased_parts(config) for part in parts]
        self.biased = [part for part, biased in zip(parts, has, strict=True) if biased]
        lengths = self.rows = self.sizes if SPLITS[parts[0]].dim == 0 else [shape[0]]
        self.lengths = [length for length, biased in zip(lengths, has, strict=True) if biased]
        unbiased = shape[0] - sum(self.lengths)
        self.padding = (0, unbiased) if has[0] else (unbiased, 0)
        # of the sum over input features, with --deterministic
        self.sum_parts = determinism.parts(self.sizes[0] * shard.count) // shard.count if SPLITS[parts[0]].dim == 1 else 1
        self.bias = nn.Parameter(torch.zeros(sum(self.lengths), device=device, dtype=dtype)) if self.biased else None
        self.adapters: LayerAdapters | None = None

    def _quantized(
        self, config: ModelConfig, shape: tuple[int, int], device: torch.device | None, dtype: torch.dtype | None
    ) -> nn.ModuleList | None:
        """The parts of a layer of which at least one is quantized, else None."""
        if config.quantization is None or self.parts == ("embed_tokens",):
            return None
        schemes = [config.quantization.scheme(checkpoint_name(self.layer, part)) for part in self.parts]
        rows = self.sizes if SPLITS[self.parts[0]].dim == 0 else [shape[0]]
        modules = [
            QuantizedWeight(scheme, n, shape[1], device) if scheme else PlainWeight(n, shape[1], device, dtype)
            for scheme, n in zip(schemes, rows, strict=True)
        ]
        return nn.ModuleList(modules) if any(schemes) else None

    def forward(self, x: Tensor | RowCodes) -> Any:
        """(..., in_features) to (..., out_features), half of them in a gated layer, as `RowCodes` if its reader reads them."""
        if self.adapters is not None:
            assert isinstance(x, Tensor)
            return self.finish(self.adapters.add(self._product(x), x))
        if (packed := self.packed) is not None:
            return quantized_linear(x, packed, self.whole_bias(), self.gated, self.finish)
        assert isinstance(x, Tensor)
        if self.gated and on_gpu(x) and not self.quantized:
            return linear_swiglu(x, self.weight, self.whole_bias())
        return self.finish(self._product(x))

    def _product(self, x: Tensor) -> Tensor:
        """The matrix product with its bias, (..., out_features)."""
        if (packed := self.packed) is not None:
            product: Tensor = quantized_linear(x, packed, self.whole_bias())
            return product
        if self.quantized:
            if determinism.enabled():
                return self._quantized_tree(x)
            out, bias = torch.cat([part(x) for part in self.quantized], -1), self.whole_bias()
            return out if bias is None else out + bias
        return linear(x, self.weight, self.whole_bias(), self.sum_parts)

    def _quantized_tree(self, x: Tensor) -> Tensor:
        """The product with --deterministic."""
        assert self.quantized is not None
        bias, sizes = self.whole_bias(), self.rows
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        return torch.cat(
            [
                part.tree(x, own, self.sum_parts)  # type: ignore[operator]
                for part, own in zip(self.quantized, biases, strict=True)
            ],
            -1,
        )

    @property
    def packed(self) -> Packed | None:
        """The weight of a quantized layer as the kernels of this GPU read it; None if they do not."""
        return getattr(self.quantized[0], "packed", None) if self.quantized and len(self.quantized) == 1 else None

    def reads_codes(self, like: Tensor) -> bool:
        """Whether an input with the rows (..., any) and the data type of `like` may be `RowCodes`."""
        packed = None if self.adapters else self.packed
        return packed is not None and reads_codes(packed, like)

    def gate(self, gate_up: Tensor) -> Tensor | RowCodes:
        """silu(gate) * up of (..., 2 * in_features), as this layer reads it."""
        return swiglu_codes(gate_up) if self.reads_codes(gate_up) else swiglu(gate_up)

    def pack(self, dtype: torch.dtype) -> None:
        """Prepare quantized parts that are filled for the kernels of this GPU: as one weight if all are quantized alike.

        dtype: of the inputs. Without such kernels, PyTorch computes the parts as they are."""
        if not quantized_supports(dtype):
            return
        parts = [part for part in self.quantized or [] if isinstance(part, QuantizedWeight)]
        if self.quantized and len(parts) == len(self.quantized) and len(parts) > 1 and (whole := merged(parts)):
            self.quantized, parts = nn.ModuleList([whole]), [whole]
        for part in parts:
            part.pack()

    def finish(self, out: Tensor) -> Any:
        """What follows the product."""
        if not self.gated:
            return out
        return self.readers[0].gate(out) if self.readers else swiglu(out)

    def whole_bias(self) -> Tensor | None:
        """The bias that this shard adds to its features or to its partial sum; None without one."""
        if self.bias is None:
            return None
        if SPLITS[self.parts[0]].dim == 1:
            # with --deterministic in fp32, where no share of a 16-bit bias is rounded
            whole = self.bias.float() if determinism.enabled() else self.bias
            return self.bias if self.shard.count == 1 else whole / self.shard.count
        return F.pad(self.bias, self.padding) if any(self.padding) else self.bias

    @property
    def is_quantized(self) -> bool:
        return self.quantized is not None

    def own_range(self, part: str) -> range:
        """Which of a part's features in the full model this shard has: output features, or input features of a row-parallel layer."""
        return self.shard.range(self.config, SPLITS[part].axis)

    @property
    def only_called(self) -> bool:
        return self.is_quantized or self.adapters is not None

    @property
    def multiplied(self) -> Tensor | Packed | None:
        if self.adapters is not None:
            return None
        return self.packed if self.quantized else self.weight

    def quantized_parts(self) -> Iterator[tuple[str, QuantizedWeight]]:
        """The quantized parts and their names (`q_proj`, …)."""
        for part, module in zip(self.parts, self.quantized or [], strict=False):
            if isinstance(module, QuantizedWeight):
                yield part, module

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """The fused parts with their checkpoint names (`q_proj.weight`, `q_proj.bias`, …), as views of this layer's tensors,
        without the weights that are quantized."""
        sizes = self.rows
        if self.quantized:
            plain = [(part, m.weight) for part, m in zip(self.parts, self.quantized, strict=True) if isinstance(m, PlainWeight)]
        else:
            plain = list(zip(self.parts, self.weight.split(sizes), strict=True))
        for part, weight in plain:
            yield f"{part}.weight", weight
        if self.bias is not None:
            for part, bias in zip(self.biased, self.bias.split(self.lengths), strict=True):
                yield f"{part}.bias", bias


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
    error_budget: float = 0.0,
    overlap: str = "auto",
    deterministic: bool = False,
    facts: Mapping[str, str] | None = None,
    error: UserError | None = None,
) -> World:
    """Join the ranks that a launcher started, or be the only rank.

    device: `cpu` or `cuda`; None takes CUDA if there is a GPU. comm: a name that `communicators.choose` accepts; None takes the
    device's default. simulate_link: a latency and a bandwidth, `10us,100GB/s`; all-reduces of CPU ranks then take as long as on
    such a link. error_budget: the relative error that `auto` may accept in an all-reduce to make it faster. overlap: see `World`.
    deterministic: from now on, this process computes as `--deterministic` says.
    facts: what must be the same on all hosts, by name; see `hosts.join`. error: of this rank, so that on several hosts no other waits.
    Raises UserError for a device that does not exist or a communicator that does not support it, and as `hosts.join`.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if deterministic:
        determinism.enable()
    try:
        if kind not in ("cpu", "cuda"):
            raise UserError(f"unknown device {kind!r}; known: cpu, cuda")
        choice, torch_device = choose(kind, comm, simulate_link, error_budget), _own_device(kind, rank)
    except UserError as e:
        if hosts.several():
            hosts.join({}, error or e)  # raises the first error of all hosts on all of them
        raise
    if world_size == 1:
        return World(0, 1, torch_device, Local())
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    if one_host:
        listen_on_loopback()
    store: Store | None = hosts.join(facts or {}, error) if hosts.several() else None
    if one_host:
        store = _own_store() if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else _loopback_store(rank)
    dist.init_process_group(
        choice.backend,
        timeout=timedelta(minutes=10),
        device_id=torch_device if kind == "cuda" else None,
        store=store,
        rank=rank if store else -1,
        world_size=world_size if store else -1,
    )
    control = dist.group.WORLD if choice.backend == "gloo" else dist.new_group(backend="gloo")
    return World(rank, world_size, torch_device, choice.build(), control, overlap)


def _own_store() -> Store:
    """The agent's store, with a part for each start of the ranks: torchrun's is the same for all, and has the addresses of ranks that
    have ended."""
    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(minutes=10))))
    return PrefixStore(f"rung/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _own_device(kind: str, rank: int) -> torch.device:
    """This rank's device, which is made the current one. Raises UserError if the host has too few GPUs."""
    if kind == "cuda":
        local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if gpus == 0:
            raise UserError("--device cuda, but this machine shows no GPU; use --device cpu")
        if local_ranks > gpus:  # all ranks of the host compare the same two numbers, so all of them stop
            if not shared_gpus.allowed():
                raise UserError(
                    f"{local_ranks} ranks need a GPU each, but this host has {gpus}; start at most {gpus} ranks a host, "
                    f"or set {shared_gpus.VARIABLE}=1 to try them on fewer GPUs, slowly"
                )
            shared_gpus.prepare(rank)
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


def _loopback_store(rank: int) -> TCPStore:
    """A store on loopback for the ranks of one host whose launcher has none. PyTorch's own would listen on all interfaces."""
    address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    if rank:
        return TCPStore(*address, is_master=False)
    with socket.create_server(address) as listener:
        return TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


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
