"""EAGLE-3 heads: the layouts they are read from, their forward pass, and the streams of the model that they read."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import eagle
from checkpoints.eagle import check_head, is_head, read_head
from checkpoints.hf_config import config_to_hf
from comms import Local
from comms.interface import SCHEDULES, Schedule
from config import ModelConfig, with_variant
from errors import UserError
from layers.attention import Causal
from tests.support.models import ALONE, load, save_random
from tests.support.paged import CachedSequences
from tests.support.ranks import RankError, Ranks
from tests.test_model import Reference, random_split
from tests.test_tensor_parallel import VARIANTS, base_config, variant_of
from tp import World

CPU = torch.device("cpu")
TOLERANCE = 1e-4  # of fp32 values of size about 1


# --- the model's streams -------------------------------------------------------------------------------------------------


class Streams(Reference):
    """The streams before each layer and after the last one, in fp64."""

    def all(self, tokens: Tensor) -> list[Tensor]:
        c = self.config
        if c.variant == "desync":
            reduces = [flag for layer in c.desync_pattern for flag in (layer.attention, layer.mlp)]
            return self.of_desync(tokens, c.desync_streams, reduces)
        x = [self.embedded(tokens)]
        if c.variant == "parallel":
            for layer in range(c.n_layers):
                normed = self.norm(x[-1], self.weight(layer, "input_layernorm.weight"))
                x.append(x[-1] + self.attention(layer, normed) + self.mlp(layer, normed))
            return x
        for i in range(1, self.modules + 1):
            lag = (i - 1) // 2 in c.ladder_layers
            x.append(x[-1] + self.h(i, x[max(0, i - 2)] if lag else x[-1]))
        return x[::2]

    def of_desync(self, tokens: Tensor, streams: int, reduces: list[bool]) -> list[Tensor]:
        x = [self.embedded(tokens)] * streams
        means = [x[0]]
        for i in range(1, self.modules + 1):
            out = [self.h(i, x[r], (r, streams)) for r in range(streams)]
            total = sum(o + old / streams for o, old in zip(out, x, strict=True))
            x = [total] * streams if reduces[i - 1] else [old + o for old, o in zip(x, out, strict=True)]
            means.append(sum(x) / streams)
        return means[::2]


@torch.inference_mode()
def streams(
    world: World, directory: Path, tokens: Tensor, layers: list[int], lengths: list[int], schedule: Schedule
) -> list[Tensor]:
    """The streams of all tokens, without a cache and in parts with one. Checks that the pass has the bits of one without them."""
    world.comm.use(schedule)
    model = load(world, directory)
    last, whole = model.hidden_and_streams(tokens, Causal(tokens.shape[1], CPU), layers)
    assert torch.equal(last, model.hidden(tokens, Causal(tokens.shape[1], CPU)))
    for some in (layers, layers[:-1], layers[:2], []):  # a pass that needs few rows keeps all rows of the streams
        rows = torch.tensor(lengths).cumsum(0) - 1
        few, kept = model.hidden_and_streams(tokens, Causal(tokens.shape[1], CPU), some, rows)
        torch.testing.assert_close(few, last[:, rows], atol=1e-5, rtol=1e-5)
        assert all(torch.equal(one, other) for one, other in zip(kept, whole, strict=False)) and len(kept) == len(some)
    sequences = CachedSequences(model, 1, tokens.shape[1])
    parts = [model.hidden_and_streams(part, sequences.context(part.shape[1]), layers)[1] for part in tokens.split(lengths, 1)]
    return [*whole, *(torch.cat(part, 1) for part in zip(*parts, strict=True))]


@pytest.mark.parametrize(("place", "variant"), list(enumerate(VARIANTS)))
def test_streams_are_the_complete_ones_of_the_definition(
    place: int, variant: str, in_turn: Callable[..., int], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    n = in_turn((1, 2), place)
    config = variant_of(base_config(), variant)
    save_random(config, tmp_path)
    tokens, layers = torch.randint(config.vocab_size, (1, 12)), [0, random.randint(1, 2), 3, 4]
    schedule = random.choice(SCHEDULES)
    found = ranks.run(n, streams, tmp_path, tokens, layers, random_split(12), schedule)
    expected = Streams(config, tmp_path).all(tokens)
    for rank in found:
        for ours, i in zip(rank, layers * 2, strict=True):
            assert (ours - expected[i]).abs().max() < TOLERANCE
        assert all(map(torch.equal, rank, found[0])), "the ranks' streams are not bitwise equal"


# --- the head against its definition -------------------------------------------------------------------------------------


class HeadReference(Reference):
    """The head's equations in fp64, from the names and shapes of the published layout."""

    def __init__(self, config: ModelConfig, directory: Path, layer: str, norm_first: bool) -> None:
        super().__init__(config, directory)
        self.layer, self.norm_first = layer, norm_first

    def weight(self, layer: int, name: str) -> Tensor:
        return self.weights[self.layer + name]

    def hidden(self, embedded: Tensor, features: Tensor) -> Tensor:
        normed = self.norm(features, self.weight(0, "hidden_norm.weight"))
        both = torch.cat((self.norm(embedded, self.weight(0, "input_layernorm.weight")), normed), -1)
        x = (normed if self.norm_first else features) + self.attended(both)
        return x + self.mlp(0, self.norm(x, self.weight(0, "post_attention_layernorm.weight")))

    def attended(self, both: Tensor) -> Tensor:
        """`attention` with inputs of twice the width of its outputs."""
        c = self.config
        q = [self.projected(0, "q", head, both) for head in range(c.n_heads)]
        k, v = ([self.projected(0, part, head, both) for head in range(c.n_kv_heads)] for part in "kv")
        future = torch.ones(both.shape[1], both.shape[1], dtype=torch.bool).triu(1)
        mixed = []
        for head, query in enumerate(q):
            shared = head // (c.n_heads // c.n_kv_heads)
            scores = (query @ k[shared].transpose(1, 2) / math.sqrt(c.head_dim)).masked_fill(future, -math.inf)
            mixed.append(scores.softmax(-1) @ v[shared])
        out = torch.cat(mixed, -1) @ self.weight(0, "self_attn.o_proj.weight").T
        return out + self.weight(0, "self_attn.o_proj.bias") if c.o_bias else out


