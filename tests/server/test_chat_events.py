"""The streams of completions and chat completions are those that OpenAI publishes, byte for byte.

fixtures/chat has them, written from OpenAI's reference: the role first, then each part, the reason to finish, the usage in a chunk
without choices, and [DONE]. README.md names the pages.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.calls.parser import Arguments, Call, Part, Reasoning, Text
from engine.protocol import Logprob, TokenLogprobs
from server.chat import ChatRequest
from server.completions import CompletionRequest
from server.endpoint import GenerationRequest
from server.generation import Prompt
from server.replies import ChatChunk, CompletionChunk, ErrorReply
from server.schemas import ChatBody, CompletionBody
from tests.support.scripted import Scripted, deltas, written
from tests.support.server_thread import Site

FIXTURES = Path(__file__).parent / "fixtures" / "chat"
LOGPROBS = [TokenLogprobs(Logprob(300, -0.5, 1), [Logprob(300, -0.5, 1), Logprob(301, -1.25, 2)])]
USAGE = {"stream_options": {"include_usage": True}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS: list[list[Part]] = [
    [Text("Let me ask.")],
    [Call("call_1", "weather"), Arguments("{")],
    [Arguments('"city":"Bonn"}')],
    [Call("call_2", "weather"), Arguments("{}")],
]
SCRIPTS: dict[str, tuple[list[list[Part]], str]] = {
    "text": ([[Text("Hel")], [Text("lo")], []], "stop"),
    "calls": ([*CALLS, []], "stop"),
    "cut_call": (CALLS[:3], "length"),
    "reasoning": ([[Reasoning("Hm")], [Reasoning(".")], [Text("Yes")]], "length"),
}


def streamed(request: GenerationRequest, texts: list[str], reason: str, logprobs: list[TokenLogprobs] | None = None) -> bytes:
    request.id, request.created = f"{request.id_prefix}-0", 1700000000
    return written(request, deltas(texts, reason, logprobs))


def chunks(stream: bytes) -> list[Any]:
    events = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n") if event]
    assert events.pop() == b"[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("name", SCRIPTS)
def test_chunks_of_a_chat(site: Site, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, reason = SCRIPTS[name]
    monkeypatch.setattr("server.chat.parser_for", lambda *_: Scripted(parts, name == "calls"))
    body = ChatBody.model_validate(CHAT | USAGE | ({"tools": [TOOL]} if "call" in name else {}))
    stream = streamed(ChatRequest(site.server.service, body, [Prompt([1, 2, 3])], ""), [""] * len(parts), reason)
    assert stream == (FIXTURES / f"{name}.sse").read_bytes()
    assert all(ChatChunk.model_validate(chunk) for chunk in chunks(stream))


def test_chunks_of_a_completion(site: Site) -> None:
    body = CompletionBody.model_validate({"prompt": [1, 2, 3], "stream": True} | USAGE)
    stream = streamed(CompletionRequest(site.server.service, body, [Prompt([1, 2, 3])], ""), ["Hel", "lo"], "stop")
    assert stream == (FIXTURES / "completion.sse").read_bytes()
    assert all(CompletionChunk.model_validate(chunk) for chunk in chunks(stream))


@pytest.mark.parametrize("name", ["chat", "completion"])
def test_chunks_with_log_probabilities(site: Site, name: str) -> None:
    request, chunk = make(site, name, logprobs=True, top_logprobs=2) if name == "chat" else make(site, name, logprobs=2)
    stream = streamed(request, ["Hel", "lo"], "stop", LOGPROBS)
    assert stream == (FIXTURES / f"{name}_logprobs.sse").read_bytes()
    assert all(chunk.model_validate(one) for one in chunks(stream))


@pytest.mark.parametrize("name", ["chat", "completion"])
def test_an_error_is_the_last_chunk(site: Site, name: str) -> None:
    request, chunk = make(site, name)
    stream = streamed(request, ["Hel"], "")
    assert stream == (FIXTURES / f"{name}_error.sse").read_bytes()
    *others, error = chunks(stream)
    assert all(chunk.model_validate(one) for one in others) and ErrorReply.model_validate(error)


def make(site: Site, name: str, **asked: Any) -> tuple[GenerationRequest, Any]:
    """A request, and the model of its chunks."""
    if name == "chat":
        return ChatRequest(site.server.service, ChatBody.model_validate(CHAT | asked), [Prompt([1, 2, 3])], ""), ChatChunk
    body = CompletionBody.model_validate({"prompt": [1, 2, 3], "stream": True} | asked)
    return CompletionRequest(site.server.service, body, [Prompt([1, 2, 3])], ""), CompletionChunk
