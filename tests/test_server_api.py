"""The HTTP frontend against a fake engine: every parameter, error and end of a request, with real clients on a real port."""

import asyncio
import contextlib
import gc
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
import zmq
from prometheus_client import CollectorRegistry, Histogram

from engine import worker
from engine.protocol import (
    Abort,
    Fatal,
    FromEngine,
    Logprob,
    Outputs,
    Ready,
    Refused,
    RequestParams,
    Shutdown,
    Stats,
    Submit,
    TokenLogprobs,
    TokenOutput,
    decode_to_engine,
    encode,
)
from errors import UserError
from server import frontend, grammar, replies
from server.completions import work_of
from server.engine_client import SLICE, EngineClient
from server.frontend import FrontendServer, make_server, run_frontend
from server.generation import Usage
from server.metrics import Metrics, TokenHistogram
from server.problems import ApiError
from server.schemas import CompletionBody
from server.settings import Settings, load_settings
from server.sse import PIECE, ClientGone, EventStream, to_json
from server.text import LONG_TEXT, TextStream
from tokenizer import load_tokenizer
from tp import World

MODEL = Path(__file__).parent.parent / "models" / "tiny-hybrid"
TOKENIZER = load_tokenizer(MODEL)
EOS = TOKENIZER.eos_ids[0]
CONTEXT = 256
STORY = "Once upon a time, Zoë saw a 🐉 über the café. It was kind. END of it"


