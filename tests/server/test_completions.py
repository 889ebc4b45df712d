"""`/v1/completions` against a fake engine: prompts, parameters, stops, log-probabilities, usage; with and without streaming."""

import codecs
import math
from itertools import accumulate
from typing import Any

import pytest

from engine.protocol import Logprob, TokenLogprobs
from server import replies
from server.logprobs import by_id_layout, chat_layout, completion_layout
from tests.support.server_thread import CONTEXT, EOS, STORY, TOKENIZER, Site, wait_for


def test_completion_with_the_openai_client(site: Site) -> None:
    answer = site.openai.completions.create(model="tiny-hybrid", prompt="Hi", max_tokens=100)
    assert answer.choices[0].text == STORY
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.usage is not None and answer.usage.prompt_tokens == len(TOKENIZER.encode("Hi"))
    assert answer.usage.completion_tokens == len(TOKENIZER.encode(STORY, add_special_tokens=False))
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.parametrize("group", [1, 3, 1000])
@pytest.mark.parametrize(
    "extra", [{}, {"stop": ["kind. EN"]}, {"logprobs": 2, "echo": True}, {"stop": "é", "n": 2}, {"logprobs": 0}]
)
def test_stream_equals_answer(site: Site, group: int, extra: dict[str, Any]) -> None:
    whole = site.complete(seed=1, **extra)
    replies.CompletionReply.model_validate(whole)
    site.engine.group = group
    events = site.events("/v1/completions", {"prompt": "Hi", "max_tokens": 100, "seed": 1, **extra})
    assert all(replies.CompletionChunk.model_validate(event) for event in events)
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        if choice["logprobs"]:
            for key, values in choice["logprobs"].items():
                assert [v for one in mine[:-1] for v in one["logprobs"][key]] == values
        else:
            assert all(one["text"] for one in mine[:-1]), "an empty chunk"
        assert mine[-1]["text"] == "" and mine[-1]["logprobs"] is None


def test_multi_byte_text_is_never_cut(site: Site) -> None:
    texts = [e["choices"][0]["text"] for e in site.events("/v1/completions", {"prompt": "Hi", "max_tokens": 100})]
    assert "".join(texts) == STORY and not any("\ufffd" in text for text in texts)
    assert len(texts[:-1]) < len(TOKENIZER.encode(STORY)), "the dragon takes more than one token"


def test_an_echo_does_not_wait_for_a_whole_character(site: Site) -> None:
    site.says("🐉 it", end=False)
    events = site.events("/v1/completions", {"prompt": "Hi", "echo": True})
    assert [e["choices"][0]["text"] for e in events[:2]] == ["Hi", "🐉"]


def test_stop_string_across_tokens_aborts_the_engine(site: Site) -> None:
    site.engine.delay = 0.002
    before = len(site.engine.aborts)
    answer = site.complete(stop=["nothing", "It was k"])
    choice = answer["choices"][0]
    assert choice["text"] == STORY[: STORY.index("It was k")]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "It was k")
    wait_for(lambda: len(site.engine.aborts) == before + 1)
    assert site.engine.aborts[-1].used == answer["usage"]["completion_tokens"]
    assert site.complete(stop="It was k", include_stop_str_in_output=True)["choices"][0]["text"].endswith("It was k")
    unstopped = site.complete(stop="Once", min_tokens=8)["choices"][0]
    assert unstopped["text"] == STORY and site.last().params.min_tokens == 8
    assert site.complete(stop=["END of its"])["choices"][0]["text"] == STORY, "held text must come out at the end"


def test_eos_and_stop_tokens(site: Site) -> None:
    story = TOKENIZER.encode(STORY, add_special_tokens=False)
    site.engine.reply = lambda submit: [*story[:5], EOS, *story[5:]]
    answer = site.complete()
    assert answer["choices"][0]["text"] == TOKENIZER.decode(story[:5])
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 6
    assert site.complete(ignore_eos=True)["choices"][0]["text"] == STORY
    assert "<|end|>" in site.complete(ignore_eos=True, skip_special_tokens=False)["choices"][0]["text"]
    site.complete(ignore_eos=True, allowed_token_ids=[EOS], min_tokens=3)
    site.complete(allowed_token_ids=[EOS, 5], min_tokens=3)
    site.complete(stop_token_ids=[story[2]])
    assert site.last().params.stop_token_ids == sorted({EOS, story[2]})


