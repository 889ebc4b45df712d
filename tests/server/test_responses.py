"""/v1/responses: events as published, conversations, the store, and what is refused."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.calls.parser import Arguments, Call, Part, Reasoning, Text
from engine.protocol import Logprob, TokenLogprobs
from server.errors import ApiError
from server.generation import Prompt
from server.http import to_json
from server.messages.bodies import MessagesBody
from server.replies import ResponseItems, ResponsesReply
from server.responses import answer
from server.responses.answer import ResponsesRequest
from server.responses.convert import convert, seal
from server.responses.schemas import ResponsesBody
from server.schemas import ChatBody
from tests.support.scripted import Scripted, deltas, written
from tests.support.server_thread import CONTEXT, STORY, TOKENIZER, Site, wait_for

PATH = "/v1/responses"
FIXTURES = Path(__file__).parent / "fixtures" / "responses"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FORCED = '{"name": "weather", "arguments": {"city": "Bonn"}}'
EVENT = TypeAdapter[Any](ResponseStreamEvent)

# the parts that each delta brings, and why the answer ends
SCRIPTS: dict[str, tuple[list[list[Part]], str]] = {
    "text": ([[Text("Grüß")], [Text(" dich")], [], [Text("!")]], "stop"),
    "calls": (
        [
            [Text("I look.")],
            [Call("call_a", "weather")],
            [Arguments('{"city":')],
            [Arguments('"Bonn"}')],
            [Text("\n"), Call("call_b", "weather")],
            [Arguments('{"city":"Köln"}')],
        ],
        "stop",
    ),
    "reasoning": ([[Reasoning("2 and 2")], [Reasoning(" is 4.")], [Text("\n")], [Text("4")], []], "stop"),
    "incomplete": ([[Text("Once")], [Text(" upon")]], "length"),
    "logprobs": ([[Text("Once")], [], [Text(" upon")]], "stop"),
    "encrypted_reasoning": ([[Reasoning("2 and 2 is 4.")], [Text("4")]], "stop"),
    "failed": ([[Reasoning("Hm")], [Text("Once")], [Text(" upon")]], ""),
}
ASKED: dict[str, dict[str, Any]] = {
    "calls": {"tools": [TOOL]},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "encrypted_reasoning": {"include": ["reasoning.encrypted_content"]},
}


def respond(site: Site, **body: Any) -> dict[str, Any]:
    reply = site.post(PATH, {"input": "Hi", **body})
    ResponsesReply.model_validate(reply)
    return reply


def stream(site: Site, **body: Any) -> list[dict[str, Any]]:
    reply = site.http.post(PATH, json={"input": "Hi", "stream": True, **body})
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    events = [json.loads(one.partition("\ndata: ")[2]) for one in reply.text.split("\n\n") if one]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    for one in events:
        EVENT.validate_python(one)
    return events


@pytest.mark.parametrize("name", SCRIPTS)
def test_events_are_those_that_are_published(site: Site, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same parts give the bytes of the recorded stream, of which each event is of the published type. Without a reason to
    end there is an error."""
    parts, reason = SCRIPTS[name]
    logprobs = [TokenLogprobs(Logprob(300, -0.5, 1), [Logprob(300, -0.5, 1), Logprob(301, -1.25, 2)])]
    numbers = itertools.count(1)
    monkeypatch.setattr(answer.time, "time", lambda: 1700000009.5)
    thoughts = sum(isinstance(part, Reasoning) for some in parts for part in some)  # each token is a character
    monkeypatch.setattr("server.chat.parser_for", lambda *_: Scripted(parts, reasoned=thoughts))
    body = ResponsesBody.model_validate({"input": "Hi", **ASKED.get(name, {})})
    chat, _, repeated = convert(body, [], {})
    request = ResponsesRequest(site.server.service, body, chat, [Prompt([1, 2, 3])], "", repeated)
    request.id, request.created = "resp_0", 1700000000
    monkeypatch.setattr(answer, "new_id", lambda prefix: f"{prefix}_{next(numbers)}")
    given = deltas([""] * len(parts), reason, logprobs if name == "logprobs" else None)
    data = written(request, given, ApiError(500, "internal error"))
    assert data == (FIXTURES / f"{name}.sse").read_bytes()
    events = [json.loads(one.partition(b"\ndata: ")[2]) for one in data.split(b"\n\n") if one]
    for one in events:
        # its answers have these nevertheless, and its whole answers the `bytes` of log-probabilities
        assert set(_extra(EVENT.validate_python(one))) <= {"store", "presence_penalty", "frequency_penalty", "bytes"}, one
    ResponsesReply.model_validate(events[-1]["response"])