class FakeEngine(threading.Thread):
    """Speaks the protocol: every request gets `reply`, rotated by its seed, or waits if told to hold."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.to_engine, self.from_engine = f"ipc://{folder}/to", f"ipc://{folder}/from"
        self.reply: Callable[[Submit], list[int]] = lambda submit: TOKENIZER.encode(STORY, add_special_tokens=False)
        self.group = 1  # tokens of a sequence in one output
        self.together = 1  # outputs in one message
        self.delay = 0.0  # seconds before each message
        self.hold = False
        self.submits: list[Submit] = []
        self.aborts: list[str] = []
        self.shutdowns = 0
        self._alive = True

    def run(self) -> None:
        context = zmq.Context()
        inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        inbox.bind(self.to_engine)
        outbox.connect(self.from_engine)
        self.send: Callable[[FromEngine], None] = lambda message: outbox.send(encode(message))
        self.send(ready())
        work: dict[str, Iterator[TokenOutput]] = {}
        while self._alive:
            while inbox.poll(0 if work and not self.hold else 5):
                self._take(decode_to_engine(inbox.recv()), work)
            for request_id, outputs in [] if self.hold else list(work.items()):
                time.sleep(self.delay)
                new = list(islice(outputs, self.together))
                self.send(Outputs(new))
                if new[-1].finish_reason:
                    del work[request_id]
        context.destroy(linger=0)

    def stop(self) -> None:
        self._alive = False
        self.join(5)

    def _take(self, message: Any, work: dict[str, Iterator[TokenOutput]]) -> None:
        if isinstance(message, Submit):
            self.submits.append(message)
            if message.prompt_ids[-1] == 1000:
                self.send(Refused(message.request_id, "this can never run"))
            else:
                work[message.request_id] = self._outputs(message)
        elif isinstance(message, Abort):
            self.aborts.append(message.request_id)
            work.pop(message.request_id, None)
        elif isinstance(message, Shutdown):
            self.shutdowns += 1

    def _outputs(self, submit: Submit) -> Iterator[TokenOutput]:
        params = submit.params
        ids = self.reply(submit)[: params.max_tokens]
        ended = [i for i, token in enumerate(ids) if token in params.stop_token_ids]
        ids, reason = (ids[: ended[0] + 1], "stop") if ended else (ids, "length")
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            k = params.prompt_logprobs
            prompt_logprobs = [None, *(entry(one, k) for one in submit.prompt_ids[1:])]
        for at in range(0, len(ids), self.group):
            new = ids[at : at + self.group]
            yield TokenOutput(
                request_id=submit.request_id,
                token_ids=new,
                finish_reason=reason if at + self.group >= len(ids) else None,
                logprobs=None if params.logprobs is None else [entry(one, params.logprobs) for one in new],
                prompt_logprobs=prompt_logprobs if at == 0 else None,
                cached_tokens=4 if at == 0 else 0,
                queue_seconds=0.001,
                prefill_seconds=0.002,
            )


def entry(token: int, k: int) -> TokenLogprobs:
    """The chosen token second to another one, so that a layout must add it."""
    others = [Logprob((token + 1 + i) % 1024, -0.25 * (i + 1), i + 1) for i in range(k)]
    return TokenLogprobs(Logprob(token, -0.1 * (token % 7), 1), others)


def ready() -> Ready:
    return Ready("tiny", "hybrid", "gloo", 2, "cpu", "float32", CONTEXT, TOKENIZER.vocab_size, 100, 16)


class Site:
    """A frontend on a free port in a thread, and its fake engine."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.engine = FakeEngine(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.settings = Settings(**{"model": str(MODEL), "port": self.port, "idle_timeout": 5.0, **settings})
        self.server: FrontendServer = make_server(self.settings, TOKENIZER, self.engine.to_engine, self.engine.from_engine)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.openai = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    def start(self, engine: bool = True) -> "Site":
        self.thread.start()
        if engine:
            self.engine.start()
        wait_for(lambda: self.server.started and (not engine or self.health() == "ready"))
        return self

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        if self.engine.is_alive():
            self.engine.stop()
        assert not self.thread.is_alive()

    def health(self) -> str:
        return str(self.http.get("/health").json()["status"])

    def complete(self, **body: Any) -> dict[str, Any]:
        return self.post("/v1/completions", {"prompt": "Hi", "max_tokens": 100, **body})

    def chat(self, **body: Any) -> dict[str, Any]:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **body})

    def post(self, path: str, body: Any) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        content: dict[str, Any] = response.json()
        return content

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = replies.ErrorReply.model_validate(response.json()).error.model_dump()
        return error

    def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream, the last one checked to be [DONE]."""
        response = self.http.post(path, json={**body, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def last(self) -> Submit:
        return self.engine.submits[-1]


def wait_for(condition: Callable[[], Any], seconds: float = 8.0) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("z")).start()
    yield site
    site.close()


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    engine = shared.engine
    default = engine.reply
    yield shared
    engine.reply, engine.group, engine.together, engine.delay, engine.hold = default, 1, 1, 0.0, False
    wait_for(lambda: shared.server.client.active == 0)


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(start: bool = True, engine: bool = True, **settings: Any) -> Site:
        made.append(Site(tmp_path, **settings))
        return made[-1].start(engine) if start else made[-1]

    yield make
    for one in made:
        if one.thread.is_alive():
            one.close()


# --------------------------------------------------------------------------------------------------------- completions


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
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        if choice["logprobs"]:
            for key, values in choice["logprobs"].items():
                assert [v for one in mine for v in one["logprobs"][key]] == values
        else:
            assert all(one["text"] for one in mine[:-1]), "an empty chunk"


def test_multi_byte_text_is_never_cut(site: Site) -> None:
    texts = [e["choices"][0]["text"] for e in site.events("/v1/completions", {"prompt": "Hi", "max_tokens": 100})]
    assert "".join(texts) == STORY and not any("\ufffd" in text for text in texts)
    assert len(texts) < len(TOKENIZER.encode(STORY)), "the dragon takes more than one token"


def test_stop_string_across_tokens_aborts_the_engine(site: Site) -> None:
    site.engine.delay = 0.002
    before = len(site.engine.aborts)
    choice = site.complete(stop=["nothing", "It was k"])["choices"][0]
    assert choice["text"] == STORY[: STORY.index("It was k")]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "It was k")
    wait_for(lambda: len(site.engine.aborts) == before + 1)
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
    }
    site.complete(**given, logit_bias={"5": -100, "7": 1.5}, n=2, user="me")
    second, first = site.engine.submits[-1].params, site.engine.submits[-2].params
    assert {name: getattr(first, name) for name in given} == given
    assert first.logit_bias == {5: -100.0, 7: 1.5} and second.seed == 6
    site.complete(temperature=None, stop=None, logprobs=None, top_p=0, top_k=-1, length_penalty=1.0, suffix=None)
    params = site.last().params
    assert params.temperature == 1.0 and params.logprobs is None and 0 < params.top_p < 1e-6 and params.top_k == 0
    site.post("/v1/completions", {"prompt": "Hi"})
    assert site.last().params.max_tokens == 16
    assert site.complete(model="tiny-hybrid", request_id="mine")["id"] == "cmpl-mine"


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


def test_best_of_keeps_the_likeliest(site: Site) -> None:
    site.engine.reply = lambda submit: [7 * 40 + 6 - submit.params.seed] * 4  # a higher seed is likelier
    answer = site.complete(best_of=3, n=2, seed=0)
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["text"] == TOKENIZER.decode([7 * 40 + 4] * 4)
    assert answer["choices"][0]["logprobs"] is None and answer["usage"]["completion_tokens"] == 12


def test_usage_in_streams(site: Site) -> None:
    body = {"prompt": "Hi", "max_tokens": 5, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = site.events("/v1/completions", body)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 5
    assert [e["usage"]["completion_tokens"] for e in events[:-1]] == [1, 2, 3, 4, 5]
    events = site.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert all(e["usage"] is None for e in events[:-1]) and events[-1]["usage"]["total_tokens"] > 5


# ---------------------------------------------------------------------------------------------------------------- chat


def test_chat_with_the_openai_client(site: Site) -> None:
    messages: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    answer = site.openai.chat.completions.create(model="tiny-hybrid", messages=messages, logprobs=True, top_logprobs=2, n=2)
    assert [c.message.content for c in answer.choices] == [STORY, STORY]
    chat_text = TOKENIZER.render_chat([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}])
    assert site.last().prompt_ids == TOKENIZER.encode(chat_text, add_special_tokens=False)
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content and all(len(one.top_logprobs) == 2 for one in content)
    assert b"".join(bytes(one.bytes or []) for one in content).decode() == STORY
    assert site.last().params.max_tokens == CONTEXT - len(site.last().prompt_ids)


def test_chat_stream_has_the_role_first(site: Site) -> None:
    chunks = list(
        site.openai.chat.completions.create(
            model="tiny-hybrid",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            max_completion_tokens=6,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == STORY_6
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 6


STORY_6 = TOKENIZER.decode(TOKENIZER.encode(STORY, add_special_tokens=False)[:6])


def test_chat_template_options(site: Site) -> None:
    def prompt(**body: Any) -> str:
        site.chat(max_tokens=1, **body)
        return TOKENIZER.decode(site.last().prompt_ids, skip_special_tokens=False)

    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    assert prompt(messages=turns, continue_final_message=True).endswith("<|assistant|>Well")
    assert prompt(add_generation_prompt=False).endswith("Hi<|end|>")
    assert prompt(chat_template="{{ messages[0].content }}{{ x }}", chat_template_kwargs={"x": "yz"}) == "Hiyz"
    assert prompt(chat_template="{{ documents[0].text }}", documents=[{"text": "abc"}]) == "abc"
    assert "weather" in prompt(tools=[TOOL]) and "weather" not in prompt(tools=[TOOL], tool_choice="none")
    calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}]
    template = "{{ messages[1].tool_calls[0].function.arguments.city }}"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert prompt(messages=messages, chat_template=template) == "Ulm"
    for bad in ("{{ x", "{{ raise_exception('no') }}", "{% for %}", "{{ 1 / 0 }}"):
        assert site.refused("/v1/chat/completions", {**CHAT, "chat_template": bad})["param"] == "chat_template"


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def test_json_formats_make_a_grammar(site: Site) -> None:
    site.chat(response_format={"type": "json_object"})
    assert '"object"' in (site.last().params.grammar or "")
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    json_schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    site.complete(response_format=json_schema)
    assert '"age"' in (site.last().params.grammar or "")
    site.chat(response_format={"type": "text"})
    assert site.last().params.grammar is None
    json_schema["json_schema"]["schema"] = {"type": "nonsense"}  # type: ignore[index]
    assert site.refused("/v1/chat/completions", {**CHAT, "response_format": json_schema})["param"] == "response_format"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}, "auto"])
def test_tool_calls(site: Site, choice: Any) -> None:
    text = '{"name": "weather", "arguments": {"city": "Zürich"}}'
    site.engine.reply = lambda submit: [*TOKENIZER.encode(text, add_special_tokens=False), EOS]
    answer = site.openai.chat.completions.create(
        model="tiny-hybrid",
        messages=CHAT["messages"],
        tools=[TOOL],
        tool_choice=choice,
    ).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    call: Any = answer.message.tool_calls and answer.message.tool_calls[0]
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Zürich"}
    assert (site.last().params.grammar is None) == (choice == "auto")
    events = site.events("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": choice})
    whole = [e["choices"][0] for e in events]
    assert [c["finish_reason"] for c in whole][-1] == "tool_calls"
    assert whole[-1]["delta"]["tool_calls"][0]["function"]["name"] == "weather"
    assert not any(c["delta"].get("content") for c in whole)


def test_text_with_tools_stays_text(site: Site) -> None:
    for text in ("{not a call", '{"name": "other", "arguments": {}}', "Plain words"):
        site.engine.reply = lambda submit, text=text: [*TOKENIZER.encode(text, add_special_tokens=False), EOS]  # type: ignore[misc]
        answer = site.chat(tools=[TOOL])["choices"][0]
        assert answer["message"]["content"] == text and answer["finish_reason"] == "stop"
        events = site.events("/v1/chat/completions", {**CHAT, "tools": [TOOL]})
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == text


def test_chat_answers_match_their_description(site: Site) -> None:
    answer = site.chat(logprobs=True, prompt_logprobs=1, return_token_ids=True, max_tokens=3)
    replies.ChatReply.model_validate(answer)
    assert len(answer["prompt_token_ids"]) == len(answer["prompt_logprobs"]) and len(answer["choices"][0]["token_ids"]) == 3


# -------------------------------------------------------------------------------------------------------------- errors

BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": 3}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [3]}, "stop.0"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5000": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [5000]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [5] * CONTEXT}, "prompt"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"cache_salt": "x"}, "cache_salt"),
    ({"priority": 1}, "priority"),
    ({"nonsense": 1}, "nonsense"),
    ({"messages": []}, "messages"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
    ({"seed": 2**63}, "seed"),
    ({"prompt": [1000]}, None),
]


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS, ids=lambda v: str(v)[:40])
def test_bad_completions_name_the_field(site: Site, body: dict[str, Any], param: str | None) -> None:
    content = json.dumps({"prompt": "Hi", **body})
    response = site.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = replies.ErrorReply.model_validate(response.json()).error
    assert error.param == param and error.type == "invalid_request_error"
    assert param is None or param.split(".")[0] in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"echo": True}, "echo"),
        ({"bad_words": ["x"]}, "bad_words"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_bad_chats_name_the_field(site: Site, body: dict[str, Any], param: str) -> None:
    error = site.refused("/v1/chat/completions", {**CHAT, **body})
    assert error["param"] == param, error


def test_error_statuses(site: Site) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        site.openai.completions.create(model="nope", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="never run"):
        site.openai.completions.create(model="tiny-hybrid", prompt=[1000])
    with pytest.raises(openai.BadRequestError, match=r"holds 256 tokens, but the prompt alone has 300"):
        site.openai.completions.create(model="tiny-hybrid", prompt=[5] * 300)
    for path, status in (("/nope", 404), ("/v1/models/nope", 404), ("/v1/completions", 405)):
        response = site.http.get(path)
        assert response.status_code == status and replies.ErrorReply.model_validate(response.json())
    for content in (b"{", b"[]", b"\xff", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"):
        response = site.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400 and replies.ErrorReply.model_validate(response.json()), response.text
    response = site.http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert response.status_code == 400 and "Content-Type" in response.text


def test_lone_surrogates_are_harmless(site: Site) -> None:
    body = '{"prompt": "a\\ud800b", "echo": true, "max_tokens": 1}'
    response = site.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200 and response.json()["choices"][0]["text"].startswith("a")
    response = site.http.post(
        "/v1/completions", content='{"prompt": "a", "model": "\\ud800"}', headers={"content-type": "application/json"}
    )
    assert response.status_code == 404


def test_keys(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key=("right", "other"), protect_metrics=True)
    for path, status in (
        ("/health", 200),
        ("/version", 200),
        ("/docs", 200),
        ("/v1/models", 401),
        ("/metrics", 401),
        ("/stats", 401),
    ):
        assert site.http.get(path).status_code == status, path
    with pytest.raises(openai.AuthenticationError):
        site.openai.models.list()
    for key in ("right", "other"):
        assert openai.OpenAI(base_url=site.url + "/v1", api_key=key).models.list().data[0].id == "tiny-hybrid"
    assert site.http.get("/metrics", headers={"authorization": "Bearer right"}).status_code == 200
    assert site.http.options("/v1/models").headers.get("access-control-allow-origin") is None


def test_limits(make_site: Callable[..., Site]) -> None:
    site = make_site(max_num_seqs=1, max_queue=1, max_body_mb=0.01, request_timeout=0.5, cors_origin=("https://a.example",))
    site.engine.hold = True
    assert site.refused("/v1/completions", {"prompt": "x" * 20_000}, 413)["code"] == "body_too_large"
    chunked = site.http.post("/v1/completions", content=iter([b"x" * 6000] * 3))
    assert chunked.status_code == 413
    assert site.refused("/v1/completions", {"prompt": "x", "n": 3})["code"] == "too_many_choices"
    with httpx.Client(base_url=site.url) as other:
        waiting = threading.Thread(target=lambda: other.post("/v1/completions", json={"prompt": "x", "n": 2}))
        waiting.start()
        wait_for(lambda: site.server.client.active == 2)
        response = site.http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        waiting.join()
    assert site.refused("/v1/completions", {"prompt": "x"}, 503)["code"] == "timeout"
    wait_for(lambda: len(site.engine.aborts) == 3)
    response = site.http.get("/version", headers={"origin": "https://a.example"})
    assert response.headers["access-control-allow-origin"] == "https://a.example"


# -------------------------------------------------------------------------------------------- ends of requests and server


def raw_request(body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_aborts(site: Site, stream: bool) -> None:
    site.engine.delay = 0.05
    before = len(site.engine.aborts)
    with socket.create_connection(("127.0.0.1", site.port)) as raw:
        raw.sendall(raw_request({"prompt": "Hi", "max_tokens": 60, "n": 2, "stream": stream}))
        wait_for(lambda: site.server.client.active == 2)
        if stream:
            assert raw.recv(10)
    wait_for(lambda: len(site.engine.aborts) == before + 2, 1.0)
    wait_for(lambda: site.server.service.open_requests == 0)


def test_slow_readers_do_not_slow_others(site: Site) -> None:
    long = TOKENIZER.encode("word " * 40, add_special_tokens=False)
    site.engine.reply = lambda submit: long
    with contextlib.ExitStack() as stack:
        for _ in range(5):  # open streams that nobody reads
            request = site.http.build_request(
                "POST", "/v1/completions", json={"prompt": "Hi", "max_tokens": 200, "stream": True}
            )
            stack.callback(site.http.send(request, stream=True).close)
        started = time.monotonic()
        assert site.complete()["choices"][0]["text"]
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_tokens_that_arrive_together_stay_chunks(site: Site, path: str, seed: int) -> None:
    """However many outputs a message of the engine has, the stream is the same but for its times."""
    body: dict[str, Any] = {"max_tokens": 40, "n": 3, "seed": seed, "return_token_ids": True, "logprobs": path.endswith("chat")}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stop": ["END"]}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi", "logprobs": 2}

    def by_choice() -> dict[int | None, list[Any]]:
        found: dict[int | None, list[Any]] = {}
        for event in site.events(path, body):
            for choice in event["choices"] or [{"index": None, "usage": event["usage"]}]:
                found.setdefault(choice["index"], []).append(choice)
        return found

    alone = by_choice()
    assert len(alone) == 4 and len(alone[0]) > 10
    for site.engine.together in (2, 7, 1000):
        assert by_choice() == alone, (site.engine.together, seed)


def test_usage_counts_up_within_a_message(site: Site) -> None:
    site.engine.together = 1000
    options = {"continuous_usage_stats": True}
    events = site.events(
        "/v1/completions", {"prompt": "Hi", "max_tokens": 20, "return_token_ids": True, "stream_options": options}
    )
    assert [e["usage"]["completion_tokens"] for e in events] == list(range(1, len(events) + 1))


def test_what_is_there_at_once_is_written_at_once(seed: int) -> None:
    rng = random.Random(seed)
    groups = [[{"n": rng.random()} for _ in range(rng.randint(1, 4))] for _ in range(20)]
    written: list[bytes] = []

    async def events() -> AsyncGenerator[list[Any], None]:
        for group in groups:
            yield group

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            written.append(message["body"])

    async def run() -> None:
        await EventStream(events(), 30)({"type": "http", "state": {"send": send}}, asyncio.Event().wait, send)  # type: ignore[arg-type]

    asyncio.run(run())
    wanted = [b"".join(b"data: " + to_json(one) + b"\n\n" for one in group) for group in groups]
    assert written == [*wanted, b"data: [DONE]\n\n", b""], seed


def test_a_reader_that_stalls_is_left(make_site: Callable[..., Site]) -> None:
    """Its buffers are full and stay so: its sequences end, and those of others go on."""
    site = make_site(idle_timeout=0.5)
    site.engine.reply = lambda submit: [300] * 200
    body = {"prompt": "Hi", "max_tokens": 200, "n": 64, "stream": True, "logprobs": 20}
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", site.port))
        raw.sendall(raw_request(body))
        assert raw.recv(10)
        assert site.server.service.open_requests == 1
        wait_for(lambda: site.server.service.open_requests == 0 and site.server.client.active == 0, 15)
    metrics = site.http.get("/metrics").text
    assert 'path="/v1/completions",status="499"} 1.0' in metrics
    assert site.complete(max_tokens=3)["choices"][0]["text"]


def test_a_slow_reader_that_goes_on_gets_all(make_site: Callable[..., Site]) -> None:
    """Megabytes wait for it, and it takes many times --idle-timeout for them."""
    timeout = 0.5
    site = make_site(idle_timeout=timeout)
    site.engine.reply = lambda submit: [300] * 100
    site.engine.together = 1000
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(10)
        raw.connect(("127.0.0.1", site.port))
        raw.sendall(raw_request({"prompt": "Hi", "max_tokens": 100, "n": 96, "stream": True, "logprobs": 20}))
        started, size, end = time.monotonic(), 0, b""
        while not end.endswith(b"0\r\n\r\n"):
            part = raw.recv(4096)
            assert part, f"cut off after {size} bytes and {time.monotonic() - started:.1f} s"
            size, end = size + len(part), (end + part)[-64:]
            if (ahead := started + size / 1.2e6 - time.monotonic()) > 0.01:  # bytes a second
                time.sleep(ahead)
    assert b"data: [DONE]" in end
    assert size > 4e6 and time.monotonic() - started > 4 * timeout


@pytest.mark.parametrize("stalls", [False, True])
def test_large_events_leave_in_pieces_with_a_time_limit_each(seed: int, stalls: bool) -> None:
    rng = random.Random(seed)
    group = [{"n": rng.random(), "text": "x" * rng.randint(0, 2 * PIECE)} for _ in range(8)]
    written: list[bytes] = []

    async def events() -> AsyncGenerator[list[Any], None]:
        yield group

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(3600 if stalls and len(written) == 3 else 0.1)
            written.append(message["body"])

    async def run() -> None:
        await EventStream(events(), 0.5)({"type": "http", "state": {"send": send}}, asyncio.Event().wait, send)  # type: ignore[arg-type]

    wanted = b"".join(b"data: " + to_json(one) + b"\n\n" for one in group) + b"data: [DONE]\n\n"
    if stalls:
        with pytest.raises(ClientGone):
            asyncio.run(run())
        assert b"".join(written) == wanted[: 3 * PIECE], seed
    else:
        asyncio.run(run())
        assert b"".join(written) == wanted, seed
    assert max(map(len, written)) <= PIECE


def lone_client() -> EngineClient:
    """Without sockets: what it would send is dropped."""
    client = EngineClient("", "", Metrics("lone"))
    client._send = lambda message: None  # type: ignore[method-assign]
    client.ready = ready()
    return client


def test_a_backlog_comes_in_slices_in_order(seed: int) -> None:
    rng = random.Random(seed)
    submits = [Submit(f"r{i}", [1], RequestParams(max_tokens=10**6)) for i in range(3)]
    client = lone_client()

    async def run() -> None:
        with client.generate(submits) as generation:
            sent = [(rng.randrange(3), rng.randrange(1000)) for _ in range(rng.randint(3 * SLICE, 5 * SLICE))]
            client._dispatch(Outputs([TokenOutput(f"r{i}", [token]) for i, token in sent]))
            generation.on_error(ApiError(503, "behind all of it"))
            slices, turns = [], 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            task = asyncio.create_task(other())
            while sum(map(len, slices)) < len(sent):
                slices.append([(i, output.token_ids[0]) for i, output in await generation.next()])
            with pytest.raises(ApiError, match="behind all of it"):
                await generation.next()
            task.cancel()
            assert [one for part in slices for one in part] == sent, seed
            assert {len(part) for part in slices[:-1]} == {SLICE}, seed
            assert turns >= len(slices) - 1, seed

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("where", ["push", "report"])
def test_what_came_before_a_failure_is_sent(
    site: Site, path: str, where: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A token whose text, or whose chunk, cannot be made ends the stream, but takes no earlier one of its message along."""
    site.engine.together = 1000
    good, calls = random.Random(seed).randint(2, 6), 0
    owner: Any = TextStream if where == "push" else Usage
    whole = getattr(owner, where)

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > good:
            raise RuntimeError("made to fail")
        return whole(*args)

    monkeypatch.setattr(owner, where, failing)
    body = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    options = {"continuous_usage_stats": True}
    events = site.events(path, {**body, "max_tokens": 20, "return_token_ids": True, "stream_options": options})
    *chunks, error = events
    assert error["error"]["type"] == "server_error", seed
    sent = [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", [])]
    # a chat's first delta makes two chunks, the role and the text
    tokens = good - 1 if where == "report" and "chat" in path else good
    assert sent == TOKENIZER.encode(STORY, add_special_tokens=False)[:tokens], seed


SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("body", "inline"),
    [
        ({"prompt": "Hi"}, True),
        ({"prompt": [5] * 2000}, True),
        ({"prompt": ["Hi"] * 16, "response_format": {"type": "text"}}, True),
        ({"prompt": "Hi", "allowed_token_ids": [1, 2], "logit_bias": {"3": 1.0}, "stop_token_ids": [4]}, True),
        ({"prompt": "x" * 5000}, False),
        ({"prompt": [5] * 5000}, False),
        ({"prompt": [[5] * 50] * 100}, False),
        ({"prompt": ["Hi"] * 200}, False),
        ({"prompt": "Hi", "response_format": {"type": "json_object"}}, False),
        ({"prompt": "Hi", "response_format": SCHEMA}, False),
        ({"prompt": "Hi", "allowed_token_ids": [1] * 5000}, False),
        ({"prompt": ["Hi"] * 16, "allowed_token_ids": [1] * 300}, False),
        ({"prompt": ["Hi"] * 16, "stop_token_ids": [1] * 300}, False),
        ({"prompt": ["Hi"] * 16, "logit_bias": {str(i): 1.0 for i in range(300)}}, False),
    ],
)
def test_only_light_preparation_stays_on_the_event_loop(body: dict[str, Any], inline: bool) -> None:
    work = work_of(CompletionBody(**body))
    assert (work <= LONG_TEXT) == inline, work
    assert (work == math.inf) == (body.get("response_format", {}).get("type", "text") != "text")


