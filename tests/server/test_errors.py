"""What the frontend refuses, and with which errors: invalid fields and bodies, wrong keys, exceeded limits."""

import contextlib
import json
import logging
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from files import SHOWN, shown
from server import middleware, replies
from server.body import Body
from server.bounds import MAX_LOGPROBS
from server.errors import MAX_MESSAGE
from server.messages.bodies import MessagesBody
from server.responses.schemas import ResponsesBody
from server.schemas import ChatBody, CompletionBody, EmbeddingBody, TokenizeBody
from server.settings import HttpOptions
from tests.support.quiet_clock import quiet_seconds
from tests.support.server_thread import CHAT, CONTEXT, EOS, TOKENIZER, TOOL, Site, raw_request, wait_for

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
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"min_tokens": 3, "max_tokens": 3, "allowed_token_ids": [EOS]}, "min_tokens"),
    ({"min_tokens": 3, "max_tokens": 3, "allowed_token_ids": [EOS, 5, 5], "stop_token_ids": [5]}, "min_tokens"),
    ({"min_tokens": 3, "max_tokens": 3, "stop_token_ids": [*range(TOKENIZER.vocab_size)]}, "min_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"tools": [{}]}, "tools"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "\ud800"}, "cache_salt"),
    ({"bad_words": ["\ud800"]}, "bad_words.0"),
    ({"truncation_side": "right"}, "truncation_side"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"priority": 0.5}, "priority"),
    ({"priority": 1}, "priority"),
    ({"guided_json": {"type": "nope"}}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": "(?=x)y"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": {"structures": []}}}, "structured_outputs.structural_tag.structures"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"grammar": "root ::= x"}, "grammar"),
    ({"max_new_tokens": 5}, "max_new_tokens"),
    ({"repeat_penalty": 1.1}, "repeat_penalty"),
    ({"mirostat": 2}, "mirostat"),
    ({"moderation": {}}, "moderation"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {"type": "nope"}}}, "response_format"),
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