def _extra(model: Any) -> list[str]:
    """Fields that OpenAI's types do not have."""
    children = model if isinstance(model, list) else vars(model).values() if hasattr(model, "model_extra") else ()
    return [*(getattr(model, "model_extra", None) or ()), *(name for child in children for name in _extra(child))]


def test_a_stream_equals_the_whole_answer(site: Site) -> None:
    """With log-probabilities, with a forced call, and cut off."""
    for text, body in (
        (STORY, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        (FORCED, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}}),
        (STORY, {"max_output_tokens": 5}),
    ):
        site.says(text)
        whole, events = respond(site, **body), stream(site, **body)
        last = events[-1]["response"]
        assert events[-1]["type"] == f"response.{whole['status']}"
        assert whole["status"] == ("incomplete" if "max_output_tokens" in body else "completed")
        pieces = "".join(one["delta"] for one in events if one["type"].endswith(".delta"))
        for reply in (whole, last):
            Response.model_validate(reply, strict=True)
            for item in reply["output"]:
                item["id"] = item["call_id"] = "x"
        assert whole["output"] == last["output"] and whole["usage"] == last["usage"]
        item = whole["output"][0]
        assert pieces == (item["arguments"] if body.get("tools") else item["content"][0]["text"])
        if body.get("include"):
            logprobs = item["content"][0]["logprobs"]
            assert b"".join(bytes(one["bytes"]) for one in logprobs).decode().startswith(STORY)
            deltas = [entry for one in events if one["type"] == "response.output_text.delta" for entry in one["logprobs"]]
            assert deltas == logprobs[: len(deltas)] and all(len(one["top_logprobs"]) == 2 for one in logprobs)


