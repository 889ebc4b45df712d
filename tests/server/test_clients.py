"""Fields that client libraries send and the server does not use: accepted without effect, ignored and named, or refused."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.server_thread import CHAT, STORY, TOKENIZER, TOOL, Site, wait_for

CACHED = {"type": "ephemeral"}
HARMLESS: list[dict[str, Any]] = [
    {"metadata": {"run": "1"}},
    {"store": True},
    {"reasoning_effort": "low"},
    {"verbosity": "low"},
    {"prediction": {"type": "content", "content": "x"}},
    {"prompt_cache_key": "k"},
    {"prompt_cache_retention": "24h"},
    {"prompt_cache_options": {"mode": "explicit"}},
    {"safety_identifier": "s"},
    {"service_tier": "flex"},
    {"top_logprobs": 0},
    {"stream_options": {"include_usage": True}},
    {"cache_control": CACHED},
]


def ids(bodies: list[dict[str, Any]]) -> list[str]:
    return [next(iter(body)) for body in bodies]


@pytest.mark.parametrize("extra", HARMLESS, ids=ids(HARMLESS))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_cannot_change_the_answer_is_accepted(site: Site, path: str, extra: dict[str, Any]) -> None:
    body: dict[str, Any] = {**(CHAT if "chat" in path else {"prompt": "Hi"}), "seed": 7, "max_tokens": 20}
    plain = site.post(path, body)
    asked = site.last()
    response = site.http.post(path, json={**body, **extra})
    assert response.status_code == 200 and "x-rung-ignored" not in response.headers, response.text
    assert response.json()["choices"] == plain["choices"] and response.json()["usage"] == plain["usage"]
    assert (site.last().prompt_ids, site.last().params) == (asked.prompt_ids, asked.params)
    assert site.http.post(path, json={**body, **dict.fromkeys(extra)}).status_code == 200  # null means not given


def test_what_cannot_change_the_answer_is_documented(site: Site) -> None:
    schemas = site.http.get("/openapi.json").json()["components"]["schemas"]
    for body in HARMLESS:
        (name,) = body
        if name not in (
            "top_logprobs",
            "stream_options",
            "prediction",
            "store",
            "reasoning_effort",
        ):  # which other settings use
            text = schemas["ChatBody"]["properties"][name]["description"]
            assert text.startswith("Accepted, without effect") and name in site.http.get("/docs").text
    for name in ("TextPart", "ChatMessage", "Tool", "FunctionDefinition"):
        assert schemas[name]["properties"]["cache_control"]["description"].startswith("Accepted, without effect")


def test_cache_control_and_unknown_names_reach_no_template(site: Site) -> None:
    """The template writes everything that it is given, so equal prompts show that it did not get these fields."""
    function = {**TOOL["function"], "cache_control": CACHED}
    body = {
        "messages": [
            {"role": "user", "cache_control": CACHED, "content": [{"type": "text", "text": "Hi", "cache_control": CACHED}]}
        ],
        "tools": [{**TOOL, "function": function, "cache_control": CACHED, "defer": True}],
    }
    plain = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "tools": [TOOL]}
    template = "{{ messages | tojson }}{{ tools | tojson }}"
    service = site.server.service
    before, service.chat_template = service.chat_template, template
    try:
        assert site.post("/tokenize", body)["tokens"] == site.post("/tokenize", plain)["tokens"]
    finally:
        service.chat_template = before
    response = site.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200 and response.headers["x-rung-ignored"] == "tools.defer"


def test_an_earlier_refusal_is_text(site: Site) -> None:
    def tokens(*parts: dict[str, str]) -> Any:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts}]
        return site.post("/tokenize", {"messages": messages})["tokens"]

    text, refusal = {"type": "text", "text": "No."}, {"type": "refusal", "refusal": "No."}
    assert tokens(refusal) == tokens(text)
    assert tokens(text, refusal) == tokens(text, text)
    for wrong in ({"type": "refusal"}, {"type": "refusal", "refusal": 1}):
        error = site.refused("/v1/chat/completions", {"messages": [{"role": "assistant", "content": [text, wrong]}]})
        assert error["param"] == "messages.0.content.1.refusal"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"prompt": "Hi", "nonsense": 1}, "nonsense"),
        ("/v1/completions", {"prompt": "Hi", "keep_alive": None, "options": {"a": 1}}, "keep_alive, options"),
        ("/v1/chat/completions", {**CHAT, "provider": {}, "stream": True}, "provider"),
        (
            "/v1/chat/completions",
            {**CHAT, "stream_options": {"x": 1}, "tools": [{**TOOL, "y": 1}]},
            "stream_options.x, tools.y",
        ),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "text", "z": 1}}, "response_format.z"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}] * 3}]},
            "messages.content.b",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi", "reasoning_content": "x"}]}, None),
        ("/tokenize", {"prompt": "Hi", "nonsense": 1}, "nonsense"),
        ("/detokenize", {"tokens": [5], "nonsense": 1}, "nonsense"),
        ("/v1/completions", {"prompt": "Hi", "a\r\nset-cookie: b=ü": 1}, "a??set-cookie??b??"),
        ("/v1/completions", {"prompt": "Hi", **{f"{i:04}" + "x" * 100: 1 for i in range(1000)}}, "and more"),
    ],
)
def test_unknown_names_are_told(
    site: Site, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], named: str | None
) -> None:
    with caplog.at_level(logging.INFO, "rung.access"):
        response = site.http.post(path, json=body)
        wait_for(lambda: [record for record in caplog.records if record.name == "rung.access"])
    (line,) = [record.fields for record in caplog.records if record.name == "rung.access"]  # type: ignore[attr-defined]
    assert response.status_code == 200, response.text
    told = response.headers.get("x-rung-ignored")
    assert line.get("ignored") == told
    if named and named.endswith("more"):
        assert told and told.endswith(named) and len(told) < 700
    else:
        assert set((told or "").split(", ")) == set((named or "").split(", "))


def test_strict_requests_refuses_unknown_names(make_site: Callable[..., Site]) -> None:
    site = make_site(strict_requests=True)
    error = site.refused("/v1/chat/completions", {**CHAT, "nonsense": 1})
    assert error["param"] == "nonsense" and "unknown parameter" in error["message"]
    assert site.refused("/v1/chat/completions", {**CHAT, "tools": [{**TOOL, "y": 1}]})["param"] == "tools.y"
    flat = {"type": "function", "name": "f", "y": 1}
    for path, body, param in (
        ("/v1/messages", {**CHAT, "max_tokens": 1, "user": "x"}, "user"),
        ("/v1/responses", {"input": "Hi", "tools": [flat]}, "tools.y"),
        ("/v1/responses", {"input": "Hi", "tools": [{"type": "namespace", "name": "n", "tools": [flat]}]}, "tools.tools.y"),
    ):
        answer = site.http.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(f"{param}: unknown parameter")
    for extra in HARMLESS:
        assert site.chat(**extra)["choices"][0]["message"]["content"] == STORY
    assert TOKENIZER.encode("Hi") == site.post("/tokenize", {"prompt": "Hi"})["tokens"]


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        (
            "/v1/completions",
            {"messages": None, "tools": [], "tool_choice": "none", "top_logprobs": 0, "max_completion_tokens": None},
        ),
        ("/v1/chat/completions", {"prompt": None, "echo": False, "best_of": 1, "suffix": None}),
        (
            "/v1/chat/completions",
            {"mirostat": 0, "typical_p": 1.0, "repeat_penalty": 1.0, "do_sample": True, "guided_json": None},
        ),
    ],
)
def test_neutral_values_of_what_is_refused_pass(site: Site, path: str, extra: dict[str, Any]) -> None:
    response = site.http.post(path, json={**(CHAT if "chat" in path else {"prompt": "Hi"}), **extra})
    assert response.status_code == 200 and "x-rung-ignored" not in response.headers, response.text