def test_parameters_reach_the_engine(site: Site) -> None:
    given = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "logprobs": 3,
        "prompt_logprobs": 2,
        "min_tokens": 2,
        "max_tokens": 9,
        "allowed_token_ids": [1, 5, 6],
        "cache_salt": "mine",
    }
    site.complete(**given, logit_bias={"5": -100, "7": 1.5}, bad_words=["kind", " once", "<|end|>"], n=2, user="me")
    second, first = site.engine.submits[-1].params, site.engine.submits[-2].params
    spelled = [
        TOKENIZER.encode(text, add_special_tokens=False) for text in ("kind", " kind", "once", " once", "<|end|>", " <|end|>")
    ]
    assert {name: getattr(first, name) for name in given} == given
    assert first.banned == spelled and spelled[-2] == [EOS]
    assert first.logit_bias == {5: -100.0, 7: 1.5} and second.seed == 6
    site.complete(temperature=None, stop=None, logprobs=None, top_p=0, top_k=-1, length_penalty=1.0, suffix=None)
    params = site.last().params
    assert params.temperature == 1.0 and params.logprobs is None and 0 < params.top_p < 1e-6 and params.top_k == 0
    site.post("/v1/completions", {"prompt": "Hi"})
    assert site.last().params.max_tokens == 16
    assert site.complete(model="tiny-hybrid", request_id="mine")["id"] == "cmpl-mine"


@pytest.mark.parametrize("seed", [None, 0, 2**63 - 3])
def test_no_answer_shares_its_noise_with_another(site: Site, seed: int | None) -> None:
    """Of no prompt: equal prompts get other answers. What a seed gives can be repeated."""

    def seeds() -> list[int]:
        site.complete(prompt=["Hi"] * 3, n=2, **({} if seed is None else {"seed": seed}))
        return [submit.params.seed for submit in site.engine.submits[-6:]]

    found, again = seeds(), seeds()
    assert len(set(found)) == 6 and all(-(2**63) <= one < 2**63 for one in found)
    if seed is None:
        assert not set(found) & set(again)
    else:
        assert found == again and {one % 2**64 for one in found} == {seed + i for i in range(6)}


def test_prompt_forms(site: Site) -> None:
    ids = TOKENIZER.encode("Hi there")
    for prompt, wanted in (("Hi there", [ids]), (["Hi there"], [ids]), (ids, [ids]), ([ids, ids[:2]], [ids, ids[:2]])):
        answer = site.complete(prompt=prompt, n=2)
        assert [c["index"] for c in answer["choices"]] == list(range(2 * len(wanted)))
        assert [s.prompt_ids for s in site.engine.submits[-2 * len(wanted) :: 2]] == wanted
        assert answer["usage"]["prompt_tokens"] == sum(map(len, wanted))
    site.complete(prompt="Hi there", add_special_tokens=False)
    assert site.last().prompt_ids == TOKENIZER.encode("Hi there", add_special_tokens=False)
    site.complete(prompt=ids * 20, truncate_prompt_tokens=3)
    assert site.last().prompt_ids == (ids * 20)[-3:]
    site.complete(prompt=[5] * 500, truncate_prompt_tokens=-1)
    assert len(site.last().prompt_ids) == CONTEXT - 100


def test_echo_with_logprobs_as_harnesses_need_it(site: Site) -> None:
    ids = TOKENIZER.encode("A cat sat")
    for max_tokens in (0, 1):
        answer = site.complete(prompt=[ids, ids], max_tokens=max_tokens, logprobs=1, echo=True, temperature=0, seed=1)
        for choice in answer["choices"]:
            table = choice["logprobs"]
            assert {len(values) for values in table.values()} == {len(ids) + max_tokens}
            assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
            assert all(len(top) == 2 for top in table["top_logprobs"][1:])
            assert table["text_offset"] == sorted(table["text_offset"])
            assert choice["text"].startswith("A cat sat")
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens
    assert site.complete(prompt="A cat", echo=True, max_tokens=2)["choices"][0]["logprobs"] is None


