"""A model's description: shape, family and residual variant.

`checkpoints/presets.py` has descriptions by name, `checkpoints/hf_config.py` reads and writes them as `config.json`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal

from errors import UserError
from files import shown
from quantized.scheme import Quantization


@dataclass(frozen=True)
class Kind:
    """What the blocks of a model have in common, for a value of `ModelConfig.variant`."""

    shared_input: bool = False  # attention and MLP share a norm, and one fused matrix computes qkv, gate and up
    streams: bool = False  # a checkpoint has several residual streams, and a rank carries some of them
    speed_limit: bool = False  # without all-reduces: for measurements only, and wrong text on several ranks


KINDS = {
    "standard": Kind(),
    "parallel": Kind(shared_input=True),
    "ladder": Kind(),  # in all layers or in some of them
    "desync": Kind(streams=True),
    "upper-bound": Kind(speed_limit=True),
}


@dataclass(frozen=True)
class Variant:
    """A value of `--variant`: NAME, or NAME:NUMBER if `number` is set."""

    name: str
    kind: str  # one of KINDS
    number: str = ""  # what the number counts
    period: int = 1  # desync: of so many successive all-reduces, only the last remains

    @property
    def usage(self) -> str:
        """The name as a help text has it: `hybrid[:LAYERS]`."""
        return f"{self.name}[:{self.number}]" if self.number else self.name


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("standard", "standard"),
        Variant("parallel", "parallel"),
        Variant("ladder", "ladder"),
        Variant("hybrid", "ladder", number="LAYERS"),
        Variant("desync-2x", "desync", number="STREAMS", period=2),
        Variant("desync-4x", "desync", number="STREAMS", period=4),
        Variant("upper-bound", "upper-bound"),
    )
}
TRAINABLE = tuple(variant.name for variant in VARIANTS.values() if not KINDS[variant.kind].speed_limit)


def usage(names: Iterable[str] = tuple(VARIANTS)) -> str:
    """The variants as a help text lists them."""
    return ", ".join(VARIANTS[name].usage for name in names)


def parse_variant(text: str) -> tuple[Variant, int | None]:
    """The variant and the number of a value of `--variant`; None if it has no number. Raises UserError."""
    name, colon, number = text.partition(":")
    variant = VARIANTS.get(name)
    if colon and not (variant and variant.number and number.isdecimal() and int(number) >= 1):
        *others, last = (known.name for known in VARIANTS.values() if known.number)
        raise UserError(
            f"unknown variant {text!r}; only these take a number after the name: {', '.join(others)} and {last}, as in hybrid:16"
        )
    if variant is None:
        raise UserError(f"unknown variant {text!r}; known: {usage()}")
    return variant, int(number) if colon else None


# --- how RoPE is extended beyond the first training context: `checkpoints/rope_scaling.py` reads it, `layers/rope.py` computes with it


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies are divided by `factor`. Lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies are divided by `factor`. `trained`: the unscaled context, `max_position_embeddings`, in tokens."""

    factor: float
    trained: int


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows with the context's length beyond `trained`, which is `max_position_embeddings`, in tokens."""

    factor: float
    trained: int


@dataclass(frozen=True)
class YarnScaling:
    """Frequencies with fewer than `beta_slow` turns in the original context are divided by `factor`; those with more than
    `beta_fast` turns are kept; between the two they are blended. Cosines and sines are multiplied by `attention_factor`."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRopeScaling:
    """Each frequency is divided by its own factor, from `long_factor` if the context is longer than the original one, else from
    `short_factor`. Cosines and sines are multiplied by `attention_factor`."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


ROPES = ("scaled", "local", "none")  # of layers in general, with a window if these have a base of their own, and without RoPE
RopeScaling = Llama3Scaling | LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling


