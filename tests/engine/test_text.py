"""Answer streams against their definition: decode all ids, and cut the text before the first stop string."""

import codecs
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import SamplingParams, TokenOutput
from engine.text import AnswerStream
from tests import MODELS
from text.tokenizer import Tokenizer
from text.tokenizer_files import load_tokenizer

FOLDER = MODELS / "tiny-hybrid"
TOKENIZER = load_tokenizer(FOLDER)
PADDED_VOCABULARY = TOKENIZER.vocab_size + 8  # as for a model that pads its embedding
TEXTS = [
    "Once upon a time there was a fox.",
    "naïve façade, Grüße",
    "日本語と🦊👩‍👩‍👧",
    "привет, мир",
    "aaaaabaaaab",
    "12 + 34 = 46",
]


def decoded(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], final: bool) -> str:
    """The text of `ids` after `prompt`, decoded from bytes. An incomplete last character is left out unless `final`."""

    def text(ids: Sequence[int], final: bool) -> str:
        data = [tokenizer.token_bytes(i) for i in ids if i < tokenizer.vocab_size and i not in tokenizer.special_ids]
        return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(data), final)

    return text([*prompt, *ids], final)[len(text(prompt, False)) :]


def defined(
    prompt: Sequence[int], ids: Sequence[int], max_tokens: int, stop_ids: frozenset[int], stop: Sequence[str]
) -> tuple[str, list[int], str | None]:
    """Text, token ids and finish reason by definition: search the whole text again after each token."""
    for n in range(1, len(ids) + 1):
        ended = ids[n - 1] in stop_ids
        text = decoded(TOKENIZER, prompt, ids[: n - ended], final=ended or n == max_tokens)
        ends = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
        if ends:
            return text[: min(ends)[1]], list(ids[:n]), "stop"
        if ended or n == max_tokens:
            return text, list(ids[:n]), "stop" if ended else "length"
    return decoded(TOKENIZER, prompt, ids, final=False), list(ids), None


def text_ids(rng: random.Random) -> list[int]:
    """A text's ids. Some tokens are replaced by the tokens of their bytes."""
    by_byte = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if i not in TOKENIZER.special_ids}
    ids: list[int] = []
    for i in TOKENIZER.encode(rng.choice(TEXTS) + rng.choice(TEXTS), add_special_tokens=False):
        split = [by_byte[bytes([b])] for b in TOKENIZER.token_bytes(i)]
        ids += split if rng.random() < 0.5 else [i]
    return ids


def random_ids(rng: random.Random) -> list[int]:
    """A text's ids with random ids inserted: broken characters, special tokens, ids without text."""
    ids = text_ids(rng)
    for _ in range(rng.randrange(4)):
        ids.insert(rng.randrange(len(ids) + 1), rng.randrange(PADDED_VOCABULARY))
    return ids


def random_stops(rng: random.Random, text: str) -> list[str]:
    """Parts of `text`, which stop it, and parts of `text` with a different last character, which may match except for it."""
    stops = []
    for _ in range(rng.randrange(4)):
        start = rng.randrange(max(1, len(text)))
        part = text[start : start + rng.randint(1, 8)]
        if part:
            stops.append(part if rng.random() < 0.4 else part + rng.choice("#aé🦊"))
    return stops


class Output:
    """A stream that gets tokens one by one, as the engine sends them, and the answer so far. tokenizer: None for none."""

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
        tokenizer: Tokenizer | None = TOKENIZER,
    ) -> None:
        self.max_tokens, self.stop_ids = max_tokens, stop_ids
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=sorted(stop_ids), stop=list(stop))
        self.stream = AnswerStream(0, tokenizer, prompt, params)
        self.text, self.token_ids, self.finish_reason = "", list[int](), None

    def push(self, token_id: int) -> str:
        last = len(self.token_ids) + 1 == self.max_tokens
        reason = "stop" if token_id in self.stop_ids else "length" if last else None
        delta = self.stream.push(TokenOutput("", [token_id], reason))
        assert delta is not None
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        return delta.text


