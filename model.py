"""The whole model: norm, attention, MLP, the block classes of the residual variants, and the `Transformer`.

Shapes: B sequences, T tokens, C hidden_size, H query heads and K key-value heads of this shard, D head_dim.

The residual variants (Zhang et al., "Ladder-residual", arXiv:2501.06589) in one notation. Modules h_1 … h_2L alternate
attention and MLP, each with its own pre-norm; x_i is the residual stream after module i, x_0 the embedding. A rank computes a
partial sum of h_i; AR is the all-reduce, the sum over ranks.

    standard      x_i = x_{i-1} + AR(h_i(x_{i-1}))
    parallel      x_l = x_{l-1} + AR(attention(n(x_{l-1})) + mlp(n(x_{l-1})))
    ladder        x_i = x_{i-1} + AR(h_i(x_{i-2})),  x_{-1} = x_0
    desync        x^r += h_i^r(x^r) on every stream r, or, where it reduces, x = AR(h_i^r(x^r) + x^r / S)
    upper-bound   standard without AR: wrong on more than one rank

A family with a norm n behind its modules (OLMo 2) has n(AR(h_i)) instead of AR(h_i).

Where only some tokens are wanted, as at the end of a prompt, the last block goes on with these `rows` after its attention: all
tokens need keys and values there, and nothing more.

Blocks pass on a `Residual` stream (`comms/residual.py`). A module reads it when all of its all-reduces but the newest `lag` have
been added: 0 is standard, 1 a ladder. So a hybrid can mix the two; its first ladder layer, too, reads the stream without the output
of the module before it, the MLP of the last standard layer.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comms import Communicator, Local, NoCommunication, Residual
from config import FAMILIES, ModelConfig
from errors import UserError
from kernels import determinism
from kernels.dispatch import on_gpu, rejoin
from kernels.embedding import embedding_shard
from kernels.norm import rms_norm
from layers.attention import AttentionContext, Heads, HeadsNorm
from layers.experts import Beside, SparseMLP
from layers.linear import ShardedLinear, StepAdapters
from layers.rope import rope_frequencies
from tp import Shard, stream_shards


class Factory(TypedDict):
    """Where and how new parameters are allocated."""

    device: torch.device
    dtype: torch.dtype


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, computed in fp32 (Zhang & Sennrich, arXiv:1910.07467). Centered: 1 + weight instead.

    part, layer: its name in the checkpoint, as that of a linear layer (`tp.checkpoint_name`).
    """

    def __init__(self, config: ModelConfig, part: str, layer: int | None, factory: Factory) -> None:
        super().__init__()
        of_heads = part in ("q_norm", "k_norm")
        self.part, self.layer = part, layer
        self.eps = config.norm_eps / (1 if of_heads else config.residual_multiplier**2)  # of the stream: see `embedding_scale`
        size = config.head_dim if of_heads else config.hidden_size
        self.centered = FAMILIES[config.family].centered
        self.weight = nn.Parameter(torch.full((size,), 0.0 if self.centered else 1.0, **factory))
        self.kept: tuple[int, Tensor] | None = None  # with the weight's version

    @property
    def scale(self) -> Tensor:
        """What x / rms(x) is multiplied by. GPU kernels read it before the kernels ahead of them have ended, so these are waited for once,
        and inference keeps the sum until the weight changes."""
        if not self.centered:
            return self.weight
        version = 0 if self.weight.is_inference() else self.weight._version
        if self.kept is not None and self.kept[0] == version and torch.is_inference_mode_enabled():
            return self.kept[1]
        scale = 1 + self.weight.float()
        if on_gpu(scale):
            rejoin(scale)
            self.kept = (version, scale) if scale.is_inference() else None
        return scale

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, self.eps)


def marked(x: Tensor) -> Tensor:
    """x, on a CPU with NaN for values whose squares overflow: PyTorch's norm makes zeros of such a row, which look like a result. The
    kernels' norms make NaN."""
    return x if x.is_cuda or torch.is_grad_enabled() or x.dtype == torch.float16 else x + 0.0 * x.square()


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def scaled_embeddings(x: Tensor, config: ModelConfig) -> Tensor:
    factor = config.embedding_scale
    return scaled(x, torch.tensor(factor, dtype=x.dtype).item() if FAMILIES[config.family].scaled_embeddings else factor)


# --- the modules h_i: each reads the stream, and adds the all-reduce of this shard's partial sum -------------------------------