NAMED = {"type": "function", "function": {"name": "x"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "function_call": NAMED["function"]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}},
            "tool_choice",
        ),
        ({"tools": [TOOL], "response_format": {"type": "json_object", "schema": {"type": "nope"}}}, "response_format"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"echo": True}, "echo"),
        ({"bad_words": ["x", ""]}, "bad_words.1"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": ["x" * 129]}, "bad_words.0"),
        ({"bad_words": "x"}, "bad_words"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_bad_chats_name_the_field(site: Site, body: dict[str, Any], param: str) -> None:
    error = site.refused("/v1/chat/completions", {**CHAT, **body})
    assert error["param"] == param, error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": CONTEXT, "truncate_prompt_tokens": -1}, "max_tokens"),
        ("/v1/completions", {"prompt": [5, 6], "max_tokens": 10**6, "truncate_prompt_tokens": -1}, "max_tokens"),
        (
            "/v1/chat/completions",
            {**CHAT, "max_completion_tokens": CONTEXT, "truncate_prompt_tokens": -1},
            "max_completion_tokens",
        ),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": CONTEXT, "truncation": "auto"}, "max_output_tokens"),
    ],
)
def test_truncation_makes_no_room_for_an_answer_of_the_whole_context(
    site: Site, path: str, body: dict[str, Any], param: str
) -> None:
    error = site.refused(path, body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens.")
    assert error["message"].endswith(f"{param} can be at most {CONTEXT - 1}.")
    assert site.http.post(path, json={**body, param: CONTEXT - 1}).status_code == 200


def test_error_statuses(site: Site) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        site.openai.completions.create(model="nope", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="never run"):
        site.openai.completions.create(model="tiny-hybrid", prompt=[1000])
    for path, status in (("/nope", 404), ("/v1/models/nope", 404), ("/v1/completions", 405)):
        response = site.http.get(path)
        assert response.status_code == status and replies.ErrorReply.model_validate(response.json())
    assert site.http.delete("/v1/models").status_code == 405
    for content in (b"[]", b'"text"'):
        response = site.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400 and "JSON object" in response.json()["error"]["message"]


# Patterns by which clients recognize that a conversation is too long, and by how much. The first is litellm's, the last
# langchain-openai's; the others are common in agents.
CONTEXT_PATTERNS = (
    r"This model's maximum context length is",
    r"^This model's maximum context length is (?P<limit>\d+) tokens\. However, you requested (?P<all>\d+) tokens "
    r"\((?P<prompt>\d+) in the messages, (?P<answer>\d+) in the completion\)\. Please reduce the length of the messages or completion\.",
    r"maximum context length is (\d+) tokens.+you requested (\d+) tokens",
    r"(?i)reduce the length",
    r"context_length_exceeded",
)


@pytest.mark.parametrize(
    ("words", "asked", "answer", "param"),
    [
        (600, {}, 1, "messages"),
        (600, {"max_tokens": 9}, 9, "messages"),
        (1, {"max_completion_tokens": 999}, 999, "max_completion_tokens"),
    ],
)
def test_clients_recognize_a_conversation_that_is_too_long(
    site: Site, words: int, asked: dict[str, int], answer: int, param: str
) -> None:
    messages: Any = [{"role": "user", "content": "word " * words}]
    with pytest.raises(openai.BadRequestError) as caught:
        site.openai.chat.completions.create(model="tiny-hybrid", messages=messages, **asked)  # type: ignore[call-overload]
    assert caught.value.code == "context_length_exceeded" and caught.value.param == param
    body: Any = caught.value.body
    found = [re.search(pattern, body["message"]) for pattern in CONTEXT_PATTERNS]
    assert all(found), body["message"]
    assert body["message"] in str(caught.value)  # some clients look only at this text
    assert found[1] and {k: int(v) for k, v in found[1].groupdict().items()} == {
        "limit": CONTEXT,
        "all": len(TOKENIZER.encode_chat(messages)) + answer,
        "prompt": len(TOKENIZER.encode_chat(messages)),
        "answer": answer,
    }
    if param == "max_completion_tokens":  # the message names the largest value that is accepted
        most = int(body["message"].split()[-1].rstrip("."))
        assert site.chat(messages=messages, max_completion_tokens=most)["choices"]
        assert site.refused("/v1/chat/completions", {"messages": messages, "max_completion_tokens": most + 1})


def test_a_prompt_that_is_too_long_has_its_numbers(site: Site) -> None:
    error = site.refused("/v1/completions", {"prompt": [5] * 300})
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert error["message"].startswith(
        "This model's maximum context length is 256 tokens. However, you requested 316 tokens (300 in the prompt, 16 in the completion)."
    )
    error = site.refused("/v1/completions", {"prompt": [5] * 200, "max_tokens": 57})
    assert error["param"] == "max_tokens" and error["message"].endswith("max_tokens can be at most 56.")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"prompt": "x" "n": 1}', 'Expecting \',\' delimiter at line 1, column 16 (character 15), found "\\"n\\": 1}"'),
        (b'{\n  "prompt": x}', 'Expecting value at line 2, column 13 (character 14), found "x}"'),
        (b"{'prompt': 'x'}", "Expecting property name enclosed in double quotes"),
        (b'{"prompt": "x"', "Expecting ',' delimiter at line 1, column 15 (character 14), found its end"),
        (b'{"prompt": "\xff"}', "it is not UTF-8 text: byte 0xff at position 12"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "4300"),
    ],
    ids=["comma", "value", "quotes", "end", "bytes", "depth", "digits"],
)
def test_a_body_that_is_no_json_is_told_why(site: Site, content: bytes, reason: str) -> None:
    response = site.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    error = replies.ErrorReply.model_validate(response.json()).error
    assert response.status_code == 400 and error.code == "invalid_json"
    assert error.message.startswith("the body is not valid JSON: ") and reason in error.message, error.message
    assert len(error.message) < 300


def test_a_body_that_does_not_say_that_it_is_json_is_not_parsed(site: Site) -> None:
    """Nothing would bound its number of values and its depth."""
    for kind in (None, "text/plain", "text/json", "application/jsonl", "application/x+y", "xapplication/json"):
        headers = {} if kind is None else {"content-type": kind}
        response = site.http.post("/v1/completions", content=b'{"prompt": "Hi"}', headers=headers)
        assert response.status_code == 400 and "Content-Type" in response.json()["error"]["message"], kind
    empty = site.http.post("/v1/completions", content=b"", headers={"content-type": "application/json"}).json()
    assert empty["error"]["message"] == "the body must be a JSON object, sent with Content-Type: application/json"
    for kind in ("Application/JSON ; charset=utf-8", "application/vnd.api+json"):
        response = site.http.post("/v1/completions", content=b'{"prompt": "Hi"}', headers={"content-type": kind})
        assert response.status_code == 200, kind