def test_a_schema_that_takes_long_holds_up_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release = threading.Event(), threading.Event()
    compile_schema = grammar.compile_schema

    def slow(schema: dict[str, Any], param: str) -> str:
        begun.set()
        assert release.wait(10)
        return compile_schema(schema, param)

    monkeypatch.setattr(grammar, "compile_schema", slow)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(site.complete(response_format=SCHEMA)))
    asking.start()
    try:
        assert begun.wait(5)
        assert httpx.get(site.url + "/version", timeout=5).status_code == 200
        assert not answers
    finally:
        release.set()
        asking.join(10)
    assert answers[0]["choices"][0]["text"]


class _Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


def left_garbage() -> weakref.ref[_Ring]:
    gc.disable()
    return weakref.ref(_Ring())


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_the_worker_freezes_no_garbage() -> None:
    link: Any = SimpleNamespace(receive=lambda timeout: [encode(Shutdown())], send=lambda message: None, close=lambda: None)
    engine: Any = SimpleNamespace(has_work=lambda: False)
    local: Any = None
    garbage = left_garbage()
    worker.serve(engine, World(0, 1, torch.device("cpu"), local), link, ready(), lambda: True)
    assert garbage() is None and gc.get_freeze_count() > 0


@pytest.mark.usefixtures("thawed")
def test_the_frontend_freezes_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    server = SimpleNamespace(run=lambda: found.append((garbage(), gc.get_freeze_count())), exit_code=0, started=True)
    monkeypatch.setattr(frontend, "make_server", lambda *args: server)
    monkeypatch.setattr(frontend, "os", SimpleNamespace(_exit=lambda code: found.append(code)))
    monkeypatch.setattr(frontend.logs, "configure", lambda *args: None)
    garbage = left_garbage()
    run_frontend(Settings(model=str(MODEL)), "", "")
    (alive, frozen), code = found
    assert alive is None and frozen > 0 and code == 0


