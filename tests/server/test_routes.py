"""The frontend's other routes: tokens, models, health, the API's description, metrics and statistics."""

import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jsonschema
import openapi_spec_validator
import pytest
from prometheus_client import CollectorRegistry, Histogram

from engine.protocol import Stats
from server import frontend, metrics, replies
from server.metrics import Latencies, Rate, TokenHistogram
from tests.support.server_thread import CHAT, CONTEXT, TOKENIZER, Site, wait_for


def test_tokenize_and_detokenize(site: Site) -> None:
    text = "Hi Zoë, a 🦊"
    answer = site.post("/tokenize", {"model": "tiny-hybrid", "prompt": text, "return_token_strs": True})
    assert answer["tokens"] == TOKENIZER.encode(text) and answer["max_model_len"] == CONTEXT
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    bare = site.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert bare == answer["tokens"][1:]
    for body, wanted in (
        ({"tokens": bare}, text),
        ({"tokens": answer["tokens"]}, "<|begin|>" + text),
        ({"tokens": answer["tokens"], "skip_special_tokens": True}, text),
    ):
        assert site.post("/detokenize", body)["prompt"] == wanted
    chat = site.post("/tokenize", {"messages": CHAT["messages"]})
    assert chat["tokens"] == TOKENIZER.encode_chat(CHAT["messages"])
    assert site.refused("/tokenize", {})["param"] == "prompt"
    assert site.refused("/detokenize", {"tokens": [5000]})["param"] == "tokens"


def test_models_health_version_docs(site: Site) -> None:
    assert site.openai.models.list().data[0].id == "tiny-hybrid"
    replies.ModelCard.model_validate(site.http.get("/v1/models/tiny-hybrid").json())
    assert site.http.get("/version").json()["version"].count(".") == 2
    for path in ("/", "/docs"):
        page = site.http.get(path)
        assert page.headers["content-type"].startswith("text/html") and "Rung" in page.text
    assert "repetition_penalty" in site.http.get("/docs").text and "//cdn" not in site.http.get("/docs").text
    assert site.http.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"


