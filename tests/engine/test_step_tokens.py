"""The default of `--max-batch-tokens`: by GPU and layers, the same on all ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoints.presets import model_config
from engine import limits as module
from engine.core import Engine
from engine.limits import USUAL, EngineLimits, Entry, default_tokens, entries, kind, step_tokens
from tests.engine.test_engine import ALONE, config_of, random_model
from tp import World

H100 = "NVIDIA H100 80GB HBM3"


def test_the_fewest_tokens_that_are_enough_of_the_nearest_entry() -> None:
    few = Entry("H100", "", 1, 100, {1024: 96.0, 2048: 99.0, 4096: 100.0, 8192: 101.0})
    many = Entry("H100", "", 1, 300, {8192: 100.0, 512: 98.0})
    split, known = Entry("H100", "", 2, 100, {1024: 1.0}), [few, many, Entry("H200", "", 1, 100, {64: 1.0})]
    assert [default_tokens(H100, weights, 1, known) for weights in (49, 50, 170, 180, 600, 601)] == [
        USUAL,
        2048,
        2048,
        512,
        512,
        USUAL,
    ]
    assert default_tokens("H100", 100, 1, known) == 2048 and default_tokens("NVIDIA H200", 100, 1, known) == 64
    assert default_tokens(H100, 100, 2, known) == USUAL and default_tokens(H100, 100, 8, [*known, split]) == 1024
    for other in ("", "NVIDIA A100-SXM4-80GB", "NVIDIA GH200 480GB", "H1000"):
        assert default_tokens(other, 100, 1, known) == USUAL


def test_the_table_that_is_shipped() -> None:
    assert entries()
    for entry in entries():
        assert entry.layer_weights == model_config(entry.model, None, 1).layer_parameter_count() // entry.ranks
        assert entry.gpu == kind(entry.gpu) and len(entry.tokens_per_second) > 1
        assert entry.tokens == default_tokens(f"NVIDIA {entry.gpu} X", entry.layer_weights, entry.ranks, entries())


def test_an_engine_takes_it_unless_told() -> None:
    model = random_model(config_of("parallel"))
    for given, expected in ((None, USUAL), (77, 77)):
        engine = Engine(model, None, EngineLimits(max_batch_tokens=given, max_num_seqs=2, kv_memory=1e6, block_size=4), ALONE)
        assert engine.scheduler.max_batch_tokens == engine.runner.capacity.tokens == expected


def chosen(world: World) -> int:
    """As if each rank had another GPU."""
    config = model_config("tiny", None, world.world_size)
    weights = config.layer_parameter_count() // world.world_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda _: f"NVIDIA X{world.rank}")
        found = [Entry(f"X{rank}", "", 2, weights, {100 + rank: 1.0}) for rank in range(world.world_size)]
        patch.setattr(module, "entries", lambda: found)
        return step_tokens(config, replace(world, device=torch.device("cuda")))


def test_all_ranks_take_rank_0s(ranks: Any) -> None:
    assert ranks.run(3, chosen) == [100] * 3
