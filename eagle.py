"""EAGLE-3 draft heads: one layer that guesses a model's next tokens from its hidden states (Li et al., arXiv:2503.01840).

Shapes: B sequences, T tokens, C hidden size of the model, D hidden size of the head (mostly C), V tokens of the draft vocabulary.

With x_t the token at position t and s_t three residual streams of the model there (`Transformer.hidden_and_streams`), row t is

    f_t = fc(s_t)                                   the model has computed x_t
    f_t = h_{t-1}, the head's own output            further tokens of a chain
    a   = f_t + O · attend(QKV · (n(e(x_{t+1})), n(f_t)))
    h_t = a + down · (silu(gate · n(a)) * (up · n(a)))
    guess of x_{t+2} = argmax of lm_head · n(h_t)

So a row pairs a position's features with the embedding e of the token after it, and its keys and values belong to position t. They are
kept in a cache of one slot of its own. The head is replicated: every rank computes the same rows with the same bits, so ranks agree on
drafts without a message. Only the model's embedding, if the head has none of its own, takes an all-reduce.

Two published layouts are read: `LlamaForCausalLMEagle3` (SafeAILab/EAGLE, SpecForge, SGLang) and `speculators` (vLLM).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import AttentionContext, Heads
from checkpoint import Place, SafetensorsSource, check_names, fill_all
from config import ModelConfig
from errors import UserError
from files import CONFIG_BYTES, read_json
from hf_config import config_from_hf
from json_fields import count, get, shown
from kernels.activation import swiglu
from kernels.linear import linear
from kernels.norm import add_rms_norm
from model import Factory, RMSNorm, Transformer
from rope import rope_frequencies
from tp import World, agree_on_error

ARCHITECTURE = "LlamaForCausalLMEagle3"
STREAMS = 3  # hidden states of the model that a head reads


# --- the description of a head -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EagleConfig:
    """A head's description."""

    layer: ModelConfig  # of its one layer; vocab_size is the model's
    base_hidden_size: int
    draft_vocab_size: int
    stream_layers: tuple[
        int, ...
    ]  # before which layers of the model it reads the stream, ascending; the number of layers: the last
    norm_before_residual: bool = False  # whether the attention is added to n(f) instead of f


def is_head(directory: Path) -> bool:
    """Whether the folder's config.json describes a draft head, and not a model. Raises UserError if it cannot be read."""
    raw = _read(directory)
    names = get(raw, "architectures", list, [])
    return "speculators_model_type" in raw or any("eagle" in str(name).lower() for name in names)


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
    if "speculators_model_type" in raw:
        if raw["speculators_model_type"] != "eagle3":
            raise UserError(
                f"speculators_model_type {shown(raw['speculators_model_type'])} is not supported; supported: eagle3"
            )
        layer, before = get(raw, "transformer_layer_config", dict), get(raw, "norm_before_residual", bool)
    elif ARCHITECTURE in get(raw, "architectures", list, []):
        layer, before = raw, get(raw, "norm_before_residual", bool, False)
    else:
        raise UserError(f"no EAGLE-3 head; architectures must name {ARCHITECTURE}, or speculators_model_type be eagle3")
    shape = config_from_hf({"num_hidden_layers": 1, **layer})
    if shape.n_layers != 1 or shape.quantization is not None:
        raise UserError(
            f"a head of {shape.n_layers} layers, or a quantized one, is not supported; use one with a single plain layer"
        )
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
    """Before which layers a head reads the stream. There are two conventions: ids at the top level (vLLM, speculators) name the layer
    that follows, ids in `eagle_config` (SGLang, SpecForge) the layer before, whose output the stream is."""
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


