"""The whole model: norm, attention, MLP, one block class per residual variant, and the `Transformer`.

Shapes: B sequences, T tokens, C hidden_size, H query heads and K key-value heads of this shard, D head_dim.

The residual variants (Zhang et al., "Ladder-residual", arXiv:2501.06589) in one notation. Modules h_1 … h_2L alternate
attention and MLP, each with its own pre-norm; x_i is the residual stream after module i, x_0 the embedding. A rank computes a
partial sum of h_i; AR is the all-reduce, the sum over ranks.

    standard      x_i = x_{i-1} + AR(h_i(x_{i-1}))
    parallel      x_l = x_{l-1} + AR(attention(n(x_{l-1})) + mlp(n(x_{l-1})))
    ladder        x_i = x_{i-1} + AR(h_i(x_{i-2})),  x_{-1} = x_0
    desync        x^r += h_i^r(x^r) on every stream r, or, where it reduces, x = AR(h_i^r(x^r) + x^r / S)
    upper-bound   standard without AR: wrong on more than one rank

Each module passes on a tensor `x` and the all-reduces in flight, oldest first. The residual stream is `x` plus their results.
A module reads the stream when all but the newest `lag` all-reduces have finished: `lag` is 0 for standard and 1 for a ladder.
So standard and ladder blocks can be mixed, and the rule x_{i-2} also holds where a hybrid changes from one to the other.
"""

from collections.abc import Callable
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import AttentionContext
from comm import Communicator, Done, Handle, NoCommunication, Product, Scattered
from config import ModelConfig
from kernels.activation import swiglu
from kernels.embedding import embedding_shard
from kernels.linear import linear
from kernels.norm import rms_norm
from rope import rope_frequencies, rotate
from tp import Project, Shard, ShardedLinear, stream_shards


class Factory(TypedDict):
    """Where and how new parameters are allocated."""

    device: torch.device
    dtype: torch.dtype


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, computed in fp32 (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, factory: Factory) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, **factory))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


# --- the modules h_i without their pre-norm; each returns this shard's partial sum ---------------------------------------


class Heads(nn.Module):
    """The part of attention between its two projections: split into heads, QK norm, RoPE, attend."""

    def __init__(self, config: ModelConfig, layer: int, slot: int, shard: Shard, factory: Factory) -> None:
        super().__init__()
        self.slot, self.window, self.head_dim = slot, config.window(layer), config.head_dim
        self.rope_factor = config.rope_factor
        self.n_heads = len(shard.range(config, "heads")) // config.head_dim
        self.n_kv_heads = len(shard.range(config, "kv_heads")) // config.head_dim
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, factory) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, factory) if config.qk_norm else None

    def split(self, qkv: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, (H + 2K) * D) to q (B, T, H, D), k and v (B, T, K, D), rotated."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        qk, v = heads.split((self.n_heads + self.n_kv_heads, self.n_kv_heads), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((self.n_heads, self.n_kv_heads), dim=-2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-2)
        q, k = rotate(qk, *rope).split((self.n_heads, self.n_kv_heads), dim=-2)
        return q, k, v

    def forward(self, qkv: Tensor, frequencies: Tensor, context: AttentionContext) -> Tensor:
        """(B, T, (H + 2K) * D) to (B, T, H * D). The context computes the attention to earlier tokens."""
        return context.attend(self, qkv, frequencies)