# --- the model ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """What the models of a `model_type` of `config.json` have in common, as transformers defines it."""

    name: str  # with which the names of its classes in transformers begin
    head_dim: int | None = None  # if config.json has none; None: hidden_size / num_attention_heads
    qk_norm: bool = False
    wide_norm: bool = False  # q and k have a norm each over all heads
    attention_bias: bool = True  # whether config.json has this key
    qkv_bias: bool = False  # always a bias in q, k and v, and never one in o_proj
    out_bias: bool = False  # whether o_proj has a key of its own, attention_out_bias
    mlp_bias: bool = False  # whether config.json has this key
    # whose layers have one: "where used" and "without RoPE" by `use_sliding_window`; n: all but each n-th
    windows: Literal["none", "where used", "without RoPE", "all"] | int = "none"
    bare: int = 0  # of so many successive layers the last has no RoPE, if config.json does not say which; 0: all layers have it
    # before and behind attention, before and behind the MLP; "": none
    norms: tuple[str, str, str, str] = "input_layernorm", "", "post_attention_layernorm", ""
    centered: bool = False  # norms multiply by 1 + weight
    activation: str = "silu"  # of the gate; "gelu_pytorch_tanh"
    scaled_embeddings: bool = False  # embeddings are multiplied by sqrt(hidden_size), rounded to their dtype
    extended: bool = False  # `max_position_embeddings` counts the context after linear scaling
    query_scalar: int | None = (
        None  # if config.json has no `query_pre_attn_scalar`, whose root divides scores; None: no such key
    )
    sinks: bool = False  # each head's softmax has one more term (Xiao et al., arXiv:2309.17453), a parameter
    scaled: bool = False  # config.json must say how RoPE is scaled, because transformers assumes a way of its own
    growing: bool = False  # queries grow with their position: `ModelConfig.query_growth`
    multipliers: bool = False  # config.json has `MULTIPLIERS`
    fused: bool = False  # files have q, k and v as one tensor, and gate and up; `partial_rotary_factor` may be below 1
    keys: tuple[str, ...] = ()  # of config.json, which change what a model computes, and other families refuse
    # what a missing key of config.json means
    biased: bool = False
    tied: bool = False
    window: int | None = 4096
    theta: float = 10000.0
    local_theta: float | None = None  # of layers with a window; 0: as of others; None: all layers have the same RoPE
    eps: float = 1e-6
    # of a sparse model: the key with the width of an expert, and whether chosen experts' weights add up to 1 (None: it has a key)
    expert_size: str = ""
    normalized: bool | None = None
    sparse_bias: bool = False  # router and experts have biases
    limit: float | None = None  # if config.json has none; see `Experts`


# fields of `ModelConfig` and keys of config.json that scale what a Granite computes, each 1 if it is missing
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
BEHIND = "", "post_attention_layernorm", "", "post_feedforward_layernorm"  # OLMo 2, arXiv:2501.00656, section 3.2
AROUND = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
FAMILIES = {
    "llama": Family("Llama", mlp_bias=True),
    "mistral": Family("Mistral", attention_bias=False, windows="all"),
    "ministral3": Family(
        "Ministral3", head_dim=128, attention_bias=False, windows="all", window=None, eps=1e-5, scaled=True, growing=True,
        keys=("llama_4_scaling_beta",),
    ),
    "qwen2": Family("Qwen2", qkv_bias=True, windows="where used"),
    "qwen3": Family("Qwen3", head_dim=128, qk_norm=True, windows="where used"),
    "granite": Family("Granite", mlp_bias=True, multipliers=True, keys=MULTIPLIERS),
    "smollm3": Family(
        "SmolLM3", mlp_bias=True, windows="without RoPE", window=None, bare=4, tied=True, theta=2e6,
        keys=("no_rope_layers", "no_rope_layer_interval"),
    ),
    "seed_oss": Family("SeedOss", head_dim=128, out_bias=True, mlp_bias=True, biased=True, keys=("attention_out_bias",)),
    "phi3": Family("Phi3", attention_bias=False, windows="all", window=None, eps=1e-5, fused=True, keys=("partial_rotary_factor",)),
    "qwen3_moe": Family("Qwen3Moe", qk_norm=True, expert_size="moe_intermediate_size"),
    "mixtral": Family(
        "Mixtral", attention_bias=False, windows="all", window=None, theta=1e6, eps=1e-5,
        expert_size="intermediate_size", normalized=True,
    ),
    "gemma3_text": Family(
        "Gemma3", head_dim=256, qk_norm=True, windows=6, theta=1e6, local_theta=10000.0, norms=AROUND, centered=True,
        activation="gelu_pytorch_tanh", scaled_embeddings=True, query_scalar=256, extended=True, tied=True,
        keys=("query_pre_attn_scalar", "sliding_window_pattern"),
    ),
    "olmo2": Family("Olmo2", wide_norm=True, eps=1e-5, norms=BEHIND),
    "olmo3": Family("Olmo3", wide_norm=True, windows=4, theta=500000.0, local_theta=0, eps=1e-5, norms=BEHIND),
    "olmoe": Family("Olmoe", wide_norm=True, eps=1e-5, expert_size="intermediate_size"),
    "gpt_oss": Family(
        "GptOss", head_dim=64, biased=True, windows=2, window=128, theta=150000.0, eps=1e-5, sinks=True, scaled=True,
        expert_size="intermediate_size", normalized=True, sparse_bias=True, limit=7.0,
    ),
}  # fmt: skip