def test_an_unknown_model_is_named_beside_those_that_the_server_has(site: Site) -> None:
    error = site.refused("/v1/completions", {"prompt": "Hi", "model": "x" * 100_000}, 404)
    assert len(error["message"]) < 200 and error["message"].endswith("this server has: tiny-hybrid")


BODIES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, {"prompt": "Hi"}),
    "/v1/chat/completions": (ChatBody, CHAT),
    "/v1/responses": (ResponsesBody, {"input": "Hi"}),
    "/v1/messages": (MessagesBody, CHAT | {"max_tokens": 1}),
    "/v1/embeddings": (EmbeddingBody, {"input": "Hi"}),
    "/tokenize": (TokenizeBody, {"prompt": "Hi"}),
}


@pytest.mark.parametrize("path", BODIES)
def test_what_an_error_quotes_is_cut(site: Site, path: str, seed: int) -> None:
    """Whichever field has a long text, or an object with a long key or type: in the message, and in the name of the field."""
    long = "\n\U0001f409" * 1500
    model, own = BODIES[path]
    for field in [*random.choices(sorted(model.model_fields), k=20), "logit_bias", "tools", long]:
        named = {"role": "user", "type": "function", "name": long}
        for value in (long, [long], {long: long}, [{long: 1}], {"type": long}, [{"type": long}], named, [named]):
            answer = site.http.post(path, json=own | {field: value})
            assert answer.status_code < 500, (field, value, answer.text)
            if answer.status_code >= 400:
                assert len(answer.content) < 4 * MAX_MESSAGE, (field, value)


