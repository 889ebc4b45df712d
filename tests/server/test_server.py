"""The whole server as a process: the `openai` client against two gloo ranks that serve an embedded checkpoint."""

import itertools
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
from pydantic import BaseModel, Field

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from comm import Local
from engine import LLM, SamplingParams
from tests import ROOT
from tests.clients.thinking import thinking_server
from tests.support.command_line import HYBRID
from tests.support.server_process import ServerProcess, wait_until
from tests.support.server_thread import raw_request
from text.tokenizer import Tokenizer
from text.tokenizer_files import load_tokenizer
from tp import World

NAME = "tiny-hybrid"
PROMPT = "Once upon a time"
STORY: Any = [{"role": "user", "content": "Tell me about a child."}]
SUM = [{"role": "user", "content": "What is 27 plus 48?"}]
EOS = 1
CLIENTS = ROOT / "tests" / "clients"
LONG = {"max_tokens": 900, "temperature": 0, "extra_body": {"ignore_eos": True}}  # runs until it is stopped

ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
PAINT = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}},
    "required": ["color"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "paint", "parameters": PAINT}},
]
PARAMETERS = {"add": ADD, "paint": PAINT}


class Reference:
    """The same checkpoint without a server: one rank, one prompt."""

    def __init__(self, path: str) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(path)
        world = World(0, 1, torch.device("cpu"), Local())
        self.model = load_model(path, model_config(path, None, 1), world, torch.float32)
        self.llm = LLM(self.model, self.tokenizer, world)

    def generate(self, prompt: list[int], count: int, **params: Any) -> list[int]:
        sampling = SamplingParams(**({"max_tokens": count, "temperature": 0.0, "ignore_eos": True} | params))
        return self.llm.generate([prompt], sampling)[0].token_ids

    def score(self, prompt: list[int]) -> tuple[list[float | None], list[int]]:
        scores = self.llm.score(prompt)
        return scores.logprobs, scores.argmax

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(HYBRID)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--model", HYBRID, "--trust-request-chat-template", ranks=2) as started:
        yield started.ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def greedy(reference: Reference) -> list[int]:
    """40 token ids: the greedy continuation of PROMPT."""
    return reference.generate(reference.encode(PROMPT), 40)


Complete = Callable[..., Any]


def at_once(function: Callable[..., Any], *params: dict[str, Any]) -> list[Any]:
    """`function(**each)` for each of the params, at the same time: the requests share the engine's steps. Streams are read to
    their ends."""

    def call(params: dict[str, Any]) -> Any:
        return list(function(**params)) if params.get("stream") else function(**params)

    with ThreadPoolExecutor(len(params)) as pool:
        return list(pool.map(call, params))


@pytest.fixture(scope="module")
def complete(client: openai.OpenAI) -> Complete:
    """A function that completes PROMPT, by default greedily. Parameters that OpenAI's API lacks are added to the body."""

    def call(**params: Any) -> Any:
        known = {"best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty"}
        known |= {"prompt", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "model"}
        params = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 16} | params
        extra = {name: params.pop(name) for name in set(params) - known}
        return client.completions.create(**params, extra_body=extra)

    return call


def ids_of(reply: Any) -> list[int]:
    found: list[int] = reply.choices[0].token_ids
    return found


def joined(chunks: list[Any]) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


# --- generated tokens ----------------------------------------------------------------------------------------------------


def test_greedy_equals_the_offline_path(complete: Complete, reference: Reference, greedy: list[int]) -> None:
    reply = complete(max_tokens=40, return_token_ids=True)
    choice = reply.choices[0]
    assert ids_of(reply) == greedy
    assert choice.prompt_token_ids == reference.encode(PROMPT)
    assert choice.text == reference.tokenizer.decode(reference.encode(PROMPT) + greedy)[len(PROMPT) :]
    assert choice.finish_reason == "length"
    assert (reply.object, reply.model, reply.id[:5]) == ("text_completion", NAME, "cmpl-")
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 40, 45)


def test_max_tokens(complete: Complete) -> None:
    assert complete(max_tokens=3).usage.completion_tokens == 3
    default = complete(max_tokens=openai.omit)
    assert default.usage.completion_tokens == 16 and default.choices[0].finish_reason == "length"


def test_a_seed_gives_what_the_offline_sampler_gives(complete: Complete, reference: Reference) -> None:
    wanted = reference.generate(reference.encode(PROMPT), 16, temperature=1.0, seed=7)
    asked = ({"temperature": 1, "seed": 7}, {"temperature": 1, "seed": 8}, {"temperature": 0.3, "seed": 7})
    unseeded = [{"temperature": 1.5}] * 3
    same, *others = at_once(complete, *({**each, "return_token_ids": True} for each in (*asked, *unseeded)))
    assert ids_of(same) == wanted and ids_of(others[0]) != wanted and ids_of(others[1]) != wanted
    assert len({tuple(ids_of(reply)) for reply in others[2:]}) > 1


