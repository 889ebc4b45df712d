"""Tensor parallelism: 1, 2 and 4 gloo ranks compute what one process computes, each from its own slice of the weights."""

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import comms
from checkpoints import sources
from comms.interface import SCHEDULES
from config import ModelConfig, YarnScaling, with_variant
from errors import UserError
from layers.attention import Causal
from tests.support.models import ALONE, CPU, custom_desync, load, save_random
from tests.support.paged import CachedSequences
from tests.support.ranks import Ranks
from tp import World, agree_on_error, stream_shards

TOLERANCE = 1e-4  # of fp32 logits of size about 1
STEPS = 5  # greedy tokens
VARIANTS = ["standard", "parallel", "ladder", "hybrid-list", "desync-2x:4", "desync-4x:4", "desync-custom"]


def base_config(**more: Any) -> ModelConfig:
    shape = dict(
        vocab_size=101,  # not divisible by 2 or 4 ranks
        hidden_size=40,
        n_layers=4,
        n_heads=8,
        n_kv_heads=random.choice([2, 4, 8]),
        head_dim=8,
        intermediate_size=48,
        max_seq_len=64,
    )
    return ModelConfig(**shape | more)


def variant_of(config: ModelConfig, name: str) -> ModelConfig:
    if name == "hybrid-list":
        return replace(config, variant="ladder", ladder_layers=(0, 3))
    if name == "desync-custom":
        return custom_desync(config)
    return with_variant(config, name)


@torch.inference_mode()
def evaluate(world: World, directory: Path, tokens: Tensor) -> dict[str, Tensor]:
    """Logits of a whole prompt, and of its last and first token alone; tokens and logits of the greedy steps after it, with a
    cache."""
    model = load(world, directory)
    context = Causal(tokens.shape[1], CPU)
    logits = model(tokens, context)
    ends = model.logits(model.hidden(tokens, context, torch.tensor([tokens.shape[1] - 1, 0])))
    batch, length = tokens.shape
    sequences = CachedSequences(model, batch, length + STEPS)
    chosen, seen = [], []
    for _ in range(STEPS):
        seen.append(sequences.logits(tokens)[:, -1])
        tokens = seen[-1].argmax(-1, keepdim=True)
        chosen.append(tokens)
    return {"logits": logits, "ends": ends, "tokens": torch.cat(chosen, 1), "steps": torch.stack(seen, 1)}