def test_items_become_the_messages_of_one_chat() -> None:
    body = {
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "And kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "summary": [], "content": [], "encrypted_content": seal("hm")},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bonn"}'},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "another server's"},
            {"role": "assistant", "content": "Rain."},
        ],
        "tools": [{"type": "web_search"}, TOOL, {**TOOL, "name": "other"}],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "max_output_tokens": 7,
        "top_k": 3,
    }
    chat = convert(ResponsesBody.model_validate(body), [], {}).chat
    call = {"type": "function", "function": {"name": "weather"}}
    assert [message.model_dump(exclude_none=True) for message in chat.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "And kind."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "I look.",
            "tool_calls": [
                {**call, "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}},
                {**call, "id": "c2", "function": {"name": "weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        {"role": "assistant", "content": "Rain."},
    ]
    assert [[tool.function.name for tool in some] for some in (chat.tools or [], chat.forced_tools)] == [
        ["weather", "other"],
        ["weather"],
    ]
    assert chat.limit == 7 and chat.top_k == 3
    assert chat.ignored == ["tools.0.web_search", "input.8.encrypted_content"]


def test_conversations_go_on(site: Site) -> None:
    """By previous_response_id, by references to items, and with the calls between; instructions are of one turn alone."""
    client = site.openai
    site.says(FORCED)
    first = client.responses.create(
        model="tiny-hybrid", input="Hi", instructions="Be brief.", tools=[TOOL], tool_choice="required", metadata={"a": "b"}
    )
    call: Any = first.output[0]
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Bonn"} and first.metadata == {"a": "b"}
    site.says("Rain.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(model="tiny-hybrid", input=[result], previous_response_id=first.id)
    assert second.output_text == "Rain." and second.previous_response_id == first.id
    by_parts = site.last().prompt_ids
    given: Any = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": call.id}, result]
    assert client.responses.create(model="tiny-hybrid", input=given, store=False).output_text == "Rain."
    assert site.last().prompt_ids == by_parts
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [_chat_call(call)]}]
    messages.append({"role": "tool", "tool_call_id": call.call_id, "name": "weather", "content": "rain"})
    site.chat(messages=messages)
    assert site.last().prompt_ids == by_parts
    client.responses.delete(first.id)  # takes nothing from the second
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [one.type for one in items] == ["message", "function_call", "function_call_output"]
    page = site.http.get(f"{PATH}/{second.id}/input_items", params={"limit": 1}).json()
    assert ResponseItems.model_validate(page).has_more and page["data"][0]["output"] == "rain"
    TypeAdapter[Any](list[ResponseItem]).validate_python(page["data"])
    third = respond(site, input="long " * 9000, previous_response_id=second.id, truncation="auto")  # a worker reads it
    assert third["usage"]["input_tokens"] == CONTEXT - CONTEXT // 4
    items = list(client.responses.input_items.list(third["id"], order="asc"))
    assert len(items) == 5 and items[-1].content[0].text == "long " * 9000  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


ALTERNATING = """{% for m in messages %}{% if (m.role == "user") != (loop.index % 2 == 1) %}
{{ raise_exception("roles must alternate") }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"""


@pytest.mark.parametrize("how", ["stop", "EOS", "max_output_tokens"])
def test_a_conversation_goes_on_behind_a_call_that_is_cut_off(make_site: Callable[..., Site], tmp_path: Path, how: str) -> None:
    """The model sees what there is of the call, in whatever way the client sends it, and roles alternate."""
    (tmp_path / "template").write_text(ALTERNATING)
    site = make_site(chat_template=str(tmp_path / "template"), tool_parser="hermes")
    call = f"<tool_call>{FORCED}</tool_call>"
    cut = call[: call.index("onn")]
    site.says(call if how == "stop" else cut)
    limit = len(TOKENIZER.encode(cut, add_special_tokens=False))
    ways: dict[str, dict[str, Any]] = {"stop": {"stop": ["onn"]}, "EOS": {}, "max_output_tokens": {"max_output_tokens": limit}}
    asked = ways[how]
    first, streamed = respond(site, tools=[TOOL], **asked), stream(site, tools=[TOOL], **asked)[-1]["response"]
    for reply in (first, streamed):
        assert reply["status"] == ("incomplete" if how == "max_output_tokens" else "completed")
        assert [(one["status"], one["arguments"]) for one in reply["output"]] == [("incomplete", '{"city": "B')]
    (item,) = first["output"]
    site.says("Rain.")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "no JSON"}
    hi, on = ({"role": "user", "content": text} for text in ("Hi", "Go on"))
    call = '<user>Hi<assistant>{"name": "weather", "arguments": {"city": "B"}}<user>'
    for given, prompt in (([on], f"{call}Go on"), ([result], f"{call}no JSON")):
        bare = {name: value for name, value in item.items() if name != "status"}  # as some clients send it
        for call_item in (item, bare, {"type": "item_reference", "id": item["id"]}):
            respond(site, input=[hi, call_item, *given])
            assert TOKENIZER.decode(site.last().prompt_ids) == prompt
        second = respond(site, input=given, previous_response_id=first["id"])
        assert TOKENIZER.decode(site.last().prompt_ids) == prompt
        kept = site.openai.responses.input_items.list(second["id"], order="asc").data
        assert [one.type for one in kept] == ["message", "function_call", given[0].get("type", "message")]
        assert kept[1].status == "incomplete"  # type: ignore[union-attr]


def test_items_that_share_an_id_are_listed_once_each(site: Site) -> None:
    """By all pages, in one turn and by a reference in the next. The first keeps the id."""
    site.says("Rain.")
    ids = ["a", "b", "a", None, "", "a", "b"]
    first = respond(site, input=[{"id": name, "role": "user", "content": str(i)} for i, name in enumerate(ids)])
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    last = respond(site, input=[reference, reference], previous_response_id=first["id"])
    for order in ("asc", "desc"):
        pages = site.openai.responses.input_items.list(last["id"], limit=2, order=order)
        items: list[Any] = list(itertools.islice(pages, 20))[:: 1 if order == "asc" else -1]
        assert [one.content[0].text for one in items] == [*"0123456", *["Rain."] * 3]
        assert len({one.id for one in items}) == len(items)
        assert [items[0].id, items[1].id, items[7].id] == ["a", "b", reference["id"]]
    for limit in (9, 10, 11):
        listed = site.http.get(f"{PATH}/{last['id']}/input_items", params={"limit": limit}).json()
        assert (len(listed["data"]), listed["has_more"]) == (min(limit, 10), limit < 10)


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_what_is_left_of_answers_that_are_cut_off(role: str) -> None:
    """Reasoning alone is an answer without text. A call is one, whatever its status and its arguments are."""
    hi, call = {"role": "user", "content": "Hi"}, {"type": "function_call", "status": "incomplete", "name": "weather"}
    calls = [call | {"call_id": name, "arguments": text} for name, text in (("a", "{}"), ("b", ""), ("c", '{"x": [}'))]
    outputs = [{"type": "function_call_output", "call_id": name, "output": name} for name in "abcd"]
    given = [
        hi,
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        hi | {"role": role},
        *calls,
        *outputs,
    ]
    messages = convert(ResponsesBody.model_validate({"input": given}), [], {}).chat.messages
    assert [message.role for message in messages] == ["user", "assistant", role, "assistant", *["tool"] * 4]
    assert messages[1].model_dump(exclude_none=True) == {"role": "assistant", "reasoning_content": "hm", "content": ""}
    assert [one.function.arguments for one in messages[3].tool_calls or []] == ["{}", "", '{"x": [}']


def _chat_call(call: Any) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def test_text_behind_calls_is_another_answer() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
    given = [{"role": "user", "content": "Hi"}, call, {"role": "assistant", "content": "Wait"}, call]
    messages = convert(ResponsesBody.model_validate({"input": given}), [], {}).chat.messages
    assert [(message.content, len(message.tool_calls or [])) for message in messages[1:]] == [(None, 1), ("Wait", 1)]


def test_a_client_streams_and_stores(site: Site) -> None:
    site.says(STORY)
    with site.openai.responses.stream(model="tiny-hybrid", input="Hi") as events:
        types = [one.type for one in events]
        final = events.get_final_response()
    assert final.output_text == STORY and types[0] == "response.created" and types[-1] == "response.completed"
    assert site.openai.responses.retrieve(final.id).output_text == STORY
    hidden = respond(site, store=False)
    assert site.http.get(f"{PATH}/{hidden['id']}").status_code == 404
    assert site.http.get(f"{PATH}/{'x' * 9000}").json()["error"]["code"] == "response_not_found"
    assert site.http.get(f"{PATH}/{final.id}", params={"stream": "true"}).status_code == 400
    assert site.http.post(f"{PATH}/{final.id}/cancel").status_code == 400


def test_a_failure_after_the_start_is_an_event(make_site: Callable[..., Site]) -> None:
    site = make_site(request_timeout=2.0)
    site.engine.delay, site.engine.reply = 0.2, lambda submit: [300] * 100
    last = stream(site)[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    ("parts", "texts"),
    [
        ([Text("\n"), Text(" x")], ["\n x"]),
        ([Reasoning("r"), Text("\n"), Text("x")], ["r", "\nx"]),
        ([Text("\n"), Call("a", "f"), Arguments("{}"), Text("x")], ["{}", "x"]),
        ([Call("a", "f"), Arguments("{}"), Text("\n")], ["{}"]),
        ([Text("\n")], ["\n"]),
    ],
)
def test_white_space_is_text_only_before_text(parts: list[Part], texts: list[str]) -> None:
    made = answer.Output(False, [])
    for part in parts:
        list(made.push([part], None))
    list(made.end("completed"))
    assert [one["arguments"] if "arguments" in one else one["content"][0]["text"] for one in made.items] == texts


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_an_answer_that_ends_in_the_middle_keeps_its_items(site: Site, how: str) -> None:
    """The engine brings a few deltas and no end."""
    for parts, open_item in (
        ([[Text("Grüß")], [Text(" dich")]], {"type": "message", "text": "Grüß dich"}),
        ([[Reasoning("2 and 2")]], {"type": "reasoning", "text": "2 and 2"}),
        (
            [[Text("I look.")], [Call("call_a", "weather")], [Arguments('{"city":')]],
            {"type": "function_call", "text": '{"city":'},
        ),
    ):
        body = ResponsesBody.model_validate({"input": "Hi", "tools": [TOOL]})
        chat, _, repeated = convert(body, [], {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("server.chat.parser_for", lambda *_, parts=parts: Scripted(parts))
            request = ResponsesRequest(site.server.service, body, chat, [Prompt([1, 2, 3])], "", repeated)
        for delta in deltas([""] * len(parts), ""):
            list(request.events_of(delta))
        if how == "fails":
            for status, code in ((429, "rate_limit_exceeded"), (500, "server_error")):
                kind, fields = request.fail(ApiError(status, "broken"))
                assert (kind, fields["response"]["status"]) == ("response.failed", "failed")
                assert fields["response"]["error"] == {"code": code, "message": "broken"}
        else:
            request.cancel()
        reply = json.loads(to_json(request.reply()))
        ResponsesReply.model_validate(reply)
        *others, last = reply["output"]
        assert [one["status"] for one in others] == ["completed"] * len(others) and last["status"] == "incomplete"
        text = last["arguments"] if last["type"] == "function_call" else last["content"][0]["text"]
        assert {"type": last["type"], "text": text} == open_item


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0", "text alone"),
        ({"input": [{"type": "computer_call"}]}, "input.0", "this server reads messages"),
        ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]}]}, "input", "a message"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.id", "no stored item"),
        ({"input": "a", "conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"input": "a", "max_tokens": 3}, "max_tokens", "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 999}, "max_output_tokens", "maximum context length"),
        ({"input": "a " * 400}, "input", "truncation: auto"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools", "runs no tools itself"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "runs no tools itself"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "not in tools"),
        (
            {
                "input": "a",
                "tools": [{"type": "mcp"}, {**TOOL, "parameters": {"properties": {"a": {"type": "no"}}}}],
                "tool_choice": "required",
            },
            "tools.1.parameters",
            "cannot be enforced",
        ),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}},
            "text.format",
            "cannot be enforced",
        ),
        ({"input": "a", "tools": [{"type": "function", "function": TOOL}]}, "tools.0.function", "beside type"),
        (
            {"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "function": TOOL}},
            "tool_choice.function",
            "beside",
        ),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}},
            "text.format.json_schema",
            "beside type",
        ),
        ({"input": "a", "min_tokens": 4, "max_output_tokens": 3}, "min_tokens", "the maximum length of the answer"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs", "include"),
        ({"input": "a", "background": True, "stream": True}, "background", "poll"),
        ({"input": "a", "metadata": {"k": "v" * 513}}, "metadata.k", "512"),
        ({"input": "a", "include": ["everything"]}, "include.0", "reasoning.encrypted_content"),
    ],
)
def test_errors_name_the_field_of_this_api(site: Site, body: dict[str, Any], param: str, says: str) -> None:
    error = site.refused(PATH, body)
    assert error["param"] == param and says in error["message"] and len(error["message"]) < 700