def base_of(**more: Any) -> ModelConfig:
    return base_config(n_layers=8, **more)


def write_head(directory: Path, base: ModelConfig, drafted: int = 30, speculators: bool = False, **more: Any) -> ModelConfig:
    """Write a random head for `base`, in one of the two layouts. more: keys of config.json. Returns the layer's config."""
    kv_heads, width = random.choice([1, 2]), more.get("hidden_size", base.hidden_size)
    layer = base_config(hidden_size=width, n_heads=4, n_kv_heads=kv_heads, head_dim=12, intermediate_size=24, n_layers=1)
    if speculators:
        bias = random.random() < 0.5
        family = dict(family="qwen3", qk_norm=True) if random.random() < 0.5 else dict(family="llama")
        layer = ModelConfig(**vars(layer) | family | dict(qkv_bias=bias, o_bias=bias))
    save_random(layer, directory)
    found = load_file(directory / "model.safetensors")
    prefix = "layers.0." if speculators else "midlayer."
    tensors = {prefix + name.removeprefix("model.layers.0."): t for name, t in found.items() if ".layers.0." in name}
    for part in "qkv":
        name = f"{prefix}self_attn.{part}_proj.weight"
        tensors[name] = torch.randn(len(tensors[name]), 2 * width) * (2 * width) ** -0.5
    tensors |= {f"{prefix}hidden_norm.weight": torch.rand(width) + 0.5, "norm.weight": found["model.norm.weight"]}
    tensors["fc.weight"] = torch.randn(width, 3 * base.hidden_size) * (3 * base.hidden_size) ** -0.5
    tensors["lm_head.weight"] = torch.randn(drafted, width) * width**-0.5
    if random.random() < 0.5 or width != base.hidden_size:
        tensors["embed_tokens.weight"] = found["model.embed_tokens.weight"]
    if drafted < base.vocab_size:
        targets = torch.randperm(base.vocab_size)[:drafted].sort().values
        tensors |= {"d2t": targets - torch.arange(drafted), "t2d": torch.zeros(base.vocab_size, dtype=torch.bool)}
        tensors["t2d"][targets] = True
    save_file(tensors, directory / "model.safetensors")
    raw = config_to_hf(layer)
    if speculators:
        raw = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "transformer_layer_config": raw}
        raw["norm_before_residual"] = random.random() < 0.5
    else:
        raw["architectures"] = ["LlamaForCausalLMEagle3"]
    (directory / "config.json").write_text(json.dumps(raw | {"draft_vocab_size": drafted} | more))
    return layer