def test_the_histogram_of_tokens_is_prometheus_own(seed: int) -> None:
    rng = random.Random(seed)
    bounds, registries = sorted({rng.uniform(0, 2) for _ in range(6)} | {1.0}), (CollectorRegistry(), CollectorRegistry())
    ours = TokenHistogram("x_seconds", "text", "m", bounds)
    registries[0].register(ours)
    theirs = Histogram("x_seconds", "text", ["model_name"], registry=registries[1], buckets=bounds).labels("m")
    for value in (*(rng.uniform(-0.1, 2.5) for _ in range(50)), *bounds):
        count = rng.randint(1, 3)
        ours.observe(value, count)
        for _ in range(count):
            theirs.observe(value)
    found, wanted = (
        {s.name + str(sorted(s.labels.items())): s.value for f in r.collect() for s in f.samples} for r in registries
    )
    assert found == pytest.approx(wanted), seed


def test_loading_then_ready(make_site: Callable[..., Site]) -> None:
    site = make_site(engine=False)
    assert site.http.get("/health").status_code == 503 and site.health() == "loading"
    response = site.http.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503 and response.headers["retry-after"]
    site.engine.start()
    wait_for(lambda: site.health() == "ready")
    assert site.complete()["choices"][0]["text"] == STORY


def test_drain(make_site: Callable[..., Site]) -> None:
    site = make_site(drain_timeout=5)
    site.engine.delay = 0.02
    events: list[Any] = []
    with httpx.Client(base_url=site.url) as other:
        reader = threading.Thread(
            target=lambda: events.append(other.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 30}).json())
        )
        reader.start()
        wait_for(lambda: site.server.client.active)
        site.server._loop.call_soon_threadsafe(site.server.drain)
        wait_for(lambda: site.http.get("/health").json() == {"status": "draining"})
        assert site.http.post("/v1/completions", json={"prompt": "x"}).json()["error"]["code"] == "draining"
        reader.join()
    assert events[0]["usage"]["completion_tokens"] == len(TOKENIZER.encode(STORY, add_special_tokens=False)), (
        "a running request ends as usual"
    )
    site.thread.join(5)
    assert not site.thread.is_alive() and site.server.exit_code == 0
    wait_for(lambda: site.engine.shutdowns == 1)


