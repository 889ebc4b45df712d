"""`/v1/messages` and `/v1/messages/count_tokens` against a fake engine: prompts, answers, streams and errors."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest

from engine.calls.parser import Arguments, Call, Part, Reasoning, Text
from engine.protocol import Starting
from server import recovery, replies
from server.errors import ApiError, messages_error_type
from server.generation import Prompt
from server.messages.answer import MessagesRequest, read_input
from server.messages.bodies import MessagesBody
from tests.support import server_thread
from tests.support.scripted import Scripted, deltas, written
from tests.support.server_thread import CONTEXT, STORY, TOKENIZER, Site, ready

FIXTURES = Path(__file__).parent / "fixtures" / "messages"
PATH = "/v1/messages"
HI = {"role": "user", "content": "Hi"}
BODY: dict[str, Any] = {"model": "tiny-hybrid", "max_tokens": 100, "messages": [HI]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
CALL = '{"name": "weather", "arguments": {"city": "Zürich"}}'


def ask(site: Site, **body: Any) -> dict[str, Any]:
    answer = site.post(PATH, BODY | body)
    replies.MessageReply.model_validate(answer)
    return answer


def stream(site: Site, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each valid and under its name."""
    response = site.http.post(PATH, json={**BODY, **body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    return read_events(response.text)


def read_events(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        replies.EVENTS[name.removeprefix("event: ")].model_validate(events[-1])
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, put together as clients do."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message: dict[str, Any] = events[0]["message"]
    current: dict[str, Any] | None = None
    for one in events[1:-1]:
        if one["type"] == "content_block_start":
            assert current is None and one["index"] == len(message["content"])
            message["content"].append(one["content_block"])
            current = {}
        elif one["type"] == "content_block_delta":
            assert current is not None and one["index"] == len(message["content"]) - 1
            for name in one["delta"].keys() - {"type"}:
                current[name] = current.get(name, "") + one["delta"][name]
        elif one["type"] == "content_block_stop":
            assert current is not None and one["index"] == len(message["content"]) - 1
            if "partial_json" in current:
                current = {"input": read_input(current["partial_json"])}
            message["content"][-1] |= current
            current = None
        elif one["type"] == "message_delta":
            assert current is None
            message |= {**one["delta"], "usage": one["usage"]}
        else:
            assert one["type"] == "ping"
    return message


@pytest.mark.parametrize(
    ("name", "parts", "finish", "tokens"),
    [
        ("text", [Text("Hello"), Text("!")], "stop", 15),
        (
            "tool_use",
            [
                *(Text("Okay"), Text(", let me look."), Call("call_1", "get_weather"), Arguments('{"location":')),
                *(Arguments(' "Zürich"}'), Call("2", "get_time"), Arguments("{}")),
            ],
            "stop",
            89,
        ),
        ("thinking", [Reasoning("27 * 453"), Reasoning(" = 12231"), Text("12,231")], "stop", 40),
        ("stop_sequence", [Text("It was kind. ")], "stop", 7),
        ("max_tokens", [Text("Okay"), Call("1", "get_weather"), Arguments('{"location":'), Arguments(' "Zü')], "length", 20),
        ("error", [Text("Hel")], "", 0),
    ],
)
def test_streams_equal_the_published_order(
    site: Site, name: str, parts: list[Part], finish: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte. The whole answer has the content that clients put together, also without the text of thinking."""
    each = [[part] for part in parts]
    given = deltas([""] * len(parts), finish, stop="END" if name == "stop_sequence" else None)
    monkeypatch.setattr("server.chat.parser_for", lambda *_: Scripted(each, complete=name == "tool_use"))
    for display in ("summarized", "omitted"):
        usages = iter((1, tokens, tokens, tokens))

        def report(_: Any, usages: Any = usages) -> dict[str, int]:
            cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 4}
            return {"input_tokens": 25, **cached, "output_tokens": next(usages)}

        monkeypatch.setattr(MessagesRequest, "_report", report)
        body = MessagesBody.model_validate(BODY | {"thinking": {"type": "adaptive", "display": display}})
        streamed, whole = (
            MessagesRequest(site.server.service, body, body.chat, [Prompt([1, 2, 3])], "", "req_1") for _ in range(2)
        )
        streamed.id, streamed.model = "msg_1", "m"
        data = written(streamed, given, ApiError(503, "the server is overloaded"))
        if display == "summarized":
            assert data == (FIXTURES / f"{name}.sse").read_bytes()
        events = read_events(data.decode())
        if not finish:
            assert events[-1]["type"] == "error"
            continue
        for delta in given:
            whole.collect(delta)
        content = whole.content.blocks
        assert joined(events)["content"] == content == streamed.content.blocks
        assert display == "summarized" or not any(block.get("thinking") for block in content)


def test_streams_equal_whole_answers(site: Site, seed: int) -> None:
    """Text, a call, several calls, calls that are cut off at any token, stop sequences, and an empty answer."""
    random = Random(seed)
    call = TOKENIZER.encode(CALL, add_special_tokens=False)
    cases: list[tuple[str, dict[str, Any], str]] = [
        (STORY, {}, "end_turn"),
        ("", {}, "end_turn"),
        (STORY, {"stop_sequences": ["END", "never"]}, "stop_sequence"),
        (STORY, {"max_tokens": random.randint(1, 9)}, "max_tokens"),
        (STORY, {"tools": [TOOL]}, "end_turn"),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "auto"}}, "tool_use"),
        (f"[{CALL}, {CALL}]", {"tools": [TOOL]}, "tool_use"),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": random.randint(1, len(call) - 1)}, "max_tokens"),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "none"}}, "end_turn"),
    ]
    for text, body, reason in cases:
        site.says(text)
        site.engine.group = random.randint(1, 4)
        whole, streamed = ask(site, **body), joined(stream(site, **body))
        for message in (whole, streamed):
            assert message["id"].startswith("msg_"), seed
            for one in message["content"]:
                assert one.get("id", "toolu_").startswith("toolu_"), seed
                one["id"] = ""
            message["id"] = ""
        assert whole == streamed, (seed, body)
        assert whole["stop_reason"] == reason, (seed, body)
        assert whole["stop_sequence"] == ("END" if reason == "stop_sequence" else None)
        if reason == "tool_use":
            assert {one["type"] for one in whole["content"]} == {"tool_use"}
            assert whole["content"][0]["input"] == {"city": "Zürich"} and len(whole["content"]) == text.count("name")


def test_thinking(make_site: Callable[..., Site], tmp_path: Path, seed: int) -> None:
    """Thinking, then text and calls; streamed as whole; and its text left out, or cut off."""
    template = tmp_path / "template"
    template.write_text(
        "{{ messages[0].content }}{% if enable_thinking is false %}<think>\n\n</think>{% endif %}{# <tool_call> #}"
    )
    site = make_site(chat_template=str(template))
    text = f"<think>\nOf what city?\n</think>\n\nLet me look.\n<tool_call>\n{CALL}\n</tool_call>"
    site.says(text)
    site.engine.group = Random(seed).randint(1, 4)
    for display in ("summarized", "omitted"):
        body = {"tools": [TOOL], "thinking": {"type": "adaptive", "display": display}}
        whole, streamed = ask(site, **body), joined(stream(site, **body))
        thinking, said, call = whole["content"]
        assert thinking["thinking"].strip() == ("Of what city?" if display == "summarized" else "")
        assert said["text"].strip() == "Let me look." and call["input"] == {"city": "Zürich"}
        assert whole["stop_reason"] == streamed["stop_reason"] == "tool_use", seed
        assert 0 < whole["usage"]["output_tokens_details"]["thinking_tokens"] < whole["usage"]["output_tokens"]
        assert streamed["content"][:2] == [thinking, said] and streamed["usage"] == whole["usage"], seed
    cut = ask(site, max_tokens=len(TOKENIZER.encode("<think>\nOf what", add_special_tokens=False)))
    assert [block["type"] for block in cut["content"]] == ["thinking"] and cut["stop_reason"] == "max_tokens"
    site.says("Plain")
    plain = ask(site, thinking={"type": "disabled"})
    assert plain["content"] == [{"type": "text", "text": "Plain"}]
    assert TOKENIZER.decode(site.last().prompt_ids).endswith("</think>")


def test_the_usage_counts_cached_tokens_apart(site: Site) -> None:
    usage = ask(site)["usage"]
    assert usage["cache_read_input_tokens"] == 4 and usage["cache_creation_input_tokens"] == 0
    assert usage["input_tokens"] + 4 == len(site.last().prompt_ids)
    assert usage["output_tokens"] == len(TOKENIZER.encode(STORY, add_special_tokens=False))
    count = site.post(PATH + "/count_tokens", {"messages": BODY["messages"], "model": "tiny-hybrid"})
    replies.TokenCount.model_validate(count)
    assert count["input_tokens"] == usage["input_tokens"] + 4


def test_unknown_fields_are_named(site: Site) -> None:
    """And what makes no difference to the number of a prompt's tokens."""
    answers = {"max_tokens": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.5}
    body = {**BODY, **answers, "foo": 1, "tools": [{**TOOL, "bar": 2}]}
    for path in (PATH, PATH + "/count_tokens"):
        ignored = site.http.post(path, json=body).headers["x-rung-ignored"].split(", ")
        assert sorted(ignored) == sorted(["foo", "tools.bar", *(answers if path != PATH else ())])


def test_an_answer_may_fill_the_context(site: Site) -> None:
    """Coding agents ask for 32,000 tokens, however long the context is."""
    site.engine.reply = lambda submit: [7] * CONTEXT
    answer = ask(site, max_tokens=32_000)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["output_tokens"] == (most := CONTEXT - len(site.last().prompt_ids))
    assert [ask(site, max_tokens=n)["stop_reason"] for n in (most, most + 1)] == ["max_tokens", answer["stop_reason"]]
    response = site.http.post(PATH, json=BODY | {"messages": [{**HI, "content": "word " * CONTEXT}]})
    error = refused(response, 400, "invalid_request_error")
    assert error.endswith(f" tokens > {CONTEXT - 1} maximum"), "one token is left for the answer"


def test_effort_is_none_of_an_answer_without_thinking() -> None:
    for thinking, effort in ((None, "high"), ({"type": "adaptive"}, "high"), ({"type": "disabled"}, None)):
        body = MessagesBody.model_validate(BODY | {"output_config": {"effort": "max"}, "thinking": thinking})
        assert body.chat.reasoning_effort == effort


CACHED = {"cache_control": {"type": "ephemeral"}}
CONVERSATION = {
    "max_tokens": 5000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2;"},
        {"type": "text", "text": "Be kind.", **CACHED},
    ],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "text", "text": "Look", **CACHED}, {"type": "text", "text": "there"}]},
        {"role": "system", "content": "Agents: none"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "thinking", "thinking": "So", "signature": "s"},
                {"type": "redacted_thinking", "data": "zz"},
                {"type": "text", "text": "Well", "citations": None},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Ulm"}},
                {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "dry"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no city", "is_error": True, **CACHED},
                {"type": "text", "text": "And now?"},
            ],
        },
        {"role": "assistant", "content": "It is"},
    ],
    "tools": [{**TOOL, "type": "custom", "defer_loading": False, **CACHED}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "disabled"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "u" * 300},
    "service_tier": "auto",
    "output_config": {"effort": "max"},
    "mcp_servers": [],
    "container": None,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "stop_sequences": ["END"],
}
TEMPLATE = "{{ messages[:-1] | tojson }}|{{ tools | tojson }}|{{ enable_thinking }}|{{ messages[-1].content }}|"