def unmistakable(directory: Path, vocab_size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A random prompt whose greedy tokens do not depend on rounding, and what one process computes for it."""
    for _ in range(50):
        tokens = torch.randint(vocab_size, (2, random.randint(3, 9)))
        expected = evaluate(ALONE, directory, tokens)
        first, second = expected["steps"].topk(2).values.unbind(-1)
        if (first - second).min() > 10 * TOLERANCE:
            return tokens, expected
    raise AssertionError("every prompt has a near tie")


def assert_ranks_compute(ranks: Ranks, n: int, directory: Path, vocab_size: int) -> None:
    tokens, expected = unmistakable(directory, vocab_size)
    assert expected["logits"].abs().max() > 0.5, "logits too small for an absolute tolerance"
    results = ranks.run(n, evaluate, directory, tokens)
    for result in results:
        assert result["logits"].shape == (*tokens.shape, vocab_size)
        assert (result["logits"] - expected["logits"]).abs().max() < TOLERANCE
        assert (result["ends"] - expected["logits"][:, [-1, 0]]).abs().max() < TOLERANCE
        assert (result["steps"] - expected["steps"]).abs().max() < TOLERANCE
        assert torch.equal(result["tokens"], expected["tokens"])
        for key in result:
            assert torch.equal(result[key], results[0][key]), f"the ranks' {key} are not bitwise equal"


# --- the same numbers on every number of ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_compute_what_one_process_computes(
    variant: str, in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    """Also that biases are added once, whatever the number of ranks."""
    place = VARIANTS.index(variant)
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), True)
    bare, output = dict(family="smollm3", no_rope_layers=(1, 2)), dict(family="seed_oss", qkv_bias=False)
    grown = dict(family="ministral3", query_growth=0.5, rope_scaling=YarnScaling(4.0, 3, 1.1))
    n, more = in_turn([2, 4, 2], place), in_turn([{}, biases, biases | bare, biases | output, grown], place)
    config = variant_of(base_config(**more), variant)
    assert_ranks_compute(ranks, n, save_random(config, tmp_path), config.vocab_size)


def test_a_group_of_one_computes_what_one_process_computes(
    in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    config = variant_of(base_config(), in_turn(VARIANTS, 0))
    assert_ranks_compute(ranks, 1, save_random(config, tmp_path), config.vocab_size)


def evaluate_scheduled(world: World, directory: Path, tokens: Tensor) -> dict[str, dict[str, Tensor]]:
    found = {}
    for schedule in SCHEDULES:
        world.comm.use(schedule)
        found[schedule] = evaluate(world, directory, tokens)
    return found


@pytest.mark.parametrize(("place", "variant"), list(enumerate(["ladder", "hybrid:2", "hybrid-list"])))
def test_all_schedules_of_a_ladder_give_the_same_bits(
    place: int, variant: str, in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    n = in_turn([1, 2, 4], place)
    config = variant_of(base_config(), variant)
    tokens, expected = unmistakable(save_random(config, tmp_path), config.vocab_size)
    results = ranks.run(n, evaluate_scheduled, tmp_path, tokens)
    for result in results:
        for schedule, found in result.items():
            assert (found["logits"] - expected["logits"]).abs().max() < TOLERANCE, schedule
            assert (found["steps"] - expected["steps"]).abs().max() < TOLERANCE, schedule
            for key in found:
                assert torch.equal(found[key], results[0]["overlapped"][key]), f"{schedule}: {key}"


@pytest.mark.parametrize(("place", "variant"), list(enumerate(["standard", "parallel", "ladder", "desync-2x:4"])))
def test_families_with_fewer_kv_heads_than_ranks(
    place: int, variant: str, in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    """One KV head, replicated; Qwen2's biases or Qwen3's QK norm; a tied embedding; a sliding window."""
    n = in_turn([2, 4], place)
    qwen2 = random.random() < 0.5
    family = dict(family="qwen2", qkv_bias=True) if qwen2 else dict(family="qwen3", qk_norm=True)
    config = base_config(n_kv_heads=1, tie_embeddings=True, windows=(None, 4, None, 4), **family)
    assert_ranks_compute(ranks, n, save_random(variant_of(config, variant), tmp_path), config.vocab_size)


def test_a_vocabulary_that_leaves_a_rank_without_rows(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    """5 ids over 4 ranks: 2, 2, 1 and none."""
    config = base_config(vocab_size=5)
    assert_ranks_compute(ranks, 4, save_random(config, tmp_path), 5)


@torch.inference_mode()
def upper_bound_logits(world: World, directory: Path, tokens: Tensor) -> tuple[Tensor, Tensor]:
    model = load(world, directory)
    sent: list[str] = []

    def counted(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **more: sent.append(name) or collective(*args, **more)  # type: ignore[func-returns-value]

    with pytest.MonkeyPatch.context() as patch:
        for name in "all_reduce", "all_to_all_single":  # of long sums and of short ones
            patch.setattr(dist, name, counted("sum", getattr(dist, name)))
        patch.setattr(comms.process_group, "all_gather", counted("gather", comms.process_group.all_gather))
        return model(tokens, Causal(tokens.shape[1], CPU)), sent


def test_upper_bound_sends_nothing_and_still_gives_tokens(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    config = with_variant(base_config(), "upper-bound")
    tokens = torch.randint(config.vocab_size, (2, 5))
    for logits, sent in ranks.run(2, upper_bound_logits, save_random(config, tmp_path), tokens):
        assert sent == []
        assert logits.shape == (2, 5, config.vocab_size)
        assert not logits.isnan().any()
        assert logits.max(-1).values.isfinite().all()
    standard = save_random(with_variant(config, "standard"), tmp_path / "standard")
    assert all(
        sent.count("gather") == 1 and sent.count("sum") == 9 for _, sent in ranks.run(2, upper_bound_logits, standard, tokens)
    )


# --- what cannot be split ------------------------------------------------------------------------------------------------


def failure(world: World, directory: Path) -> str | None:
    try:
        load(world, directory)
    except UserError as e:
        return str(e)
    return None


@pytest.mark.parametrize(
    ("shape", "variant", "n", "words"),
    [
        (dict(), "desync-2x:4", 3, "3 ranks.*divides 4"),
        (dict(), "desync-2x:2", 4, "4 ranks.*divides 2"),
        (dict(), "desync-2x:1", 2, "2 ranks.*divides 1"),
        (dict(n_heads=6, n_kv_heads=2), "standard", 4, "6 attention heads.*4 ranks; use 1, 2 or 6$"),
        (dict(n_heads=9, n_kv_heads=3), "standard", 2, "9 attention heads.*2 ranks; use 1 or 3$"),
        (dict(n_heads=12, n_kv_heads=6), "standard", 4, "6 KV heads.*4 ranks; use 1, 2, 3, 6 or 12$"),
        (dict(intermediate_size=50), "standard", 4, "50 intermediate features.*4 ranks; use 1 or 2$"),
    ],
)
def test_what_ranks_cannot_share(
    shape: dict[str, int], variant: str, n: int, words: str, ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    config = with_variant(base_config(**shape), variant)
    for rank in range(n):
        with pytest.raises(UserError, match=words):
            stream_shards(config, rank, n)
    messages = ranks.run(n, failure, save_random(config, tmp_path))
    assert messages[0] is not None and re.search(words, messages[0]) and len(set(messages)) == 1


def test_streams_that_the_model_cannot_be_split_into() -> None:
    config = with_variant(base_config(n_heads=6, n_kv_heads=2), "desync-2x:4")
    with pytest.raises(UserError, match=r"6 attention heads.*4 desync streams"):
        stream_shards(config, 0, 1)


# --- every rank holds and reads only its slice -----------------------------------------------------------------------------


def slices(world: World, directory: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """This rank's parameters, and how many elements of each tensor it read from the file."""
    taken: dict[str, int] = {}
    read = sources.SafetensorsSource.read

    def counting(self: sources.SafetensorsSource, name: str, *where: int) -> Tensor:
        part = read(self, name, *where)
        taken[name] = taken.get(name, 0) + part.numel()
        return part

    sources.SafetensorsSource.read = counting  # type: ignore[method-assign]
    try:
        model = load(world, directory)
    finally:
        sources.SafetensorsSource.read = read  # type: ignore[method-assign]
    return {name: p.detach().clone() for name, p in model.named_parameters()}, taken


@pytest.mark.parametrize(("place", "variant"), list(enumerate(["standard", "parallel", "hybrid-list", "desync-2x:4"])))
def test_ranks_read_each_element_once(
    place: int, variant: str, in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    """Every rank holds all norms (a desync rank reads them at most once for each stream's module). Every other element is read
    by exactly one rank and held by one rank."""
    n = in_turn([2, 4], place)
    config = variant_of(base_config(n_kv_heads=4), variant)
    full = load_file(save_random(config, tmp_path) / "model.safetensors")
    results = ranks.run(n, slices, tmp_path)
    for name, tensor in full.items():
        counts = [taken.get(name, 0) for _, taken in results]
        if "norm" in name:
            assert all(count >= tensor.numel() for count in counts), name
        else:
            assert sum(counts) == tensor.numel(), name
            assert max(counts) <= math.ceil(tensor.shape[0] / n) * tensor.shape[1], name
    norms = sum(tensor.numel() for name, tensor in full.items() if "norm" in name)
    rest = sum(tensor.numel() for name, tensor in full.items() if "norm" not in name)
    padding = 2 * (-(-config.vocab_size // n) * n - config.vocab_size) * config.hidden_size
    held = [sum(p.numel() for p in parameters.values()) for parameters, _ in results]
    assert sum(held) == rest + padding + n * norms
    assert len(set(held)) == 1


# --- the communicator ----------------------------------------------------------------------------------------------------


def sums_of(world: World, partials: list[Tensor]) -> list[Tensor]:
    """All-reduces of this rank's partials (row r of each). All have begun before the first wait."""
    pending = [world.comm.begin_all_reduce(p[world.rank].clone()) for p in partials]
    return [each.wait() for each in pending]


def wide_range(n: int, size: int) -> Tensor:
    """bf16 partials (n, size) whose sum is exact in fp32, as its terms are multiples of 2^-6 below 2^14, but not in bf16."""
    exponents = torch.randint(-6, 7, (n, size))
    return (torch.randint(-255, 256, (n, size)) * 2.0**exponents).bfloat16()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_bf16_is_summed_in_fp32_and_rounded_once(n: int, ranks: Ranks, seed: int) -> None:
    partials = [wide_range(n, size) for size in (1, 7, 1000, 40_000)]
    expected = [p.double().sum(0).bfloat16() for p in partials]
    for sums in ranks.run(n, sums_of, partials):
        for total, right in zip(sums, expected, strict=True):
            assert total.dtype == torch.bfloat16
            assert torch.equal(total, right)
    if n == 4:
        in_bf16 = partials[-1][0]
        for row in partials[-1][1:]:
            in_bf16 = in_bf16 + row
        assert not torch.equal(in_bf16, expected[-1]), "the inputs do not tell fp32 sums from bf16 sums"


# --- errors are raised on every rank ---------------------------------------------------------------------------------------


def agree(world: World, messages: list[str | None]) -> str | None:
    mine = messages[world.rank]
    try:
        agree_on_error(world, UserError(mine) if mine else None)
    except UserError as e:
        return str(e)
    return None


@pytest.mark.parametrize(
    ("messages", "raised"),
    [
        ([None, None, None], None),
        ([None, "no such file", None], "no such file"),
        (["a disk is full", None, None], "a disk is full"),
        ([None, None, "too few GPUs"], "too few GPUs"),
        ([None, "one", "two"], "one"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(messages: list[str | None], raised: str | None, ranks: Ranks, seed: int) -> None:
    assert ranks.run(3, agree, messages) == [raised] * 3


def load_own(world: World, directories: list[Path]) -> str | None:
    return failure(world, directories[world.rank])


def test_a_checkpoint_broken_on_one_rank_stops_all(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    whole = save_random(base_config(), tmp_path / "whole")
    torn = save_random(base_config(), tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-100])
    results = ranks.run(2, load_own, [whole, torn])
    assert results[0] is not None and "torn" in results[0]
    assert results[1] == results[0]