# multimodal models of which the text part is read: the kinds of their text_config
TEXTS = {"mistral3": ("mistral", "ministral3"), "gemma3": ("gemma3_text",)}


@dataclass(frozen=True)
class Reduces:
    """One layer of a desync pattern: after which of its two modules the streams are all-reduced."""

    attention: bool
    mlp: bool


@dataclass(frozen=True)
class Experts:
    """The MLPs of a layer of a sparse model (Shazeer et al., arXiv:1701.06538): a router chooses some of them for each token.

    normalized: whether the weights of the chosen ones, their softmax over all experts, are divided by their sum.
    limit: of gate and up in `kernels.activation.clamped_swiglu`, which is then the activation."""

    count: int
    chosen: int
    normalized: bool
    limit: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's complete description. Counts are of the full model, never of one rank's shard."""

    # shape
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int  # of each expert in a sparse model
    max_seq_len: int  # tokens, prompt and answer together
    # family
    family: str = "llama"
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0  # which part of a head's features RoPE rotates; see `sources.paired`
    local_theta: float | None = None  # RoPE's base in layers with a window, which is then not scaled; None: as in other layers
    no_rope_layers: tuple[int, ...] = ()
    query_growth: float | None = None  # `growth` of `layers.rope.query_scale`
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False  # of all three layers
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window of each layer, in tokens; empty: no layer has one
    experts: Experts | None = None  # None: one MLP in each layer
    causal: bool = True  # False: tokens attend in both directions, so that the model only makes embeddings
    embedding_multiplier: float = 1.0  # of embeddings
    attention_multiplier: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    residual_multiplier: float = 1.0  # of every module's output; see `embedding_scale`
    logits_scaling: float = 1.0  # logits are divided by it
    # residual variant
    variant: str = "standard"  # one of KINDS
    ladder_layers: tuple[int, ...] = ()  # for `ladder` only; all layers or some of them (hybrid)
    desync_streams: int = 1  # S: how many streams the checkpoint was trained with
    desync_pattern: tuple[Reduces, ...] = ()  # one entry a layer
    # other settings of `config.json` that must be saved again
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # which linear layers are quantized, in the file or at load
    quantization: Quantization | None = None

    @property
    def kind(self) -> Kind:
        return KINDS[self.variant]

    @property
    def is_hybrid(self) -> bool:
        return self.variant == "ladder" and len(self.ladder_layers) < self.n_layers

    @property
    def description(self) -> str:
        """The variant in the paper's terms: `hybrid ladder (layers 4-7 of 8)`, `desync-2x (S = 4)`."""
        if self.is_hybrid:
            first, last = min(self.ladder_layers), max(self.ladder_layers)
            named = f"{first}-{last}" if len(self.ladder_layers) == last - first + 1 else str(list(self.ladder_layers))
            return f"hybrid ladder (layers {named} of {self.n_layers})"
        if self.variant == "desync":
            names = {desync_pattern(self.n_layers, v.period): v.name for v in VARIANTS.values() if v.kind == "desync"}
            return f"{names.get(self.desync_pattern, 'desync')} (S = {self.desync_streams})"
        return self.variant

    @property
    def variant_name(self) -> str:
        """The description's first word: `hybrid`, `desync-2x`."""
        return self.description.partition(" ")[0]

    def rope_factor(self, layer: int) -> float:
        """The factor by which RoPE multiplies queries and keys in addition to rotating them."""
        scaling, scores = self.rope_scaling if ROPES[self.rope(layer)] == "scaled" else None, self.attention_multiplier
        factor = scaling.attention_factor if isinstance(scaling, YarnScaling | LongRopeScaling) else 1.0
        return factor if scores is None else factor * math.sqrt(scores * math.sqrt(self.head_dim))

    @property
    def rotary_dim(self) -> int:
        """How many of a head's features RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings. The whole residual stream is divided by `residual_multiplier`, so that modules' outputs are added as
        they are; norms with an epsilon divided by its square give the same."""
        return self.embedding_multiplier / self.residual_multiplier

    def rope(self, layer: int) -> int:
        """Which row of `rope_frequencies` the layer has."""
        local = self.local_theta is not None and self.window(layer) is not None
        return ROPES.index("none" if layer in self.no_rope_layers else "local" if local else "scaled")

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def parameter_count(self, active: bool = False) -> int:
        """Entries of the full model's matrices. A tied embedding counts once; norms and biases, which are few, do not count.
        active: of the experts, only as many as a token has."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.n_layers * self.layer_parameter_count(active) + tables

    def layer_parameter_count(self, active: bool = False) -> int:
        """Entries of one layer's matrices, in the full model."""
        attention = self.hidden_size * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.experts:
            mlp = mlp * (self.experts.chosen if active else self.experts.count) + self.experts.count * self.hidden_size
        return attention + mlp


