"""Low-rank adapters: the model computes what the base with merged weights computes, for any mixture of rows, on any number of
ranks. Files that cannot be used are refused in one line."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import files
from checkpoints import lora
from checkpoints.lora import LoraLimits, open_adapter
from checkpoints.presets import model_config
from checkpoints.weights import load_model
from engine import LLM, SamplingParams
from engine.adapters import Adapters
from errors import UserError
from kernels.lora import Groups, group_rows
from layers.attention import Causal
from tests import MODELS
from tests.support.adapters import PARTS, merged, write_adapter
from tests.support.models import ALONE, CPU, load, save_random
from tests.support.ranks import Ranks
from tests.test_tensor_parallel import TOLERANCE, VARIANTS, base_config, variant_of
from tp import World

SLOTS, RANK = 3, 16


def groups_of(slots: list[int], tile: int = 1000) -> Groups:
    return Groups(*map(torch.from_numpy, group_rows(np.array(slots), tile)), tile)


@torch.inference_mode()
def adapted_logits(world: World, base: Path, adapters: list[Path], tokens: Tensor, slots: list[int]) -> Tensor:
    """Logits of sequences (B, T), each with the adapter in its slot, -1 without one."""
    model = load(world, base)
    Adapters(model, LoraLimits(SLOTS, RANK), world).load_now([(path.name, str(path)) for path in adapters])
    context = Causal(tokens.shape[1], CPU)
    context.adapters = groups_of([slot for slot in slots for _ in range(tokens.shape[1])], random.choice([3, 16, 1000]))
    return model(tokens, context)


@pytest.mark.parametrize("place", range(len(VARIANTS)))
def test_rows_compute_what_merged_weights_compute(
    place: int, in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    """Each row of a mixed batch has the logits of its adapter, merged into the base and loaded as an ordinary checkpoint."""
    config = variant_of(base_config(), VARIANTS[place])
    base = save_random(config, tmp_path / "base")
    adapters = [write_adapter(tmp_path / str(i), base, PARTS if i == 2 else None, use_rslora=i == 1) for i in range(SLOTS)]
    models = [base, *(merged(tmp_path / f"merged-{i}", base, adapter) for i, adapter in enumerate(adapters))]
    slots = [*random.sample(range(-1, SLOTS), SLOTS + 1), random.randrange(-1, SLOTS)]
    tokens = torch.randint(config.vocab_size, (len(slots), random.randint(1, 9)))
    context = Causal(tokens.shape[1], CPU)
    with torch.inference_mode():
        expected = torch.cat(
            [load(ALONE, models[1 + slot])(row[None], context) for slot, row in zip(slots, tokens, strict=True)]
        )
        plain = load(ALONE, base)(tokens, context)
    assert (expected - plain)[[slot >= 0 for slot in slots]].abs().amax((1, 2)).min() > 100 * TOLERANCE, (
        "adapters without effect"
    )
    for found in ranks.run(in_turn((1, 2, 4), place), adapted_logits, base, adapters, tokens, slots):
        assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_quantized_base(kind: str, tmp_path: Path, seed: int) -> None:
    """The adapters' product is added to the quantized layers' outputs."""
    base = save_random(base_config(hidden_size=128, intermediate_size=128), tmp_path / "base")
    adapter = write_adapter(tmp_path / "a", base, PARTS)
    model = load_model(str(base), model_config(str(base), None, 1, kind), ALONE, torch.float32)
    files = load_file(adapter / "adapter_model.safetensors")
    layer = model.layers[1].mlp.w_down
    x = torch.randn(1, 4, 128)
    plain = layer(x)
    Adapters(model, LoraLimits(SLOTS, RANK), ALONE).load_now([("a", str(adapter))])
    layer.adapters.step.groups = groups_of([0, -1, 0, 0])
    a, b = (files[f"base_model.model.model.layers.1.mlp.down_proj.lora_{kind}.weight"] for kind in "AB")
    expected = (x @ a.T @ b.T) * torch.tensor([1, 0, 1, 1])[:, None]
    assert expected.abs().max() > 0.1 and (layer(x) - plain - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("use_rslora", [False, True])
def test_patterns(use_rslora: bool, tmp_path: Path, seed: int) -> None:
    """Each layer has the factor that its alpha and rank give."""
    base = save_random(base_config(), tmp_path / "base")
    settings: dict[str, Any] = dict(r=4, lora_alpha=6, rank_pattern={"q_proj": 8}, alpha_pattern={"layers.1.mlp.up_proj": 9})
    found = open_adapter(
        folder := write_adapter(tmp_path / "a", base, ("q_proj", "up_proj"), use_rslora=use_rslora, **settings),
        model_config(str(base), None, 1),
    )
    layers = "model.layers."
    eight, four = (8**0.5, 2.0) if use_rslora else (8, 4)
    expected = {f"{layers}{i}.self_attn.q_proj": 6 / eight for i in range(4)} | {
        f"{layers}{i}.mlp.up_proj": 6 / four for i in range(4)
    }
    assert found.factors == expected | {f"{layers}1.mlp.up_proj": 9 / four} and found.rank == 8
    with pytest.raises(UserError, match="its rank 8 is above --max-lora-rank 7"):
        open_adapter(folder, model_config(str(base), None, 1), 7)


def test_factors_are_not_rounded_to_the_file_s_data_type(tmp_path: Path, seed: int) -> None:
    base = save_random(base_config(n_layers=1), tmp_path / "base")
    folder = write_adapter(tmp_path / "a", base, ("o_proj",), r=3, lora_alpha=7)
    damaged(folder, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    model = load(ALONE, base)
    Adapters(model, LoraLimits(1, 3), ALONE).load_now([("a", str(folder))])
    file = load_file(folder / "adapter_model.safetensors")["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"]
    torch.testing.assert_close(
        model.layers[0].attention.wo.adapters.weights.b[0, :, :3], file.float() * (7 / 3), atol=0, rtol=1e-6
    )


PEFT = Path(__file__).parent / "peft_adapter"


@pytest.mark.parametrize("count", [1, 2])
def test_what_peft_saves_gives_its_logits(count: int, ranks: Ranks) -> None:
    """With ranks, alphas and layers of its own, and rsLoRA; make.py has saved it and the logits."""
    saved = load_file(PEFT / "logits.safetensors")
    tokens = saved["tokens"].repeat(2, 1)
    for found in ranks.run(count, adapted_logits, MODELS / "tiny-standard", [PEFT], tokens, [0, -1]):
        assert (found[0] - saved["logits"]).abs().max() < TOLERANCE
        assert (found[1] - saved["logits"]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("change", ["wrapped", "default", "bare"])
def test_names_that_peft_does_not_save_but_others_do(change: str, tmp_path: Path, seed: int) -> None:
    """A wrapper's part more or less, or the adapter's name as in a `state_dict`."""
    base = save_random(base_config(), tmp_path / "base")
    adapter, prefix = write_adapter(tmp_path / "a", base, PARTS), "base_model.model."
    tokens = torch.randint(101, (1, 7))
    expected = adapted_logits(ALONE, base, [adapter], tokens, [0])
    names = {"wrapped": lambda n: prefix + n, "default": lambda n: n.replace(".weight", ".default.weight")}
    renamed = names.get(change, lambda n: n.removeprefix(prefix))
    own = {renamed(name): tensor for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(own, adapter / "adapter_model.safetensors")
    assert (adapted_logits(ALONE, base, [adapter], tokens, [0]) - expected).abs().max() < TOLERANCE


def damaged(folder: Path, tensors: Callable[[dict[str, Tensor]], object] | None = None, **settings: Any) -> None:
    config = json.loads((folder / "adapter_config.json").read_text()) | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if tensors is not None:
        found = load_file(folder / "adapter_model.safetensors")
        tensors(found)
        save_file(found, folder / "adapter_model.safetensors")


HEAD = "base_model.model.lm_head."
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


BAD: dict[str, Callable[[Path], object]] = {
    r"A.weight has shape \(4, 39\)": lambda f: damaged(f, lambda t: t.update({Q + "A.weight": torch.randn(4, 39)})),
    r"B.weight has shape": lambda f: damaged(f, lambda t: t.update({Q + "B.weight": torch.randn(64, 3)})),
    "it has base_model.model.transformer.h.0": lambda f: damaged(
        f, lambda t: t.update({"base_model.model.transformer.h.0.attn.lora_A.weight": torch.randn(4, 40)})
    ),
    "lora_B.weight is missing": lambda f: damaged(f, lambda t: t.pop(Q + "B.weight")),
    "is missing, though target_modules": lambda f: damaged(f, lambda t: [t.pop(Q + "A.weight"), t.pop(Q + "B.weight")]),
    "layers.2.5.*is missing, though": lambda f: damaged(f, layers_to_transform=2.5),
    "which target_modules does not name": lambda f: damaged(f, target_modules=["v_proj"]),
    "q_proj, which target_modules does not name": lambda f: damaged(f, target_modules=["proj", "down_proj"]),
    "its rank 4 is above --max-lora-rank 3": lambda f: None,
    "says 5": lambda f: damaged(f, r=5),
    "values that are not finite": lambda f: damaged(f, lambda t: t[Q + "B.weight"][5].fill_(torch.nan)),
    "truncated": truncate,
    "adapter_model.safetensors is missing": lambda f: (f / "adapter_model.safetensors").unlink(),
    "adapter_config.json is missing": lambda f: (f / "adapter_config.json").unlink(),
    "is not valid JSON": lambda f: (f / "adapter_config.json").write_text("{"),
    "use_dora": lambda f: damaged(f, use_dora=True),
    "modules_to_save": lambda f: damaged(f, modules_to_save=["lm_head"]),
    "bias 'all'": lambda f: damaged(f, bias="all"),
    "quantization_config": lambda f: damaged(f, quantization_config={"bits": 4}),
    "data type I8": lambda f: damaged(f, lambda t: t.update({Q + "A.weight": torch.zeros(4, 40, dtype=torch.int8)})),
    "peft_type is 'IA3'": lambda f: damaged(f, peft_type="IA3"),
    "init_lora_weights pissa": lambda f: damaged(f, init_lora_weights="pissa_niter_4"),
    "lora_alpha is 'x'": lambda f: damaged(f, lora_alpha="x"),
    "lora_alpha is True": lambda f: damaged(f, lora_alpha=True),
    "exclude_modules is 5, not names": lambda f: damaged(f, exclude_modules=5),
    "rank_pattern is not supported": lambda f: damaged(f, rank_pattern={"(a+)+$": 4}),
    "it changes lm_head": lambda f: damaged(f, lambda t: t.update({HEAD + "lora_A.weight": torch.randn(4, 40)})),
    "it changes embed_tokens": lambda f: damaged(
        f, lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.randn(4, 101)})
    ),
    "alora_invocation_tokens": lambda f: damaged(f, alora_invocation_tokens=[1]),
    "q_proj.lora_A.default.weight twice": lambda f: damaged(
        f, lambda t: t.update({Q + "A.default.weight": torch.randn(4, 40)})
    ),
}
MERGED = {  # by PEFT
    *(
        "its rank 4 is above --max-lora-rank 3",
        "use_dora",
        "modules_to_save",
        "bias 'all'",
        "quantization_config",
        "peft_type is 'IA3'",
    ),
    *("init_lora_weights pissa", "rank_pattern is not supported", "it changes lm_head", "it changes embed_tokens"),
}


def test_bad_adapters_are_refused_in_one_line(tmp_path: Path, seed: int) -> None:
    base = save_random(base_config(n_layers=1), tmp_path / "base")
    model = load(ALONE, base)
    adapters = Adapters(model, LoraLimits(1, 4), ALONE)
    for number, (message, damage) in enumerate(BAD.items()):
        adapter = write_adapter(tmp_path / str(number), base, ("q_proj", "down_proj"), r=4)
        damage(adapter)
        adapters.limits = LoraLimits(1, 3 if "above" in message else 4)
        with pytest.raises(UserError, match=message) as caught:
            adapters.load_now([("a", str(adapter))])
        assert "\n" not in str(caught.value) and str(adapter) in str(caught.value), message
        merge = f"PEFT: AutoPeftModelForCausalLM.from_pretrained('{adapter}').merge_and_unload().save_pretrained('merged')"
        assert (merge in str(caught.value)) == (message in MERGED), message
    good = [(name, str(write_adapter(tmp_path / name, base, r=4))) for name in ("b", "c")]
    with pytest.raises(UserError, match="1 adapters are loaded, which is --max-loras"):
        adapters.load_now(good)


def test_only_folders_in_the_root(tmp_path: Path, seed: int) -> None:
    base = save_random(base_config(n_layers=1), tmp_path / "base")
    config, root = model_config(str(base), None, 1), tmp_path / "root"
    inside, outside = write_adapter(root / "in", base), write_adapter(tmp_path / "out", base)
    (root / "link").symlink_to(outside)
    (root / "half").mkdir()
    (root / "half" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (root / "alias").symlink_to(inside)
    for good in (inside, root / "alias"):
        open_adapter(good, config, root=root)
    for bad in (outside, root / "link", root / "half", root / ".." / "out", Path("/etc"), root / "x\0"):
        with pytest.raises(UserError, match=r"not a folder in --lora-root|is not in"):
            open_adapter(bad, config, root=root)


def test_what_was_opened_is_checked_and_read(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that changes after a check leads to an error, and one that changes after the opening to what was opened."""
    base = save_random(base_config(n_layers=1), tmp_path / "base")
    config, root = model_config(str(base), None, 1), tmp_path / "root"
    inside, outside = write_adapter(root / "in", base, PARTS, r=4), write_adapter(tmp_path / "out", base, PARTS, r=4)
    link, check = root / "link", files.check_regular
    left = 0  # checks of a path until the link changes, just before what the path names is opened

    def swap(path: Path) -> int:
        nonlocal left
        size, left = check(path), left - 1
        if left == 0:
            link.unlink()
            link.symlink_to(outside)
        return size

    monkeypatch.setattr(files, "check_regular", swap)
    for count in (1, 2):  # config and weights
        left = count
        link.symlink_to(inside)
        with pytest.raises(UserError, match="is not in"):
            open_adapter(link, config, root=root)
        link.unlink()
    link.symlink_to(inside)
    monkeypatch.setattr(lora, "_check_settings", lambda _: [link.unlink(), link.symlink_to(outside)])  # after the opening
    found = open_adapter(link, config, root=root)
    name = Q + "A.weight"
    assert torch.equal(found.tensors.get_tensor(name), load_file(inside / "adapter_model.safetensors")[name])


def test_one_adapter_for_all_calls(tmp_path: Path, seed: int) -> None:
    """`LLM` scores and continues as the merged checkpoint does."""
    base = save_random(base_config(), tmp_path / "base")
    adapter = write_adapter(tmp_path / "a", base, PARTS)
    adapted, expected = LLM(base, lora=adapter), LLM(merged(tmp_path / "merged", base, adapter))
    prompt = torch.randint(101, (12,)).tolist()
    found, wanted = (llm.score(prompt).logprobs[1:] for llm in (adapted, expected))
    assert torch.tensor(found).sub(torch.tensor(wanted)).abs().max() < TOLERANCE
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=0, temperature=0, ignore_eos=True)
    [one], [other] = (llm.generate([prompt], params) for llm in (adapted, expected))
    values = [
        [entry.chosen.logprob for entry in (*(answer.prompt_logprobs or [])[1:], *answer.logprobs) if entry]
        for answer in (one, other)
    ]
    assert len(values[0]) == len(prompt) and torch.tensor(values[0]).sub(torch.tensor(values[1])).abs().max() < TOLERANCE