def test_a_seed_gives_the_same_in_company(complete: Complete) -> None:
    alone = complete(temperature=1, seed=11, max_tokens=24).choices[0].text
    with ThreadPoolExecutor(21) as pool:
        others = [
            pool.submit(complete, prompt=PROMPT + " there" * (i % 5), temperature=1, seed=i, max_tokens=12 + i)
            for i in range(20)
        ]
        again = pool.submit(complete, temperature=1, seed=11, max_tokens=24)
        assert again.result().choices[0].text == alone
        texts = [other.result().choices[0].text for other in others]
    assert len(set(texts)) == 20


def test_filters_leave_the_likeliest(complete: Complete, greedy: list[int]) -> None:
    hot = {"temperature": 1.5, "seed": 3, "return_token_ids": True}
    narrow: list[dict[str, float]] = [{"top_k": 1}, {"top_p": 0.0001}, {"top_p": 0}, {"min_p": 1.0}]
    free, *filtered = at_once(complete, hot, *(hot | each for each in narrow))
    assert ids_of(free) != greedy[:16]
    for each, reply in zip(narrow, filtered, strict=True):
        assert ids_of(reply) == greedy[:16], each


def test_filters_drop_the_unlikely(complete: Complete, reference: Reference) -> None:
    """40 first tokens drawn at a high temperature: more than two differ without a filter, and exactly two with top_k=2."""
    scored = complete(max_tokens=1, logprobs=20, return_tokens_as_token_ids=True).choices[0].logprobs.top_logprobs[0]
    ranked = [int(name.removeprefix("token_id:")) for name in sorted(scored, key=scored.__getitem__, reverse=True)]
    free = complete(max_tokens=1, temperature=2, seed=1, n=40, logit_bias={str(ranked[0]): -14}, return_token_ids=True)
    kept = complete(max_tokens=1, temperature=2, seed=1, n=40, logit_bias={str(ranked[0]): -14}, top_k=2, return_token_ids=True)
    assert len({choice.token_ids[0] for choice in free.choices}) > 2
    assert len({choice.token_ids[0] for choice in kept.choices}) == 2


# --- where an answer ends ------------------------------------------------------------------------------------------------


def test_stop_across_tokens(complete: Complete, reference: Reference, greedy: list[int]) -> None:
    """Stop strings that span tokens, are part of a token, have non-ASCII characters, or match only in their first half."""
    text = complete(max_tokens=40).choices[0].text
    ends = list(itertools.accumulate(len(reference.tokenizer.decode([one])) for one in greedy))
    across = next(text[end - 3 : end + 3] for end in ends if end > 20)
    wide = next(text[i - 2 : i + 2] for i in range(len(text)) if ord(text[i]) > 127)

    def check(stop: Any) -> None:
        found = stop if isinstance(stop, str) else stop[1]
        before = text[: text.index(found)]
        reply = complete(max_tokens=40, stop=stop)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == (before, "stop")
        assert reply.choices[0].stop_reason == found
        assert 0 < reply.usage.completion_tokens < 40
        assert joined(list(complete(max_tokens=40, stop=stop, stream=True))) == before
        kept = complete(max_tokens=40, stop=stop, include_stop_str_in_output=True)
        assert kept.choices[0].text == before + found

    with ThreadPoolExecutor(4) as pool:  # at once, so that they share the engine's steps
        list(pool.map(check, (across, across[2:4], wide, ["never said", across])))
    half = text[10:16] + "#"
    unstopped = complete(max_tokens=40, stop=[half])
    assert (unstopped.choices[0].text, unstopped.choices[0].finish_reason) == (text, "length")
    assert joined(list(complete(max_tokens=40, stop=[half], stream=True))) == text


def test_stop_inside_multi_byte_text(client: openai.OpenAI) -> None:
    """A schema forces characters of several tokens each. Only complete characters are sent, and stop strings are found."""
    text = '"aé日本🦊z"'
    forced: Any = {"type": "json_schema", "json_schema": {"name": "text", "schema": {"const": text[1:-1]}}}

    def say(**params: Any) -> Any:
        return client.chat.completions.create(model=NAME, messages=SUM, temperature=0, response_format=forced, **params)

    kept = {"extra_body": {"include_stop_str_in_output": True}}
    whole, streamed, stopped, stopped_stream, shown = at_once(
        say,
        {"extra_body": {"return_token_ids": True}},
        {"stream": True},
        {"stop": "本🦊"},
        {"stop": "本🦊", "stream": True},
        {"stop": "🦊", **kept},
    )
    assert whole.choices[0].message.content == text
    assert len(whole.choices[0].token_ids) > len(text), "characters of one token each would test nothing"
    pieces = [c.choices[0].delta.content or "" for c in streamed]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces) and len(pieces) > 5
    assert stopped.choices[0].message.content == '"aé日'
    assert "".join(c.choices[0].delta.content or "" for c in stopped_stream) == '"aé日'
    assert shown.choices[0].message.content == '"aé日本🦊'


