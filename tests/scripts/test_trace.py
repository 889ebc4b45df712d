"""scripts/trace.py and one run of a sweep: sequences whose prompts take several steps decode together in the steps that count."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import engine.core
import engine.llm
from engine import LLM
from engine.llm import Timing
from engine.profiling import annotate, read_trace
from engine.runner import InFlightStep, Runner
from engine.sequence import Chunk
from errors import UserError
from scripts import trace
from scripts.sweep import worker
from scripts.sweep.rows import Setting
from tests import MODELS
from tests.engine.test_engine import ALONE, config_of, random_model
from tests.engine.test_runner import as_on_a_gpu
from tests.support.ranks import Ranks
from tp import World

TINY = MODELS / "tiny-ladder"
NEW_TOKENS = 6


@contextmanager
def launches() -> Iterator[list[list[int]]]:
    """Of each step that is launched meanwhile, the tokens of each sequence."""
    found: list[list[int]] = []
    launch = Runner.launch

    def noted(runner: Runner, chunks: list[Chunk], *more: Any) -> InFlightStep:
        found.append([chunk.count for chunk in chunks])
        return launch(runner, chunks, *more)

    with patch.object(Runner, "launch", noted):
        yield found


def assert_together(steps: list[list[int]], lengths: list[int], budget: int) -> None:
    """The last steps compute a token of each sequence, and the ones before all prompts, the last one in the last of them."""
    *before, last = steps[: 1 - NEW_TOKENS]
    assert steps[1 - NEW_TOKENS :] == [[1] * len(lengths)] * (NEW_TOKENS - 1)
    assert all(sum(counts) == max(budget, len(lengths)) for counts in before)  # so the step after the prefill is none too late
    assert len(last) == len(lengths)
    assert sum(map(sum, [*before, last])) >= sum(lengths)


def generated(llm: LLM, lengths: list[int], budget: int) -> list[list[int]]:
    """What each launched step of one call computes, after a check of what the call yields and leaves behind."""
    prompts = [[random.randrange(101) for _ in range(length)] for length in lengths]
    with patch.object(engine.llm, "PREFILL_TOKENS", budget):
        for _ in range(2):  # the second call finds a clean engine
            timing, seen = Timing(), list[int]()
            with launches() as steps:
                for _ in trace.generate_together(llm, prompts, NEW_TOKENS, timing):
                    seen.append(len(timing.steps))
            assert seen == list(range(NEW_TOKENS))
            assert timing.prefill > 0 and timing.tokens == (NEW_TOKENS - 1) * len(prompts)
            assert llm.engine is not None and not llm.engine.has_work()
    return steps


def random_lengths() -> list[int]:
    return [random.randint(1, 30) for _ in range(random.randint(2, 9))]


@pytest.mark.parametrize("gpu", [False, True])
def test_sequences_of_several_prefill_steps_decode_together(gpu: bool, seed: int) -> None:
    llm = LLM(random_model(replace(config_of("ladder"), max_seq_len=400)), world=ALONE)
    for _ in range(4):
        lengths, budget = random_lengths(), random.choice([1, 2, 7, 16, 40])
        with as_on_a_gpu() if gpu else nullcontext():  # where steps are launched ahead
            assert_together(generated(llm, lengths, budget), lengths, budget)
        llm._engine = None  # the next one may need the same limits, but another kind of runner


def test_sequences_that_cannot_run_at_once_are_refused(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = random_model(config_of("standard")), [[5] * 10] * 4
    for changed, name, value in (engine.llm, "MAX_SEQUENCES", 3), (engine.core, "count_blocks", lambda *_: 3):
        llm = LLM(model, world=ALONE)
        with monkeypatch.context() as patched:
            patched.setattr(changed, name, value)
            with pytest.raises(UserError, match="4 sequences of 10 tokens do not run at once"):
                list(trace.generate_together(llm, prompts, NEW_TOKENS))
        assert llm.engine is not None and not llm.engine.has_work()


def rank_records(world: World, folder: Path, prompts: list[list[int]], budget: int) -> None:
    llm = LLM(str(TINY), world=world)
    annotate(llm.model)
    with patch.object(engine.llm, "PREFILL_TOKENS", budget):
        trace.record(llm, prompts, NEW_TOKENS, folder / "trace.json", world)


@pytest.mark.parametrize("n", [1, 2])
def test_a_recorded_decode_step_is_one_step(n: int, ranks: Ranks, tmp_path: Path, seed: int) -> None:
    prompts, budget = [[5] * 10] * 4, random.randint(12, 18)
    ranks.run(n, rank_records, tmp_path, prompts, budget)
    events = read_trace(tmp_path / "trace.json")["traceEvents"]
    line = trace.timeline(events)
    assert [name for name, _ in line.steps] == ["prefill", *(f"decode {i}" for i in range(1, NEW_TOKENS))]
    begun = [e["ts"] for e in events if e.get("ph") == "X" and e["name"].startswith("layer 0 attention")]
    counts = [sum(first <= ts < last for ts in begun) for _, (first, last) in line.steps]
    assert counts == [3 if budget > 14 else 4, *[1] * (NEW_TOKENS - 1)]
    assert set(trace.by_phase(line)) == {"prefill", "decode"}


def rank_samples(world: World, s: Setting, budgets: list[int]) -> list[dict[str, Any]]:
    llm, comm = worker.Models(world).get(s)
    samples = []
    for budget in budgets:
        with patch.object(engine.llm, "PREFILL_TOKENS", budget):
            samples.append(worker.one_run(llm, comm, s, world))
    return samples


def test_what_a_run_counts_does_not_depend_on_the_steps_of_its_prefill(ranks: Ranks, seed: int) -> None:
    setting = Setting("tiny", "ladder", 2, 5, 20, NEW_TOKENS, interconnect="1us,1GB/s")
    for several, one in ranks.run(2, rank_samples, setting, [random.randint(6, 60), 1000]):
        assert several["link_ms"] == one["link_ms"] > 0
        assert len(several["step_ms"]) == len(one["step_ms"]) == NEW_TOKENS - 1
        assert several["step_tokens"] < one["step_tokens"] == 100
