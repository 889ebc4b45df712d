"""Grammars in the engine: compiled in a thread, once for each text, with limits. All ranks admit a request in the same step."""

import gc
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import llguidance
import pytest
import torch

from checkpoints import weights
from checkpoints.presets import model_config
from comms import Local
from engine import grammars as grammars_module
from engine.core import Engine
from engine.grammars import CACHED, CACHED_TEXT, MAX_COMPILING, MAX_DIGITS, MAX_TEXT, Grammars
from engine.limits import EngineLimits
from engine.protocol import Abort, Refused, SamplingParams, Submit, Turn, joined
from errors import UserError
from kernels import determinism
from tests import MODELS
from tests.engine.test_logits import MODEL_VOCAB
from tests.support.ranks import Ranks
from text.tokenizer_files import load_tokenizer
from tp import World

TINY = MODELS / "tiny-hybrid"
ALONE = World(0, 1, torch.device("cpu"), Local())
SECONDS = 300.0


def grammar_of(schema: Any) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})


def large(branches: int, mark: str = "") -> str:
    """A grammar that takes about 0.2 ms to compile for each branch."""
    names = [
        {f"{mark}{i} {j}": {"type": "string", "pattern": f"^[a-z]{{{j + 1},9}}$"} for j in range(3)} for i in range(branches)
    ]
    objects = [{"type": "object", "properties": one, "required": [*one], "additionalProperties": False} for one in names]
    return grammar_of({"anyOf": objects})


# Compiles fast. After the constant, its mask needs more items than a row may have.
_LISTS = {"anyOf": [{"type": "array", "items": {"type": "string", "pattern": f"^a*{i}$"}, "minItems": 1} for i in range(500)]}
_WORDS = "some words that are more than the first tokens"
COMPLEX = grammar_of({"type": "array", "prefixItems": [{"const": _WORDS}], "items": _LISTS, "minItems": 2})
WORD = grammar_of({"enum": ["hi", "ho"]})


def engine_of(world: World = ALONE) -> Engine:
    model = weights.load_model(str(TINY), model_config(str(TINY), None, world.world_size), world, torch.float32)
    return Engine(model, load_tokenizer(TINY), EngineLimits(kv_memory=64 << 20), world)


@pytest.fixture(scope="module")
def shared() -> Engine:
    return engine_of()


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    for request_id in [*shared.scheduler.by_id, *(s.request_id for _, waiting in shared.compiling.values() for s in waiting)]:
        shared.abort(Abort(request_id))


def submit(request_id: str, grammar: str | None, max_tokens: int = 40, seed: int = 0, client: str = "") -> Submit:
    params = SamplingParams(max_tokens=max_tokens, grammar=grammar, seed=seed, stop_token_ids=[1])
    return Submit(request_id, [5, 6, 7], params, turn=Turn(client))


def run(engine: Engine, until: float = SECONDS) -> dict[str, Any]:
    """Run all requests to their end. Returns the token ids or the refusal of each request, by request id."""
    found: dict[str, Any] = {}
    end = time.monotonic() + until
    while engine.has_work() or engine.compiling or engine.refused:
        engine.admit()
        for output in engine.step() if engine.has_work() else []:
            found.setdefault(output.request_id, []).extend(output.token_ids)
        for refused in engine.refused:
            found[refused.request_id] = refused
        engine.refused.clear()
        assert time.monotonic() < end, "the engine does not come to an end"
    return found