def attention_heads(config: ModelConfig, layer: int, slot: int, shard: Shard, factory: Factory) -> Heads:
    """This shard's heads of a layer, with their norms."""
    own, keys = (shard.range(config, axis) for axis in ("heads", "kv_heads"))
    size = config.head_dim
    heads = Heads(config, layer, slot, range(own.start // size, own.stop // size), len(keys) // size)
    if FAMILIES[config.family].sinks:
        heads.sinks = nn.Parameter(torch.zeros(heads.n_heads, **factory))
    if FAMILIES[config.family].wide_norm:
        heads.norm = HeadsNorm(config, layer, shard, **factory)
    if config.qk_norm:
        heads.q_norm, heads.k_norm = (RMSNorm(config, part, layer, factory) for part in ("q_norm", "k_norm"))
    return heads


Norms = tuple[RMSNorm | None, RMSNorm | None]  # before a module, and behind it, of the sum over ranks


def layer_norms(config: ModelConfig, layer: int, factory: Factory) -> list[Norms]:
    """The norms of a layer's attention and MLP."""
    norms = [RMSNorm(config, part, layer, factory) if part else None for part in FAMILIES[config.family].norms]
    return [(norms[0], norms[1]), (norms[2], norms[3])]


class Attention(nn.Module):
    """h(x) = O · attend(QKV · n(x))."""

    def __init__(self, config: ModelConfig, layer: int, slot: int, shard: Shard, norms: Norms, factory: Factory) -> None:
        super().__init__()
        self.norm, self.post_norm = norms
        self.wqkv = ShardedLinear(config, shard, ("q_proj", "k_proj", "v_proj"), layer, **factory)
        self.heads = attention_heads(config, layer, slot, shard, factory)
        self.wo = ShardedLinear(config, shard, ("o_proj",), layer, **factory)

    def forward(
        self, stream: Residual, frequencies: Tensor, context: AttentionContext, lag: int = 0, rows: Tensor | None = None
    ) -> Residual:
        stream, qkv = stream.read(self.norm, self.wqkv, lag)
        attended = self.heads(qkv, frequencies, context)
        if rows is not None:
            stream, attended = stream.rows(rows), attended[:, rows]
        return stream.add(attended, self.wo, lag, self.post_norm)


class MLP(nn.Module):
    """h(x) = down · (silu(gate · n(x)) * (up · n(x))), or a sparse model's sum of such (`layers/experts.py`)."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, norms: Norms, factory: Factory) -> None:
        super().__init__()
        self.norm, self.post_norm = norms
        self.sparse = SparseMLP(config, layer, shard, **factory) if config.experts else None
        if self.sparse:
            return
        down = ShardedLinear(config, shard, ("down_proj",), layer, **factory)
        self.w_gate_up = ShardedLinear(config, shard, ("gate_proj", "up_proj"), layer, gated=True, reader=down, **factory)
        self.w_down = down

    def forward(self, stream: Residual, lag: int = 0, next_lag: int = 0) -> Residual:
        if self.sparse:
            stream, partial = stream.read(self.norm, self.sparse, lag)
            return stream.add(partial, lag=next_lag, norm=self.post_norm)
        stream, hidden = stream.read(self.norm, self.w_gate_up, lag)
        return stream.add(hidden, self.w_down, next_lag, self.post_norm)


# --- the blocks of the residual variants: see BLOCKS ----------------------------------------------------------------------


class SequentialBlock(nn.Module):
    """x_i = x_{i-1} + AR(h_i(x_{i-1-lag})): attention, then MLP. With lag 0 (standard) each waits for the all-reduce of the one
    before. With lag 1 (ladder, Algorithm 1) it computes while this all-reduce is in flight. The upper bound is standard on a
    stream that sends nothing."""

    def __init__(self, config: ModelConfig, layer: int, shards: list[Shard], comm: Communicator, factory: Factory) -> None:
        super().__init__()
        first, second = layer_norms(config, layer, factory)
        self.attention = Attention(config, layer, layer, shards[0], first, factory)
        self.mlp = MLP(config, layer, shards[0], second, factory)
        following = min(layer + 1, config.n_layers - 1)
        self.lag, self.next_lag = (int(i in config.ladder_layers) for i in (layer, following))

    def forward(self, stream: Residual, frequencies: Tensor, context: AttentionContext, rows: Tensor | None = None) -> Residual:
        stream = self.attention(stream, frequencies, context, self.lag, rows)
        return self.mlp(stream, self.lag, self.next_lag)


class ParallelBlock(nn.Module):
    """x_l = x_{l-1} + AR(attention(n(x)) + mlp(n(x))): one norm, one fused input weight, one all-reduce a layer
    (Wang & Komatsuzaki's GPT-J; PaLM, arXiv:2204.02311)."""

    def __init__(self, config: ModelConfig, layer: int, shards: list[Shard], comm: Communicator, factory: Factory) -> None:
        super().__init__()
        shard = shards[0]
        self.norm = RMSNorm(config, FAMILIES[config.family].norms[0], layer, factory)
        self.sparse = SparseMLP(config, layer, shard, **factory) if config.experts else None
        inputs = ("q_proj", "k_proj", "v_proj", *(() if self.sparse else ("gate_proj", "up_proj")))
        self.w_in = ShardedLinear(config, shard, inputs, layer, **factory)
        self.heads = attention_heads(config, layer, layer, shard, factory)
        self.wo = ShardedLinear(config, shard, ("o_proj",), layer, **factory)
        if not self.sparse:
            self.w_down = ShardedLinear(config, shard, ("down_proj",), layer, **factory)

    def forward(self, stream: Residual, frequencies: Tensor, context: AttentionContext, rows: Tensor | None = None) -> Residual:
        if self.sparse:
            return self._sparse(self.sparse, stream, frequencies, context, rows)
        stream, both = stream.read(self.norm, self.w_in)
        q_size, k_size, v_size, gate_size, up_size = self.w_in.sizes
        qkv, gate_up = both.split((q_size + k_size + v_size, gate_size + up_size), dim=-1)
        attended = self.heads(qkv, frequencies, context)
        if rows is not None:
            stream, attended, gate_up = stream.rows(rows), attended[:, rows], gate_up[:, rows]
        gated = self.w_down.gate(gate_up)
        if determinism.enabled():  # each layer's sum is a tree over the ranks, the sum of both is not
            return stream.add(attended, self.wo).add(gated, self.w_down)
        return stream.add(self.wo(attended) + self.w_down(gated))

    def _sparse(
        self, mlp: SparseMLP, stream: Residual, frequencies: Tensor, context: AttentionContext, rows: Tensor | None
    ) -> Residual:
        stream, (partial, qkv) = stream.read(self.norm, Beside(mlp, self.w_in))
        attended = self.heads(qkv, frequencies, context)
        if rows is not None:
            stream, attended, partial = stream.rows(rows), attended[:, rows], partial[:, rows]
        return stream.add(self.wo(attended) + partial)


class DesyncBlock(nn.Module):
    """Each stream r advances separately, x^r += h^r(x^r), until a module reduces: x = AR(h^r(x^r) + x^r / S).

    A checkpoint with S streams runs on every number of ranks N that divides S: a rank carries S / N streams, each with its own
    shard of the weights; the norms are shared. A stream's own all-reduces stay on this rank (`Local`).
    """

    def __init__(self, config: ModelConfig, layer: int, shards: list[Shard], comm: Communicator, factory: Factory) -> None:
        super().__init__()
        self.comm, self.count, self.reduces = comm, config.desync_streams, config.desync_pattern[layer]
        first, second = layer_norms(config, layer, factory)
        slots = range(layer * len(shards), (layer + 1) * len(shards))
        self.attention = nn.ModuleList(
            Attention(config, layer, slot, shard, first, factory) for slot, shard in zip(slots, shards, strict=True)
        )
        self.mlp = nn.ModuleList(MLP(config, layer, shard, second, factory) for shard in shards)

    def forward(
        self, streams: list[Residual], frequencies: Tensor, context: AttentionContext, rows: Tensor | None = None
    ) -> list[Residual]:
        streams = [h(stream, frequencies, context, rows=rows) for h, stream in zip(self.attention, streams, strict=True)]
        streams = self.reduce(streams) if self.reduces.attention else streams
        streams = [h(stream) for h, stream in zip(self.mlp, streams, strict=True)]
        return self.reduce(streams) if self.reduces.mlp else streams

    def reduce(self, streams: list[Residual]) -> list[Residual]:
        partial = _sum([stream.pending[-1].wait() + stream.x / self.count for stream in streams])
        return [Residual(self.comm.all_reduce(partial), Local())] * len(streams)


def _sum(streams: list[Tensor]) -> Tensor:
    """The sum of this rank's streams, each (B, T, C), to (B, T, C)."""
    return determinism.tree_sum(streams) if determinism.enabled() else torch.stack(streams).sum(0)


BLOCKS = {
    "standard": SequentialBlock,
    "parallel": ParallelBlock,
    "ladder": SequentialBlock,
    "desync": DesyncBlock,
    "upper-bound": SequentialBlock,
}


# --- the model -----------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """This rank's shard of a Llama-like decoder.

    Parameters are allocated on `device` in `dtype`; `checkpoints/weights.py` fills them. Raises UserError if the config cannot be split
    over the communicator's ranks.
    """

    def __init__(self, config: ModelConfig, comm: Communicator, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        factory: Factory = {"device": device, "dtype": dtype}
        family = FAMILIES[config.family]
        if device.type == "cuda" and comm.world_size > 1 and (family.wide_norm or any(family.norms[1::2])):
            raise UserError(f"{config.family} models run on one GPU only; start one rank, or use --device cpu")
        self.config = config
        self.shards = stream_shards(config, comm.rank, comm.world_size)
        comm.check_width(config.hidden_size)
        self.comm = NoCommunication(comm.rank, comm.world_size) if config.kind.speed_limit else comm
        rank = Shard(comm.rank, comm.world_size)
        self.vocab = rank.range(config, "vocab")
        self.embedding = ShardedLinear(config, rank, ("embed_tokens",), **factory)
        self.layers = nn.ModuleList(
            BLOCKS[config.variant](config, layer, self.shards, self.comm, factory) for layer in range(config.n_layers)
        )
        self.norm = RMSNorm(config, "norm", None, factory)
        self.head = self.embedding if config.tie_embeddings else ShardedLinear(config, rank, ("lm_head",), **factory)
        for module in self.modules():
            if isinstance(module, HeadsNorm):
                module.comm = self.comm
        self.frequencies: Tensor
        self.register_buffer("frequencies", rope_frequencies(config).to(device), persistent=False)
        self.step_adapters: StepAdapters | None = None  # of the blocks' linear layers, if they can have adapters

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

        The collectives are not compiled: Inductor would move the wait for a collective directly after its start. Raises UserError
        with --deterministic.
        """
        determinism.refuse(determinism.enabled(), compiled=True)
        for module in self.modules():
            if isinstance(module, ShardedLinear) and module.gated and not module.only_called:
                module.forward = torch.compile(module.forward)  # type: ignore[method-assign]
            elif isinstance(module, Heads):
                module.split = torch.compile(module.split)  # type: ignore[method-assign]

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T) ids to (B, T, C). Each rank looks up the ids of its part of the vocabulary; an all-reduce adds the parts."""
        if self.comm.world_size == 1:
            return scaled_embeddings(F.embedding(tokens, self.embedding.weight), self.config)
        parts = embedding_shard(tokens, self.embedding.weight, self.vocab.start)
        return scaled_embeddings(self.comm.all_reduce(parts), self.config)

    def logits(self, x: Tensor) -> Tensor:
        """(..., C) to (..., vocab_size) fp32, the same on every rank."""
        whole = self.comm.all_gather(self.head(self.norm(x)))[..., : self.config.vocab_size]
        return scaled(whole.float(), 1 / self.config.logits_scaling)

    def hidden(self, tokens: Tensor, context: AttentionContext, rows: Tensor | None = None) -> Tensor:
        """(B, T) ids to the last residual stream before the final norm: (B, T, C), or (B, W, C) of the W wanted tokens
        `rows` (W,)."""
        return self.hidden_and_streams(tokens, context, (), rows)[0]

    def hidden_and_streams(
        self, tokens: Tensor, context: AttentionContext, layers: Sequence[int], rows: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """`hidden`, and the residual streams (B, T, C) before these layers, complete on every rank; the number of layers names the
        last stream. For draft heads (`checkpoints/eagle.py`).

        A stream has the output of every module before the layer. A ladder layer itself reads one that lacks the newest output. The
        complete one is kept when a later module reads it, so nothing waits for it, and the forward pass has the same bits as
        without. With desync it is the mean of the streams, which takes one more all-reduce. All are scaled as the model's definition
        has them; the stream within is not: see `ModelConfig.embedding_scale`.
        """
        # desync: the streams begin equal; the last module of all reduces, so they end equal
        streams = self.config.kind.streams
        stream: Any = Residual(self.embed(tokens), Local() if streams else self.comm)
        stream = [stream] * len(self.shards) if streams else stream
        found: dict[int, Callable[[], Tensor]] = {}
        end = len(self.layers)
        # the kept stream of the last layer has all rows, and a step's adapters are laid out for all
        early = rows if max(layers, default=-1) < end - 1 and self.step_adapters is None else None
        if self.step_adapters is not None:
            self.step_adapters.groups = context.adapters
        for i, layer in enumerate(self.layers):
            if i in layers:
                stream, found[i] = self._mean_recorded(stream) if streams else stream.recorded()
            if i == end - 1:  # a NaN here reaches the cache of the last layer, so that later tokens overflow, too
                stream = [own._replace(x=marked(own.x)) for own in stream] if streams else stream._replace(x=marked(stream.x))
            stream = layer(stream, self.frequencies, context, early if i == end - 1 else None)
        last = marked(stream[0].x if streams else stream.finish())
        found[end] = lambda: last
        kept = [scaled(found[i](), self.config.residual_multiplier) for i in layers]
        return (last if early is rows else last[:, rows]), kept

    def _mean_recorded(self, streams: list[Residual]) -> tuple[list[Residual], Callable[[], Tensor]]:
        """`Residual.recorded` of the mean of a desync model's streams."""
        recorded, whole = zip(*(stream.recorded() for stream in streams), strict=True)
        count = self.config.desync_streams
        return list(recorded), lambda: self.comm.all_reduce(_sum([x() / count for x in whole]))

    def forward(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """(B, T) int64 ids to (B, T, vocab_size) fp32 logits."""
        return self.logits(self.hidden(tokens, context))