def test_a_quoted_text_is_not_escaped_as_a_whole() -> None:
    class Text(str):
        def __repr__(self) -> str:
            raise AssertionError("it may have megabytes")

    for size in (SHOWN + 1, 10**6):
        assert shown(Text("\n" * size)) == "'" + r"\n" * (SHOWN // 2 - 1) + "\\…"


def test_lone_surrogates_are_harmless(site: Site) -> None:
    body = '{"prompt": "a\\ud800b", "echo": true, "max_tokens": 1}'
    response = site.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200 and response.json()["choices"][0]["text"].startswith("a")
    response = site.http.post(
        "/v1/completions", content='{"prompt": "a", "model": "\\ud800"}', headers={"content-type": "application/json"}
    )
    assert response.status_code == 404


def test_all_prompts_of_a_request_together(make_site: Callable[..., Site]) -> None:
    """The limits count a prompt, and the log-probabilities of its tokens, once for each answer."""
    site = make_site(max_num_seqs=64, max_queue=8192)
    prompts = [[5] * (CONTEXT - 1)] * 40
    reply = site.http.post("/v1/completions", json={"prompt": prompts, "n": 2, "max_tokens": 1})
    assert reply.status_code == 200 and len(reply.json()["choices"]) == 80
    submits = list(site.engine.submits)
    assert len({id(one.params.stop_token_ids) for one in submits}) == 1, "what they share is there once"
    assert [one.params.seed - submits[0].params.seed for one in submits] == [*range(80)]
    assert len(prompts) * (CONTEXT - 1) * 128 > 2**20 > (CONTEXT - 1) * 128 * 8 > MAX_LOGPROBS / 21
    many = {"prompt": prompts, "n": 128, "max_tokens": 1}
    assert site.refused("/v1/completions", many)["code"] == "too_many_tokens"
    scored = {"prompt": prompts[:8], "n": 128, "max_tokens": 1, "prompt_logprobs": 20}
    assert site.refused("/v1/completions", scored)["code"] == "too_many_tokens"
    assert len(site.engine.submits) == len(submits)


def test_the_log_probabilities_of_all_answers_of_a_request(site: Site) -> None:
    """The log-probabilities kept until an answer is complete are limited. A stream keeps none."""
    asked = {"prompt": ["Hi"] * 8, "n": 10, "max_tokens": 100, "logprobs": 20, "ignore_eos": True}
    assert 8 * 10 * 100 * 21 > MAX_LOGPROBS > 8 * 10 * 70 * 21
    site.engine.together = 16  # a message for each token takes most of the time, and an engine sends one for each step
    error = site.refused("/v1/completions", asked)
    assert (error["param"], error["code"]) == ("logprobs", "too_many_tokens") and str(MAX_LOGPROBS) in error["message"]
    assert len(site.complete(**{**asked, "max_tokens": 70})["choices"]) == 80
    assert len(site.events("/v1/completions", asked)) > 80
    assert site.complete(**{**asked, "logprobs": None, "n": 1, "best_of": 110, "max_tokens": 200})["choices"]
    chat = {"logprobs": True, "top_logprobs": 20, "n": 128}
    assert site.refused("/v1/chat/completions", {**CHAT, **chat, "max_tokens": 100})["code"] == "too_many_tokens"
    site.chat(**chat)
    assert site.last().params.max_tokens == MAX_LOGPROBS // (128 * 21), "a default is cut to what can be kept"
    site.events("/v1/chat/completions", {**CHAT, **chat})
    assert site.last().params.max_tokens > MAX_LOGPROBS // (128 * 21)


def test_a_streamed_response_has_the_limits_of_a_whole_answer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last event has all items again."""
    monkeypatch.setattr("server.bounds.MAX_LOGPROBS", 100)
    most = 2 * CONTEXT // 21
    asked = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 20, "stream": True}
    assert site.refused("/v1/responses", {**asked, "max_output_tokens": most + 1})["code"] == "too_many_tokens"
    assert site.http.post("/v1/responses", json={**asked, "max_output_tokens": most}).status_code == 200


def test_a_stream_that_a_journal_keeps_has_the_limits_of_a_whole_answer(make_site: Callable[..., Site], tmp_path: Path) -> None:
    site = make_site(journal=str(tmp_path / "journal"))
    asked = {"prompt": "Hi", "n": 80, "max_tokens": 100, "logprobs": 20, "stream": True}
    assert site.refused("/v1/completions", asked)["code"] == "too_many_tokens"


def test_keys(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key=("right", "other"), protect_metrics=True)
    for path in ("/health", "/health_generate", "/ping", "/version", "/docs"):
        assert site.http.get(path).status_code == 200, path
    help_text = HttpOptions.__dataclass_fields__["protect_metrics"].metadata["help"]
    for path in ("/metrics", "/stats", "/load", "/get_load", "/v1/models"):
        assert site.http.get(path).status_code == 401, path
        assert (path in re.findall("[/a-z_]+", help_text)) == (path != "/v1/models")
    with pytest.raises(openai.AuthenticationError):
        site.openai.models.list()
    for key in ("right", "other"):
        assert openai.OpenAI(base_url=site.url + "/v1", api_key=key).models.list().data[0].id == "tiny-hybrid"
    assert site.http.get("/metrics", headers={"authorization": "Bearer right"}).status_code == 200
    assert site.http.options("/v1/models").headers.get("access-control-allow-origin") is None


def test_limits(make_site: Callable[..., Site]) -> None:
    site = make_site(max_num_seqs=1, max_queue=1, max_body_mb=0.01, cors_origin=("https://a.example",))
    site.engine.hold = True
    assert site.refused("/v1/completions", {"prompt": "x" * 20_000}, 413)["code"] == "body_too_large"
    chunked = site.http.post("/v1/completions", content=iter([b"x" * 6000] * 3))
    assert chunked.status_code == 413
    assert site.refused("/v1/completions", {"prompt": "x", "n": 3})["code"] == "too_many_choices"
    with httpx.Client(base_url=site.url, timeout=120) as other:
        waiting = threading.Thread(target=lambda: other.post("/v1/completions", json={"prompt": "x", "n": 2}))
        waiting.start()
        wait_for(lambda: site.server.client.active == 2)
        response = site.http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        site.engine.hold = False
        waiting.join()
    response = site.http.get("/version", headers={"origin": "https://a.example"})
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert {"Retry-After", "X-Should-Retry"} <= set(response.headers["access-control-expose-headers"].split(", "))


def test_a_request_that_takes_too_long_ends(make_site: Callable[..., Site], tmp_path: Path) -> None:
    """In the engine, or while it waits for a worker. OpenAI's client does not repeat it."""
    site = make_site(request_timeout=0.5)
    site.engine.hold = True
    with pytest.raises(openai.InternalServerError, match="took longer than"):
        site.openai.with_options(max_retries=2).completions.create(model="tiny-hybrid", prompt="x")
    site.settle()
    assert len(site.engine.submits) == 1
    response = site.http.post("/v1/completions", json={"prompt": "x", "n": 2})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "timeout")
    assert "retry-after" not in response.headers
    wait_for(lambda: len(site.engine.aborts) == 3)
    blocker = site.occupy_worker(tmp_path / "gate")
    error = site.refused("/v1/completions", {"prompt": "x", "metadata": {"a": "x" * 70_000}}, 503)
    assert error["code"] == "overloaded" and "longer than 0.5 s" in error["message"]
    blocker.cancel()


