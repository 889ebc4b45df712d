"""A model that does not fit in memory is refused before allocation; a config.json alone is a model with random weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tp
from checkpoints import memory
from checkpoints.hf_config import config_to_hf
from checkpoints.lora import LoraLimits, adapted_layers
from checkpoints.memory import cache_bytes, check_memory, weight_bytes
from checkpoints.presets import has_random_weights, model_config, preset
from checkpoints.weights import load_model
from comms import Local
from config import with_variant
from engine.adapters import Adapters
from engine.paged_cache import CODES, PagedCache
from errors import UserError
from model import Transformer
from options import KV_DTYPES
from server.launch import prepare
from server.settings import Settings
from tests.support.command_line import MODELS, Here
from tests.support.models import ALONE, CPU
from text.tokenizer import ByteTokenizer
from tp import World


class Ranks(Local):
    """The communicator of one rank of several. It only serves to compute the shapes of the weights."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capfd)


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """A folder that holds only a config.json, whose shape differs from every preset."""
    raw = config_to_hf(replace(preset("tiny"), n_layers=3, vocab_size=1021, hidden_size=160))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


# --- memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["standard", "parallel", "ladder", "desync-2x:8"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_the_estimate_is_what_a_rank_allocates(variant: str, ranks: int, tied: bool) -> None:
    """On 8 ranks each of the 4 KV heads is held by two ranks. The vocabulary of 1,021 is padded."""
    config = with_variant(replace(preset("tiny:2"), vocab_size=1021, tie_embeddings=tied), variant)
    model = Transformer(config, Ranks(ranks), CPU, torch.bfloat16)
    matrices = sum(p.nbytes for p in model.parameters() if p.dim() == 2)
    assert weight_bytes(config, ranks, torch.bfloat16) == matrices


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_estimate_of_a_cache_is_what_it_takes(ranks: int, kv_dtype: str) -> None:
    model = Transformer(preset("tiny:2"), Ranks(ranks), CPU, torch.bfloat16)
    dtype = CODES if kv_dtype == "fp8" else torch.bfloat16
    cache = PagedCache(model.attention_slots, 3, 16, model.n_kv_heads, model.config.head_dim, CPU, dtype)
    taken = cache.keys_values.nbytes + (0 if cache.scales is None else cache.scales.nbytes)
    assert cache_bytes(model.config, ranks, torch.bfloat16, 3 * 16, kv_dtype) == taken


