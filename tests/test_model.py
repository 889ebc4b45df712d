"""The model: every family equals transformers and every residual variant equals its definition, with and without a cache."""

import math
import random
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import model as model_file
from config import FAMILIES as KNOWN
from config import ModelConfig, Reduces, desync_pattern, with_variant
from layers.attention import Causal, Heads
from model import Transformer
from scripts.lib.results import ROOT
from tests.support.models import ALONE, CPU, load, multipliers, randomize, save_random
from tests.support.paged import CachedSequences

TOLERANCE = 1e-4  # of fp32 logits of size about 1
BATCH = 3


@torch.inference_mode()
def whole(model: Transformer, tokens: Tensor) -> Tensor:
    return model(tokens, Causal(tokens.shape[1], CPU))


@torch.inference_mode()
def cached(model: Transformer, tokens: Tensor, lengths: list[int]) -> Tensor:
    """The logits of `whole`, computed by forward passes of `lengths` tokens through one cache."""
    batch, total = tokens.shape
    assert sum(lengths) == total
    sequences = CachedSequences(model, batch, total + random.randrange(3))
    return torch.cat([sequences.logits(part) for part in tokens.split(lengths, 1)], dim=1)


def random_split(total: int) -> list[int]:
    """Lengths that add up to `total`: a prompt, two single tokens, a chunk, and then single tokens."""
    prompt, chunk = random.randint(2, total // 2), random.randint(2, total // 3)
    return [prompt, 1, 1, chunk] + [1] * (total - prompt - chunk - 2)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert theirs.abs().max() > 0.5, "logits too small for an absolute tolerance"
    worst = (ours.double() - theirs.double()).abs().max().item()
    assert worst < TOLERANCE, f"the largest difference is {worst:.2e}"


def assert_model_equals(model: Transformer, tokens: Tensor, expected: Tensor) -> None:
    """Compare logits (fp32) without and with a cache, for the whole batch and for a single sequence."""
    assert_close(whole(model, tokens), expected)
    assert_close(whole(model, tokens[:1]), expected[:1])
    assert_close(cached(model, tokens, random_split(tokens.shape[1])), expected)
    assert_close(cached(model, tokens[1:2], [1] * tokens.shape[1]), expected[1:2])


# --- families against transformers ---------------------------------------------------------------------------------------


def hf_shape(**more: Any) -> dict[str, Any]:
    kv_heads = random.choice([1, 2, 3])
    heads = kv_heads * random.choice([2, 4])
    shape = dict(
        vocab_size=random.randint(50, 130),
        hidden_size=heads * 8,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=random.randint(20, 70),
        max_position_embeddings=64,
        rms_norm_eps=random.choice([1e-5, 1e-6]),
        attn_implementation="eager",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),  # some families' own are outside the vocabulary
    )
    return shape | more


def rope(theta: float, factor: float | None = None) -> dict[str, Any]:
    """factor: of Llama 3's scaling; None: none."""
    scaling = dict(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
    kind = {"rope_type": "llama3", **scaling} if factor else {"rope_type": "default"}
    return {"rope_parameters": kind | {"rope_theta": theta}}


def grown() -> dict[str, Any]:
    """Queries that grow several times within a test's prompt."""
    yarn = dict(
        rope_type="yarn", rope_theta=1e3, factor=4.0, original_max_position_embeddings=random.randint(3, 9), beta_fast=4.0
    )
    return {"rope_parameters": yarn | {"mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": random.uniform(0.1, 0.6)}}


FAMILIES = (
    "llama2", "llama3", "llama31", "llama32", "mistral", "mistral_window", "qwen2", "qwen2_window", "qwen3", "smollm3", "smollm3_window",
    "seed_oss", "ministral3",
)  # fmt: skip


def family_config(name: str) -> Any:
    """A small config of transformers with a random shape."""
    shape, window = hf_shape(), dict(sliding_window=random.randint(2, 9))
    some_layers = dict(use_sliding_window=True, max_window_layers=random.choice([1, 2]))
    more: dict[str, Any] = {
        "llama2": rope(1e4) | {"num_key_value_heads": shape["num_attention_heads"]},
        "llama3": rope(5e5),
        "llama31": rope(1e3, 8.0) | {"tie_word_embeddings": False},
        "llama32": rope(1e3, 32.0) | {"tie_word_embeddings": True, "head_dim": 16},
        "mistral": rope(1e4) | {"sliding_window": None, "head_dim": 12},
        "mistral_window": rope(1e4) | window,
        "qwen2": rope(1e6) | {"tie_word_embeddings": random.choice([True, False])},
        "qwen2_window": rope(1e6) | window | some_layers,
        "qwen3": rope(1e6) | {"head_dim": 16},
        "smollm3": rope(1e3, 8.0) | {"no_rope_layer_interval": random.choice([2, 3]), "attention_bias": True, "mlp_bias": True},
        "smollm3_window": rope(1e4) | window | {"use_sliding_window": True, "no_rope_layers": random.sample([0, 0, 1], 3)},
        "seed_oss": rope(1e4)
        | {key: random.random() < 0.7 for key in ("attention_bias", "attention_out_bias", "mlp_bias")}
        | {"head_dim": 16},
        "ministral3": grown() | {"head_dim": 16, "sliding_window": random.choice([None, 7])},
    }[name]
    kind = KNOWN["llama" if name.startswith("llama") else name.removesuffix("_window")].name
    return getattr(transformers, f"{kind}Config")(**shape | more)


def save_hf(hf_config: Any, directory: Path) -> Any:
    """Save a transformers model to `directory`, with weights of `randomize`."""
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(directory)
    return model


def random_tokens(vocab_size: int, length: int = 20) -> Tensor:
    return torch.randint(vocab_size, (BATCH, length))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path, seed: int) -> None:
    hf_config = family_config(family)
    hf_model = save_hf(hf_config, tmp_path)
    tokens = random_tokens(hf_config.vocab_size)
    with torch.inference_mode():
        expected = hf_model(tokens).logits
    assert_model_equals(load(ALONE, tmp_path), tokens, expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["mistral", "ministral3", "gemma3_text"])