def test_tools_that_are_not_run_are_left_out_and_named(site: Site) -> None:
    inner = [TOOL, {"type": "mcp", "name": "c"}, {**TOOL, "name": "x" * 59}, {**TOOL, "name": "y" * 58}]  # behind `home__`
    space = {"type": "namespace", "name": "home", "description": "Mine.", "tools": inner}
    body = {"input": "a", "tools": [{"type": "web_search\r\nx: y"}, TOOL, space], "truncation": "auto"}
    reply = site.http.post(PATH, json=body)
    assert reply.headers["x-rung-ignored"] == "tools.0.web_search??x??y, tools.2.tools.1.mcp, tools.2.tools.2.function"
    assert [tool["name"] for tool in reply.json()["tools"]] == ["weather", "home"]


def test_functions_of_a_namespace(site: Site) -> None:
    """The model sees one name; the client gets both back, and so sends them again."""
    space = {"type": "namespace", "name": "home", "tools": [TOOL]}
    site.says(FORCED.replace("weather", "home__weather"))
    call = respond(site, tools=[space])["output"][0]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "weather", "home")
    given = [
        {"role": "user", "content": "Hi"},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "1"},
    ]
    messages = convert(ResponsesBody.model_validate({"input": given}), [], {}).chat.messages
    assert messages[1].tool_calls and messages[1].tool_calls[0].function.name == "home__weather"
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "namespace": "home", "input": "x"}
    messages = convert(ResponsesBody.model_validate({"input": [given[0], custom]}), [], {}).chat.messages
    assert messages[1].tool_calls and messages[1].tool_calls[0].function.name == "home__apply_patch"
    wrong = {**space, "tools": [{**TOOL, "parameters": {"properties": {"a": {"type": "no"}}}}]}
    error = site.refused(PATH, {"input": "a", "tools": [{"type": "mcp"}, wrong], "tool_choice": "required"})
    assert error["param"] == "tools.1.tools.0.parameters"


PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}


def test_the_tokens_of_the_input_are_counted(site: Site) -> None:
    body: Any = {"model": "tiny-hybrid", "instructions": "Be brief.", "input": "Hi", "tools": [TOOL]}
    first = respond(site, **body)
    assert site.openai.responses.input_tokens.count(**body).input_tokens == first["usage"]["input_tokens"]
    body |= {"input": "And?", "previous_response_id": first["id"]}
    counted = site.http.post(f"{PATH}/input_tokens", json={**body, "tools": [{"type": "web_search"}, TOOL]})
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": respond(site, **body)["usage"]["input_tokens"]}
    assert counted.headers["x-rung-ignored"] == "tools.0.web_search"
    assert "truncation" in site.refused(f"{PATH}/compact", body)["message"]


def test_a_custom_tool_takes_a_text(site: Site) -> None:
    """It is offered as a function with one argument. The call, streamed or whole, has the text, and is taken back."""
    text = "*** Begin\n+ü"
    site.says(json.dumps({"name": "apply_patch", "arguments": {"input": text}}))
    for choice in ("required", {"type": "custom", "name": "apply_patch"}):
        call = respond(site, tools=[PATCH], tool_choice=choice)["output"][0]
        assert (call["type"], call["name"], call["input"], call["status"]) == (
            "custom_tool_call",
            "apply_patch",
            text,
            "completed",
        )
        events = stream(site, tools=[PATCH], tool_choice=choice)
        kinds = [one["type"] for one in events if "custom" in one["type"]]
        assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
        assert events[-1]["response"]["output"][0]["input"] == text
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": [{"type": "input_text", "text": "ok"}]}
    body = ResponsesBody.model_validate({"input": [{"role": "user", "content": "Hi"}, call, output], "tools": [PATCH, TOOL]})
    chat = convert(body, [], {}).chat
    (told,) = chat.messages[1].tool_calls or []
    assert (told.function.name, told.function.arguments, chat.messages[2].content) == ("apply_patch", {"input": text}, "ok")
    assert [tool.function.name for tool in chat.tools or []] == ["apply_patch", "weather"]
    assert "start: x" in ((chat.tools or [])[0].function.description or "")