@pytest.mark.parametrize("speculators", [False, True], ids=["midlayer", "speculators"])
@torch.inference_mode()
def test_a_head_follows_its_definition(speculators: bool, tmp_path: Path, seed: int) -> None:
    base = base_of()
    drafted = random.choice([30, base.vocab_size])
    width = random.choice([{}, {"hidden_size": 24, "target_hidden_size": base.hidden_size}])
    layer = write_head(tmp_path, base, drafted, speculators, **width)
    head, stored = read_head(tmp_path, base, ALONE, torch.float32), load_file(tmp_path / "model.safetensors")
    assert is_head(tmp_path)
    reference = HeadReference(layer, tmp_path, "layers.0." if speculators else "midlayer.", head.config.norm_before_residual)
    assert head.config.norm_before_residual == json.loads((tmp_path / "config.json").read_text()).get(
        "norm_before_residual", False
    )
    given, embedded = [torch.randn(2, 11, base.hidden_size) for _ in range(3)], torch.randn(2, 11, layer.hidden_size)
    features = head.fuse(given)
    assert (features - torch.cat(given, -1).double() @ stored["fc.weight"].double().T).abs().max() < TOLERANCE
    expected = reference.hidden(embedded.double(), features.double())
    assert (head(embedded, features, Causal(11, CPU)) - expected).abs().max() < TOLERANCE

    cache = SimpleNamespace(attention_slots=1, n_kv_heads=layer.n_kv_heads, config=layer, norm=head.norm)
    sequences, lengths = CachedSequences(cache, 2, 11), random_split(11)  # type: ignore[arg-type]
    parts = zip(embedded.split(lengths, 1), features.split(lengths, 1), strict=True)
    rows = [
        head(e.reshape(1, -1, layer.hidden_size), f.reshape(1, -1, layer.hidden_size), sequences.context(e.shape[1])).view_as(f)
        for e, f in parts
    ]
    assert (torch.cat(rows, 1) - expected).abs().max() < TOLERANCE

    logits = reference.norm(expected, reference.weights["norm.weight"]) @ reference.weights["lm_head.weight"].T
    assert (head.logits(expected.float()) - logits).abs().max() < TOLERANCE
    targets = torch.arange(drafted) + stored["d2t"] if "d2t" in stored else torch.arange(drafted)
    assert torch.equal(head.guess(expected.float()), targets[head.logits(expected.float()).argmax(-1)])
    if head.embed_tokens is not None:
        tokens = torch.randint(base.vocab_size, (1, 5))
        assert torch.equal(head.embed(tokens, None), stored["embed_tokens.weight"][tokens])  # type: ignore[arg-type]


def logits_on(device: torch.device, dtype: torch.dtype, directory: Path, base: ModelConfig, given: list[Tensor]) -> Tensor:
    head = read_head(directory, base, World(0, 1, device, Local()), dtype)
    embedded, *streams = (tensor.to(device, dtype) for tensor in given)
    return head.logits(head(embedded, head.fuse(streams), Causal(11, device))).cpu().double()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.inference_mode()