def check(ids: list[int], prompt: list[int], max_tokens: int, stop_ids: frozenset[int], stop: list[str]) -> str | None:
    """Push `ids` one by one and compare with the definition. Return the finish reason.

    Released text must never be taken back, and only text that may become a stop string may be held back."""
    text, token_ids, reason = defined(prompt, ids, max_tokens, stop_ids, stop)
    output = Output(prompt, max_tokens, stop_ids, stop)
    released = ""
    for i in ids:
        released += output.push(i)
        assert output.text == released
        if reason is not None:
            assert text.startswith(released), "released text that the end swallows"
        if output.finish_reason is not None:
            break
        held = decoded(TOKENIZER, prompt, output.token_ids, final=False).removeprefix(released)
        assert held == "" or any(s.startswith(held) for s in stop), "held back text that no stop string can swallow"
    assert (output.token_ids, output.finish_reason) == (token_ids, reason)
    if reason is not None:
        assert released == text
    return reason


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=400)
def test_the_stream_is_what_the_definition_says(rng: random.Random) -> None:
    ids = random_ids(rng)
    prompt = random_ids(rng)[: rng.randrange(12)] if rng.random() < 0.5 else []
    stop_ids = frozenset(rng.sample(ids, min(len(ids), rng.randrange(2))))
    max_tokens = rng.randint(1, len(ids) + 3)
    check(ids, prompt, max_tokens, stop_ids, random_stops(rng, decoded(TOKENIZER, prompt, ids, final=True)))


def test_the_random_cases_reach_every_end(seed: int) -> None:
    rng = random.Random(seed)
    reasons = set()
    for _ in range(300):
        ids = random_ids(rng)
        stop = random_stops(rng, decoded(TOKENIZER, [], ids, final=True))
        reasons.add(check(ids, [], rng.randint(1, 2 * len(ids)), frozenset(), stop))
    assert reasons == {"stop", "length", None}


def stream(text: str, stop: Sequence[str], stop_ids: frozenset[int] = frozenset(), more: Sequence[int] = ()) -> Output:
    """Push `text` byte by byte, then the ids in `more`."""
    output = Output([], 10_000, stop_ids, stop)
    single = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if i not in TOKENIZER.special_ids}
    for i in [*(single[bytes([b])] for b in text.encode()), *more]:
        if output.finish_reason is None:
            output.push(i)
    return output


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("aaab", ["aab"], "a"),  # the text has a partial match that overlaps the match
        ("ababac", ["abac"], "ab"),
        ("abcd", ["bc", "abcd"], "a"),  # the stop string that is complete first ends the sequence
        ("abcd", ["cd", "bcd"], "a"),  # both are complete with the same token: the earlier start counts
        ("🦊🦋", ["🦋"], "🦊"),  # the characters share their first three bytes
        ("é", ["é"], ""),
    ],
)
def test_overlapping_stop_strings(text: str, stop: list[str], expected: str) -> None:
    output = stream(text, stop)
    assert (output.text, output.finish_reason) == (expected, "stop")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_spell_a_special_token(seed: int, include: bool) -> None:
    """By definition: decode with this special token, cut at the stop string, and take it out of the rest."""
    rng = random.Random(seed)
    mark, other = rng.sample([i for i in sorted(TOKENIZER.special_ids) if TOKENIZER.token_text(i)], 2)
    sign, stops = TOKENIZER.token_text(mark), 0
    for _ in range(100):
        ids = TOKENIZER.encode("a cat sat on a mat", add_special_tokens=False)
        for added in (mark, mark, other, other):
            ids.insert(rng.randrange(len(ids) + 1), added)
        whole = TOKENIZER.decode([i for i in ids if i != other], skip_special_tokens=False)
        stop = rng.choice([sign, f"t{sign}", f"at{sign}", f"{sign} on", f"a{sign} ", sign + sign, f"{sign}z"])
        before, found, _ = whole.partition(stop)
        least = rng.choice([0, 0, len(ids)])
        params = SamplingParams(max_tokens=99, stop=[stop], include_stop=include, min_tokens=least)
        output, text, reason = AnswerStream(0, TOKENIZER, [], params), "", None
        for i in ids:
            delta = output.push(TokenOutput("", [i]))
            assert delta is not None
            text, reason = text + delta.text, delta.stop_reason
            if delta.finish_reason:
                break
        stops += reason is not None
        if least:
            before, found = whole, ""
        delta = None if found else output.push(TokenOutput("", [], "length"))
        text += delta.text if delta else ""
        assert (text, reason) == (before.replace(sign, "") + found * include, stop if found else None), (whole, stop)
    assert stops
    # it is also an end token: the client has named it, so it counts as a stop string
    params = SamplingParams(max_tokens=99, stop=[sign], include_stop=include, stop_token_ids=[mark], min_tokens=1)
    output = AnswerStream(0, TOKENIZER, [], params)
    ends = [delta for delta in [output.push(TokenOutput("", [mark])) for _ in range(2)] if delta]
    assert [(delta.text, delta.stop_reason) for delta in ends] == [("", None), (sign * include, sign)]