class Attention(nn.Module):
    """h(x) = O · attend(QKV · n(x)). Takes n(x), (B, T, C); returns this shard's partial sum, (B, T, C)."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        slot: int,
        shard: Shard,
        norm: RMSNorm,
        factory: Factory,
        project: Project = linear,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.wqkv = ShardedLinear(config, shard, ("q_proj", "k_proj", "v_proj"), **factory)
        self.heads = Heads(config, layer, slot, shard, factory)
        self.wo = ShardedLinear(config, shard, ("o_proj",), project=project, **factory)

    def forward(self, normed: Tensor | Scattered, frequencies: Tensor, context: AttentionContext) -> Tensor | Product:
        return self.wo(self.heads(self.wqkv(normed), frequencies, context))


class MLP(nn.Module):
    """h(x) = down · (silu(gate · n(x)) * (up · n(x))). Takes n(x), (B, T, C); returns this shard's partial sum, (B, T, C)."""

    def __init__(self, config: ModelConfig, shard: Shard, norm: RMSNorm, factory: Factory, project: Project = linear) -> None:
        super().__init__()
        self.norm = norm
        self.w_gate_up = ShardedLinear(config, shard, ("gate_proj", "up_proj"), **factory)
        self.w_down = ShardedLinear(config, shard, ("down_proj",), project=project, **factory)

    def forward(self, normed: Tensor | Scattered) -> Tensor | Product:
        return self.w_down(self.w_gate_up.with_swiglu(normed))


# --- the residual variants: one block class each -------------------------------------------------------------------------


Pending = tuple[Handle, ...]  # all-reduces in flight, oldest first


def settle(x: Tensor, pending: Pending) -> Tensor:
    """Wait for every all-reduce in flight and add its result to x: the whole residual stream."""
    for total in pending:
        x = total.settle(x)
    return x


def read(x: Tensor, pending: Pending, norm: RMSNorm, lag: int) -> tuple[Tensor, Tensor | Scattered, Pending]:
    """Read a module's input: wait for all but the newest `lag` all-reduces. Returns (x, norm(x), those still in flight)."""
    arrived = max(0, len(pending) - lag)
    if not arrived:
        return x, norm(x), pending
    x = settle(x, pending[: arrived - 1])
    return *pending[arrived - 1].add_norm(x, norm.weight, norm.eps), pending[arrived:]


class StandardBlock(nn.Module):
    """x_i = x_{i-1} + AR(h_i(x_{i-1})): attention, then MLP; each waits for the previous module's all-reduce."""

    lag = 0

    def __init__(self, config: ModelConfig, layer: int, shards: list[Shard], comm: Communicator, factory: Factory) -> None:
        super().__init__()
        self.start: Callable[[Any], Handle] = comm.start if self.lag else comm.defer
        # A ladder's all-reduce runs while the next module computes, so its partial sum must be computed first, unfused.
        # A projection with a bias is not fused either. Then no module is: a fused all-reduce may leave each rank only some
        # rows of the stream, and only the same communicator's next fused all-reduce can continue with them.
        project: Project = linear if self.lag or config.o_bias or config.mlp_bias else comm.project
        norms = [RMSNorm(config.hidden_size, config.norm_eps, factory) for _ in range(2)]
        self.attention = Attention(config, layer, layer, shards[0], norms[0], factory, project)
        self.mlp = MLP(config, shards[0], norms[1], factory, project)

    def forward(self, x: Tensor, pending: Pending, frequencies: Tensor, context: AttentionContext) -> tuple[Tensor, Pending]:
        x, normed, pending = read(x, pending, self.attention.norm, self.lag)
        pending += (self.start(self.attention(normed, frequencies, context)),)
        x, normed, pending = read(x, pending, self.mlp.norm, self.lag)
        return x, (*pending, self.start(self.mlp(normed)))


class SeamBlock(StandardBlock):
    """The standard block directly before a ladder block, which needs all rows of the stream on every rank.

    It makes its input whole, and its all-reduces use `comm.whole`, whose results are whole.
    """

    def __init__(self, config: ModelConfig, layer: int, shards: list[Shard], comm: Communicator, factory: Factory) -> None:
        super().__init__(config, layer, shards, comm, factory)
        if not (config.o_bias or config.mlp_bias):
            self.attention.wo.project = self.mlp.w_down.project = comm.whole.project

    def forward(self, x: Tensor, pending: Pending, frequencies: Tensor, context: AttentionContext) -> tuple[Tensor, Pending]:
        return super().forward(settle(x, pending), (), frequencies, context)


class LadderBlock(StandardBlock):
    """x_i = x_{i-1} + AR(h_i(x_{i-2})): while one module's all-reduce is in flight, the next module computes (Algorithm 1)."""

    lag = 1