def test_a_body_becomes_a_conversation(make_site: Callable[..., Site], tmp_path: Path) -> None:
    """All that a template may see, in one conversation of a coding agent."""
    (tmp_path / "template").write_text(TEMPLATE)
    site = make_site(chat_template=str(tmp_path / "template"))
    assert site.server.client.ready
    site.server.client.ready = msgspec.structs.replace(site.server.client.ready, max_model_len=4096)
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "effort-2025-11-24"}
    response = site.http.post(PATH, json=CONVERSATION, headers=headers, params={"beta": "true"})
    assert response.status_code == 200, response.text
    assert "x-rung-ignored" not in response.headers
    text = TOKENIZER.decode(site.last().prompt_ids, skip_special_tokens=False)
    messages, tools, thinks, last = text.split("|")
    calls = [("1", {"city": "Ulm"}), ("2", {})]
    assert json.loads(messages) == [
        {"role": "system", "content": "Be kind."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\nLook\nthere"},
        {"role": "system", "content": "Agents: none"},
        {
            "role": "assistant",
            "reasoning_content": "Hm\nSo",
            "thinking": "Hm\nSo",
            "content": "Well",
            "tool_calls": [
                {"id": i, "type": "function", "function": {"name": "weather", "arguments": given}} for i, given in calls
            ],
        },
        {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "dry"},
        {"role": "tool", "tool_call_id": "2", "name": "weather", "content": "Error: no city"},
        {"role": "user", "content": "And now?"},
    ]
    function = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
    assert json.loads(tools) == [{"type": "function", "function": function}]
    assert (thinks, last) == ("False", "It is"), "the answer goes on where the last message ends"
    params = site.last().params
    assert (params.temperature, params.top_k, params.top_p, params.stop) == (0.5, 3, 0.9, ["END"])


def test_formats_and_forced_tools_make_a_grammar(site: Site) -> None:
    ask(site, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert '"city"' in (site.last().params.grammar or "")
    ask(site, output_format={"type": "json_schema", "schema": SCHEMA})
    assert '"city"' in (site.last().params.grammar or "")
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        ask(site, tools=[TOOL], tool_choice=choice)
        assert '"city"' in (site.last().params.grammar or "")


def test_documents_are_text_and_other_servers_tools_are_named(
    make_site: Callable[..., Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_thread, "CONTEXT", 1024)
    (tmp_path / "template").write_text("{{ messages | tojson }}{{ tools | tojson }}")
    site = make_site(chat_template=str(tmp_path / "template"))
    found = {"type": "search_result", "title": "Found", "source": "https://x", "content": [{"type": "text", "text": "it"}]}
    documents: list[dict[str, Any]] = [
        {
            "type": "document",
            "title": "T",
            "context": "C",
            "source": {"type": "text", "media_type": "text/plain", "data": "plain"},
        },
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "blocks"}]}, "citations": None},
    ]
    answer = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "tool_use", "id": "a", "name": "search", "input": '{"q": "cu'},
    ]
    reference = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [reference, *documents]}
    body = {
        "messages": [
            {"role": "user", "content": [*documents, found]},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}, TOOL],
        "mcp_servers": [{"type": "url", "url": "https://x", "name": "s"}],
    }
    response = site.http.post(PATH, json=BODY | body)
    assert response.status_code == 200, response.text
    assert response.headers["x-rung-ignored"] == (
        "tools.0.web_search_20250305, mcp_servers, messages.1.content.0.server_tool_use, messages.1.content.1.web_search_tool_result"
    )
    prompt = TOKENIZER.decode(site.last().prompt_ids, skip_special_tokens=False)
    said, offered = (json.loads(part) for part in (prompt[: prompt.index("][{") + 1], prompt[prompt.index("][{") + 1 :]))
    assert said[0]["content"] == "T\nC\nplain\nblocks\nFound\nhttps://x\nit"
    assert said[1]["tool_calls"][0]["function"] == {"name": "search", "arguments": {"q": "cu"}}
    assert said[2]["content"] == "weather\nT\nC\nplain\nblocks"
    assert [tool["function"]["name"] for tool in offered] == ["weather"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: "),
    ({"temperature": 1.5}, "temperature: "),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences: "),
    ({"messages": []}, "messages: "),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0: has the type 'image'"),
    (
        {"messages": [HI, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]}]},
        "messages.1.content.0.content.0: has the type 'image'",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages.0.content.0: "),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text: "),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "JVBE"}}]}]},
        "messages.0.content.0.source: has the type 'base64'",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0: has the type 'web_search_20250305'"),
    ({"tools": [TOOL, TOOL]}, "tools: "),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name: "),
    (
        {"tools": [{**TOOL, "strict": True, "input_schema": {"not": {}}}], "tool_choice": {"type": "any"}},
        "tools.0.input_schema: ",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name: "),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: "),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens: "),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000}, "max_tokens: "),
    ({"mcp_servers": [{"url": "https://x"}]}, "mcp_servers"),
    ({"container": "c"}, "container: "),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits.0.type: "),
    ({"output_format": {"type": "json_schema", "schema": {"type": "x"}}}, "output_config.format: "),
    ({"prompt": "Hi"}, "prompt: "),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt is too long: "),
]


