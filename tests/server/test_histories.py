"""What the server has answered it takes back: conversations of its own answers, in all three APIs, wherever they were cut off."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_tool_loops import FAMILIES
from tests.support import server_thread
from tests.support.server_thread import EOS, TOKENIZER, TOOL, Site

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOOLS: dict[str, Any] = {
    CHAT: [TOOL],
    RESPONSES: [{"type": "function", **TOOL["function"]}],
    MESSAGES: [{"name": "weather", "input_schema": TOOL["function"]["parameters"]}],
}
# what answers have besides, here or elsewhere
MORE: dict[str, Any] = {
    "refusal": None, "audio": None, "function_call": None, "annotations": [], "reasoning": "Hm", "reasoning_content": "Hm",
    "logprobs": None, "index": 0, "id": "x", "provider_specific_fields": None, "tool_calls": None,
}  # fmt: skip
ARGUMENTS = [
    '{"city": "Ulm"}',
    "{}",
    '{"city": "a\nb"}',
    '{"city": "Ulm"}{"city": "Ulm"}',
    '{"city": "Ulm}',
    '{"city": {"a": [1, "b"]}}',
]


@pytest.fixture(params=["Qwen3", "Llama 3.1", "Mistral v3", "R1", "none"])
def site(
    request: pytest.FixtureRequest, make_site: Callable[..., Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Site:
    monkeypatch.setattr(server_thread, "CONTEXT", 4096)
    family = FAMILIES.get(request.param)
    alternating = """{% for m in messages %}{% if (m.role == "user") != (loop.index % 2 == 1) %}{{ raise_exception("roles") }}
{%- endif %}<{{ m.role }}>{{ m.content + "" }}{% endfor %}"""
    (tmp_path / "template").write_text(family.template.replace("\n", "") if family else alternating)
    return make_site(chat_template=str(tmp_path / "template"), tool_parser="hermes", reasoning_parser="think")


def answer() -> str:
    """What a model writes: reasoning, text and calls, all of them or some."""
    calls = [
        f'<tool_call>{{"name": "weather", "arguments": {random.choice(ARGUMENTS)}}}</tool_call>'
        for _ in range(random.randint(0, 2))
    ]
    return random.choice(["", "<think>Let me see</think>"]) + random.choice(["", "Look: "]) + "\n".join(calls)


def said(path: str, reply: dict[str, Any]) -> list[Any]:
    """The items by which a client sends an answer back."""
    if path == RESPONSES:
        return [
            random.choice([item, {name: value for name, value in item.items() if name not in ("id", "status")}])
            for item in reply["output"]
        ]
    if path == MESSAGES:
        return [{"role": "assistant", "content": reply["content"]}] if reply["content"] else []
    message = reply["choices"][0]["message"]
    message["tool_calls"] = [
        random.choice([call, {**call, "index": i, "type": None}]) for i, call in enumerate(message.get("tool_calls", []))
    ]
    return [{**random.choice([MORE, {}]), **message}]


def results(path: str, items: list[Any]) -> list[Any]:
    """Those of the calls in an answer."""
    if path == RESPONSES:
        return [
            {"type": "function_call_output", "call_id": one["call_id"], "output": random.choice(["dry", None])}
            for one in items
            if one["type"] == "function_call"
        ]
    if path == MESSAGES:
        calls = [one["id"] for item in items for one in item["content"] if one["type"] == "tool_use"]
        blocks = [{"type": "tool_result", "tool_use_id": one, "content": random.choice(["dry", None])} for one in calls]
        return [{"role": "user", "content": blocks}] if blocks else []
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": random.choice(["dry", None])}
        for item in items
        for call in item["tool_calls"]
    ]


def test_what_the_server_answered_is_a_history(site: Site, seed: int) -> None:
    for path in 2 * (CHAT, RESPONSES, MESSAGES):
        where, limit = ("input", "max_output_tokens") if path == RESPONSES else ("messages", "max_tokens")
        history: list[Any] = []
        for turn in range(3):
            if turn == 0 or random.random() < 0.6:
                history.append({"role": "user", "content": f"Turn {turn}"})
            ids = TOKENIZER.encode(answer(), add_special_tokens=False)
            site.engine.reply = lambda submit, ids=ids: [*ids, EOS]  # type: ignore[misc]
            most = random.choice([len(ids) + 1, random.randint(1, max(1, len(ids)))])
            body = {"model": "tiny-hybrid", where: history, "tools": TOOLS[path], limit: most}
            response = site.http.post(path, json=body)
            assert response.status_code == 200, (response.text, json.dumps(history))
            assert "x-rung-ignored" not in response.headers, response.headers["x-rung-ignored"]
            prompt = TOKENIZER.decode(site.last().prompt_ids, skip_special_tokens=False)
            assert all(f"Turn {t}" in prompt for t in range(turn + 1) if {"role": "user", "content": f"Turn {t}"} in history)
            items = said(path, response.json())
            history += items
            history += random.choice([results(path, items), results(path, items)[:1], []])