@pytest.mark.parametrize(
    ("trusted", "given", "client"),
    [
        ((), "8.8.8.8", "127.0.0.1"),
        (("10.0.0.0/8",), "8.8.8.8", "127.0.0.1"),
        (("127.0.0.1", "10.0.0.0/8"), "1.1.1.1, 8.8.8.8, 10.1.2.3", "8.8.8.8"),
        (("127.0.0.1",), "x" * 5000, "x" * 64),
    ],
    ids=["nobody", "another", "a chain", "too long"],
)
def test_only_a_trusted_proxy_names_the_client(
    make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture, trusted: tuple[str, ...], given: str, client: str
) -> None:
    site = make_site(engine=False, trusted_proxy=trusted)
    with caplog.at_level(logging.INFO, "rung.access"):
        assert site.http.get("/version", headers={"x-forwarded-for": given}).status_code == 200
        wait_for(lambda: [record for record in caplog.records if record.name == "rung.access"])
    (line,) = [record.fields for record in caplog.records if record.name == "rung.access"]  # type: ignore[attr-defined]
    assert line["client"] == client


def slowest_health(site: Site, job: Future[Any]) -> float:
    """The longest that the server takes to say that it is ready while `job` runs."""
    slowest = 0.0
    while not job.done():
        began = quiet_seconds(os.getpid())
        assert site.health() == "ready"
        slowest = max(slowest, quiet_seconds(os.getpid()) - began)
    return slowest


LONG = "word " * 800_000  # 4 MB, which would take seconds to tokenize


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", json.dumps({"prompt": LONG}), "may be longer still"),
        ("/v1/completions", json.dumps({"prompt": ["Hi", LONG]}), "may be longer still"),
        ("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": LONG}]}), "may be longer still"),
        ("/v1/chat/completions", '{"messages":[' + "0," * 2_000_000 + "0]}", "values"),
        ("/v1/completions", '{"prompt":[' + "null," * 200_000 + "null]}", "prompt.0"),
        ("/v1/completions", '{"prompt":[' + "[]," * 500_000 + "[]]}", "lists and objects"),
        ("/tokenize", '{"prompt":' + "[" * 150 + "]" * 150 + "}", "nested too deeply"),
    ],
    ids=["prompt", "prompts", "chat", "items", "errors", "lists", "depth"],
)
def test_what_is_wrong_with_a_body_is_found_in_bounds(site: Site, path: str, body: str, says: str) -> None:
    """Neither this request nor others wait long: a text beyond the context is not tokenized. A list of all errors in the other bodies
    would take minutes in the event loop, and gigabytes."""
    site.chat()  # starts the workers
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(site.http.post, path, content=body, headers={"content-type": "application/json"})
        assert slowest_health(site, job) < 2
    error = job.result().json()["error"]
    assert job.result().status_code == 400 and says in error["message"] and len(error["message"]) < 500
    assert (error["code"] == "context_length_exceeded") == (LONG in body)


def test_a_body_read_in_a_worker_is_the_same(site: Site) -> None:
    """Long lists of token ids, a long text and unknown names are read as FastAPI would read them."""
    ids = [5] * 200
    assert site.complete(prompt=[ids] * 60, max_tokens=1, unknown="x" * 20_000)["usage"]["prompt_tokens"] == 60 * 200
    response = site.http.post("/v1/completions", json={"prompt": ids, "max_tokens": 1, "unknown": "x" * 20_000})
    assert response.headers["x-rung-ignored"] == "unknown"
    assert site.refused("/v1/completions", {"prompt": [[*ids, -1]] * 100})["param"] == "prompt.0.200"