def test_drain_timeout_ends_what_is_left(make_site: Callable[..., Site]) -> None:
    site = make_site(drain_timeout=0.2)
    site.engine.hold = True
    with httpx.Client(base_url=site.url) as other:
        answers: list[httpx.Response] = []
        reader = threading.Thread(target=lambda: answers.append(other.post("/v1/completions", json={"prompt": "Hi"})))
        reader.start()
        wait_for(lambda: site.server.client.active)
        site.server._loop.call_soon_threadsafe(site.server.drain)
        reader.join()
    assert answers[0].status_code == 503
    site.thread.join(5)
    assert not site.thread.is_alive() and site.server.exit_code == 0


def test_engine_failure_reaches_waiting_clients(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.engine.delay = 0.05
    answers: list[httpx.Response] = []

    def ask(stream: bool) -> None:
        with httpx.Client(base_url=site.url) as one:
            answers.append(one.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 60, "stream": stream}))

    readers = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    for reader in readers:
        reader.start()
    wait_for(lambda: site.server.client.active == 2)
    time.sleep(0.3)
    site.engine.send(Fatal("rank 1 was lost"))
    for reader in readers:
        reader.join(10)
    by_kind = {answer.headers["content-type"].split(";")[0]: answer for answer in answers}
    assert by_kind["application/json"].status_code == 503
    lines = by_kind["text/event-stream"].text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]" and "engine_failed" in lines[-2]
    site.thread.join(8)
    assert not site.thread.is_alive() and site.server.exit_code == 1