def test_other_items_are_text_or_named(site: Site) -> None:
    """Calls of other tools and what they brought, tools in the input, and what the model does not see."""
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"type": "additional_tools", "role": "developer", "tools": [TOOL, {**TOOL, "name": "more"}, {"type": "web_search"}]},
        {"type": "compaction", "encrypted_content": "abc"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {
            "type": "local_shell_call",
            "id": "l",
            "call_id": "c1",
            "action": {"type": "exec", "command": ["ls"]},
            "status": "completed",
        },
        {"type": "local_shell_call_output", "id": "c1", "output": "file"},
        {"type": "shell_call", "call_id": "c2", "action": {"commands": ["pwd"]}},
        {
            "type": "shell_call_output",
            "call_id": "c2",
            "output": [{"stdout": "/", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
        {"type": "mcp_call", "id": "m", "name": "find", "server_label": "s", "arguments": '{"q": 1}', "output": "found"},
        {
            "type": "code_interpreter_call",
            "id": "ci",
            "code": "1 + 1",
            "container_id": "x",
            "outputs": [{"type": "logs", "logs": "2"}],
        },
    ]
    chat = convert(ResponsesBody.model_validate({"input": given, "tools": [TOOL]}), [], {}).chat
    said = [(one.role, one.tool_calls[0].function if one.tool_calls else one.content) for one in chat.messages]
    calls = [(f.name, f.arguments) for role, f in said if role == "assistant"]  # type: ignore[union-attr]
    assert calls == [
        ("local_shell", {"type": "exec", "command": ["ls"]}),
        ("shell", {"commands": ["pwd"]}),
        ("find", '{"q": 1}'),
        ("code_interpreter", {"code": "1 + 1"}),
    ]
    results = [content for role, content in said if role == "tool"]
    assert results[0] == "file" and '"/"' in str(results[1]) and results[2] == "found" and '"2"' in str(results[3])
    assert [one.tool_call_id for one in chat.messages if one.role == "tool"][:2] == ["c1", "c2"]
    assert [tool.function.name for tool in chat.tools or []] == ["weather", "more"]
    assert chat.ignored == ["input.1.tools.2.web_search", "input.2.compaction", "input.3.web_search_call"]
    first = respond(site, input=given, truncation="auto")  # and they are kept
    kept = site.openai.responses.input_items.list(first["id"], order="asc", limit=100).data
    assert [one.type for one in kept] == ["message", *(one["type"] for one in given[1:])]
    respond(site, input="And?", previous_response_id=first["id"], truncation="auto")


def test_many_tools_and_a_long_user() -> None:
    functions = [{"name": f"tool_{i}", "parameters": {}} for i in range(300)]
    hi, user = {"role": "user", "content": "Hi"}, "u" * 2000
    tools = [{"type": "function", "function": one} for one in functions]
    chat = ChatBody.model_validate({"messages": [hi], "tools": tools, "user": user})
    flat = [{"type": "function", **one} for one in functions]
    made = convert(ResponsesBody.model_validate({"input": "Hi", "tools": flat, "user": user}), [], {}).chat
    own = [{"name": one["name"], "input_schema": {}} for one in functions]
    body = MessagesBody.model_validate({"max_tokens": 5, "messages": [hi], "tools": own, "metadata": {"user_id": user}})
    assert [len(one.tools or []) for one in (chat, made, body.chat)] == [300] * 3


def test_a_long_conversation_takes_no_place_of_quick_jobs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the body of its next turn is short."""
    long = [{"role": "user", "content": "word " * 20_000}]
    first = respond(site, input=long, truncation="auto", max_output_tokens=5)
    workers, slow = site.server.service.workers, []
    run = workers.run
    monkeypatch.setattr(workers, "run", lambda *job, **options: slow.append(options["slow"]) or run(*job, **options))
    respond(site, previous_response_id=first["id"], truncation="auto", max_output_tokens=5)
    assert slow == [True, True]  # the conversion, and the template


def test_an_accepted_response_outlives_the_server(make_site: Callable[..., Site], tmp_path: Path) -> None:
    """With a journal, /v1/results has it."""
    journal = str(tmp_path / "journal")
    site = make_site(journal=journal)
    site.says(STORY)
    made = respond(site)
    wait_for(lambda: site.http.get(f"/v1/results/{made['id']}").status_code == 200)
    assert site.http.get(f"/v1/results/{made['id']}").json() == made
    site.engine.hold = True
    running = site.openai.responses.create(model="tiny-hybrid", input="Hi", background=True)
    cancelled = site.openai.responses.create(model="tiny-hybrid", input="Hi", background=True)
    assert site.openai.responses.cancel(cancelled.id).status == "cancelled"
    site.server.service.journal.ending = True  # type: ignore[union-attr]
    site.close()
    second = make_site(journal=journal)  # its engine begins at once, with its own text
    wait_for(lambda: second.http.get(f"/v1/results/{running.id}").status_code == 200)
    result = ResponsesReply.model_validate(second.http.get(f"/v1/results/{running.id}").json())
    assert result.error is None and result.output[0].content[0].text  # type: ignore[union-attr]
    assert second.http.get(f"/v1/results/{cancelled.id}").status_code == 404