def test_stop_token_ids(complete: Complete, reference: Reference, greedy: list[int]) -> None:
    stop = greedy[6]
    at = greedy.index(stop)
    reply = complete(stop_token_ids=[stop], return_token_ids=True)
    assert ids_of(reply) == greedy[: at + 1]
    assert (reply.choices[0].finish_reason, reply.choices[0].stop_reason) == ("stop", stop)
    shown = complete(stop_token_ids=[stop], include_stop_str_in_output=True).choices[0].text
    assert shown == reply.choices[0].text + reference.tokenizer.token_text(stop)


def test_end_of_text(client: openai.OpenAI) -> None:
    """EOS ends the answer unless it is ignored or comes before min_tokens. Special tokens are shown on request."""

    def answer(**extra: Any) -> Any:
        reply = client.chat.completions.create(model=NAME, messages=SUM, temperature=0, max_tokens=12, extra_body=extra)
        return reply.choices[0].message.content, reply.choices[0].finish_reason, reply.usage.completion_tokens

    plain, shown, ignored, ignored_and_shown, least = at_once(
        answer,
        {},
        {"include_stop_str_in_output": True, "skip_special_tokens": False},
        {"ignore_eos": True},
        {"ignore_eos": True, "skip_special_tokens": False},
        {"min_tokens": 6},
    )
    assert plain == ("75", "stop", 3)
    assert shown == ("75<|end|>", "stop", 3)
    text, reason, count = ignored
    assert text.startswith("75") and "<|" not in text and (reason, count) == ("length", 12)
    assert ignored_and_shown[0].startswith("75<|end|>")
    text, reason, count = least
    assert text.startswith("75") and text != "75" and count >= 6


# --- logit biases and penalties ------------------------------------------------------------------------------------------


def test_logit_bias(complete: Complete, greedy: list[int]) -> None:
    asked: list[dict[str, Any]] = [
        {"logit_bias": {str(greedy[0]): -100}},
        {"logit_bias": {"300": 100}},
        {"allowed_token_ids": [300, 301], "temperature": 2},
    ]
    banned, pushed, allowed = map(ids_of, at_once(complete, *({**each, "return_token_ids": True} for each in asked)))
    assert banned[0] != greedy[0] and greedy[0] not in banned
    assert pushed == [300] * 16
    assert set(allowed) <= {300, 301}


def test_penalties(complete: Complete, greedy: list[int]) -> None:
    """A bias makes the model repeat a token until a penalty outweighs the bias."""
    pushed = {"logit_bias": {"300": 24}, "max_tokens": 16, "return_token_ids": True}
    free = {"max_tokens": 40, "return_token_ids": True}
    asked: list[dict[str, Any]] = [
        pushed,
        {**pushed, "frequency_penalty": 2},
        {**pushed, "frequency_penalty": 1},
        {**pushed, "presence_penalty": 2},
        {**free, "presence_penalty": 2},
        {**free, "repetition_penalty": 2.0},
        {**free, "frequency_penalty": -2},
    ]
    plain, frequency, less, presence, present, repeated, encouraged = map(ids_of, at_once(complete, *asked))
    assert plain == [300] * 16
    assert 0 < frequency.count(300) < 16 and frequency[0] == 300
    assert less.count(300) > frequency.count(300)
    assert presence != frequency
    assert present[0] == greedy[0] and present != greedy
    assert len(set(present)) > len(set(greedy))
    assert repeated != greedy and len(set(repeated)) > len(set(greedy))
    assert len(set(encouraged)) < len(set(greedy))


# --- several prompts and answers -----------------------------------------------------------------------------------------


def test_n_draws_with_successive_seeds(complete: Complete) -> None:
    reply, *single = at_once(
        complete, {"n": 3, "temperature": 1, "seed": 20}, *({"temperature": 1, "seed": 20 + i} for i in range(3))
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert [choice.text for choice in reply.choices] == [one.choices[0].text for one in single]
    assert len({choice.text for choice in reply.choices}) == 3
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5, 48)