def test_idle_connections_are_closed(make_site: Callable[..., Site]) -> None:
    site = make_site(idle_timeout=0.3)
    for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"):
        with socket.create_connection(("127.0.0.1", site.port), timeout=5) as raw:
            raw.sendall(sent)
            assert raw.recv(10) == b""


def frontend_process(folder: Path, settings: Settings) -> None:
    run_frontend(settings, f"ipc://{folder}/to", f"ipc://{folder}/from")


@pytest.mark.parametrize(("signals", "code"), [(1, 0), (2, 128 + signal.SIGTERM)])
def test_signals_end_the_process(tmp_path: Path, signals: int, code: int) -> None:
    site = Site(tmp_path, drain_timeout=20)
    process = multiprocessing.get_context("spawn").Process(target=frontend_process, args=(tmp_path, site.settings))
    process.start()
    site.engine.start()
    wait_for(lambda: site.health() == "ready", 20)
    site.engine.delay = 0.05
    with httpx.Client(base_url=site.url) as other:
        answers: list[httpx.Response] = []

        def ask() -> None:
            with contextlib.suppress(httpx.TransportError):
                answers.append(other.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 100}))

        reader = threading.Thread(target=ask)
        reader.start()
        wait_for(lambda: site.engine.submits)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        wait_for(lambda: site.health() == "draining")
        if signals == 2:
            os.kill(process.pid, signal.SIGTERM)
        reader.join()
        process.join(10)
    assert process.exitcode == code and len(answers) == (signals == 1)
    wait_for(lambda: site.engine.shutdowns == 1)
    site.engine.stop()


