"""The layouts of answers of the whole server: streams, chats, schemas and tools, with the `openai` client against two gloo ranks."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.clients.thinking import thinking_server
from tests.support.real_server import CLIENTS, NAME, PROMPT, STORY, SUM, Complete, Reference, at_once
from tests.support.server_process import ServerProcess

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