class UpperBoundBlock(StandardBlock):
    """Standard without communication, the upper bound of speed. For benchmarks only: on several ranks its text is wrong."""

    def __init__(self, config: ModelConfig, layer: int, shards: list[Shard], comm: Communicator, factory: Factory) -> None:
        super().__init__(config, layer, shards, NoCommunication(comm.rank, comm.world_size), factory)


class ParallelBlock(nn.Module):
    """x_l = x_{l-1} + AR(attention(n(x)) + mlp(n(x))): one norm, one fused input weight, one all-reduce a layer
    (Wang & Komatsuzaki's GPT-J; PaLM, arXiv:2204.02311)."""

    def __init__(self, config: ModelConfig, layer: int, shards: list[Shard], comm: Communicator, factory: Factory) -> None:
        super().__init__()
        self.comm, shard = comm, shards[0]
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, factory)
        inputs = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        self.w_in = ShardedLinear(config, shard, inputs, **factory)
        self.heads = Heads(config, layer, layer, shard, factory)
        self.wo = ShardedLinear(config, shard, ("o_proj",), **factory)
        self.w_down = ShardedLinear(config, shard, ("down_proj",), **factory)

    def forward(self, x: Tensor, pending: Pending, frequencies: Tensor, context: AttentionContext) -> tuple[Tensor, Pending]:
        x, normed, pending = read(x, pending, self.norm, lag=0)
        q_size, k_size, v_size, gate_size, up_size = self.w_in.sizes
        qkv, gate_up = self.w_in(normed).split((q_size + k_size + v_size, gate_size + up_size), dim=-1)
        attended = self.heads(qkv, frequencies, context)
        return x, (self.comm.defer(self.wo(attended) + self.w_down(swiglu(gate_up))),)


class DesyncBlock(nn.Module):
    """Each stream r advances separately, x^r += h^r(x^r), until a module reduces: x = AR(h^r(x^r) + x^r / S).

    A checkpoint with S streams runs on every number of ranks N that divides S. A rank carries S / N streams, each with its own
    shard of the weights; the norms are shared. `x` is a list of this rank's streams, each (B, T, C). `pending` has one update
    for each stream; directly after a reduction it is empty.
    """

    def __init__(self, config: ModelConfig, layer: int, shards: list[Shard], comm: Communicator, factory: Factory) -> None:
        super().__init__()
        self.comm, self.streams, self.reduces = comm, config.desync_streams, config.desync_pattern[layer]
        self.norms = norms = tuple(RMSNorm(config.hidden_size, config.norm_eps, factory) for _ in range(2))
        slots = range(layer * len(shards), (layer + 1) * len(shards))
        self.attention = nn.ModuleList(
            Attention(config, layer, slot, shard, norms[0], factory) for slot, shard in zip(slots, shards, strict=True)
        )
        self.mlp = nn.ModuleList(MLP(config, shard, norms[1], factory) for shard in shards)

    def forward(
        self, x: list[Tensor], pending: Pending, frequencies: Tensor, context: AttentionContext
    ) -> tuple[list[Tensor], Pending]:
        x, normed = self.read(x, pending, self.norms[0])
        updates = [h(y, frequencies, context) for h, y in zip(self.attention, normed, strict=True)]
        x, pending = self.advance(x, updates, self.reduces.attention)
        x, normed = self.read(x, pending, self.norms[1])
        return self.advance(x, [h(y) for h, y in zip(self.mlp, normed, strict=True)], self.reduces.mlp)

    @staticmethod
    def read(x: list[Tensor], pending: Pending, norm: RMSNorm) -> tuple[list[Tensor], list[Tensor | Scattered]]:
        if not pending:  # after a reduction all streams are equal
            return x, [norm(x[0])] * len(x)
        both = [update.add_norm(x_r, norm.weight, norm.eps) for x_r, update in zip(x, pending, strict=True)]
        return [x_r for x_r, _ in both], [normed for _, normed in both]

    def advance(self, x: list[Tensor], updates: list[Tensor], reduce: bool) -> tuple[list[Tensor], Pending]:
        if not reduce:
            return x, tuple(Done(update) for update in updates)
        partial = torch.stack([update + x_r / self.streams for x_r, update in zip(x, updates, strict=True)]).sum(0)
        return [self.comm.all_reduce(partial)] * len(x), ()