# ------------------------------------------------------------------------------------------------------ the other routes


def test_tokenize_and_detokenize(site: Site) -> None:
    answer = site.post("/tokenize", {"prompt": "Hi Zoë", "return_token_strs": True})
    assert answer["tokens"] == TOKENIZER.encode("Hi Zoë") and answer["count"] == len(answer["token_strs"])
    assert site.post("/detokenize", {"tokens": answer["tokens"]})["prompt"] == TOKENIZER.decode(answer["tokens"], False)
    chat = site.post("/tokenize", {"messages": CHAT["messages"]})
    assert chat["tokens"] == TOKENIZER.encode_chat(CHAT["messages"])
    assert site.refused("/tokenize", {})["param"] == "prompt"
    assert site.refused("/detokenize", {"tokens": [5000]})["param"] == "tokens"


def test_models_health_version_docs(site: Site) -> None:
    assert site.openai.models.list().data[0].id == "tiny-hybrid"
    replies.ModelCard.model_validate(site.http.get("/v1/models/tiny-hybrid").json())
    assert site.http.get("/version").json()["version"]
    assert "repetition_penalty" in site.http.get("/docs").text and "//cdn" not in site.http.get("/docs").text
    api = site.http.get("/openapi.json").json()
    assert "422" not in api["paths"]["/v1/completions"]["post"]["responses"]
    assert "text/event-stream" in api["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert site.http.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"


def test_metrics_and_stats(site: Site) -> None:
    site.complete(max_tokens=4)
    site.engine.send(Stats(2, 3, 10, 40, 100, 50, 1, 1000, 2000, 30, 0.004, [1, 2, 300]))
    wait_for(lambda: site.http.get("/stats").json()["waiting"] == 3)
    stats = site.http.get("/stats").json()
    replies.StatsReply.model_validate(stats)
    assert stats["kv_cache_usage"] == 0.25 and stats["prefix_hit_rate"] == 0.5 and stats["ttft_seconds"]["p50"] > 0
    text = site.http.get("/metrics").text
    for name in (
        'rung:num_requests_running{model_name="tiny-hybrid"} 2.0',
        'rung:kv_cache_usage_perc{model_name="tiny-hybrid"} 0.25',
        'rung:prefix_cache_hits_total{model_name="tiny-hybrid"} 50.0',
        "rung:num_preemptions_total",
        "rung:prompt_tokens_total",
        "rung:generation_tokens_total",
        'rung:request_success_total{finished_reason="length"',
        "rung:time_to_first_token_seconds_bucket",
        "rung:inter_token_latency_seconds_sum",
        "rung:e2e_request_latency_seconds_count",
        "rung:request_queue_time_seconds_count",
        "rung:request_prefill_time_seconds_count",
        "rung:request_decode_time_seconds_count",
        "rung:iteration_tokens_total_bucket",
        "rung:request_prompt_tokens_count",
        "rung:request_generation_tokens_count",
    ):
        assert name in text, name


def test_many_connections_opened_and_dropped(site: Site) -> None:
    site.engine.delay = 0.002

    async def one(client: httpx.AsyncClient, i: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02 * (i % 10)):
                await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 30, "stream": i % 2 == 0})

    async def storm() -> None:
        async with httpx.AsyncClient(base_url=site.url, timeout=20) as client:
            await asyncio.gather(*(one(client, i) for i in range(60)))

    asyncio.run(storm())
    wait_for(lambda: site.server.client.active == 0 and site.server.service.open_requests == 0)


