"""The memory of the KV cache, and what happens when a GPU's memory runs out."""

import random

import pytest
import torch

from engine.core import Engine
from engine.limits import GRAPHS, MOST_DRAFTED, STEP_TOKENS, EngineLimits, cache_memory
from errors import RankError
from tests.engine.test_engine import ALONE, config_of, random_model

GPU = torch.device("cuda")
GIB = 1 << 30


def test_a_gpu_keeps_memory_for_graphs(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    for free, models, expected in (
        (60 * GIB, 1, 54 * GIB),
        (60 * GIB, 2, 54 * GIB),
        (12 * GIB, 1, 10 * GIB),
        (12 * GIB, 2, 8 * GIB),
        (3 * GIB, 1, 1.5 * GIB),  # else little would be left
        (3 * GIB, 2, 1.5 * GIB),
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80 * GIB))
        assert cache_memory(EngineLimits(), GPU, models) == pytest.approx(expected)
        share, size = random.uniform(0.01, 1), random.uniform(2, 1e12)  # what the user asks for is what he gets
        assert cache_memory(EngineLimits(kv_memory=share), GPU, models) == share * free
        assert cache_memory(EngineLimits(kv_memory=1.0), GPU, models) == free
        assert cache_memory(EngineLimits(kv_memory=size), GPU, models) == size
    assert GRAPHS == 2 * GIB


def test_the_drafted_tokens_of_a_step_are_bounded() -> None:
    drafted = [EngineLimits(draft_tokens=most, max_num_seqs=n).drafted for most, n in ((0, 9), (7, 3), (7, 1000))]
    assert drafted == [0, 21, MOST_DRAFTED]


@pytest.mark.parametrize(("longest", "blocks"), [(None, 40), (17, 10), (80, 40), (10**5, 40)])
def test_no_more_blocks_than_sequences_of_the_models_context_can_use(longest: int | None, blocks: int) -> None:
    model = random_model(config_of("standard"))  # its context has 80 tokens
    engine = Engine(model, None, EngineLimits(max_model_len=longest, max_num_seqs=2, block_size=4), ALONE)
    assert engine.scheduler.blocks.n_blocks == blocks and engine.max_model_len == min(longest or 80, 80)


@pytest.mark.parametrize(("given", "expected"), [(None, STEP_TOKENS), (77, 77)])
def test_the_tokens_of_a_step(given: int | None, expected: int) -> None:
    limits = EngineLimits(max_batch_tokens=given, max_num_seqs=2, kv_memory=1e6, block_size=4)
    engine = Engine(random_model(config_of("parallel")), None, limits, ALONE)
    assert engine.scheduler.max_batch_tokens == engine.runner.capacity.tokens == expected


def test_memory_that_runs_out_in_a_capture_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(random_model(config_of("standard")), None, EngineLimits(kv_memory=1e6), ALONE)

    def capture(quiet: bool) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 56.00 MiB.\nmore")

    monkeypatch.setattr(engine.runner, "capture", capture)
    with pytest.raises(RankError, match=r"rank 0.*--kv-memory.*--max-num-seqs.*56\.00 MiB") as raised:
        engine.capture()
    assert "\n" not in str(raised.value)