class Fused(nn.Module):
    """Linear layers with the same input as one: weight (sum of the sizes, inputs), and a bias (the same sum,) if they have one."""

    def __init__(self, inputs: int, sizes: dict[str, int], bias: bool, factory: Factory) -> None:
        """sizes: the output features by name."""
        super().__init__()
        self.sizes, features = sizes, sum(sizes.values())
        self.weight = nn.Parameter(torch.empty(features, inputs, **factory))
        self.bias = nn.Parameter(torch.zeros(features, **factory)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        for kind, whole in (("weight", self.weight), ("bias", self.bias)):
            if whole is not None:
                for name, part in zip(self.sizes, whole.data.split(list(self.sizes.values())), strict=True):
                    yield f"{name}.{kind}", part


class EagleHead(nn.Module):
    """A head on one rank. Parameters are allocated on `device` in `dtype`; `load_head` fills them."""

    def __init__(self, config: EagleConfig, device: torch.device, dtype: torch.dtype, own_embedding: bool = False) -> None:
        super().__init__()
        factory: Factory = {"device": device, "dtype": dtype}
        c = config.layer
        self.config, size, q_size, kv_size = config, c.hidden_size, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        self.embed_tokens = Fused(size, {"embed_tokens": c.vocab_size}, False, factory) if own_embedding else None
        self.fc = Fused(STREAMS * config.base_hidden_size, {"fc": size}, False, factory)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = (
            RMSNorm(size, c.norm_eps, factory) for _ in range(4)
        )
        self.wqkv = Fused(2 * size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, c.qkv_bias, factory)
        self.heads = Heads(c, 0, 0, c.n_heads, c.n_kv_heads)
        if c.qk_norm:
            self.heads.q_norm, self.heads.k_norm = (RMSNorm(c.head_dim, c.norm_eps, factory) for _ in range(2))
        self.wo = Fused(q_size, {"o_proj": size}, c.o_bias, factory)
        self.w_gate_up = Fused(size, dict.fromkeys(("gate_proj", "up_proj"), c.intermediate_size), c.mlp_bias, factory)
        self.w_down = Fused(c.intermediate_size, {"down_proj": size}, c.mlp_bias, factory)
        self.lm_head = Fused(size, {"lm_head": config.draft_vocab_size}, False, factory)
        self.frequencies: Tensor
        self.register_buffer("frequencies", rope_frequencies(c).to(device), persistent=False)
        self.targets: Tensor  # (V,) int64: the model's id of each id of the draft vocabulary
        self.register_buffer("targets", torch.arange(config.draft_vocab_size, device=device), persistent=False)

    def fuse(self, streams: Sequence[Tensor]) -> Tensor:
        """The features (B, T, D) of the model's streams, three of (B, T, C), in the order of `config.stream_layers`."""
        return self.fc(torch.cat(tuple(streams), -1))

    def embed(self, tokens: Tensor, model: Transformer) -> Tensor:
        """(B, T) ids of the model to (B, T, D), with the head's own table or the model's. Collective in the latter case."""
        return model.embed(tokens) if self.embed_tokens is None else F.embedding(tokens, self.embed_tokens.weight)

    def forward(self, embedded: Tensor, features: Tensor, context: AttentionContext) -> Tensor:
        """h of the module's docstring. embedded: e(x_{t+1}); features: f_t; both and the result (B, T, D). context: attention to a cache
        with one slot of `config.layer.n_kv_heads` heads, at the positions t."""
        normed = self.hidden_norm(features)
        qkv = self.wqkv(torch.cat((self.input_layernorm(embedded), normed), -1))
        attended = self.wo(self.heads(qkv, self.frequencies, context))
        residual, norm = normed if self.config.norm_before_residual else features, self.post_attention_layernorm
        residual, normed = add_rms_norm(residual, attended, norm.weight, norm.eps)
        return residual + self.w_down(swiglu(self.w_gate_up(normed)))

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) to (..., V) fp32, over the draft vocabulary."""
        return self.lm_head(self.norm(hidden)).float()

    def guess(self, hidden: Tensor) -> Tensor:
        """The model's ids (...) int64 of the best tokens after hidden (..., D)."""
        return self.targets[self.logits(hidden).argmax(-1)]


# --- reading a head ------------------------------------------------------------------------------------------------------


def head_places(head: EagleHead, layer: str = "midlayer.") -> Iterator[Place]:
    """The head's tensors under their published names. layer: the prefix of those of its layer."""
    inside = [(head.wqkv, "self_attn."), (head.wo, "self_attn."), (head.w_gate_up, "mlp."), (head.w_down, "mlp.")]
    outside = [(fused, "") for fused in (head.embed_tokens, head.fc, head.lm_head) if fused is not None]
    for fused, prefix in [*((fused, layer + prefix) for fused, prefix in inside), *outside]:
        for name, tensor in fused.pieces():
            yield _whole(prefix + name, tensor)
    norms = {layer + name: getattr(head, name) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    if head.heads.q_norm is not None:
        norms |= {f"{layer}self_attn.q_norm": head.heads.q_norm, f"{layer}self_attn.k_norm": head.heads.k_norm}
    for name, norm in {**norms, "norm": head.norm}.items():
        yield _whole(name + ".weight", norm.weight.data)


def _whole(name: str, tensor: Tensor) -> Place:
    return Place(name, tensor, tuple(tensor.shape), 0, range(len(tensor)))


def load_head(directory: Path, base: ModelConfig, world: World, dtype: torch.dtype) -> EagleHead:
    """The head in `directory` for the model `base`, whole on this rank. Collective: a UserError of one rank is raised on all."""
    error, head = None, None
    try:
        head = read_head(directory, base, world.device, dtype)
    except UserError as e:
        error = e
    agree_on_error(world, error)
    assert head is not None
    return head


def read_head(directory: Path, base: ModelConfig, device: torch.device, dtype: torch.dtype) -> EagleHead:
    """`load_head` for a single rank. Raises UserError unless the files hold what config.json says, for a model like `base`."""
    config = read_eagle_config(directory, base)
    source = SafetensorsSource(directory)
    found = source.shapes()
    embeds = "embed_tokens.weight" in found
    if not embeds and config.layer.hidden_size != base.hidden_size:
        raise UserError(
            f"{directory} has no embed_tokens, and a head of width {config.layer.hidden_size} cannot use the model's of {base.hidden_size}"
        )
    hollow = EagleHead(config, torch.device("meta"), dtype, embeds)
    layer = "midlayer." if any(name.startswith("midlayer.") for name in found) else "layers.0."
    maps = {"d2t": config.draft_vocab_size, "t2d": base.vocab_size}
    required = {"d2t"} if config.draft_vocab_size < base.vocab_size else set()
    wanted = [_whole(name, torch.empty(n, device="meta")) for name, n in maps.items() if name in found or name in required]
    try:
        check_names(config.layer, [*head_places(hollow, layer), *wanted], source)
        targets = _targets(source, config.draft_vocab_size, base.vocab_size)
        head = EagleHead(config, device, dtype, embeds).eval().requires_grad_(False)
        fill_all(list(head_places(head, layer)), source, 1)
    except UserError as e:
        raise UserError(f"draft head {directory}: {e}") from None
    head.targets.copy_(targets)
    return head


def _targets(source: SafetensorsSource, drafted: int, vocab_size: int) -> Tensor:
    """The model's ids of the draft vocabulary, (V,) int64. `d2t` has their distances from the ids of the draft vocabulary; `t2d`, which
    says the same from the model's side, may be missing."""
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