def test_a_head_on_a_gpu_is_as_exact_as_on_a_cpu(tmp_path: Path, seed: int) -> None:
    base = base_of(hidden_size=64)
    write_head(tmp_path, base)
    given = [torch.randn(1, 11, 64) for _ in range(4)]
    exact = logits_on(CPU, torch.float64, tmp_path, base, given)
    ours, theirs = (
        (logits_on(torch.device(kind), torch.bfloat16, tmp_path, base, given) - exact).abs().max() for kind in ("cuda", "cpu")
    )
    assert ours <= 2 * theirs + 0.01


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, (2, 4, 5)),
        ({IDS: [1, 3, 8]}, (1, 3, 8)),  # the layers that follow
        ({"eagle_config": {IDS: [6, 1, 3], "use_aux_hidden_state": True}}, (2, 4, 7)),  # the layers before
        ({IDS: [2, 4, 7], "eagle_config": {IDS: [1, 3, 6]}}, (2, 4, 7)),
        ({IDS: [1, 3, 8], "eagle_config": {IDS: [1, 3, 6]}}, (1, 3, 8)),
        ({"eagle_config": {IDS: []}, "draft_vocab_size": None}, (2, 4, 5)),
        ({"architectures": ["LlamaForCausalLM"]}, (2, 4, 5)),
    ],
)
def test_which_streams_a_head_reads(keys: dict[str, Any], layers: tuple[int, ...], tmp_path: Path, seed: int) -> None:
    base = base_of()
    write_head(tmp_path, base, base.vocab_size, **keys)
    assert read_head(tmp_path, base, ALONE, torch.float32).config.stream_layers == layers


def test_a_head_of_torch_save(tmp_path: Path, seed: int) -> None:
    base, path = base_of(), tmp_path / "model.safetensors"
    write_head(tmp_path, base)
    expected = read_head(tmp_path, base, ALONE, torch.float32).state_dict()
    torch.save(load_file(path), tmp_path / "pytorch_model.bin")
    path.unlink()
    found = read_head(tmp_path, base, ALONE, torch.float32).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no tensors")
    with pytest.raises(UserError, match=r"^[^\n]*pytorch_model\.bin[^\n]*$"):
        read_head(tmp_path, base, ALONE, torch.float32)


# --- bad heads -----------------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: [tensors.pop(key) for key in list(tensors) if name in key] and None


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


BAD_TENSORS: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
    (without("d2t"), "d2t"),
    (without("t2d"), ""),
    (without("hidden_norm"), "hidden_norm"),
    (without("lm_head"), "lm_head"),
    (without("midlayer"), "layers.0."),
    (changed("fc.weight", lambda t: t[:, :-1].contiguous()), "fc.weight"),
    (changed("d2t", lambda t: t + 1000), "d2t"),
    (changed("d2t", lambda t: t * 0 - torch.arange(len(t))), "d2t"),
    (changed("d2t", lambda t: t.float()), "d2t"),
    (changed("t2d", lambda t: ~t), "t2d"),
    (changed("t2d", torch.ones_like), "t2d"),
    (lambda tensors: tensors.update({"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}), "layers.1"),
]


@pytest.mark.parametrize(("spoil", "named"), BAD_TENSORS)
def test_bad_tensors_of_a_head(spoil: Callable[[dict[str, Tensor]], Any], named: str, tmp_path: Path, seed: int) -> None:
    base = base_of()
    write_head(tmp_path, base)
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    if not named:  # t2d may be missing
        read_head(tmp_path, base, ALONE, torch.float32)
        return
    with pytest.raises(UserError, match=rf"^[^\n]*{named}[^\n]*$"):
        check_head(tmp_path, base)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e5])
