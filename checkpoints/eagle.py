"""EAGLE-3 draft heads: one layer that guesses a model's next tokens from its hidden states (Li et al., arXiv:2503.01840).

Shapes: B sequences, T tokens, C hidden size of the model, D hidden size of the head (mostly C), V tokens of the draft vocabulary.

With x_t the token at position t and s_t three residual streams of the model there (`Transformer.hidden_and_streams`), row t is

    f_t = fc(s_t)                                   the model has computed x_t
    f_t = h_{t-1}, the head's own output            further tokens of a draft
    a   = f_t + O · attend(QKV · (n(e(x_{t+1})), n(f_t)))
    h_t = a + down · (silu(gate · n(a)) * (up · n(a)))
    guess of x_{t+2} = argmax of lm_head · n(h_t)

So a row pairs a position's features with the embedding e of the token after it, and its keys and values belong to position t. They
are kept in a cache of one slot of its own. A small head is replicated: every rank computes the same rows with the same bits. A
large one is split over the ranks as the model's layers are, and its collectives give every rank the same bits. So ranks agree on
drafts without a message. The model's embedding, if the head has none of its own, takes an all-reduce.

Two published layouts are read: `LlamaForCausalLMEagle3` (SafeAILab/EAGLE, SpecForge, SGLang) and `speculators` (vLLM).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoints.hf_config import config_from_hf
from checkpoints.sources import Source, open_files
from checkpoints.weights import Place, check_names, fill_all, linear_place, whole_place
from comms import Communicator, Local, Residual
from config import FAMILIES, ModelConfig
from errors import UserError
from files import CONFIG_BYTES, count, get, read_json, shown
from kernels.linear import linear
from layers.attention import AttentionContext
from layers.linear import ShardedLinear
from layers.rope import rope_frequencies
from model import Factory, RMSNorm, Transformer, attention_heads
from tp import Shard, World, stream_shards, together

ARCHITECTURE = "LlamaForCausalLMEagle3"
STREAMS = 3  # hidden states of the model that a head reads
LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
# From this size on, ranks share a head: reading the other ranks' part of it would take longer than the four collectives of a guess.
SHARED_BYTES = 1 << 28


# --- the description of a head -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EagleConfig:
    """A head's description."""

    layer: ModelConfig  # of its one layer; vocab_size is the model's
    base_hidden_size: int
    draft_vocab_size: int
    stream_layers: tuple[int, ...]  # ascending; it reads the streams before them; the number of layers names the last stream
    norm_before_residual: bool = False  # whether the attention is added to n(f) instead of f

    @property
    def drafting(self) -> ModelConfig:
        """The layer's config with the draft vocabulary."""
        return replace(self.layer, vocab_size=self.draft_vocab_size)


def is_head(directory: Path) -> bool:
    """Whether the folder's config.json describes a draft head, and not a model. Raises UserError if it cannot be read."""
    raw = _read(directory)
    named = any("eagle" in str(name).lower() for name in get(raw, "architectures", list, []))
    return named or "speculators_model_type" in raw or "draft_vocab_size" in raw


def _read(directory: Path) -> dict[str, Any]:
    try:
        return read_json(directory / "config.json", CONFIG_BYTES)
    except FileNotFoundError:
        raise UserError(f"{directory / 'config.json'} is missing; name the folder of a draft head or of a checkpoint") from None


def read_eagle_config(directory: Path, base: ModelConfig) -> EagleConfig:
    """The head in `directory`. Raises UserError if its config.json has another layout, or does not fit the model `base`."""
    raw = _read(directory)
    try:
        return _config_of(raw, base)
    except UserError as e:
        raise UserError(f"{directory / 'config.json'}: {e}") from None


