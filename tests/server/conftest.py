"""A server of one or two ranks, and its model without a server, for the modules that send requests to both."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.support.command_line import HYBRID
from tests.support.real_server import NAME, PROMPT, Complete, Reference
from tests.support.server_process import ServerProcess


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(HYBRID)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, in_turn: Callable[..., int]) -> Iterator[ServerProcess]:
    """On 2 ranks; in turn on 1, which needs a third of the time, where the layouts of answers are looked at."""
    ranks = in_turn((2, 1), 0) if request.module.__name__.endswith("answers") else 2
    with ServerProcess("--model", HYBRID, "--trust-request-chat-template", ranks=ranks) as started:
        yield started.ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def greedy(reference: Reference) -> list[int]:
    """40 token ids: the greedy continuation of PROMPT."""
    return reference.generate(reference.encode(PROMPT), 40)


@pytest.fixture(scope="module")
def complete(client: openai.OpenAI) -> Complete:
    """A function that completes PROMPT, by default greedily. Parameters that OpenAI's API lacks are added to the body."""

    def call(**params: Any) -> Any:
        known = {"best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty"}
        known |= {"prompt", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "model"}
        params = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 16} | params
        extra = {name: params.pop(name) for name in set(params) - known}
        return client.completions.create(**params, extra_body=extra)

    return call