def test_the_text_part_of_a_multimodal_checkpoint(
    kind: str, tied: bool, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the names that tensors have in files, and with those that they have in transformers' model."""
    text = hf_shape(model_type=kind) | (grown() if kind == "ministral3" else rope(1e4) | {"sliding_window": None})
    vision = dict(
        model_type="pixtral", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8, intermediate_size=16
    )
    if kind == "gemma3_text":
        text = hf_shape(model_type=kind, head_dim=16, sliding_window=5, rope_parameters=None)
        vision |= {"model_type": "siglip_vision_model"}
    whole = "Gemma3" if kind == "gemma3_text" else "Mistral3"
    config = getattr(transformers, f"{whole}Config")(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    model_class = getattr(transformers, f"{whole}ForConditionalGeneration")
    theirs = model_class._from_config(config, attn_implementation="eager").eval()
    for part in (theirs.lm_head, theirs.model.language_model):
        randomize(part)
    theirs.save_pretrained(tmp_path)
    tokens = random_tokens(text["vocab_size"])
    with torch.inference_mode():
        expected = theirs(tokens).logits
    for names in (load_file(tmp_path / "model.safetensors"), theirs.state_dict()):
        assert kind == "gemma3_text" or any("ffn_norm" in name for name in names)
        save_file({name: tensor.clone() for name, tensor in names.items()}, tmp_path / "model.safetensors")
        model = load(ALONE, tmp_path)
        assert model.config.family == kind and model.config.tie_embeddings == tied and model.config.eos_token_ids == (1,)
        said = capsys.readouterr().err
        assert "only the text model is read" in said and "multi_modal_projector." in said and "effect" not in said
        assert_model_equals(model, tokens, expected)


def test_a_window_counts_from_its_own_length_on(seed: int) -> None:
    """Without a cache, for sequences that are about as long as the window."""
    shape = ModelConfig(11, 16, 1, 2, 1, 8, 8, 99, family="mistral", windows=(6,))
    heads = Heads(shape, 0, 0, range(2), 1)
    for length in range(5, 10):
        qkv, context = torch.randn(1, length, 32), Causal(length, torch.device("cpu"))
        found = heads(qkv, torch.ones(3, 4), context)
        q, k, v = (x.transpose(1, 2) for x in context.split(heads, qkv, torch.ones(4)))
        distance = torch.arange(length)[:, None] - torch.arange(length)
        scores = (q @ k.transpose(2, 3) / 8**0.5).masked_fill((distance < 0) | (distance >= 6), -math.inf)
        torch.testing.assert_close(found, (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-5)


# --- the definitions, computed in fp64 from the full weights -------------------------------------------------------------


class Reference:
    """A decoder and its residual variants, written directly from their equations in fp64.

    Reads the HF-layout file itself and takes only numbers from `config`. Modules are numbered h_1 … h_2L: attention of the
    first layer, its MLP, attention of the second layer, and so on. `shard=(r, s)` computes the part of a module that belongs
    to the r-th of s equal slices of its heads or intermediate features.
    """

    def __init__(self, config: ModelConfig, directory: Path) -> None:
        self.config = config
        self.weights = {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}
        self.modules = 2 * config.n_layers
        for name in [name for name in self.weights if ".qkv_proj." in name or ".gate_up_proj." in name]:  # of Phi-3
            q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
            parts, sizes = ("qkv", (q, kv, kv)) if "qkv" in name else (("gate", "up"), [config.intermediate_size] * 2)
            for part, rows in zip(parts, self.weights.pop(name).split(sizes), strict=True):
                self.weights[re.sub(r"\w+_proj", f"{part}_proj", name)] = rows

    def weight(self, layer: int, name: str) -> Tensor:
        return self.weights[f"model.layers.{layer}.{name}"]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps).sqrt() * weight

    def rotated(self, x: Tensor) -> Tensor:
        """RoPE of (B, T, D): the pair (i, i + D / 2) is a complex number, rotated by the angle position * theta^(-2i / D)."""
        half, rest = self.config.rotary_dim // 2, x[..., self.config.rotary_dim :]
        frequency = torch.tensor([self.config.rope_theta ** (-i / half) for i in range(half)], dtype=torch.float64)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag, rest), dim=-1)

    def projected(self, layer: int, part: str, head: int, x: Tensor) -> Tensor:
        """One head of q_proj, k_proj or v_proj: (B, T, C) to (B, T, D)."""
        d = self.config.head_dim
        rows = slice(head * d, (head + 1) * d)
        out = x @ self.weight(layer, f"self_attn.{part}_proj.weight")[rows].T
        if self.config.qkv_bias:
            out = out + self.weight(layer, f"self_attn.{part}_proj.bias")[rows]
        if self.config.qk_norm and part in "qk":
            out = self.norm(out, self.weight(layer, f"self_attn.{part}_norm.weight"))
        return self.rotated(out) if part in "qk" and layer not in self.config.no_rope_layers else out

    def attention(self, layer: int, x: Tensor, shard: tuple[int, int] = (0, 1)) -> Tensor:
        """Attention without its pre-norm. Query head i reads KV head i // (H / K)."""
        c, (r, s) = self.config, shard
        total = torch.zeros_like(x)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for head in range(r * c.n_heads // s, (r + 1) * c.n_heads // s):
            kv_head = head // (c.n_heads // c.n_kv_heads)
            q = self.projected(layer, "q", head, x)
            k, v = (self.projected(layer, part, kv_head, x) for part in "kv")
            scale = c.attention_multiplier or c.head_dim**-0.5
            scores = (q @ k.transpose(1, 2) * scale).masked_fill(future, -math.inf)
            columns = slice(head * c.head_dim, (head + 1) * c.head_dim)
            total = total + scores.softmax(-1) @ v @ self.weight(layer, "self_attn.o_proj.weight")[:, columns].T
        return total + self.weight(layer, "self_attn.o_proj.bias") / s if c.o_bias else total

    def mlp(self, layer: int, x: Tensor, shard: tuple[int, int] = (0, 1)) -> Tensor:
        """The MLP without its pre-norm."""
        r, s = shard
        size = self.config.intermediate_size
        features = slice(r * size // s, (r + 1) * size // s)
        gate, up = (x @ self.weight(layer, f"mlp.{part}_proj.weight")[features].T for part in ("gate", "up"))
        if not self.config.mlp_bias:
            return (gate * gate.sigmoid() * up) @ self.weight(layer, "mlp.down_proj.weight")[:, features].T
        gate = gate + self.weight(layer, "mlp.gate_proj.bias")[features]
        up = up + self.weight(layer, "mlp.up_proj.bias")[features]
        out = (gate * gate.sigmoid() * up) @ self.weight(layer, "mlp.down_proj.weight")[:, features].T
        return out + self.weight(layer, "mlp.down_proj.bias") / s

    def h(self, i: int, x: Tensor, shard: tuple[int, int] = (0, 1)) -> Tensor:
        """Module i (1 … 2L) with its pre-norm."""
        layer, is_mlp = divmod(i - 1, 2)
        if is_mlp:
            out = self.mlp(layer, self.norm(x, self.weight(layer, "post_attention_layernorm.weight")), shard)
        else:
            out = self.attention(layer, self.norm(x, self.weight(layer, "input_layernorm.weight")), shard)
        return self.config.residual_multiplier * out

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.config.embedding_multiplier * self.weights["model.embed_tokens.weight"][tokens]

    def logits(self, x: Tensor) -> Tensor:
        head = "model.embed_tokens.weight" if self.config.tie_embeddings else "lm_head.weight"
        return self.norm(x, self.weights["model.norm.weight"]) @ self.weights[head].T / self.config.logits_scaling

    def sequential(self, tokens: Tensor, ladder_layers: set[int]) -> Tensor:
        """x_i = x_{i-1} + h_i(x_{i-2}) in ladder layers, with x_{-1} = x_0; x_i = x_{i-1} + h_i(x_{i-1}) in others."""
        x = {0: self.embedded(tokens)}
        x[-1] = x[0]
        for i in range(1, self.modules + 1):
            source = i - 2 if (i - 1) // 2 in ladder_layers else i - 1
            x[i] = x[i - 1] + self.h(i, x[source])
        return self.logits(x[self.modules])

    def parallel(self, tokens: Tensor) -> Tensor:
        """x_l = x_{l-1} + attention(n(x_{l-1})) + mlp(n(x_{l-1}))."""
        x = self.embedded(tokens)
        for layer in range(self.config.n_layers):
            normed = self.norm(x, self.weight(layer, "input_layernorm.weight"))
            x = x + self.config.residual_multiplier * (self.attention(layer, normed) + self.mlp(layer, normed))
        return self.logits(x)

    def desync(self, tokens: Tensor, streams: int, reduces: list[bool]) -> Tensor:
        """x^r += h_i^r(x^r). If module i reduces, every stream becomes the sum over r of (h_i^r(x^r) + x^r / S)."""
        x = [self.embedded(tokens) for _ in range(streams)]
        for i in range(1, self.modules + 1):
            out = [self.h(i, x[r], (r, streams)) for r in range(streams)]
            if reduces[i - 1]:
                total = sum(out[r] + x[r] / streams for r in range(streams))
                x = [total for _ in range(streams)]
            else:
                x = [x[r] + out[r] for r in range(streams)]
        assert reduces[-1]
        return self.logits(x[0])


def random_config(**more: Any) -> ModelConfig:
    shape = dict(
        vocab_size=random.randint(50, 130),
        hidden_size=random.choice([24, 40]),
        n_layers=4,
        n_heads=8,
        n_kv_heads=random.choice([1, 2, 4, 8]),
        head_dim=random.choice([4, 6, 8]),
        intermediate_size=random.choice([16, 32, 48]),
        max_seq_len=64,
        rope_theta=random.choice([100.0, 10000.0]),
        tie_embeddings=random.choice([True, False]),
    )
    family = random.choice(["llama", "qwen2", "qwen3", "smollm3", "seed_oss"])
    attention_bias = family != "qwen2" and random.random() < 0.5
    features = dict(
        family=family,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=random.random() < 0.5 if family == "seed_oss" else attention_bias,
        mlp_bias=KNOWN[family].mlp_bias and random.random() < 0.5,
        qk_norm=family == "qwen3",
        no_rope_layers=tuple(sorted(random.sample(range(3), 2))) if family == "smollm3" else (),
    )
    return ModelConfig(**shape | features | more)


def prepare(config: ModelConfig, directory: Path) -> tuple[Transformer, Reference, Tensor]:
    save_random(config, directory)
    model = load(ALONE, directory)
    assert model.config == config, "the config came back changed"
    return model, Reference(config, directory), random_tokens(config.vocab_size, length=12)


def written_out(pattern: tuple[Reduces, ...]) -> list[bool]:
    return [reduces for layer in pattern for reduces in (layer.attention, layer.mlp)]


SEAMS = [(0,), (0, 2), (1, 3), (1, 2)]  # ladder layers that adjoin standard ones
ALWAYS = (Reduces(attention=True, mlp=True),) * 4
VARIANTS: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    name: partial(with_variant, name=name)
    for name in ("standard", "parallel", "ladder", "hybrid:1", "hybrid:3", "desync-4x:4", "desync-2x:8", "upper-bound")
}
VARIANTS |= {f"ladder in {seams}": partial(replace, variant="ladder", ladder_layers=seams) for seams in SEAMS}
VARIANTS["desync, always"] = partial(replace, variant="desync", desync_streams=4, desync_pattern=ALWAYS)


@pytest.mark.parametrize("kind", ["plain", "biased", "granite", "phi3"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_follows_its_definition(name: str, kind: str, tmp_path: Path, seed: int) -> None:
    """With biases of attention and MLP, too: each desync stream adds its share of a bias that belongs after the all-reduce."""
    family = random.choice(["llama", "qwen3", "smollm3"]) if kind == "biased" else kind
    qk_norm, biased = family == "qwen3", kind in ("biased", "granite")
    more = multipliers() if kind == "granite" else dict(head_dim=8, partial_rotary_factor=0.75) if kind == "phi3" else {}
    given = dict(family=family, qkv_bias=biased, o_bias=biased, mlp_bias=biased and not qk_norm, qk_norm=qk_norm)
    given["no_rope_layers"] = (0, 2) if family == "smollm3" else ()
    model, reference, tokens = prepare(VARIANTS[name](random_config(**{} if kind == "plain" else given | more)), tmp_path)
    config, similar = model.config, list[Tensor]()  # the logits of variants that the test must tell from this one
    if name in ("standard", "upper-bound", "desync, always"):  # as each other
        expected = reference.sequential(tokens, set())
    elif config.variant == "parallel":
        expected = reference.parallel(tokens)
    elif config.variant == "desync":
        streams, pattern = config.desync_streams, written_out(config.desync_pattern)
        expected = reference.desync(tokens, streams, pattern)
        similar = [reference.desync(tokens, other, pattern) for other in (1, 2, 4, 8) if other != streams]
    else:
        layers = set(config.ladder_layers)
        expected = reference.sequential(tokens, layers)
        similar = [reference.sequential(tokens, layers ^ {layer}) for layer in range(config.n_layers)]
    assert all((expected - other).abs().max() > 100 * TOLERANCE for other in similar), "another variant would pass"
    assert_model_equals(model, tokens, expected)


def test_the_example_of_contributing_follows_its_definition(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads x_{i-1} and the MLP x_{i-2}: both read the layer's input."""
    found = re.search(r"\n( +class MyBlock.*?)\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert found
    names = dict(vars(model_file))
    exec(textwrap.dedent(found[1]), names)
    monkeypatch.setitem(model_file.BLOCKS, "standard", names["MyBlock"])
    model, reference, tokens = prepare(random_config(), tmp_path)
    x = reference.embedded(tokens)
    for i in range(1, reference.modules, 2):
        x = x + reference.h(i, x) + reference.h(i + 1, x)
    assert_model_equals(model, tokens, reference.logits(x))
    rows, context = torch.tensor([11, 3]), Causal(12, CPU)
    with torch.inference_mode():
        assert_close(model.hidden(tokens, context, rows), model.hidden(tokens, context)[:, rows])


def random_pattern(layers: int) -> tuple[Reduces, ...]:
    pattern = [Reduces(random.random() < 0.5, random.random() < 0.5) for _ in range(layers - 1)]
    return (*pattern, Reduces(random.random() < 0.5, True))


@pytest.mark.parametrize("kind", ["2x", "4x", "custom"])
@pytest.mark.parametrize(("streams", "kv_heads"), [(2, 4), (4, 8), (4, 2), (8, 1)])  # the last two replicate KV heads
def test_desync_follows_its_definition(
    kind: str, streams: int, kv_heads: int, in_turn: Callable[..., int], tmp_path: Path, seed: int
) -> None:
    layers = in_turn([3, 4], len(kind) + kv_heads // 4)
    plain = random_config(n_layers=layers, n_kv_heads=kv_heads)
    if kind == "custom":
        pattern = random_pattern(layers)
        config = replace(plain, variant="desync", desync_streams=streams, desync_pattern=pattern)
        reduces = written_out(pattern)
    else:
        config = with_variant(plain, f"desync-{kind}:{streams}")
        # 2x: every MLP reduces; 4x: the MLP of every second layer reduces. The model's last module always reduces.
        every = {"2x": 1, "4x": 2}[kind]
        reduces = [False] * (2 * layers)
        for layer in range(layers):
            reduces[2 * layer + 1] = (layer + 1) % every == 0 or layer == layers - 1
    model, reference, tokens = prepare(config, tmp_path)
    assert_model_equals(model, tokens, reference.desync(tokens, streams, reduces))


def test_desync_patterns_of_the_paper() -> None:
    yes, no = True, False
    assert written_out(desync_pattern(4, 2)) == [no, yes] * 4
    assert written_out(desync_pattern(4, 4)) == [no, no, no, yes] * 2
    assert written_out(desync_pattern(3, 4)) == [no, no, no, yes, no, yes]