@pytest.mark.parametrize(("body", "wanted"), WRONG, ids=[wanted for _, wanted in WRONG])
def test_wrong_bodies_are_refused(site: Site, body: dict[str, Any], wanted: str) -> None:
    error = refused(site.http.post(PATH, json=BODY | body), 400, "invalid_request_error")
    assert error.startswith(wanted), error


@pytest.mark.parametrize("path", [PATH, PATH + "/count_tokens"])
@pytest.mark.parametrize("role", [["user"], {"user": 1}, "tool", 1, None])
def test_a_wrong_role_is_named(site: Site, path: str, role: Any) -> None:
    message = {"role": role, "content": [{"type": "text", "text": "Hi"}]}
    error = refused(site.http.post(path, json=BODY | {"messages": [HI, message]}), 400, "invalid_request_error")
    assert error.startswith("messages.1.role: "), error


def refused(response: httpx.Response, status: int, kind: str) -> str:
    """The message of an error response in Anthropic's layout."""
    assert response.status_code == status, response.text
    body = replies.MessagesError.model_validate(response.json())
    assert body.error.type == kind and body.request_id == response.headers["request-id"]
    return body.error.message


def test_statuses_without_a_type_of_their_own() -> None:
    assert [messages_error_type(status) for status in (402, 499, 500, 502, 529)] == ["invalid_request_error"] * 2 + [
        "api_error"
    ] * 3