# ------------------------------------------------------------------------------------------------------------ settings


def test_settings_precedence(tmp_path: Path) -> None:
    file = tmp_path / "rung.toml"
    file.write_text('model = "m"\nport = 1\nmax-num-seqs = 2\nmax_queue = 3\napi-key = ["a", "b"]\ncompile = true\n')
    environ = {"RUNG_PORT": "10", "RUNG_MAX_NUM_SEQS": "20", "RUNG_CORS_ORIGIN": "x, y"}
    settings = load_settings(["--config", str(file), "--port", "100"], environ)
    assert (settings.port, settings.max_num_seqs, settings.max_queue) == (100, 20, 3)
    assert settings.api_key == ("a", "b") and settings.cors_origin == ("x", "y") and settings.compile
    assert "a" not in repr(settings).split("model=")[0] and "api_key=" not in repr(settings)
    keys = tmp_path / "keys"
    keys.write_text("# comment\n\nsecret\n")
    settings = load_settings(["--model", "m", "--api-key-file", str(keys), "--kv-memory", "1.5G"], {})
    assert settings.api_key == ("secret",) and settings.kv_memory == 1.5 * 2**30


@pytest.mark.parametrize(
    ("argv", "environ", "file", "message"),
    [
        ([], {}, "", "no model"),
        (["--model", "m", "--por", "1"], {}, "", "--por"),
        (["--model", "m", "--port", "x"], {}, "", "--port"),
        (["--model", "m"], {"RUNG_PORT": "70000"}, "", "RUNG_PORT"),
        (["--model", "m"], {}, "prot = 1", "prot"),
        (["--model", "m"], {}, "port = 'x'", "port in"),
        (["--model", "m"], {}, "port = [", "cannot be parsed"),
        (["--model", "m"], {"RUNG_COMPILE": "maybe"}, "", "RUNG_COMPILE"),
        (["--model", "m", "--api-key", ""], {}, "", "api-key"),
    ],
)
def test_bad_settings(tmp_path: Path, argv: list[str], environ: dict[str, str], file: str, message: str) -> None:
    if file:
        (tmp_path / "c.toml").write_text(file)
        argv = [*argv, "--config", str(tmp_path / "c.toml")]
    with pytest.raises(UserError, match=message) as caught:
        load_settings(argv, environ)
    assert "\n" not in str(caught.value)