def test_best_of_returns_the_likeliest(complete: Complete) -> None:
    drawn = complete(n=5, temperature=1.3, seed=4, logprobs=0)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    best = sorted(drawn.choices, key=mean, reverse=True)[:2]
    reply = complete(n=2, best_of=5, temperature=1.3, seed=4)
    assert [choice.text for choice in reply.choices] == [choice.text for choice in best]
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.usage.completion_tokens == 80


def test_every_form_of_prompt(complete: Complete, reference: Reference) -> None:
    texts = [PROMPT, "The fox", "In a small house"]
    ids = [reference.encode(text) for text in texts]
    asked = [{"prompt": prompt} for prompt in (*texts, texts, ids, ids[1])]
    drawn = {"temperature": 1, "seed": 5}
    *replies, both, second = at_once(
        complete, *asked, {"prompt": texts[:2], "n": 2, **drawn}, {"prompt": texts[1], **drawn, "seed": 7}
    )
    single = [reply.choices[0].text for reply in replies[:3]]
    assert len(set(single)) == 3
    for reply in replies[3:5]:
        assert [choice.text for choice in reply.choices] == single
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert reply.usage.prompt_tokens == sum(map(len, ids))
    assert replies[5].choices[0].text == single[1]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[2].text == second.choices[0].text


def test_the_prompt_s_end_alone(complete: Complete, reference: Reference) -> None:
    ids = reference.encode(PROMPT)
    reply = complete(truncate_prompt_tokens=3, return_token_ids=True)
    assert reply.choices[0].prompt_token_ids == ids[-3:]
    assert ids_of(reply) == reference.generate(ids[-3:], 16)
    bare = complete(add_special_tokens=False, return_token_ids=True).choices[0].prompt_token_ids
    assert bare == ids[1:]
    fitted = complete(prompt=ids * 300, truncate_prompt_tokens=-1, max_tokens=4)
    assert fitted.usage.total_tokens == 1024


# --- log-probabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 5])
def test_logprobs(complete: Complete, reference: Reference, greedy: list[int], k: int) -> None:
    choice = complete(logprobs=k).choices[0]
    found = choice.logprobs
    values, _ = reference.score(reference.encode(PROMPT) + greedy[:16])
    assert found.token_logprobs == pytest.approx(values[5:], abs=1e-4)
    assert "".join(found.tokens) == choice.text
    for token, value, offset, top in zip(
        found.tokens, found.token_logprobs, found.text_offset, found.top_logprobs, strict=True
    ):
        assert choice.text[offset : offset + len(token)] == token
        assert len(top) == max(k, 1) and top[token] == value == max(top.values())


@pytest.mark.parametrize("count", [0, 1])
def test_echo_scores_the_prompt(complete: Complete, reference: Reference, count: int) -> None:
    """A request as evaluation harnesses send it: batches of ids; log-probabilities of each token and of the arg-max."""
    texts = ["Once upon a time there was a merry girl named Zoë.", "The fox sat by the sea and sang."]
    prompts = [reference.encode(text) for text in texts]
    reply = complete(prompt=prompts, max_tokens=count, logprobs=1, echo=True, seed=1234, return_tokens_as_token_ids=True)
    assert [choice.index for choice in reply.choices] == [0, 1]
    for choice, ids, text in zip(reply.choices, prompts, texts, strict=True):
        found = choice.logprobs
        values, argmax = reference.score(ids)
        assert len(found.tokens) == len(ids) + count
        assert found.tokens[: len(ids)] == [f"token_id:{one}" for one in ids]
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        assert found.token_logprobs[1 : len(ids)] == pytest.approx(values[1:], abs=1e-4)
        for token, best, top in zip(found.tokens[1:], argmax, found.top_logprobs[1:], strict=False):
            assert {token, f"token_id:{best}"} == set(top)
            assert max(top, key=top.__getitem__) == f"token_id:{best}"
        answer = [int(token.removeprefix("token_id:")) for token in found.tokens[len(ids) :]]
        assert choice.text == text + reference.tokenizer.decode(answer)
    assert reply.usage.completion_tokens == 2 * count
    named = complete(prompt=texts[0], max_tokens=count, logprobs=1, echo=True).choices[0]
    assert "".join(named.logprobs.tokens[1:]) == named.text  # the first token is BOS


def test_prompt_logprobs(complete: Complete, reference: Reference) -> None:
    ids = reference.encode("The fox sat by the sea.")
    choice = complete(prompt=ids, max_tokens=1, prompt_logprobs=2).choices[0]
    values, argmax = reference.score(ids)
    assert choice.prompt_logprobs[0] is None and len(choice.prompt_logprobs) == len(ids)
    for entry, token, value, best in zip(choice.prompt_logprobs[1:], ids[1:], values[1:], argmax, strict=False):
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)
        assert entry[str(best)]["rank"] == 1
        assert 2 <= len(entry) <= 3