BLOCKS = {
    "standard": StandardBlock,
    "parallel": ParallelBlock,
    "ladder": LadderBlock,
    "desync": DesyncBlock,
    "upper-bound": UpperBoundBlock,
}


# --- the model -----------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """This rank's shard of a Llama-like decoder.

    Parameters are allocated on `device` in `dtype`; `checkpoint.py` fills them. Raises UserError if the config cannot be split
    over the communicator's ranks.
    """

    def __init__(self, config: ModelConfig, comm: Communicator, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        factory: Factory = {"device": device, "dtype": dtype}
        self.config = config
        self.shards = stream_shards(config, comm.rank, comm.world_size)
        self.comm = NoCommunication(comm.rank, comm.world_size) if config.variant == "upper-bound" else comm
        rank = Shard(comm.rank, comm.world_size)
        self.vocab = rank.range(config, "vocab")
        self.embedding = ShardedLinear(config, rank, ("embed_tokens",), **factory)
        self.layers = nn.ModuleList(
            self.block_class(layer, comm)(config, layer, self.shards, comm, factory) for layer in range(config.n_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, factory)
        self.head = self.embedding if config.tie_embeddings else ShardedLinear(config, rank, ("lm_head",), **factory)
        self.frequencies: Tensor
        self.register_buffer("frequencies", rope_frequencies(config).to(device), persistent=False)

    def block_class(self, layer: int, comm: Communicator) -> type[nn.Module]:
        if self.config.variant == "ladder" and layer not in self.config.ladder_layers:
            return SeamBlock if comm.whole is not comm and layer + 1 in self.config.ladder_layers else StandardBlock
        return BLOCKS[self.config.variant]

    @property
    def attention_slots(self) -> int:
        """How many attention modules this rank has. Each has its own keys and values."""
        return self.config.n_layers * len(self.shards)

    @property
    def n_kv_heads(self) -> int:
        """KV heads of one attention module of this rank."""
        return len(self.shards[0].range(self.config, "kv_heads")) // self.config.head_dim

    def compile_modules(self) -> None:
        """Compile the code between the collectives and the attention kernel. All layers share the compiled code.

        The collectives are not compiled: Inductor would move the wait for a collective directly after its start.
        """
        for module in self.modules():
            if isinstance(module, ShardedLinear):
                module.project = linear  # a compiled module returns its partial sum itself, not a `Product`
            if isinstance(module, MLP):
                module.forward = torch.compile(module.forward)  # type: ignore[method-assign]
            elif isinstance(module, Heads):
                module.split = torch.compile(module.split)  # type: ignore[method-assign]

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T) ids to (B, T, C). Each rank looks up the ids of its part of the vocabulary; an all-reduce adds the parts."""
        if self.comm.world_size == 1:
            return F.embedding(tokens, self.embedding.weight)
        return self.comm.all_reduce(embedding_shard(tokens, self.embedding.weight, self.vocab.start))

    def logits(self, x: Tensor) -> Tensor:
        """(..., C) to (..., vocab_size) fp32, the same on every rank."""
        return self.comm.all_gather(self.head(self.norm(x)))[..., : self.config.vocab_size].float()

    def hidden(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """(B, T) ids to the last residual stream (B, T, C), before the final norm."""
        x: Any = self.embed(tokens)
        desync = self.config.variant == "desync"
        if desync:  # the streams start equal; the model's last module reduces, so they end equal
            x = [x] * len(self.shards)
        pending: Pending = ()
        for layer in self.layers:
            x, pending = layer(x, pending, self.frequencies, context)
        return x[0] if desync else settle(x, pending)

    def forward(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """(B, T) int64 ids to (B, T, vocab_size) fp32 logits."""
        return self.logits(self.hidden(tokens, context))