def _config_of(raw: dict[str, Any], base: ModelConfig) -> EagleConfig:
    names = set(map(str, get(raw, "architectures", list, [])))
    if "speculators_model_type" in raw:
        if raw["speculators_model_type"] != "eagle3":
            raise UserError(
                f"speculators_model_type {shown(raw['speculators_model_type'])} is not supported; supported: eagle3"
            )
        layer, before = get(raw, "transformer_layer_config", dict), get(raw, "norm_before_residual", bool)
    elif ARCHITECTURE in names or (names <= {"LlamaForCausalLM"} and "draft_vocab_size" in raw):  # the latter: the first heads
        layer, before = raw, get(raw, "norm_before_residual", bool, False)
    else:
        raise UserError(f"no EAGLE-3 head; architectures must name {ARCHITECTURE}, or speculators_model_type be eagle3")
    shape = config_from_hf({"num_hidden_layers": 1, **layer})
    if shape.n_layers != 1 or shape.quantization is not None:
        raise UserError(
            f"a head of {shape.n_layers} layers, or a quantized one, is not supported; use one with a single plain layer"
        )
    if FAMILIES[shape.family].multipliers or FAMILIES[shape.family].fused:
        raise UserError(f"a head with a {shape.family} model's layer is not supported; use one with a Llama's")
    if shape.vocab_size != base.vocab_size:
        raise UserError(f"the head is for a vocabulary of {shape.vocab_size} tokens, but the model has {base.vocab_size}")
    target = count(raw, "target_hidden_size", shape.hidden_size)
    if target != base.hidden_size:
        raise UserError(f"the head is for hidden states of width {target}, but the model's have {base.hidden_size}")
    return EagleConfig(
        layer=replace(shape, tie_embeddings=False, max_seq_len=base.max_seq_len),
        base_hidden_size=target,
        draft_vocab_size=count(raw, "draft_vocab_size", shape.vocab_size, most=shape.vocab_size),
        stream_layers=_stream_layers(raw, base.n_layers),
        norm_before_residual=before,
    )


def default_streams(n_layers: int) -> tuple[int, ...]:
    """The layers that published heads read by default, as all their readers have it."""
    return (2, n_layers // 2, n_layers - 3)


def _stream_layers(raw: dict[str, Any], n_layers: int) -> tuple[int, ...]:
    """Before which layers a head reads the stream. There are two conventions: ids at the top level (vLLM, speculators) name the
    layer that follows, ids in `eagle_config` (SGLang, SpecForge) the layer before, whose output the stream is."""
    key = "eagle_aux_hidden_state_layer_ids"
    nested = get(raw, "eagle_config", dict, {})
    if not get(nested, "use_aux_hidden_state", bool, True):
        raise UserError("use_aux_hidden_state is false; only heads that read three hidden states are supported")
    following, before = get(raw, key, list, []), get(nested, key, list, [])
    if any(type(i) is not int for i in (*following, *before)):
        raise UserError(f"{key} must hold whole numbers, not {shown(following or before)}")
    layers = tuple(sorted(set(following or [i + 1 for i in before] or default_streams(n_layers))))
    if len(layers) != STREAMS or layers[0] < 0 or layers[-1] > n_layers:
        raise UserError(
            f"{key} {shown(following or before or list(layers))} must name {STREAMS} different layers of the model, which has {n_layers}"
        )
    return layers


# --- the head ------------------------------------------------------------------------------------------------------------


class EagleHead(nn.Module):
    """A head, or with the ranks of `comm` this rank's shard of its layer and output. Parameters are allocated on `device` in
    `dtype`; `load_head` fills them."""

    def __init__(
        self, config: EagleConfig, comm: Communicator, device: torch.device, dtype: torch.dtype, own_embedding: bool = False
    ) -> None:
        super().__init__()
        factory: Factory = {"device": device, "dtype": dtype}
        c, shard = config.layer, Shard(comm.rank, comm.world_size)
        self.config, self.comm, size = config, comm, c.hidden_size
        self.embed_tokens = nn.Parameter(torch.empty(c.vocab_size, size, **factory)) if own_embedding else None
        self.fc = nn.Parameter(torch.empty(size, STREAMS * config.base_hidden_size, **factory))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = (
            RMSNorm(c, part, None, factory) for part in (*LAYER_NORMS, "norm")
        )
        self.wqkv = ShardedLinear(c, shard, ("q_proj", "k_proj", "v_proj"), 0, inputs=2 * size, **factory)
        self.heads = attention_heads(c, 0, 0, shard, factory)
        self.wo = ShardedLinear(c, shard, ("o_proj",), 0, **factory)
        self.w_gate_up = ShardedLinear(c, shard, ("gate_proj", "up_proj"), 0, gated=True, **factory)
        self.w_down = ShardedLinear(c, shard, ("down_proj",), 0, **factory)
        self.output = ShardedLinear(config.drafting, shard, ("lm_head",), **factory)
        self.frequencies: Tensor
        self.register_buffer("frequencies", rope_frequencies(c).to(device), persistent=False)
        self.targets: Tensor  # (V,) int64: the model's id of each id of the draft vocabulary
        self.register_buffer("targets", torch.arange(config.draft_vocab_size, device=device), persistent=False)

    @property
    def n_kv_heads(self) -> int:
        """KV heads of this rank."""
        return self.heads.n_kv_heads

    def fuse(self, streams: Sequence[Tensor]) -> Tensor:
        """The features (B, T, D) of the model's streams, three of (B, T, C), in the order of `config.stream_layers`."""
        return linear(torch.cat(tuple(streams), -1), self.fc)

    def embed(self, tokens: Tensor, model: Transformer) -> Tensor:
        """(B, T) ids of the model to (B, T, D), with the head's own table or the model's. Collective in the latter case."""
        return model.embed(tokens) if self.embed_tokens is None else F.embedding(tokens, self.embed_tokens)

    def forward(self, embedded: Tensor, features: Tensor, context: AttentionContext) -> Tensor:
        """h of the module's docstring. embedded: e(x_{t+1}); features: f_t; both and the result (B, T, D). context: attention to a
        cache with one slot of `n_kv_heads` heads, at the positions t."""
        normed = self.hidden_norm(features)
        qkv = self.wqkv(torch.cat((self.input_layernorm(embedded), normed), -1))
        stream = Residual(normed if self.config.norm_before_residual else features, self.comm)
        stream = stream.add(self.heads(qkv, self.frequencies, context), self.wo)
        stream, gated = stream.read(self.post_attention_layernorm, self.w_gate_up)
        return stream.add(gated, self.w_down).finish()

    def lm_head(self, normed: Tensor) -> Tensor:
        """(..., D) after the final norm to (..., V) logits over the draft vocabulary, the same on every rank."""
        return self.comm.all_gather(self.output(normed))[..., : self.config.draft_vocab_size]

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) to (..., V) fp32, over the draft vocabulary."""
        return self.lm_head(self.norm(hidden)).float()

    def guess(self, hidden: Tensor) -> Tensor:
        """The model's ids (...) int64 of the best tokens after hidden (..., D)."""
        return self.targets[self.logits(hidden).argmax(-1)]