def test_sixteen_choices_of_a_large_grammar_compile_once_and_beside(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, go, in_time = list[str](), threading.Event(), list[bool]()
    compile_ = Grammars.compile

    def wait_and_compile(self: Grammars, text: str) -> Any:
        compiled.append(text)
        in_time.append(go.wait(SECONDS))  # False if submitting or a step waits for a compiler
        return compile_(self, text)

    monkeypatch.setattr(Grammars, "compile", wait_and_compile)
    text = large(900)
    assert engine.submit(Submit("plain", [5, 6, 7], SamplingParams(max_tokens=1000))) is None
    for i in range(16):
        assert engine.submit(submit(str(i), text, max_tokens=4, seed=i)) is None
    for _ in range(3):
        engine.admit()
        assert engine.has_work()
        engine.step()
    go.set()
    engine.abort(Abort("plain"))
    answers = run(engine)
    assert compiled == [text] and in_time == [True]
    assert sum(isinstance(answers[str(i)], list) for i in range(16)) == 16
    assert engine.submit(submit("again", text)) is None
    engine.admit()
    assert not engine.compiling and compiled == [text], "a compiled grammar is kept"


def test_a_request_that_still_compiles_can_be_aborted(engine: Engine) -> None:
    for i in range(8):
        assert engine.submit(submit(f"a{i}", large(300, f"{i // 2}/"))) is None
    assert len(engine.compiling) == 4
    assert engine.stats().waiting == 8
    for i in range(7):
        engine.abort(Abort(f"a{i}"))
    assert engine.stats().waiting == 1
    assert set(run(engine)) == {"a7"}


def test_short_grammars_do_not_wait_for_long_ones(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for those that nobody waits for any more, and which take no memory then."""
    compiled, begun, go = list[str](), threading.Event(), threading.Event()

    def compile_(self: Grammars, text: str) -> Any:
        compiled.append(text)
        begun.set()
        assert go.wait(SECONDS)
        raise UserError("no")

    monkeypatch.setattr(Grammars, "compile", compile_)
    first, long, short = (f"{'x' * length} first" for length in (100, 10_000, 10))
    assert engine.submit(submit("first", first)) is None
    assert begun.wait(SECONDS)
    for i in range(100):
        assert engine.submit(submit(f"gone {i}", long + "!")) is None
        engine.abort(Abort(f"gone {i}"))
    for text in (long, short):
        assert engine.submit(submit(str(len(text)), text)) is None
    assert sum(isinstance(one, grammars_module.Compilation) and one.text.endswith("!") for one in gc.get_objects()) == 0
    go.set()
    run(engine)
    assert compiled == [first, short, long]


def test_a_long_grammar_does_not_wait_for_all_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for those that come while it would have been compiled."""
    now = [100.0]
    monkeypatch.setattr(grammars_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    grammars = Grammars(load_tokenizer(TINY), MODEL_VOCAB)
    monkeypatch.setattr(grammars, "_start_thread", lambda: None)
    long, later = "x" * 500_000, {0: "first", 5: "during", 7: "after"}
    grammars.start(long)
    for seconds, short in later.items():
        now[0] = 100.0 + seconds
        grammars.start(short)
    assert [grammars._next().text for _ in range(4)] == ["first", "during", long, "after"]


def test_requests_wait_by_the_text_of_their_grammar(engine: Engine) -> None:
    """Ranks compile at different speeds, so their compilations may differ. But they must wait for the same number of grammars."""
    for i in range(2):
        assert engine.submit(submit(f"h{i}", WORD)) is None
        engine.grammars._cache.clear()
    assert list(engine.compiling) == [WORD]
    assert set(run(engine)) == {"h0", "h1"}


def test_more_grammars_than_may_wait_are_refused_for_now(engine: Engine) -> None:
    """A client alone may have half, another one then a quarter, and so on."""
    fill(engine, "a")
    half = len(engine.compiling)
    assert half == MAX_COMPILING // 2
    assert engine.submit(submit("same", grammar_of({"const": "a 0"}), client="a")) is None, (
        "the grammars count, not the requests"
    )
    refused = engine.submit(submit("one more", WORD, client="a"))
    assert isinstance(refused, Refused) and refused.code == "grammars_busy" and "try again" in refused.message
    for i in range(3 * MAX_COMPILING):
        fill(engine, f"other {i}")
    assert len(engine.compiling) == MAX_COMPILING
    kept = len(engine.compiling) + 1
    assert len(run(engine)) == kept
    assert engine.submit(submit("later", WORD, client="a")) is None


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(engine: Engine) -> None:
    assert engine.submit(submit("c", COMPLEX)) is None
    assert engine.submit(submit("d", WORD)) is None
    assert engine.submit(submit("e", None)) is None
    answers = run(engine)
    refused = answers["c"]
    assert isinstance(refused, Refused) and "cannot be used" in refused.message and "\n" not in refused.message
    assert refused.code == "invalid_schema"
    assert len(answers["e"]) > 0 and len(answers["d"]) > 0
    assert engine.scheduler.blocks.used == 0


@pytest.mark.parametrize("rule", ["e e | /[a-z ]/", "e e e | e e | /(.|\\n)/", 'e "a"? e | /[a-z]/'])
def test_an_ambiguous_grammar_ends_its_request_while_its_masks_are_cheap(engine: Engine, rule: str) -> None:
    """Each token multiplies the ways to parse the text, and the time of a mask grows with the third power of its length."""
    assert engine.submit(submit("ambiguous", f"start: e\ne: {rule}", max_tokens=400)) is None
    assert engine.submit(submit("plain", None, max_tokens=400)) is None
    steps = 0
    while not engine.refused:
        engine.admit()
        steps += len(engine.step()) if engine.has_work() else 0
    (refused,) = engine.refused
    assert (refused.request_id, refused.code) == ("ambiguous", "invalid_schema") and "Too many items" in refused.message
    assert steps < 2 * 60
    engine.refused.clear()
    engine.abort(Abort("plain"))


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_digits_of_a_number_have_an_end(engine: Engine, kind: str, in_turn: Callable[..., bool]) -> None:
    """Those of a text may go on."""
    late, tokenizer = in_turn((False, True), kind == "number"), load_tokenizer(TINY)
    begun = [*tokenizer.encode('{"a":', add_special_tokens=False)]
    digits = {i: 30.0 for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).isdigit()}
    for schema in ({"type": kind}, {"type": "string"})[: 1 + (kind == "number")]:
        grammar = grammar_of({"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False})
        params = SamplingParams(max_tokens=180, grammar=grammar, stop_token_ids=[1], logit_bias=digits, late_grammar=late)
        assert engine.submit(Submit("d", [5, 6, 7], params, begun)) is None
        answer = run(engine)["d"]
        text = tokenizer.decode(answer)
        if schema["type"] == kind:
            assert len(answer) < 170 and max(map(len, re.findall("[0-9]+", text))) < MAX_DIGITS + 9
            assert isinstance(json.loads('{"a":' + text)["a"], int | float)
        else:
            assert len(answer) == 180 - len(begun)


def test_a_grammar_whose_lexer_is_full_is_compiled_again(engine: Engine, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests with a grammar share its lexer, so what each of them adds is more than a lexer may hold."""
    names = [field for field in dir(llguidance.LLParserLimits) if not field.startswith("_")]
    values = {name: getattr(grammars_module.limits(), name) for name in names} | {"max_lexer_states": 400}
    monkeypatch.setattr(grammars_module, "limits", lambda: llguidance.LLParserLimits(**values))
    words = ["".join(random.choices("abcdefghij", k=12)) for _ in range(100)]
    texts = " | ".join(f'"{word}"' for word in words)
    word = SamplingParams(max_tokens=40, grammar=f"start: WORD\nWORD: {texts}", stop_token_ids=[1])
    assert engine.submit(Submit("first", [5, 6, 7], word)) is None
    assert isinstance(run(engine)["first"], list)
    matcher, tokenizer = engine.grammars._cache[word.grammar or ""].matcher, load_tokenizer(TINY)
    for one in words:
        other = matcher.deep_copy()
        for token in tokenizer.encode(one, add_special_tokens=False):
            other.compute_logit_bias()
            other.consume_token(token)
    assert "too many states" in other.get_error()
    assert engine.submit(Submit("refused", [5, 6, 7], word)) is None
    assert "too many states" in run(engine)["refused"].message
    assert engine.submit(Submit("again", [5, 6, 7], word)) is None
    assert isinstance(run(engine)["again"], list)


def optional(request_id: str, grammar: str) -> Submit:
    params = SamplingParams(max_tokens=40, grammar=grammar, seed=3, late_grammar=True, grammar_optional=True)
    return Submit(request_id, [5, 6, 7], params)


def test_an_optional_grammar_that_fails_leaves_the_answer_free(engine: Engine) -> None:
    begun = [5, 6, 7], [*load_tokenizer(TINY).encode(f'["{_WORDS}"', add_special_tokens=False)]
    complex_ = optional("behind", COMPLEX)
    for one in (
        optional("at once", COMPLEX),
        Submit("behind", begun[0], complex_.params, begun[1]),
        optional("wrong", grammar_of({"type": "nope"})),
        optional("long", "x" * (MAX_TEXT + 1)),
        Submit("free", begun[0], SamplingParams(max_tokens=40, seed=3)),
        Submit("free behind", begun[0], SamplingParams(max_tokens=40, seed=3), begun[1]),
    ):
        assert engine.submit(one) is None
    answers = run(engine)
    assert answers["wrong"] == answers["long"] == answers["free"]
    assert len(answers["at once"]) == 40
    assert len(answers["behind"]) == len(answers["free behind"]) > 0
    assert engine.scheduler.blocks.used == 0


def test_an_optional_grammar_waits_for_no_room(engine: Engine) -> None:
    fill(engine)
    assert engine.submit(optional("one more", WORD)) is None
    assert WORD not in engine.compiling
    assert len(run(engine)["one more"]) == 40


def test_load_does_not_decide_about_an_optional_grammar(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where answers must not depend on it, and behind tokens that other ranks may have constrained."""
    fill(engine)
    begun = optional("begun", WORD)
    several = [begun, Submit("begun 2", begun.prompt_ids, begun.params, [8])]
    for one in (Submit("begun", begun.prompt_ids, begun.params, [8]), joined(several)):
        refused = engine.submit(one)
        assert isinstance(refused, Refused) and (refused.request_id, refused.code) == ("begun", "grammars_busy")
    monkeypatch.setattr(determinism, "_enabled", True)
    refused = engine.submit(optional("new", WORD))
    assert isinstance(refused, Refused) and refused.code == "grammars_busy"
    assert engine.submit(optional("wrong", "x" * (MAX_TEXT + 1))) is None, "this does not depend on load"
    assert engine.submit(optional("known", grammar_of({"const": " 0"}))) is None


def fill(engine: Engine, client: str = "") -> None:
    """Let a client's requests wait for as many grammars as it may have compiled."""
    for i in range(MAX_COMPILING):
        if engine.submit(submit(f"{client} {i}", grammar_of({"const": f"{client} {i}"}), client=client)) is not None:
            return


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (grammar_of({"type": "nope"}), "cannot be used"),
        (large(1500), "cannot be used"),  # the first mask has too many branches
        (llguidance.LLMatcher.grammar_from_regex("((a{1000}){1000}){1000}"), "cannot be used"),  # the second one
        ("x" * (MAX_TEXT + 1), "longer than"),
    ],
    ids=["wrong", "wide", "repeated", "long"],
)
def test_a_grammar_beyond_the_limits_is_refused(engine: Engine, grammar: str, why: str) -> None:
    refused = engine.submit(submit("f", grammar)) or run(engine)["f"]
    assert why in refused.message and refused.code == "invalid_schema"


class Panic(BaseException):
    """Like the panics that pyo3 raises, it is not an `Exception`."""


@pytest.mark.parametrize("kind", [ValueError, Panic])
def test_a_library_that_fails_to_start_keeps_nobody_waiting(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Grammars) -> Any:
        raise kind("no such vocabulary")

    monkeypatch.setattr(Grammars, "_tokenizer", fail)
    grammars = Grammars(load_tokenizer(TINY), MODEL_VOCAB)
    grammars.warm_up()
    compilation, end = grammars.start(WORD), time.monotonic() + SECONDS
    while not compilation.state:
        time.sleep(0.001)
        assert time.monotonic() < end, "the thread has ended"
    assert compilation.state == grammars_module.FAILED and "no such vocabulary" in compilation.error


def test_what_is_kept_is_bounded() -> None:
    grammars = Grammars(load_tokenizer(TINY), MODEL_VOCAB)
    for i in range(CACHED + 10):
        kept(grammars, grammar_of({"const": i}))
    assert len(grammars._cache) == CACHED
    for i in range(6):
        kept(grammars, grammar_of({"const": str(i), "description": "x" * (CACHED_TEXT // 5)}), compiles=False)
    assert sum(map(len, grammars._cache)) <= CACHED_TEXT and len(grammars._cache) < 6


def kept(grammars: Grammars, text: str, compiles: bool = True) -> None:
    """Put a grammar into the cache. compiles: False stores it as if it were compiled, so the text may have any length."""
    compilation = grammars.start(text) if compiles else grammars_module.Compilation(text)
    end = time.monotonic() + SECONDS
    while compiles and not compilation.state:
        time.sleep(0.001)
        assert time.monotonic() < end
    compilation.state = grammars_module.COMPILED
    grammars.keep(compilation)


def test_min_tokens_give_way_to_a_grammar_that_ends(engine: Engine) -> None:
    """At its end the grammar allows only a stop token, which min_tokens masks. The grammar takes precedence."""
    params = SamplingParams(max_tokens=20, min_tokens=15, grammar='start: "hi" "!"?', stop_token_ids=[1])
    assert engine.submit(Submit("g", [5, 6, 7], params)) is None
    tokenizer = load_tokenizer(TINY)
    assert tokenizer.decode([one for one in run(engine)["g"] if one != 1]) in ("hi", "hi!")


# --- ranks ------------------------------------------------------------------------------------------------------------------


def rank_compiles(world: World, slow: int) -> tuple[list[int], dict[str, Any], list[str]]:
    """One rank compiles more slowly, and a grammar fails on it. Returns the number of grammars to wait for, all answers, and what is
    cached."""
    engine = engine_of(world)
    compile_, aborted = engine.grammars.compile, threading.Event()

    def compile_slowly(text: str) -> Any:
        time.sleep(0.3 * (world.rank == slow))
        if world.rank == slow and text == large(50):
            assert aborted.wait(SECONDS)
        if world.rank == slow and "unlucky" in text:
            raise UserError("no memory")
        return compile_(text)

    engine.grammars.compile = compile_slowly  # type: ignore[method-assign]
    texts = [None, WORD, COMPLEX, WORD, grammar_of({"type": "nope"}), grammar_of({"const": "unlucky"}), large(50)]
    for i, text in enumerate(texts):
        assert engine.submit(submit(str(i), text, max_tokens=30, seed=i)) is None
    compilation, _ = engine.compiling[large(50)]
    while world.rank != slow and not compilation.state:
        time.sleep(0.001)
    engine.abort(Abort("6"))
    aborted.set()
    for i, text in enumerate([COMPLEX, grammar_of({"const": "unlucky"}), grammar_of({"type": "nope"})], 7):
        assert engine.submit(optional(str(i), text)) is None
    return [len(engine.compiling)], run(engine), [*engine.grammars._cache]


def test_ranks_admit_and_refuse_together(ranks: Ranks, in_turn: Callable[..., int]) -> None:
    (waiting, first, cached), (_, second, also_cached) = ranks.run(2, rank_compiles, in_turn((0, 1), 0))
    assert waiting == [4]
    assert cached == also_cached == [WORD]
    assert {k: v for k, v in first.items() if isinstance(v, list)} == {k: v for k, v in second.items() if isinstance(v, list)}
    for answers in (first, second):
        assert {k for k, v in answers.items() if isinstance(v, Refused)} == {"2", "4", "5"}
        assert set(answers) == {*"012345789"}