def test_chat_logprobs(client: openai.OpenAI) -> None:
    asked: Any = dict(model=NAME, messages=SUM, temperature=0, logprobs=True, top_logprobs=3)
    reply = client.chat.completions.create(**asked)
    content = reply.choices[0].logprobs.content
    assert [one.token for one in content] == ["7", "5", "<|end|>"]
    for one in content:
        assert bytes(one.bytes).decode() == one.token
        assert one.top_logprobs[0].token == one.token and len(one.top_logprobs) == 3
        assert one.logprob == one.top_logprobs[0].logprob <= 0
        assert math.fsum(math.exp(top.logprob) for top in one.top_logprobs) <= 1 + 1e-5
    chunks = client.chat.completions.create(**asked, stream=True)
    streamed = [one for chunk in chunks for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])]
    assert [(one.token, one.logprob) for one in streamed] == [
        (one.token, pytest.approx(one.logprob, abs=1e-5)) for one in content
    ]
    assert client.chat.completions.create(model=NAME, messages=SUM, temperature=0).choices[0].logprobs is None


# --- streams -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.2, "seed": 5, "n": 3},
        {"prompt": [PROMPT, "The fox"], "echo": True},
        {"stop": ["girl", "boy"], "temperature": 1, "seed": 9},
        {"prompt": "<|user|>What is 27 plus 48?<|end|><|assistant|>", "skip_special_tokens": False, "ignore_eos": True},
    ],
    ids=["greedy", "n", "prompts", "stop", "special"],
)
def test_a_stream_equals_the_answer(complete: Complete, params: dict[str, Any]) -> None:
    params = {"logprobs": 1, "return_token_ids": True} | params
    answer, chunks = at_once(complete, params, {**params, "stream": True})
    texts, ids, values, tokens, reasons = {}, {}, {}, {}, {}
    for chunk in chunks:
        assert chunk.object == "text_completion" and len(chunk.choices) == 1
        (choice,) = chunk.choices
        assert choice.index not in reasons, "a chunk after the finish reason"
        if choice.finish_reason:  # this chunk has nothing else
            reasons[choice.index] = choice.finish_reason
            assert choice.text == "" and choice.logprobs is None
            continue
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        ids.setdefault(choice.index, []).extend(choice.token_ids)
        tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens)
        values.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
    for choice in answer.choices:
        assert texts[choice.index] == choice.text
        assert ids[choice.index] == choice.token_ids
        assert tokens[choice.index] == choice.logprobs.tokens
        assert values[choice.index] == [v if v is None else pytest.approx(v, abs=1e-4) for v in choice.logprobs.token_logprobs]
        assert reasons[choice.index] == choice.finish_reason
    assert len(texts) == len(answer.choices)


