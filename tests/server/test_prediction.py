"""The `prediction` of a chat request: its way to the engine, its limits, and what usage and metrics say."""

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from engine.protocol import Drafted, Stats
from server import replies
from tests.support.server_thread import CHAT, CONTEXT, TOKENIZER, Site, wait_for

TEXT = "Once upon <|end|> a time"


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site(speculate="ngram")


@pytest.mark.parametrize("content", [TEXT, [{"type": "text", "text": TEXT[:10]}, {"type": "text", "text": TEXT[10:]}]])
def test_the_engine_gets_the_prediction_as_text(site: Site, content: Any) -> None:
    site.chat(prediction={"type": "content", "content": content}, n=2, max_tokens=3)
    for submit in site.engine.submits:
        assert submit.params.prediction == TOKENIZER.encode(TEXT, add_special_tokens=False, parse_special=False)
        assert not set(submit.params.prediction) & set(TOKENIZER.special_ids)
    for none in (None, {"type": "content", "content": ""}, {"type": "content", "content": []}):
        site.chat(prediction=none, max_tokens=3)
        assert site.last().params.prediction == []


def test_without_speculation_it_is_not_used(make_site: Callable[..., Site]) -> None:
    site = make_site()
    answer = site.chat(prediction={"type": "content", "content": "word " * 10_000}, max_tokens=3)
    assert site.last().params.prediction == []
    none = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0, "reasoning_tokens": 0}
    assert answer["usage"]["completion_tokens_details"] == none


@pytest.mark.parametrize("settings", [{}, {"speculate": "ngram"}])
def test_a_prediction_of_another_form_is_refused(make_site: Callable[..., Site], settings: dict[str, Any]) -> None:
    site = make_site(**settings)
    values: list[Any] = [5, "Once", [], {}, {"type": "content"}, {"content": "x"}]
    wrong = [*values, {"type": "guess", "content": "x"}]
    for prediction in (*wrong, *({"type": "content", "content": value} for value in values if value not in ("Once", []))):
        error = site.refused("/v1/chat/completions", {**CHAT, "prediction": prediction})
        assert error["param"].startswith("prediction"), error
    image = {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert site.refused("/v1/chat/completions", {**CHAT, "prediction": image})["param"].startswith("prediction")


def test_a_prediction_that_no_answer_can_hold_is_refused(site: Site) -> None:
    least = next(n for n in count(1) if len(TOKENIZER.encode("x " * n, add_special_tokens=False)) > CONTEXT)
    for words in (least, 100_000):
        prediction = {"type": "content", "content": "x " * words}
        error = site.refused("/v1/chat/completions", {**CHAT, "prediction": prediction})
        assert (error["param"], error["code"]) == ("prediction", "too_many_tokens") and str(CONTEXT) in error["message"]
    site.chat(prediction={"type": "content", "content": "x " * (least - 1)})


def test_usage_counts_what_was_drafted(site: Site) -> None:
    site.engine.group, site.engine.drafted, site.engine.accepted = 3, 5, 2
    body = {**CHAT, "max_tokens": 7, "n": 2}
    # 3 outputs for each answer
    wanted = {"accepted_prediction_tokens": 12, "rejected_prediction_tokens": 18, "reasoning_tokens": 0}
    answer = site.post("/v1/chat/completions", body)
    replies.ChatReply.model_validate(answer)
    assert answer["usage"]["completion_tokens"] == 14
    assert answer["usage"]["completion_tokens_details"] == wanted
    stream = site.openai.chat.completions.create(
        **body, model="tiny-hybrid", stream=True, stream_options={"include_usage": True}
    )
    *_, last = stream
    assert last.usage is not None and last.usage.completion_tokens_details is not None
    details = last.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (12, 18)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_say_which_tokens_were_drafted(site: Site, stream: bool) -> None:
    """If the request asks: of each output the first tokens, whose drafts were right."""
    site.engine.group, site.engine.drafted, site.engine.accepted = 3, 5, 2
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Once"})):
        asked = {**body, "max_tokens": 7, "stream": stream}
        for more in ({}, {"return_drafted": True}, {"return_drafted": True, "return_token_ids": True}):
            response = site.http.post(path, json=asked | more)
            if stream:
                events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
            else:
                events = [response.json()]
            choices = [choice for event in events for choice in event["choices"]]
            found = [value for choice in choices for value in choice.get("drafted") or []]
            assert found == ([True, True, False, True, True, False, True] if more else [])
            ids = [value for choice in choices for value in choice.get("token_ids") or []]
            assert len(ids) == (7 if "return_token_ids" in more else 0)


def test_metrics_by_source(site: Site) -> None:
    assert site.http.get("/stats").json()["accepted_length"] is None
    for drafts in (1, 3):
        site.engine.send(Stats(steps=drafts, drafted={"ngram": Drafted(drafts, 7, 6), "prediction": Drafted(drafts, 9, 6)}))
    wait_for(lambda: site.http.get("/stats").json()["accepted_length"] == 0.0)  # 4 more drafts, and nothing accepted
    drafts = site.http.get("/stats").json()["drafts"]
    assert drafts["ngram"] == {"drafts": 3, "tokens": 7, "accepted": 6} and drafts["prediction"]["tokens"] == 9
    text = site.http.get("/metrics").text
    for name, value in (("num_drafts", 3), ("num_draft_tokens", 7), ("num_accepted_tokens", 6)):
        assert f'rung:spec_decode_{name}_total{{model_name="tiny-hybrid",source="ngram"}} {value:.1f}' in text
    site.engine.send(Stats(steps=4, drafted={"ngram": Drafted(5, 9, 11), "prediction": Drafted(3, 9, 6)}))
    wait_for(lambda: site.http.get("/stats").json()["accepted_length"] == 2.5)