def test_every_error_has_the_layout(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key=("right",), max_body_mb=1, max_num_seqs=1, max_queue=1)
    with httpx.Client(base_url=site.url, timeout=60) as client:
        assert "x-api-key" in refused(client.post(PATH, json=BODY), 401, "authentication_error")
        refused(client.post(PATH, json=BODY, headers={"x-api-key": "wrong"}), 401, "authentication_error")
        for headers in ({"authorization": "Bearer right"}, {"x-api-key": "right"}):
            assert client.post(PATH, json=BODY, headers=headers).status_code == 200
        client.headers["x-api-key"] = "right"
        assert "tiny-hybrid" in refused(client.post(PATH, json={**BODY, "model": "claude-x"}), 404, "not_found_error")
        count = PATH + "/count_tokens"
        assert refused(client.post(count, json={**BODY, "model": "claude-x"}), 404, "not_found_error")
        refused(client.post(PATH + "/nothing", json=BODY), 404, "not_found_error")
        refused(client.get(PATH), 405, "invalid_request_error")
        refused(client.post(PATH, content=b"{", headers={"content-type": "application/json"}), 400, "invalid_request_error")
        refused(client.post(PATH, content=b"x" * (1 << 21)), 413, "request_too_large")
        site.server.service.draining = True
        error = client.post(PATH, json=BODY)
        assert "shutting down" in refused(error, 503, "overloaded_error") and error.headers["retry-after"]
        assert "error" in client.post("/v1/completions", json={"prompt": "x"}).json()
        assert client.post("/v1/completions", json={"prompt": "x"}).json().keys() == {"error"}


def test_a_stream_is_pinged_while_the_ranks_start_again(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "TICK", 0.05)
    monkeypatch.setattr(recovery, "HEARTBEAT_SECONDS", 0.05)
    site = make_site()
    site.engine.delay = 0.02
    text = ""
    with site.http.stream("POST", PATH, json={**BODY, "stream": True}) as response:
        for piece in response.iter_text():
            if not text:
                site.engine.hold = True
                site.engine.send(Starting(0))
            text += piece
            if text.count("event: ping") > 3 and site.engine.hold:
                site.engine.hold = False
                site.engine.send(ready())
    assert joined(read_events(text))["content"] == [{"type": "text", "text": STORY}]


def test_an_error_behind_the_first_event_is_an_event(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    push = MessagesRequest.push

    def fail_late(self: MessagesRequest, delta: Any) -> bytes:
        if not delta.first:
            raise ApiError(503, "too late")
        return push(self, delta)

    monkeypatch.setattr(MessagesRequest, "push", fail_late)
    *_, error = stream(site)
    assert error["type"] == "error" and error["error"] == {"type": "overloaded_error", "message": "too late"}
    assert error["request_id"]