@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "midlayer.self_attn.k_proj.weight", "lm_head.weight"])
def test_a_head_with_values_that_are_not_finite(name: str, value: float, tmp_path: Path, seed: int) -> None:
    """In the data type in which it computes: 1e5 is above the largest value of float16."""
    base, path = base_of(), tmp_path / "model.safetensors"
    write_head(tmp_path, base)
    tensors = load_file(path)
    tensors[name].view(-1)[random.randrange(tensors[name].numel())] = value
    save_file(tensors, path)
    if math.isfinite(value):
        read_head(tmp_path, base, ALONE, torch.float32)
    with pytest.raises(
        UserError, match=rf"^draft head {tmp_path}: {name} has values that are not finite in torch.float16; [^\n]*$"
    ):
        read_head(tmp_path, base, ALONE, torch.float16)


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLM", "Other"]}, "LlamaForCausalLMEagle3"),
    ({"architectures": ["EagleLlamaForCausalLM"]}, "LlamaForCausalLMEagle3"),
    ({"speculators_model_type": "dflash"}, "dflash"),
    ({"speculators_model_type": "eagle3"}, "transformer_layer_config"),
    ({"model_type": "granite"}, "granite"),
    ({"model_type": "phi3"}, "phi3"),
    ({"vocab_size": 77}, "77"),
    ({"target_hidden_size": 48}, "48"),
    ({"num_hidden_layers": 2}, "2 layers"),
    ({"draft_vocab_size": 4000}, "draft_vocab_size"),
    ({IDS: [1, 2]}, "3 different"),
    ({IDS: [1, 2, 9]}, "9"),
    ({"eagle_config": {IDS: [1, 2, 8]}}, "8"),
    ({IDS: [-1, 2, 3]}, "-1"),
    ({IDS: ["a", 2, 3]}, "whole numbers"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
]


@pytest.mark.parametrize(("keys", "named"), BAD_CONFIGS)
def test_bad_descriptions_of_a_head(keys: dict[str, Any], named: str, tmp_path: Path, seed: int) -> None:
    base = base_of()
    write_head(tmp_path, base)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    with pytest.raises(UserError, match=rf"^[^\n]*{named}[^\n]*$"):
        check_head(tmp_path, base)


def test_a_head_needs_an_embedding_of_its_width(tmp_path: Path, seed: int) -> None:
    base = base_of()
    write_head(tmp_path, base, hidden_size=24, target_hidden_size=base.hidden_size)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no embed_tokens"):
        read_head(tmp_path, base, ALONE, torch.float32)


@torch.inference_mode()
def computed(world: World, directory: Path, head_of: Path, tokens: Tensor, shared_bytes: int) -> tuple[Tensor, Tensor, int]:
    """Hidden states, logits, and how many elements of the head this rank holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle, "SHARED_BYTES", shared_bytes)
        model = load(world, directory)
        head = eagle.load_head(head_of, model.config, world, torch.float32)
    count = tokens.shape[1] - 1
    _, found = model.hidden_and_streams(tokens[:, :-1], Causal(count, CPU), head.config.stream_layers)
    hidden = head(head.embed(tokens[:, 1:], model), head.fuse(found), Causal(count, CPU))
    return hidden, head.logits(hidden), sum(p.numel() for p in head.parameters())


@pytest.mark.parametrize("shared", [False, True], ids=["replicated", "shared"])
def test_ranks_compute_a_head_with_the_same_bits(
    shared: bool, ranks: Ranks, tmp_path: Path, seed: int, in_turn: Callable[..., Any]
) -> None:
    n, base = in_turn([2, 4], shared), with_variant(base_of(), in_turn(("standard", "ladder", "hybrid"), 0))
    save_random(base, tmp_path / "model")
    write_head(tmp_path / "head", base, speculators=random.random() < 0.5)
    arguments = tmp_path / "model", tmp_path / "head", torch.randint(base.vocab_size, (2, 9)), 0 if shared else 1 << 28
    [(hidden, logits, size)] = ranks.run(1, computed, *arguments)
    first, *others = ranks.run(n, computed, *arguments)
    for ours, single in zip(first[:2], (hidden, logits), strict=True):
        assert (ours - single).abs().max() < TOLERANCE
    assert all(torch.equal(a, b) for other in others for a, b in zip(first[:2], other[:2], strict=True))
    assert first[2] < size if shared else first[2] == size


def test_ranks_refuse_a_bad_head_together(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    base = base_of()
    save_random(base, tmp_path / "model")
    with pytest.raises(RankError, match=r"config\.json is missing"):
        ranks.run(2, computed, tmp_path / "model", tmp_path, torch.zeros(1, 3, dtype=torch.int64), 0)