CUT = TOKENIZER.encode("dog 🦊")[:-1]  # ends within a character
MARKED = "<|begin|><|user|>Zoë ☃<|end|>\n🦊 fox<|assistant|>"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    "prompt",
    [
        "Zoë ☃ 🦊 fox",
        MARKED,
        " x",
        TOKENIZER.encode(MARKED),
        TOKENIZER.encode("🦊")[:-1],
        [*CUT, *TOKENIZER.encode("<|end|>fox")],
    ],
)
@pytest.mark.parametrize("add_special", [True, False])
def test_offsets_are_positions_in_the_text(site: Site, prompt: str | list[int], skip: bool, add_special: bool) -> None:
    """Of the prompt, too, which has special tokens only where `text` shows them."""
    ids = TOKENIZER.encode(prompt, add_special_tokens=add_special) if isinstance(prompt, str) else prompt
    choice = site.complete(
        prompt=prompt, echo=True, logprobs=0, max_tokens=1, skip_special_tokens=skip, add_special_tokens=add_special
    )["choices"][0]
    # the tokens that `text` shows: all of a client's text, without the added BOS, or what the answer would show
    hidden = [isinstance(prompt, str) and add_special and i == 0 for i in range(len(ids))]
    if not isinstance(prompt, str):
        hidden = [skip and one in TOKENIZER.special_ids for one in ids]
    pieces = [b"" if hide else TOKENIZER.token_bytes(one) for one, hide in zip(ids, hidden, strict=True)]
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    starts = [0, *accumulate(len(decode(piece)) for piece in pieces)][:-1]
    shown = prompt if isinstance(prompt, str) else b"".join(pieces).decode(errors="replace")
    assert choice["text"].startswith(shown)
    assert choice["logprobs"]["text_offset"] == [*starts, len(shown)]


def test_logprob_options(site: Site) -> None:
    story = TOKENIZER.encode(STORY, add_special_tokens=False)
    choice = site.complete(logprobs=2, return_tokens_as_token_ids=True)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in story]
    choice = site.complete(logprobs=1)["choices"][0]
    spans = zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
    assert all(choice["text"][at:].startswith(token) for token, at in spans if not token.startswith("bytes:"))
    choice = site.complete(prompt_logprobs=1, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == TOKENIZER.encode("Hi") and choice["token_ids"] == story
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])


def test_an_excluded_token_has_a_log_probability_that_json_can_hold() -> None:
    never = -math.inf
    values = [TokenLogprobs(Logprob(5, never, 9), [Logprob(6, never, 2)])]
    chat = chat_layout(TOKENIZER, values, 1, as_ids=False)["content"][0]
    completion = completion_layout(TOKENIZER, [5], values, [0], 1, as_ids=False)
    by_id = by_id_layout(TOKENIZER, values, 1)[0] or {}
    found = [chat["logprob"], chat["top_logprobs"][0]["logprob"], *completion["token_logprobs"]]
    found += [*completion["top_logprobs"][0].values(), *(one["logprob"] for one in by_id.values())]
    assert found == [-9999.0] * 7


def test_best_of_keeps_the_likeliest(site: Site) -> None:
    site.engine.reply = lambda submit: [7 * 40 + 6 - submit.params.seed] * 4  # a higher seed gives a likelier answer
    answer = site.complete(best_of=3, n=2, seed=0)
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["text"] == TOKENIZER.decode([7 * 40 + 4] * 4)
    assert answer["choices"][0]["logprobs"] is None and answer["usage"]["completion_tokens"] == 12
    site.engine.reply = lambda submit: [7 * 40 + 1] * 4 if submit.params.seed else [7 * 40 + 3]
    answer = site.complete(best_of=2, n=1, seed=0)
    assert answer["choices"][0]["text"] == TOKENIZER.decode([7 * 40 + 1] * 4), (
        "for each of its tokens: a short one is no likelier"
    )


def test_usage_in_streams(site: Site) -> None:
    body = {"prompt": "Hi", "max_tokens": 5, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = site.events("/v1/completions", body)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 5
    assert [e["usage"]["completion_tokens"] for e in events[:-1]] == [1, 2, 3, 4, 5, 5]
    events = site.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert all(e["usage"] is None for e in events[:-1]) and events[-1]["usage"]["total_tokens"] > 5
    usage = site.complete(prompt=["Hi", "Ho"], n=3, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * 4, "a prompt counts once, as in prompt_tokens"