def desync_pattern(n_layers: int, every: int) -> tuple[Reduces, ...]:
    """`desync-nx` of the paper's section 5: only the last of every n consecutive all-reduces remains. The model's last module
    always reduces."""
    modules = [(i + 1) % every == 0 or i == 2 * n_layers - 1 for i in range(2 * n_layers)]
    return tuple(Reduces(attention=modules[2 * i], mlp=modules[2 * i + 1]) for i in range(n_layers))


def validate(config: ModelConfig) -> ModelConfig:
    """Return `config`, or raise `UserError` if it cannot describe a model."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise UserError(f"bad model config: {message}")

    for field in fields(config):
        value = getattr(config, field.name)
        if field.type is int:
            require(type(value) is int and value >= 1, f"{field.name} must be a whole number of at least 1, not {value!r}")
        if field.type is float:
            require(0 < value < math.inf, f"{field.name} must be a positive number, not {value!r}")
    require(config.family in FAMILIES, f"family {config.family!r} is unknown; known: {', '.join(FAMILIES)}")
    require(config.variant in KINDS, f"variant {config.variant!r} is unknown; known: {', '.join(KINDS)}")
    require(
        config.n_heads % config.n_kv_heads == 0,
        f"{config.n_heads} attention heads cannot share {config.n_kv_heads} KV heads evenly",
    )
    outside = [id for id in config.eos_token_ids if not 0 <= id < config.vocab_size]
    require(not outside, f"eos_token_id {shown(outside)} is outside the vocabulary of {config.vocab_size} tokens")
    require(config.head_dim % 2 == 0, f"head_dim must be even for RoPE, not {config.head_dim}")
    require(
        config.rotary_dim in range(2, config.head_dim + 1, 2),
        f"partial_rotary_factor {config.partial_rotary_factor} of a head_dim of {config.head_dim} must give an even number of features",
    )
    require(
        FAMILIES[config.family].qkv_bias or FAMILIES[config.family].out_bias or config.qkv_bias == config.o_bias,
        f"the {config.family} family has a bias in q, k, v and o_proj, or in none of them",
    )
    if config.experts:
        count, chosen = config.experts.count, config.experts.chosen
        require(1 <= chosen <= count, f"num_experts_per_tok is {chosen}, but a layer has {count} experts")
        limit = config.experts.limit
        require(limit is None or 0 < limit < math.inf, f"swiglu_limit must be a positive number, not {limit!r}")
    require(bool(FAMILIES[config.family].expert_size) == (config.experts is not None), "only a sparse family has experts")
    sizes = {w for w in config.windows if w is not None}
    require(len(config.windows) in (0, config.n_layers), "windows must name one sliding window a layer")
    require(len(sizes) <= 1 and min(sizes, default=1) >= 1, f"sliding_window must be one positive size, not {sorted(sizes)}")
    has_windows = FAMILIES[config.family].windows != "none"
    require(has_windows or not sizes, f"sliding_window is not a feature of the {config.family} family; use mistral")
    require(config.causal or not sizes, "a sliding window together with is_causal false is not supported")
    local = FAMILIES[config.family].local_theta is not None and bool(sizes)
    require(
        (config.local_theta is not None) == local, f"local_theta belongs to windows of some families, not to {config.family}"
    )
    require(config.local_theta is None or 0 < config.local_theta < math.inf, "local_theta must be a positive number")
    grows = config.query_growth is not None and isinstance(config.rope_scaling, YarnScaling)
    require(
        grows == FAMILIES[config.family].growing and grows == (config.query_growth is not None),
        "llama_4_scaling_beta together with yarn belongs to ministral3 models, and only to these",
    )
    bare = set(config.no_rope_layers)
    require(bare <= set(range(config.n_layers)), f"no_rope_layers must name layers from 0 to {config.n_layers - 1}, not {bare}")
    require(bool(FAMILIES[config.family].bare) or not bare, f"no_rope_layers is not a feature of the {config.family} family")
    if config.variant == "ladder":
        known = sorted(set(config.ladder_layers) & set(range(config.n_layers)))
        require(
            bool(known) and list(config.ladder_layers) == known,
            f"ladder_layers must name layers from 0 to {config.n_layers - 1}, each once and in order, "
            f"not {list(config.ladder_layers)}",
        )
    before, behind, *_ = FAMILIES[config.family].norms
    require(
        config.variant not in ("parallel", "desync") or bool(before and not behind),
        f"a {config.family} model has norms behind its modules, which {config.variant} does not define",
    )
    if config.variant == "desync":
        require(
            not FAMILIES[config.family].wide_norm,
            f"a {config.family} model's norm over all heads would join the streams of desync",
        )
        require(
            len(config.desync_pattern) == config.n_layers,
            f"desync_pattern has {len(config.desync_pattern)} entries for {config.n_layers} layers; give one a layer",
        )
        require(
            config.desync_pattern[-1].mlp,
            "the last module of a desync model must reduce; set mlp of the last layer to true",
        )
    return config


def with_variant(config: ModelConfig, name: str) -> ModelConfig:
    """`config` with another residual variant, for benchmarks: the weights were not trained for it.

    name: a key of VARIANTS. `hybrid` is a ladder in the upper half, `hybrid:K` in the last K layers. A desync variant
    without a number has the config's own number of streams; see `model_config` for presets. Raises UserError.
    """
    variant, number = parse_variant(name)
    layers = config.n_layers
    plain = replace(config, variant=variant.kind, ladder_layers=(), desync_streams=1, desync_pattern=())
    if variant.kind == "ladder":
        count = (number or layers - layers // 2) if variant.number else layers
        if count > layers:
            raise UserError(f"variant {name!r}: the model has only {layers} layers")
        return replace(plain, ladder_layers=tuple(range(layers - count, layers)))
    if variant.kind == "desync":
        pattern = desync_pattern(layers, variant.period)
        return replace(plain, desync_streams=number or config.desync_streams, desync_pattern=pattern)
    return plain


def require_causal(config: ModelConfig) -> None:
    """Raises UserError for a model that cannot predict a next token."""
    if not config.causal:
        raise UserError(
            "the model attends in both directions (is_causal is false in config.json), so it only makes embeddings (/v1/embeddings)"
        )


def require_dense(config: ModelConfig, what: str) -> None:
    """Raises UserError for a sparse model, which `what` does not support."""
    if config.experts:
        raise UserError(f"{what} does not support sparse models ({config.experts.count} experts); use a dense one")


def limit_context(config: ModelConfig, length: int | None) -> ModelConfig:
    """`config` with a context of `length` tokens; None keeps the checkpoint's context. Raises UserError for a longer one."""
    if length is None:
        return config
    if length > config.max_seq_len:
        raise UserError(
            f"--max-model-len {length} is above the model's context of {config.max_seq_len}; give less, or leave it out"
        )
    return replace(config, max_seq_len=length)