# --- reading a head ------------------------------------------------------------------------------------------------------


def head_places(head: EagleHead, layer: str = "midlayer.") -> Iterator[Place]:
    """The head's tensors under their published names. layer: the prefix of those of its layer."""
    attention, mlp = layer + "self_attn.", layer + "mlp."
    linears = {head.wqkv: attention, head.wo: attention, head.w_gate_up: mlp, head.w_down: mlp, head.output: ""}
    for module, prefix in linears.items():
        yield from (linear_place(module, piece, tensor, prefix + piece) for piece, tensor in module.pieces())
    norms = {layer + name: getattr(head, name) for name in LAYER_NORMS}
    if head.heads.q_norm is not None:
        norms |= {f"{attention}q_norm": head.heads.q_norm, f"{attention}k_norm": head.heads.k_norm}
    whole = {name: norm.weight for name, norm in {**norms, "norm": head.norm}.items()} | {"fc": head.fc}
    for name, tensor in (whole if head.embed_tokens is None else whole | {"embed_tokens": head.embed_tokens}).items():
        yield whole_place(name + ".weight", tensor)


def sharing(head: EagleHead, world: World) -> Communicator:
    """How the ranks hold a head: large ones are split if that is possible, others are replicated. head: may be on the meta
    device."""
    size = sum(p.numel() * p.element_size() for p in head.parameters())
    try:
        stream_shards(head.config.layer, world.rank, world.world_size)
    except UserError:
        return Local()
    return world.comm if size >= SHARED_BYTES and world.world_size > 1 else Local()


def random_config(base: ModelConfig, drafted: int = 32000) -> EagleConfig:
    """A head for models like `base`, for benchmarks: one of the model's layers, that knows the first `drafted` ids. Raises UserError
    if the model has too few layers."""
    layer = replace(base, n_layers=1, variant="standard", ladder_layers=(), quantization=None, tie_embeddings=False)
    layer = replace(layer, residual_multiplier=1.0, logits_scaling=1.0)
    return EagleConfig(layer, base.hidden_size, min(drafted, base.vocab_size), _stream_layers({}, base.n_layers))


