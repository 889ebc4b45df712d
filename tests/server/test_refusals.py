"""Parameters of another API or server: each is refused with what to use instead, unless its value changes nothing."""

import re
from typing import Any

import pytest
from msgspec.structs import asdict

from engine.protocol import SamplingParams
from server.body import REFUSED, Body
from server.messages.bodies import MessagesBody
from server.responses.schemas import ResponsesBody
from server.schemas import SAMPLED, ChatBody, CompletionBody
from tests.support.server_thread import CHAT, Site


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - ChatBody.model_fields.keys()))
def test_refusals_name_the_parameter_once_and_say_what_to_do(site: Site, name: str) -> None:
    said = site.refused("/v1/chat/completions", {**CHAT, name: {}})["message"]
    assert re.fullmatch(rf"{name}: (is not|must be|only matters|beam search is not) [^:]+", said) and said.count(name) == 1
    assert re.search("; (use|leave|ban|offer|set)|, because|neither", said), said


OTHER_APIS: list[tuple[str, dict[str, Any], type[Body]]] = [
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}, ResponsesBody),
    ("/v1/messages", {**CHAT, "max_tokens": 1}, MessagesBody),
    ("/v1/messages/count_tokens", CHAT, MessagesBody),
]
# parameters of completions and chats that cannot change an answer
NO_EFFECT = {
    "cache_control", "guided_decoding_backend", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "request_id", "safety_identifier", "spaces_between_special_tokens", "store", "stream_options", "user", "verbosity",
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "own"), OTHER_APIS, ids=[path for path, *_ in OTHER_APIS])
def test_other_apis_drop_no_parameter_of_completions_and_chats(
    site: Site, path: str, body: dict[str, Any], own: type[Body]
) -> None:
    names = (CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()) - own.model_fields.keys() - NO_EFFECT
    assert {"n", "structured_outputs", "guided_json", "response_format", "best_of", "logprobs"} <= names
    for name in sorted(names):
        answer = site.http.post(path, json={**body, name: {"x": 1}})
        said = answer.json()["error"]["message"]
        assert answer.status_code == 400 and re.fullmatch(rf"{name}: [^:]+; (use|leave it out, or use|send) .+", said), said


@pytest.mark.parametrize(("path", "body", "own"), OTHER_APIS, ids=[path for path, *_ in OTHER_APIS])
def test_other_apis_accept_neutral_and_unknown_parameters(site: Site, path: str, body: dict[str, Any], own: type[Body]) -> None:
    neutral = {"n": 1, "best_of": 1, "logprobs": False, "response_format": {"type": "text"}, "priority": 0, "guided_json": None}
    neutral |= {"chat_template_kwargs": {}, "instructions": "", "system": ""}
    defaults = {name: value for name, value in asdict(SamplingParams()).items() if name in SAMPLED and value is not None}
    neutral |= {name: value for name, value in defaults.items() if name not in own.model_fields and name != "seed"}
    answer = site.http.post(path, json={**body, **neutral, "provider": {"order": []}})
    assert answer.status_code == 200 and answer.headers["x-rung-ignored"] == "provider", answer.text


def test_how_other_servers_switch_reasoning_is_ignored_where_it_is_not_known(site: Site) -> None:
    """Clients of several servers send it everywhere."""
    off: dict[str, Any] = {"thinking": {"type": "disabled"}, "reasoning": {"effort": "none"}}
    for path, body, own in [("/v1/chat/completions", CHAT, None), ("/v1/completions", {"prompt": "Hi"}, None), *OTHER_APIS]:
        ignored = site.http.post(path, json={**body, **off}).headers["x-rung-ignored"]
        assert ignored == ", ".join(name for name in off if not own or name not in own.model_fields)


@pytest.mark.parametrize(
    ("path", "name", "instead"),
    [
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/responses", "guided_json", "text.format"),
        ("/v1/responses", "logprobs", "include: ['message.output_text.logprobs']"),
        ("/v1/messages", "response_format", "output_config.format"),
        ("/v1/messages", "stop", "stop_sequences"),
        ("/v1/chat/completions", "max_output_tokens", "max_tokens"),
        ("/v1/chat/completions", "stop_sequences", "stop"),
    ],
)
def test_refusals_name_the_parameter_of_this_api(site: Site, path: str, name: str, instead: str) -> None:
    body = {"input": "Hi"} if path == "/v1/responses" else {**CHAT, "max_tokens": 1}
    said = site.http.post(path, json={**body, name: ["x"]}).json()["error"]["message"]
    assert said.startswith(f"{name}: ") and said.endswith(f"; use {instead}")