def test_a_trickled_body_ends(make_site: Callable[..., Site]) -> None:
    """A client that sends a byte now and then is cut off: the time limit is for the whole body, as for the headers."""
    site = make_site(idle_timeout=1.0)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", site.port)) as connection:
        connection.sendall(head)
        connection.settimeout(0.2)
        answer, end = b"", time.monotonic() + 120
        while not answer and time.monotonic() < end:
            connection.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400") and b"too slowly" in answer


def test_the_bodies_that_a_client_has_in_the_server_are_bounded(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests that run and of those that still arrive. Short ones always find room."""
    monkeypatch.setattr(middleware, "BODIES_BYTES", 4 << 20)
    site = make_site(max_body_mb=0.5, idle_timeout=60.0)
    site.engine.hold = True
    large = {"prompt": "Hi", "metadata": {"a": "x" * 400_000}}
    with contextlib.ExitStack() as stack:
        for body in (raw_request(large), raw_request(large)[:-1]):
            stack.enter_context(socket.create_connection(("127.0.0.1", site.port))).sendall(body)
        wait_for(lambda: site.server.client.active == 1 and site.server.service.open_requests == 2)
        refused = site.http.post("/v1/completions", json=large)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "bodies_full"
        assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
        stack.enter_context(socket.create_connection(("127.0.0.1", site.port))).sendall(raw_request({"prompt": "Hi"}))
        wait_for(lambda: site.server.client.active == 2)
    site.settle()
    site.engine.hold = False
    assert site.complete(**large)["choices"][0]["text"]


def test_as_many_long_requests_wait_as_the_queue_has_places(make_site: Callable[..., Site], tmp_path: Path) -> None:
    site, count = make_site(max_num_seqs=40, max_queue=40, max_queue_per_client=40), 80
    workers, gate = site.server.service.workers, tmp_path / "gate"
    blocker = site.occupy_worker(gate)
    large = {"prompt": "Hi", "max_tokens": 1, "metadata": {"a": "x" * 70_000}}
    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(site.complete, **large) for _ in range(count)]
        try:
            wait_for(lambda: len(workers._slow) == count or any(one.done() for one in answers))
            refused = site.refused("/v1/completions", large, 429)
        finally:
            gate.touch()
        for one in answers:
            one.result()
    blocker.result()
    assert refused["code"] == "queue_full"


def test_the_user_of_a_refused_request_is_logged(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rung.access"):
        for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
            site.refused(path, {field: "Hi", "user": "me", "priority": 1})
        wait_for(lambda: len([record for record in caplog.records if record.name == "rung.access"]) == 2)
    assert [record.fields["user"] for record in caplog.records if record.name == "rung.access"] == ["me"] * 2  # type: ignore[attr-defined]


def test_polls_and_the_page_are_logged_at_debug(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is the 503 of a health poll, but not that of another path, nor a file that is missing."""
    often = ["/health", "/health_generate", "/ping", "/metrics", "/stats", "/load", "/get_load", "/", "/static/app.js"]
    wanted = [*((path, 200, logging.DEBUG) for path in often), ("/favicon.ico", 404, logging.DEBUG)]
    wanted += [("/version", 200, logging.INFO), ("/static/nothing.js", 404, logging.INFO)]
    with caplog.at_level(logging.DEBUG, "rung.access"):
        for path, status, _ in wanted:
            assert site.http.get(path).status_code == status
        monkeypatch.setattr(site.server.service, "draining", True)
        for path in ("/health", "/metrics", "/ping"):
            site.http.get(path)
        site.refused("/v1/completions", {"prompt": "Hi"}, 503)
        wanted += [("/health", 503, logging.DEBUG), ("/metrics", 200, logging.DEBUG), ("/ping", 503, logging.DEBUG)]
        wanted += [("/v1/completions", 503, logging.INFO)]
        wait_for(lambda: len([record for record in caplog.records if record.name == "rung.access"]) == len(wanted))
    lines = [(record.fields, record.levelno) for record in caplog.records if record.name == "rung.access"]  # type: ignore[attr-defined]
    assert sorted((line["path"], line["status"], level) for line, level in lines) == sorted(wanted)


def test_a_long_path_is_cut_in_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rung.access"):
        assert site.http.get("/" + "é" * 5_000).status_code == 404
        wait_for(lambda: [record for record in caplog.records if record.name == "rung.access"])
    (line,) = [record.fields for record in caplog.records if record.name == "rung.access"]  # type: ignore[attr-defined]
    assert line["path"] == "/" + "%C3%A9" * 255
