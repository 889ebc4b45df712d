"""Sequences that an engine has begun and another one ends: as if nothing had happened between, wherever they are cut."""

import json
import random
import time
from typing import Any

import msgspec

from engine.core import Engine
from engine.grammars import Grammars
from engine.protocol import Submit, SubmitAll, decode_to_engine, encode, joined
from model import Transformer
from tests.engine.test_drafts import JSON, assert_answers, bent_submits, predicting
from tests.engine.test_engine import Answer, cheap, config_of, engine_of, random_model, serve, step, tiny_tokenizer


def go_on(engine: Engine, submits: list[Submit], answers: dict[str, Answer], steps: int) -> None:
    """Let an engine that knows nothing of the requests go on with the unfinished ones, for at most so many steps."""
    for submit in submits:
        answer = answers[submit.request_id]
        if answer.finish_reason is None:
            sent = msgspec.structs.replace(submit, generated=list(answer.tokens))
            message = decode_to_engine(encode(random.choice([sent, joined([sent])])))
            assert isinstance(message, Submit | SubmitAll) and engine.submit(message) is None
    while engine.compiling:
        engine.admit()
        time.sleep(0.001)
    while engine.has_work() and steps:
        steps -= 1
        step(engine, answers)


def cut_anywhere(
    model: Transformer, submits: list[Submit], grammars: Grammars | None = None, **limits: Any
) -> dict[str, Answer]:
    """Serve the requests on one engine after the other, until all have ended. grammars: shared, because it starts slowly."""
    answers = {s.request_id: Answer() for s in submits}
    while any(a.finish_reason is None for a in answers.values()):
        engine = engine_of(model, **limits)
        engine.grammars = grammars or engine.grammars
        go_on(engine, submits, answers, random.randint(1, 12))
    return answers


def test_a_cut_changes_no_answer(seed: int) -> None:
    """Penalties, biases, least lengths, stop tokens, log-probabilities, with and without drafts and under preemption. `Answer`
    checks that the prompt's log-probabilities come once."""
    for name in ("hybrid:2", "desync-2x:4", "qwen3-yarn"):
        model = random_model(config_of(name))
        submits = bent_submits(8)
        submits = random.choice([submits, predicting(submits, serve(engine_of(model), submits))])
        some = random.choice([{}, dict(max_batch_tokens=7), dict(n_blocks=15, max_batch_tokens=30), dict(draft_tokens=4)])
        assert_answers(model, submits, cut_anywhere(model, submits, **some))


def test_a_cut_changes_no_grammar(seed: int) -> None:
    tokenizer = tiny_tokenizer()
    fixed = dict(max_tokens=60, grammar=JSON, stop_token_ids=list(tokenizer.eos_ids), temperature=0.7, min_tokens=0)
    submits = bent_submits(6, **fixed)
    model = cheap()
    engine = engine_of(model, tokenizer=tokenizer)
    whole = serve(engine, submits)
    answers = cut_anywhere(model, submits, engine.grammars, tokenizer=tokenizer, draft_tokens=random.choice([0, 3]))
    assert sum(answers[i].tokens == whole[i].tokens for i in whole) >= len(whole) - 1  # all, unless rounding decides a tie
    for answer in answers.values():
        if answer.finish_reason == "stop":
            assert json.loads(tokenizer.decode(answer.tokens)).keys() == {"word"}


def test_what_was_generated_is_checked(seed: int) -> None:
    engine, submit = engine_of(random_model(config_of("standard"))), bent_submits(1)[0]
    refused = engine.submit(msgspec.structs.replace(submit, generated=[5, 101]))
    assert refused is not None and "101" in refused.message
    assert not engine.has_work()