def test_the_wire_of_a_stream(server: ServerProcess) -> None:
    """The raw events: no empty text before the first token, usage last, then [DONE]."""
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    reply = server.http.post("/v1/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, end = reply.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[0]["choices"][0]["text"]
    assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0, "reasoning_tokens": 0},
    }
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_in_every_chunk(complete: Complete, client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = complete(max_tokens=8, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 8 == last.usage.completion_tokens
    assert last.choices == []
    plain = list(complete(max_tokens=8, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in plain)
    *chunks, last = client.chat.completions.create(
        model=NAME, messages=SUM, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    assert (last.choices, last.usage.completion_tokens) == ([], 3)
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


def test_a_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=NAME, messages=SUM, temperature=0, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not any(chunk.choices[0].delta.role for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "75"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


# --- chat ----------------------------------------------------------------------------------------------------------------


def test_chat_adds(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=NAME, messages=SUM, temperature=0)
    message = reply.choices[0].message
    assert (message.role, message.content, message.tool_calls) == ("assistant", "75", None)
    assert (reply.object, reply.choices[0].finish_reason) == ("chat.completion", "stop")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (15, 3)
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is 27 plus 48?"}]}]
    assert client.chat.completions.create(model=NAME, messages=parts, temperature=0).choices[0].message.content == "75"


def test_chat_limits_and_choices(client: openai.OpenAI) -> None:
    story: list[Any] = [{"role": "user", "content": "Tell me a story."}]
    for name in ("max_tokens", "max_completion_tokens"):
        reply = client.chat.completions.create(model=NAME, messages=story, temperature=0, **{name: 2})
        assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (2, "length")
    drawn = client.chat.completions.create(model=NAME, messages=story, n=3, seed=1, temperature=1.5, max_tokens=8)
    assert [choice.index for choice in drawn.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in drawn.choices}) == 3
    second = client.chat.completions.create(model=NAME, messages=story, seed=2, temperature=1.5, max_tokens=8)
    assert second.choices[0].message.content == drawn.choices[1].message.content


def test_continue_final_message(client: openai.OpenAI) -> None:
    begun: list[Any] = [*SUM, {"role": "assistant", "content": "7"}]
    extra = {"continue_final_message": True}
    reply = client.chat.completions.create(model=NAME, messages=begun, temperature=0, extra_body=extra)
    assert (reply.choices[0].message.content, reply.usage.prompt_tokens) == ("5", 16)
    unprompted = client.chat.completions.create(
        model=NAME, messages=SUM, max_tokens=1, extra_body={"add_generation_prompt": False}
    )
    assert unprompted.usage.prompt_tokens == 14


def test_chat_templates(client: openai.OpenAI) -> None:
    """A template in the request, and variables for it."""
    template = "{{ bos_token }}<|user|>What is {{ first }} plus {{ messages[0].content }}?<|end|><|assistant|>"
    extra = {"chat_template": template, "chat_template_kwargs": {"first": 12}}
    reply = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "13"}], temperature=0, extra_body=extra
    )
    assert reply.choices[0].message.content == "25"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"]},
        {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "maxItems": 3},
        {"type": "string", "pattern": "^[a-c]{3,5}$"},
        {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        PAINT,
    ],
    ids=["object", "array", "pattern", "any", "enum"],
)
def test_json_schema(client: openai.OpenAI, schema: dict[str, Any]) -> None:
    schema = {**schema, "additionalProperties": False} if schema.get("type") == "object" else schema
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    asked: Any = dict(model=NAME, messages=SUM, temperature=1, max_tokens=100, response_format=form)
    both = ({**asked, "seed": seed, "stream": stream} for stream in (False, True) for seed in range(2))
    *replies, first, second = at_once(client.chat.completions.create, *both)
    for reply, chunks in zip(replies, (first, second), strict=True):
        choice = reply.choices[0]
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def test_json_object(client: openai.OpenAI, reference: Reference, complete: Complete) -> None:
    """The small model would not come to an end by itself, so commas are banned and the end of a string gets a bias."""
    tokenizer = reference.tokenizer
    short: dict[str, int] = {str(i): -100 for i in range(tokenizer.vocab_size) if b"," in tokenizer.token_bytes(i)}
    short[str(tokenizer.encode('"', add_special_tokens=False)[0])] = 17
    asked: Any = {"max_tokens": 120, "temperature": 1, "logit_bias": short, "response_format": {"type": "json_object"}}
    chat = {"model": NAME, "messages": SUM, **asked}
    with ThreadPoolExecutor(1) as pool:
        completion = pool.submit(complete, **asked, seed=1)
        replies = at_once(client.chat.completions.create, *({**chat, "seed": seed} for seed in range(3)))
        found = [json.loads(completion.result().choices[0].text)]
    for reply in replies:
        assert reply.choices[0].finish_reason == "stop"
        found.append(json.loads(reply.choices[0].message.content))
    assert all(isinstance(one, dict) for one in found) and any(found)


class Child(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=99)


class Answer(BaseModel):
    child: Child
    happy: bool
    friends: list[Child] = Field(max_length=2)