@torch.inference_mode()
def random_head(config: EagleConfig, world: World, dtype: torch.dtype) -> EagleHead:
    """A head with random weights, the same on all ranks if they do not split it. It uses the model's embedding, as most published
    heads."""
    comm = sharing(EagleHead(config, Local(), torch.device("meta"), dtype), world)
    head, generator = EagleHead(config, comm, world.device, dtype), torch.Generator(world.device).manual_seed(0)
    for parameter in head.eval().requires_grad_(False).parameters():
        if parameter.dim() == 2:  # norms stay 1
            parameter.normal_(0.0, 0.02, generator=generator)
    return head


def load_head(directory: Path, base: ModelConfig, world: World, dtype: torch.dtype) -> EagleHead:
    """The head in `directory` for the model `base`. Collective: a UserError of one rank is raised on all."""
    return together(world, lambda: read_head(directory, base, world, dtype))


@dataclass(frozen=True)
class HeadFiles:
    """A head whose files have been checked, but for its weights' values. hollow: without memory. layer: the prefix of its layer's
    tensors. targets: see `EagleHead`."""

    source: Source
    hollow: EagleHead
    layer: str
    targets: Tensor


def read_head(directory: Path, base: ModelConfig, world: World, dtype: torch.dtype) -> EagleHead:
    """`load_head` without communication. Raises UserError unless the files hold what config.json says, for a model like `base`, and
    all weights are finite in `dtype`."""
    files = check_head(directory, base, dtype)
    hollow = files.hollow
    embeds = hollow.embed_tokens is not None
    head = EagleHead(hollow.config, sharing(hollow, world), world.device, dtype, embeds).eval().requires_grad_(False)
    try:
        fill_all(list(head_places(head, files.layer)), files.source, 1)
    except UserError as e:
        raise UserError(f"draft head {directory}: {e}") from None
    head.targets.copy_(files.targets)
    return head


def check_head(directory: Path, base: ModelConfig, dtype: torch.dtype = torch.float32) -> HeadFiles:
    """Raises UserError unless the files have what config.json says, for a model like `base`. Reads no weights."""
    config = read_eagle_config(directory, base)
    source = open_files(directory)
    found = source.shapes()
    embeds = "embed_tokens.weight" in found
    if not embeds and config.layer.hidden_size != base.hidden_size:
        raise UserError(
            f"{directory} has no embed_tokens, and a head of width {config.layer.hidden_size} cannot use the model's of {base.hidden_size}"
        )
    hollow = EagleHead(config, Local(), torch.device("meta"), dtype, embeds)
    layer = "midlayer." if any(name.startswith("midlayer.") for name in found) else "layers.0."
    maps = {"d2t": config.draft_vocab_size, "t2d": base.vocab_size}
    required = {"d2t"} if config.draft_vocab_size < base.vocab_size else set()
    wanted = [whole_place(name, torch.empty(n, device="meta")) for name, n in maps.items() if name in found or name in required]
    try:
        check_names(config.layer, [*head_places(hollow, layer), *wanted], source)
        return HeadFiles(source, hollow, layer, _targets(source, config.draft_vocab_size, base.vocab_size))
    except UserError as e:
        raise UserError(f"draft head {directory}: {e}") from None


def _targets(source: Source, drafted: int, vocab_size: int) -> Tensor:
    """The model's ids of the draft vocabulary, (V,) int64. `d2t` has their distances from the ids of the draft vocabulary; `t2d`,
    which says the same from the model's side, may be missing."""
    ids, known = torch.arange(drafted), source.shapes()
    if "d2t" not in known:
        return ids
    offsets = source.read("d2t", 0, 0, drafted)
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise UserError(f"d2t has data type {offsets.dtype}, but must hold whole numbers")
    targets = ids + offsets.long()
    if targets.min() < 0 or targets.max() >= vocab_size or len(targets.unique()) != drafted:
        raise UserError(f"d2t does not map {drafted} draft tokens to different tokens of the model, which has {vocab_size}")
    if "t2d" in known:
        mask = source.read("t2d", 0, 0, vocab_size).bool()
        if mask.sum() != drafted or not mask[targets].all():
            raise UserError("t2d does not mark the tokens that d2t names; the head's two maps must agree")
    return targets
