"""Two servers with the same model, one with `--speculate auto` and its head: the same answers, choice by choice."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import MODELS
from tests.support.server_process import ServerProcess
from tests.support.server_thread import TOOL

FLAGS = ("--model", MODELS / "tiny-hybrid", "--max-num-seqs", 8)
STORY = {"prompt": "Once upon a time there was a little dog", "max_tokens": 60}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 60}


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ServerProcess, ServerProcess]]:
    with ServerProcess(*FLAGS) as plain, ServerProcess(*FLAGS, "--speculate", "auto") as fast:
        yield plain.ready(), fast.ready()


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("completions", STORY | {"temperature": 0}),
    ("completions", STORY | {"n": 4, "seed": 5, "temperature": 0.8}),
    ("completions", STORY | {"n": 2, "best_of": 3, "seed": 6, "temperature": 0.7, "top_k": 20}),
    ("completions", STORY | {"temperature": 0, "stop": ["."]}),
    ("completions", STORY | {"seed": 3, "stop": [" and", "\n"], "include_stop_str_in_output": True}),
    ("completions", STORY | {"temperature": 0, "echo": True, "logprobs": 2}),
    ("chat/completions", CHAT | {"n": 3, "seed": 7, "temperature": 0.9}),
    ("chat/completions", CHAT | {"temperature": 0, "tools": [TOOL], "tool_choice": "required"}),
    ("chat/completions", CHAT | {"temperature": 0, "tools": [TOOL], "tool_choice": "auto"}),
    ("chat/completions", CHAT | {"temperature": 0, "response_format": {"type": "json_object"}}),
]


@pytest.mark.parametrize("place", range(4))
def test_the_same_answers(servers: tuple[ServerProcess, ServerProcess], in_turn: Callable[..., Any], place: int) -> None:
    path, body = in_turn(ASKED[place::4], place)
    plain, fast = (server.http.post(f"/v1/{path}", json=body).json() for server in servers)
    assert list(map(answer, plain["choices"])) == list(map(answer, fast["choices"])) and plain["choices"]


def answer(choice: dict[str, Any]) -> Any:
    """What must be the same: the text or message, but for the random ids of calls, and why it ended."""
    message = dict(choice.get("message") or {"content": choice.get("text")})
    calls = [call["function"] for call in message.pop("tool_calls", None) or []]
    return message, calls, choice["finish_reason"], choice.get("stop_reason")


def test_drafts_were_accepted(servers: tuple[ServerProcess, ServerProcess]) -> None:
    """Of the repeated text of long greedy answers at least, whatever pays on this machine."""
    plain, fast = servers
    for server, count in ((plain, 20), (fast, 200)):
        server.http.post("/v1/completions", json=STORY | {"temperature": 0, "max_tokens": count, "ignore_eos": True})
    assert plain.stats()["drafts"] == {} or not any(one["drafts"] for one in plain.stats()["drafts"].values())
    assert sum(one["accepted"] for one in fast.stats()["drafts"].values()) > 0