def test_the_page_of_the_api_is_made_once(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long, and anybody may ask for it."""
    made: list[Any] = []
    monkeypatch.setattr(frontend, "render_docs", lambda described: made.append(described) or "page")
    site = make_site()
    assert not made and [site.http.get("/docs").text for _ in range(3)] == ["page"] * 3 and len(made) == 1


def test_what_other_servers_clients_ask_for(site: Site) -> None:
    info = replies.TokenizerInfo.model_validate(site.http.get("/tokenizer_info").json())
    eos = site.post("/tokenize", {"prompt": info.eos_token, "add_special_tokens": False})["tokens"]
    assert eos == [TOKENIZER.eos_ids[0]] and info.chat_template == TOKENIZER.chat_template
    for answer in (site.http.get("/ping"), site.http.post("/ping"), site.http.get("/health")):
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
    assert site.http.get("/load").json() == {"server_load": 0}
    site.engine.hold = True
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(site.complete, n=3)
        wait_for(lambda: site.http.get("/load").json() == {"server_load": 3})
        site.engine.hold = False
        assert asked.result()


def test_the_description_is_valid_for_its_version(site: Site) -> None:
    api = site.http.get("/openapi.json").json()
    assert api["openapi"].startswith("3.1.")
    openapi_spec_validator.validate(api)
    for path, chunk in (("/v1/completions", "CompletionChunk"), ("/v1/chat/completions", "ChatChunk")):
        responses = api["paths"][path]["post"]["responses"]
        assert "422" not in responses
        event = responses["200"]["content"]["text/event-stream"]["schema"]
        assert f"#/components/schemas/{chunk}" in str(event)
        validator = jsonschema.Draft202012Validator({**event, "components": api["components"]})
        assert validator.is_valid({"data": "[DONE]", "event": "message"}) and not validator.is_valid({"data": {}})


def test_the_documentation_shows_every_object(site: Site) -> None:
    page = site.http.get("/docs").text
    schemas = site.http.get("/openapi.json").json()["components"]["schemas"]
    assert not [name for name in schemas if "__" in name], "two models of one name, which FastAPI tells apart by their modules"
    for name in ("ChatMessage", "Tool", "StreamOptions", "FunctionDefinition", "ChatChunk"):
        (section,) = re.findall(rf"<h2 id={name}>.*?(?=<h2|$)", page, re.DOTALL)
        assert all(f"<code>{field}</code>" in section for field in schemas[name]["properties"]), name
    links = set(re.findall(r"href=#(\w+)", page))
    assert links and all(f"<h2 id={name}>" in page for name in links)
    assert "<code>n</code><td>integer 1 to 128<td>" in page and ".0 to" not in page


def test_head_is_get_without_a_body(site: Site) -> None:
    api = site.http.get("/openapi.json").json()["paths"]
    paths = [path for path, methods in api.items() if "get" in methods and "{" not in path]
    assert len(paths) > 12
    for path in (*paths, "/", "/docs", "/openapi.json", "/v1/models/tiny-hybrid"):
        head, get = site.http.head(path), site.http.get(path)
        status = 400 if path in ("/v1/files", "/v1/batches") else 200  # these need a journal
        assert head.status_code == get.status_code == status and head.content == b"", path
        assert head.headers["content-type"] == get.headers["content-type"]
        assert head.headers["content-length"]  # the length of GET's body; not compared, because /metrics grows with time
        assert site.http.get("/version").json()["version"]  # the connection is still in sync


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


def values(found: metrics.Metrics) -> dict[str, float]:
    """The metrics without other labels, by their names without `rung:`."""
    lines = re.findall(r'^rung:(\w+){model_name="m"} (\S+)$', found.render().decode(), re.MULTILINE)
    return {name: float(value) for name, value in lines}


def test_counters_have_what_all_reports_brought() -> None:
    """A report has totals since the ranks started; new ranks begin at 0."""
    found = metrics.Metrics("m")
    for report in (
        Stats(prefix_queries=10, prefix_hits=5, preemptions=1, steps=3, step_seconds=0.5, batch_tokens=[1, 2, 3]),
        Stats(prefix_queries=30, prefix_hits=7, preemptions=1, steps=4, step_seconds=2.0, batch_tokens=[4]),
        None,
        Stats(prefix_queries=2, prefix_hits=1, preemptions=3, steps=1, step_seconds=1.0, batch_tokens=[5]),
    ):
        if report:
            found.on_stats(report)
        else:
            found.on_recovery(9.0)
    wanted = {
        "prefix_cache_queries_total": 32, "prefix_cache_hits_total": 8, "num_preemptions_total": 4, "engine_steps_total": 5,
        "engine_step_seconds_total": 4.5, "iteration_tokens_total_sum": 15, "recoveries_total": 1, "recovery_seconds_total": 9,
    }  # fmt: skip
    assert {name: values(found)[name] for name in wanted} == wanted


def test_tokens_that_come_together_share_the_time_since_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, found = SimpleNamespace(now=100.0), metrics.Metrics("m")
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: clock.now))
    times = metrics.SequenceTimes(found, 7)
    for at, count in ((101.0, 2), (103.0, 4), (104.0, 1)):
        times.on_tokens(at, count, 0.25, 0.5)
    clock.now = 106.0
    times.on_end("stop")
    wanted = {
        "time_to_first_token_seconds_sum": 1, "inter_token_latency_seconds_sum": 3, "inter_token_latency_seconds_count": 5,
        "request_generation_tokens_sum": 7, "request_prompt_tokens_sum": 7, "request_queue_time_seconds_sum": 0.25,
        "request_prefill_time_seconds_sum": 0.5, "request_decode_time_seconds_sum": 5, "e2e_request_latency_seconds_sum": 6,
    }  # fmt: skip
    assert {name: values(found)[name] for name in wanted} == wanted
    assert found.inter_token.quantiles() == {"p50": pytest.approx(0.5, rel=0.02), "p95": pytest.approx(1.0, rel=0.02)}


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


def test_quantiles_are_those_of_the_last_minute(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens it had, and also while no new ones come."""
    rng, latencies, clock = random.Random(seed), Latencies(), SimpleNamespace(now=seed % 1000)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: clock.now))
    given = list[tuple[float, float]]()
    assert latencies.quantiles() == {"p50": None, "p95": None}
    for step in range(200):
        clock.now += rng.uniform(0, 1)
        for _ in range(rng.randrange(50)):
            value, count = rng.lognormvariate(-5 + 0.01 * len(given) ** 0.5, 1), rng.randint(1, 50)
            latencies.add(clock.now, value, count)
            given += [(clock.now, value)] * count
        clock.now += 100 if step == 150 else 0
        if step % 10:
            continue
        recent = sorted(value for at, value in given if at // 10 > clock.now // 10 - 6)
        wanted = {p: pytest.approx(recent[len(recent) * p // 100], rel=0.0101) if recent else None for p in (50, 95)}
        assert latencies.quantiles() == {"p50": wanted[50], "p95": wanted[95]}, seed
    assert len(given) > 60_000


def test_the_rate_is_that_of_the_last_seconds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, rate, clock = random.Random(seed), Rate(), SimpleNamespace(now=seed % 1000)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: clock.now))
    given = list[tuple[float, int]]()
    for _ in range(200):
        for _ in range(rng.randrange(5)):
            given.append((clock.now, rng.randrange(100)))
            rate.add(*given[-1])
        clock.now += rng.expovariate(1)
        assert rate.rate() == sum(value for at, value in given if at >= clock.now - metrics.RATE_WINDOW) / metrics.RATE_WINDOW
    rate, clock.now = Rate(), 5.0
    rate.add(0.0, 3)
    assert rate.rate() == 3 / metrics.RATE_WINDOW