@pytest.mark.parametrize("variant", ["standard", "parallel", "desync-2x:8"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_estimate_of_adapters_is_what_they_take(variant: str, ranks: int) -> None:
    model = Transformer(with_variant(preset("tiny:2"), variant), Ranks(ranks), CPU, torch.bfloat16)
    limits = LoraLimits(3, 5)
    Adapters(model, limits, ALONE)
    taken = sum(t.nbytes for layer in adapted_layers(model) for t in layer.adapters.weights[:2])
    assert limits.bytes(model.config, ranks, torch.bfloat16) == taken


def test_one_line_and_exit_code_2_before_anything_is_allocated(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 0.7 TB; and a small model when other processes leave too little memory."""
    refused = here("--model", "bloom-176b", "--dtype", "float32", "--prompt-length", 4)
    assert refused.code == 2 and not refused.out
    assert refused.err.count("\n") == 1 and "needs about 7" in refused.err and "GB are free" in refused.err
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 5_000_000)
    refused = here("--model", "tiny", "--prompt-length", 4, "--max-new-tokens", 2)
    assert refused.code == 2 and "tiny needs about 0.0 GB a rank" in refused.err
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 15_000_000)
    assert here("--model", "tiny", "--prompt-length", 4, "--max-new-tokens", 2).code == 0
    refused = here("--model", "tiny", "--prompt-length", 900, "--num-samples", 8, "--batch-size", 8, "--max-new-tokens", 100)
    assert refused.code == 2 and "0.1 for its cache" in refused.err


def test_ranks_share_what_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 CPU ranks divide the host's memory: 16 layers of a 70B model in fp32 do not fit, 2 do. Every rank gets the error."""
    said: list[UserError | None] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 24_000_000_000)
    monkeypatch.setattr(tp, "agree_on_error", lambda _, error: said.append(error))
    check_memory("llama-3-70b:16", preset("llama-3-70b:16"), World(3, 8, CPU, Ranks(8)), torch.float32)
    check_memory("llama-3-70b:2", preset("llama-3-70b:2"), World(3, 8, CPU, Ranks(8)), torch.float32)
    refused = (
        "llama-3-70b:16 needs about 7.9 GB a rank for its weights, 63.2 GB for the 8 ranks of this host, and 24.0 GB are free; "
    )
    assert str(said[0]).startswith(refused) and said[1] is None


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel can reclaim a container's inactive file cache, so that part of its memory use counts as free."""
    free = memory.host_free_bytes()
    names = ["limit", "use", "stat"]
    limit, use, stat = (tmp_path / name for name in names)
    monkeypatch.setattr(memory, "CGROUPS", ((str(limit), str(use), str(stat), "inactive_file"),))
    assert memory.host_free_bytes() == pytest.approx(free, rel=0.5)  # the files do not exist: no limit
    use.write_text("600000\n")
    stat.write_text("anon 1\ninactive_file 250000\n")
    limit.write_text("max\n")
    assert memory.host_free_bytes() > 1e6
    limit.write_text("1000000\n")
    assert memory.host_free_bytes() == 650_000
    limit.write_text("100\n")
    assert memory.host_free_bytes() == 0


def test_what_the_host_has_is_counted_in_kibibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUPS", ())
    monkeypatch.setattr(memory, "_field", lambda path, name: 1000 if name == "MemAvailable:" else None)
    assert memory.host_free_bytes() == 1_024_000


def test_codes_in_the_cache_need_less(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `generate.py`: 10 MB of keys and values in fp32 do not fit where their codes do."""
    flags = ("--model", "tiny", "--prompt-length", 100, "--num-samples", 40, "--batch-size", 40, "--max-new-tokens", 1)
    config = preset("tiny")
    weights, cache = weight_bytes(config, 1, torch.float32), cache_bytes(config, 1, torch.float32, 40 * 101)
    monkeypatch.setattr(memory, "host_free_bytes", lambda: weights + cache // 2)
    assert here(*flags, "--dtype", "float32").code == 2
    assert here(*flags, "--dtype", "float32", "--kv-dtype", "fp8").code == 0


# --- a config.json alone -------------------------------------------------------------------------------------------------


def test_a_shape_runs_with_random_weights(here: Here, shape: Path) -> None:
    """The file and its folder name the same model; --variant can change its variant; it has no tokenizer, but the server's."""
    answers = [
        here("--model", name, "--prompt-ids", "5,6,7", "--temperature", 0, "--max-new-tokens", 4, "--json").record
        for name in (shape, shape / "config.json")
    ]
    assert answers[0]["token_ids"] == answers[1]["token_ids"] and len(answers[0]["token_ids"]) == 4
    ladder = here("--model", shape, "--variant", "ladder", "--prompt-length", 1, "--max-new-tokens", 2, "--json").record
    assert ladder["variant"] == "ladder"
    refused = here("--model", shape, "--prompt", "hello")
    assert refused.code == 2 and "has no tokenizer" in refused.err and "give --prompt-ids or --prompt-length" in refused.err
    settings = Settings(model=str(shape))
    config, tokenizer, _ = prepare(settings, 1)
    assert settings.random_weights and isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.vocab_size == config.vocab_size == 1021


def test_a_checkpoint_that_lost_its_weights_is_no_shape(shape: Path) -> None:
    """A folder with any other file besides config.json is a checkpoint, so its weights must exist."""
    config = model_config(str(shape), None, 1)
    assert has_random_weights(str(shape)) and has_random_weights("tiny") and not has_random_weights(str(MODELS / "tiny-hybrid"))
    assert load_model(str(shape), config, ALONE, torch.float32).embedding.weight.std() == pytest.approx(0.02, rel=0.05)
    (shape / "generation_config.json").write_text("{}")
    assert not has_random_weights(str(shape))
    with pytest.raises(UserError, match=r"has none of model\.safetensors"):
        load_model(str(shape), config, ALONE, torch.float32)