def test_a_schema_that_does_not_say_closed_comes_to_an_end(client: openai.OpenAI) -> None:
    """A schema as pydantic writes it, without additionalProperties. The model must not invent keys up to its token limit."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": Answer.model_json_schema()}}
    asked: Any = dict(messages=STORY, response_format=form, n=3, seed=1, temperature=0.7, max_tokens=600)
    for choice in client.chat.completions.create(model=NAME, **asked).choices:
        assert choice.finish_reason == "stop", choice.message.content
        answer = json.loads(choice.message.content or "")
        assert set(answer) <= {"child", "happy", "friends"} and set(answer["child"]) <= {"name", "age"}
        Answer.model_validate(answer)


def test_a_tool_without_arguments_gets_none_and_a_cut_call_stays_a_call(client: openai.OpenAI) -> None:
    now: Any = {"type": "function", "function": {"name": "now"}}
    choice = call_tools(client, tools=[now], tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {}
    cut = call_tools(client, tool_choice={"type": "function", "function": {"name": "add"}}, max_tokens=12).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", None)
    assert cut.message.tool_calls[0].function.name == "add"


def test_a_schema_wins_over_allowed_tokens(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["hi", "ho"]}}}
    extra = {"allowed_token_ids": [300], "min_tokens": 10}
    choice = client.chat.completions.create(
        model=NAME, messages=SUM, response_format=form, extra_body=extra, max_tokens=20
    ).choices[0]
    assert choice.message.content in ('"hi"', '"ho"')
    assert choice.finish_reason == "stop"


# --- tools ---------------------------------------------------------------------------------------------------------------


def call_tools(client: openai.OpenAI, **params: Any) -> Any:
    asked: Any = dict(model=NAME, messages=SUM, tools=TOOLS, temperature=1, seed=1, max_tokens=120) | params
    return client.chat.completions.create(**asked)


def test_forced_tools(client: openai.OpenAI) -> None:
    forced: list[tuple[str, Any, int]] = [("required", "required", seed) for seed in (0, 1)]
    forced += [(name, {"type": "function", "function": {"name": name}}, 2) for name in ("add", "paint")]
    asked = [{"client": client, "tool_choice": tool_choice, "seed": seed} for _, tool_choice, seed in forced]
    replies = at_once(call_tools, *asked, *({**each, "stream": True} for each in asked))
    for (choice, _, _), reply, chunks in zip(forced, replies[: len(forced)], replies[len(forced) :], strict=True):
        answer = reply.choices[0]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        (call,) = answer.message.tool_calls
        assert call.type == "function" and call.id
        assert call.function.name in (PARAMETERS if choice == "required" else [choice])
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])

        deltas = [chunk.choices[0] for chunk in chunks]
        parts = [part for one in deltas for part in one.delta.tool_calls or []]
        assert parts[0].function.name == call.function.name and {part.index for part in parts} == {0}
        assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments
        assert not any(one.delta.content for one in deltas) and deltas[-1].finish_reason == "tool_calls"


def test_constraints(client: openai.OpenAI) -> None:
    """Of the real model, streamed and whole."""
    formats: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"regex": "[A-Z][a-z]{2,9}( [0-9]{1,3}){2}"}}, "[A-Z][a-z]{2,9}( [0-9]{1,3}){2}"),
        ({"guided_choice": ["a café", "a café au lait"]}, "a café( au lait)?"),
        ({"structured_outputs": {"grammar": 'root ::= "(" root ")" | [a-c]{1,4}'}}, r"\(*[a-c]{1,4}\)*"),
    ]

    def complete(form: dict[str, Any], streamed: bool) -> str:
        reply: Any = client.completions.create(
            model=NAME, prompt="Once", max_tokens=100, seed=3, stream=streamed, extra_body=form
        )
        return "".join(one.choices[0].text for one in (reply if streamed else [reply]))

    asked = [{"form": form, "streamed": streamed} for form, _ in formats for streamed in (False, True)]
    texts = at_once(complete, *asked)
    for (_, regex), whole, streamed in zip(formats, texts[::2], texts[1::2], strict=True):
        assert whole == streamed and re.fullmatch(regex, whole), whole


def test_optional_tools(client: openai.OpenAI) -> None:
    """With auto the model sees the tools and may answer without a call. With none it does not see them."""
    plain = call_tools(client, tools=openai.omit, temperature=0)
    auto, unnamed, none = (call_tools(client, tool_choice=c, temperature=0) for c in ("auto", openai.omit, "none"))
    for reply in (plain, auto, unnamed, none):
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("75", "stop")
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens < auto.usage.prompt_tokens == unnamed.usage.prompt_tokens
    chunks = call_tools(client, tool_choice="auto", temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "75"


def test_a_conversation_with_tool_results(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 27, "b": 48}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [*SUM, asked, {"role": "tool", "tool_call_id": "call_1", "content": "75"}]
    reply = call_tools(client, messages=messages, temperature=0, max_tokens=4)
    assert reply.choices[0].message.content and reply.usage.prompt_tokens > 20


def test_all_features_that_the_openai_client_has(server: ServerProcess, tmp_path: Path) -> None:
    """The script with which `make clients` tries them, without the adapter."""
    script = CLIENTS / "openai_py" / "client.py"
    with thinking_server(tmp_path) as thinking:
        environ = {"BASE_URL": server.url, "THINKING_URL": thinking, "MODEL": NAME, "PYTHONPATH": str(CLIENTS)}
        output = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, env=os.environ | environ, capture_output=True, text=True, timeout=300
        )
    rows = [json.loads(line) for line in output.stdout.splitlines()]
    assert all(row["ok"] for row in rows) and not output.returncode, (rows, output.stderr)
    features = set(re.findall(r'^@feature\("([a-z]+)", "([a-z, ]+)"\)', script.read_text(), re.MULTILINE))
    assert {(row["api"], row["feature"]) for row in rows} == features


# --- the prefix cache, tokens, models, state -----------------------------------------------------------------------------


def test_the_second_identical_prompt_is_cached(complete: Complete, server: ServerProcess, seed: int) -> None:
    ids = torch.randint(5, 1024, (300,)).tolist()
    before = server.metrics()["rung:prefix_cache_hits_total"]
    first, second = (complete(prompt=ids, max_tokens=6, logprobs=2) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 288  # only whole blocks of 16 tokens are reused
    tops = [sorted(top.values())[-2:] for top in first.choices[0].logprobs.top_logprobs]
    near_tie = any(top[-1] - top[0] < 1e-4 for top in tops)  # in which both tokens are right
    assert near_tie or second.choices[0].text == first.choices[0].text
    other = complete(prompt=[*ids[:100], *reversed(ids)], max_tokens=1)
    assert other.usage.prompt_tokens_details.cached_tokens == 96
    for cached in (0, 288):
        assert complete(prompt=ids, max_tokens=1, cache_salt="mine").usage.prompt_tokens_details.cached_tokens == cached
    # at least: `before` may lack what a request that was dropped shortly before has found
    assert server.metrics()["rung:prefix_cache_hits_total"] >= before + 288 + 96


def test_the_model_and_the_state(server: ServerProcess, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == (NAME, "model", 1024)
    assert client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")
    stats = server.stats()
    assert (stats["world_size"], stats["communicator"], stats["device"], stats["dtype"]) == (2, "gloo", "cpu", "float32")
    assert "ladder" in stats["variant"]


def test_metrics_count(server: ServerProcess, complete: Complete) -> None:
    before = server.metrics()
    complete(max_tokens=10, n=2, temperature=1, seed=1)
    computed, running = "rung:iteration_tokens_total_sum", "rung:num_requests_running"

    def last_report() -> dict[str, float] | None:
        """Metrics once they include both answers. The engine reports with a delay, perhaps also before the answers end."""
        now = server.metrics()
        return now if now[computed] - before[computed] >= 10 + 2 * 9 and now[running] == 0 else None

    after = wait_until(last_report, 60, "a report")

    def moved(name: str) -> float:
        return after["rung:" + name] - before.get("rung:" + name, 0.0)  # a sample appears with the first request of its kind

    assert moved("generation_tokens_total") == 20
    assert moved("prompt_tokens_total") == 10
    assert moved("prefix_cache_queries_total") >= 10
    assert moved('request_success_total{finished_reason="length"}') == 2
    assert moved('http_responses_total{path="/v1/completions",status="200"}') == 1
    assert moved("engine_steps_total") >= 10
    for histogram, count in (
        ("time_to_first_token_seconds", 2),
        ("inter_token_latency_seconds", 18),
        ("e2e_request_latency_seconds", 2),
        ("request_queue_time_seconds", 2),
        ("request_prefill_time_seconds", 2),
        ("request_decode_time_seconds", 2),
        ("request_prompt_tokens", 2),
        ("request_generation_tokens", 2),
    ):
        assert moved(f"{histogram}_count") == count, histogram
    assert moved("request_generation_tokens_sum") == 20
    assert moved("iteration_tokens_total_sum") == 10 + 2 * 9
    assert after["rung:num_requests_running"] == after["rung:num_requests_waiting"] == after["rung:kv_cache_usage_perc"] == 0
    for name in ("prefix_cache_hits_total", "num_preemptions_total"):
        assert after[f"rung:{name}"] >= 0


# --- clients that leave --------------------------------------------------------------------------------------------------


def idle(server: ServerProcess) -> bool:
    stats = server.stats()
    return stats["kv_blocks_used"] == stats["running"] == stats["waiting"] == 0


def test_a_client_that_leaves_frees_its_blocks(server: ServerProcess, client: openai.OpenAI) -> None:
    wait_until(lambda: idle(server), 60, "an idle server")
    aborted = 'rung:request_success_total{finished_reason="abort"}'
    before = server.metrics()[aborted]
    stream = client.completions.create(model=NAME, prompt=PROMPT, stream=True, n=2, **LONG)
    next(iter(stream))
    wait_until(lambda: server.stats()["kv_blocks_used"] > 0, 60, "blocks in use")
    stream.close()
    wait_until(lambda: idle(server), 60, "no block in use after a stream was dropped")
    wait_until(lambda: server.metrics()[aborted] == before + 2, 60, "two sequences counted as aborted")

    with socket.create_connection(("127.0.0.1", server.port)) as raw:  # without a stream
        raw.sendall(raw_request({"prompt": PROMPT, "n": 4, **LONG}))
        wait_until(lambda: server.stats()["kv_blocks_used"] > 0, 60, "blocks in use")
    wait_until(lambda: idle(server), 60, "no block in use after an answer was given up")
    wait_until(lambda: server.metrics()[aborted] == before + 6, 60, "six sequences counted as aborted")
