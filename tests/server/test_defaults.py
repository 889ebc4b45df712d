"""`--override-generation-config`: what requests get that do not say how to sample."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import SamplingParams
from server.settings import load_settings
from tests.support.server_thread import MODEL, Site

GIVEN = '{"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5, "max_new_tokens": 5}'
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:

    settings = load_settings(["--model", str(MODEL), "--override-generation-config", GIVEN], {})
    started = Site(tmp_path_factory.mktemp("site"), override_generation_config=settings.override_generation_config).start()
    yield started
    started.close()


def sampled(site: Site, path: str, **body: Any) -> tuple[dict[str, Any], Any]:
    """The engine's parameters of a request, and its answer."""
    site.engine.submits.clear()
    answer = site.http.post(path, json={"model": site.server.service.model_name, **body})
    assert answer.status_code == 200, answer.text
    (submit,) = site.engine.submits
    return {name: getattr(submit.params, name) for name in NAMES}, answer.json()


ASK = {
    "/v1/completions": ({"prompt": "Hi"}, "max_tokens"),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Hi"}]}, "max_completion_tokens"),
    "/v1/responses": ({"input": "Hi"}, "max_output_tokens"),
    "/v1/messages": ({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}, "max_tokens"),
}


@pytest.mark.parametrize("path", ASK)
def test_what_a_request_does_not_say_is_the_server_s_default(site: Site, path: str, seed: int) -> None:
    ask, limit = ASK[path]
    defaults = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5, "max_tokens": 5}
    if path == "/v1/messages":
        defaults["max_tokens"] = 9  # its requests must say it
    found, answer = sampled(site, path, **ask, **{name: None for name in NAMES[:3] if path != "/v1/messages"})
    assert found == defaults
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (0.25, 0.5)
    draw = random.Random(seed)
    own = {
        "temperature": draw.random(),
        "top_p": draw.uniform(0.1, 1),
        "top_k": draw.randrange(1, 99),
        limit: draw.randrange(6, 20),
    }
    found, answer = sampled(site, path, **ask | own)
    assert found == defaults | {"max_tokens" if name == limit else name: value for name, value in own.items()}
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (own["temperature"], own["top_p"])
    found, _ = sampled(site, path, **ask | {"temperature": 0, "top_p": 1, "top_k": 0})
    neutral = SamplingParams(temperature=0)
    assert [found[name] for name in NAMES[:3]] == [getattr(neutral, name) for name in NAMES[:3]]


def test_log_probabilities_and_the_least_length_know_the_default(site: Site) -> None:
    chat, completion = ASK["/v1/chat/completions"][0], ASK["/v1/completions"][0]
    assert sampled(site, "/v1/chat/completions", **chat, logprobs=True)[0]["max_tokens"] == 5
    assert sampled(site, "/v1/responses", input="Hi", include=["message.output_text.logprobs"])[0]["max_tokens"] == 5
    assert sampled(site, "/v1/completions", **completion, min_tokens=5)[0]["max_tokens"] == 5
    refused = site.http.post("/v1/completions", json={**completion, "min_tokens": 6})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"
    assert "is above max_tokens (default 5)" in refused.json()["error"]["message"]


def test_without_it_defaults_are_those_of_the_description(tmp_path: Path) -> None:
    site = Site(tmp_path).start()
    try:
        usual = SamplingParams()
        found, _ = sampled(site, "/v1/completions", prompt="Hi", min_tokens=16)
        assert found == {name: getattr(usual, name) for name in NAMES} and found["max_tokens"] == 16
        refused = site.http.post("/v1/completions", json={"prompt": "Hi", "min_tokens": 17})
        assert "is above max_tokens (default 16)" in refused.json()["error"]["message"]
    finally:
        site.close()
