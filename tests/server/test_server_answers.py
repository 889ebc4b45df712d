"""The layouts of answers of the whole server: streams, chats, schemas and tools, with the `openai` client against one or two ranks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.clients.thinking import thinking_server
from tests.support.real_server import CLIENTS, NAME, PROMPT, STORY, SUM, Complete, at_once
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


def test_chat_adds(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=NAME, messages=SUM, temperature=0)
    message = reply.choices[0].message
    assert (message.role, message.content, message.tool_calls) == ("assistant", "75", None)
    assert (reply.object, reply.choices[0].finish_reason) == ("chat.completion", "stop")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (15, 3)
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is 27 plus 48?"}]}]
    assert client.chat.completions.create(model=NAME, messages=parts, temperature=0).choices[0].message.content == "75"


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