def test_a_broken_character_at_the_end_is_replaced_once() -> None:
    first_bytes = "🦊".encode()[:3]
    single = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
    output = Output([], 3)
    assert [output.push(single[bytes([b])]) for b in first_bytes] == ["", "", "\ufffd"]
    assert output.finish_reason == "length"
    stopped = Output([], 3, frozenset(), ["\ufffd"])
    assert [stopped.push(single[bytes([b])]) for b in first_bytes] == ["", "", ""]
    assert stopped.finish_reason == "stop"


def test_without_a_tokenizer_ids_are_counted_and_stop() -> None:
    output = Output([1, 2], 3, frozenset([7]), ["never"], None)
    assert [output.push(i) for i in (4, 5, 6)] == ["", "", ""]
    assert (output.text, output.token_ids, output.finish_reason) == ("", [4, 5, 6], "length")
    stopped = Output([1, 2], 3, frozenset([7]), (), None)
    assert (stopped.push(7), stopped.finish_reason) == ("", "stop")


@pytest.mark.parametrize("least", [0, 2, 3])
def test_no_stop_text_within_the_least_length_even_at_the_end(least: int) -> None:
    """The end of an incomplete character becomes text only there."""
    tokenizer = load_tokenizer(MODELS / "tiny-hybrid")
    ids = tokenizer.encode("\N{CJK UNIFIED IDEOGRAPH-4E2D}", add_special_tokens=False)[:2]
    params = SamplingParams(max_tokens=2, min_tokens=least, stop=["\N{REPLACEMENT CHARACTER}"])
    delta = AnswerStream(0, tokenizer, [0], params).push(TokenOutput("a", ids, "length"))
    assert delta is not None and len(ids) == 2
    assert (delta.text, delta.finish_reason) == (("\N{REPLACEMENT CHARACTER}", "length") if least else ("", "stop"))


def test_a_stop_token_within_the_least_length_is_no_reason() -> None:
    params = SamplingParams(max_tokens=3, min_tokens=2, stop_token_ids=[7])
    for ids, reason in (([5, 7, 9], None), ([5, 6, 7], 7), ([7, 7, 7], 7)):
        delta = AnswerStream(0, None, [0], params).push(TokenOutput("a", ids, "stop" if reason else "length"))
        assert delta is not None and delta.stop_reason == reason


def test_what_lies_behind_a_stop_string_was_not_drafted() -> None:
    tokenizer = load_tokenizer(MODELS / "tiny-hybrid")
    ids = [i for c in "abcd" for i in tokenizer.encode(c, add_special_tokens=False)]
    for stop, shown in (("b", 2), ("d", 3), ("x", 3)):
        delta = AnswerStream(0, tokenizer, [0], SamplingParams(stop=[stop])).push(TokenOutput("a", ids, accepted=3, drafted=3))
        assert delta is not None and delta.drafted == shown
