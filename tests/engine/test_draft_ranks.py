"""Drafts of the embedded heads and of a smaller model on two CPU ranks, whole and split, also over a simulated link and beside quantized
weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from comms.registry import choose
from engine import LLM, SamplingParams
from engine.draft_costs import Costs
from engine.protocol import Submit
from tests import MODELS
from tests.engine.gpu_drafts_rank import DRAFTS, PROMPTS, answers, check
from tests.engine.test_engine import ALONE, assert_same
from tests.support.ranks import Ranks
from tp import World

ROUNDING = 1e-4


def rank_drafts(world: World, link: str | None, name: str) -> list[dict[str, Any]]:
    return list(answers(replace(world, comm=choose("cpu", "gloo", link).build()), "gloo", (name,)))


def test_drafts_of_whole_and_split_models(ranks: Ranks, in_turn: Callable[..., Any]) -> None:
    first, second = ranks.run(2, rank_drafts, in_turn((None, "20us,10GB/s"), 0), in_turn(tuple(DRAFTS), 0))
    assert first == second and {line["split"] for line in first} == {False, True}
    check(first, ROUNDING)


def test_a_head_drafts_for_quantized_weights(in_turn: Callable[..., str], seed: int) -> None:
    path = Path(MODELS / f"tiny-{in_turn(tuple(DRAFTS), 0)}")
    llm = LLM(path, world=ALONE, quantize=in_turn(("int8", "int4"), 0), speculate="auto", draft_tokens=4)
    greedy = SamplingParams(max_tokens=40, temperature=0)
    prompts = [llm.encode(prompt) for prompt in PROMPTS]
    llm.generate(prompts, greedy)  # makes the engine
    assert llm._engine is not None
    engine = llm._engine[1]
    engine.speculation.costs = Costs({1: 1.0, 2: 1.0})  # what steps take must not decide what is tested
    found = llm.generate(prompts, greedy)
    assert llm._engine[1] is engine and engine.speculation.total["head"].accepted > 20
    for i, (prompt, answer) in enumerate(zip(prompts, found, strict=True)):
        params = SamplingParams(max_tokens=40, temperature=0, stop_token_ids=sorted(llm.eos_ids))
        assert_same(llm.model, Submit(str(i), prompt, params), answer.token_ids, ROUNDING)
