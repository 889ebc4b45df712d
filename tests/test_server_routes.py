"""The frontend's other routes: tokens, models, health, the API's description, metrics and statistics."""

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram

from engine.protocol import Stats
from server import replies
from server.metrics import TokenHistogram
from tests.server_thread import CHAT, TOKENIZER, Site, wait_for


def test_tokenize_and_detokenize(site: Site) -> None:
    answer = site.post("/tokenize", {"prompt": "Hi Zoë", "return_token_strs": True})
    assert answer["tokens"] == TOKENIZER.encode("Hi Zoë") and answer["count"] == len(answer["token_strs"])
    assert site.post("/detokenize", {"tokens": answer["tokens"]})["prompt"] == TOKENIZER.decode(answer["tokens"], False)
    chat = site.post("/tokenize", {"messages": CHAT["messages"]})
    assert chat["tokens"] == TOKENIZER.encode_chat(CHAT["messages"])
    assert site.refused("/tokenize", {})["param"] == "prompt"
    assert site.refused("/detokenize", {"tokens": [5000]})["param"] == "tokens"


def test_models_health_version_docs(site: Site) -> None:
    assert site.openai.models.list().data[0].id == "tiny-hybrid"
    replies.ModelCard.model_validate(site.http.get("/v1/models/tiny-hybrid").json())
    assert site.http.get("/version").json()["version"]
    assert "repetition_penalty" in site.http.get("/docs").text and "//cdn" not in site.http.get("/docs").text
    api = site.http.get("/openapi.json").json()
    assert "422" not in api["paths"]["/v1/completions"]["post"]["responses"]
    assert "text/event-stream" in api["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert site.http.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize(
    "path", ["/", "/health", "/version", "/stats", "/metrics", "/docs", "/openapi.json", "/v1/models", "/v1/models/tiny-hybrid"]
)
def test_head_is_get_without_a_body(site: Site, path: str) -> None:
    head, get = site.http.head(path), site.http.get(path)
    assert head.status_code == get.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]
    assert head.headers["content-length"]  # of the body that GET would send; the metrics' grows with time
    assert site.http.get("/version").json()["version"]  # the connection is in step


def test_methods_that_a_path_lacks(site: Site) -> None:
    assert site.http.head("/nope").status_code == 404 and site.http.head("/v1/completions").status_code == 405
    assert site.http.head("/v1/completions").headers["allow"] == "POST"
    assert site.http.delete("/health").headers["allow"] == "GET, HEAD"


def test_metrics_and_stats(site: Site) -> None:
    site.complete(max_tokens=4)
    site.engine.send(Stats(2, 3, 10, 40, 100, 50, 1, 1000, 2000, 30, 0.004, [1, 2, 300]))
    wait_for(lambda: site.http.get("/stats").json()["waiting"] == 3)
    stats = site.http.get("/stats").json()
    replies.StatsReply.model_validate(stats)
    assert stats["kv_cache_usage"] == 0.25 and stats["prefix_hit_rate"] == 0.5 and stats["ttft_seconds"]["p50"] > 0
    text = site.http.get("/metrics").text
    for name in (
        'rung:num_requests_running{model_name="tiny-hybrid"} 2.0',
        'rung:kv_cache_usage_perc{model_name="tiny-hybrid"} 0.25',
        'rung:prefix_cache_hits_total{model_name="tiny-hybrid"} 50.0',
        "rung:num_preemptions_total",
        "rung:prompt_tokens_total",
        "rung:generation_tokens_total",
        'rung:request_success_total{finished_reason="length"',
        "rung:time_to_first_token_seconds_bucket",
        "rung:inter_token_latency_seconds_sum",
        "rung:e2e_request_latency_seconds_count",
        "rung:request_queue_time_seconds_count",
        "rung:request_prefill_time_seconds_count",
        "rung:request_decode_time_seconds_count",
        "rung:iteration_tokens_total_bucket",
        "rung:request_prompt_tokens_count",
        "rung:request_generation_tokens_count",
    ):
        assert name in text, name


def test_the_histogram_of_tokens_is_prometheus_own(seed: int) -> None:
    rng = random.Random(seed)
    bounds, registries = sorted({rng.uniform(0, 2) for _ in range(6)} | {1.0}), (CollectorRegistry(), CollectorRegistry())
    ours = TokenHistogram("x_seconds", "text", "m", bounds)
    registries[0].register(ours)
    theirs = Histogram("x_seconds", "text", ["model_name"], registry=registries[1], buckets=bounds).labels("m")
    for value in (*(rng.uniform(-0.1, 2.5) for _ in range(50)), *bounds):
        count = rng.randint(1, 3)
        ours.observe(value, count)
        for _ in range(count):
            theirs.observe(value)
    found, wanted = (
        {s.name + str(sorted(s.labels.items())): s.value for f in r.collect() for s in f.samples} for r in registries
    )
    assert found == pytest.approx(wanted), seed
