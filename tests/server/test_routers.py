"""What routers in front of several servers read and send: metrics under vLLM's names, SGLang's routes, and recorded requests.

`make routers` runs the routers themselves.
"""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from engine.protocol import Stats
from server import replies
from server.engine_client import ServedAdapters
from tests import ROOT
from tests.support.server_thread import MODEL, Site, wait_for

FIXTURES = Path(__file__).parent / "fixtures" / "routers"

# What they read, by type. The production stack: EngineStats.from_vllm_scrape in src/vllm_router/stats/engine_stats.py. llm-d and the
# Gateway API Inference Extension: defaultEngineConfigs in pkg/epp/framework/plugins/datalayer/extractor/metrics/factories.go. The
# others: the histograms and counters of vLLM 0.24's dashboards.
READ = {
    "gauge": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "counter": (
        "gpu_prefix_cache_hits",
        "gpu_prefix_cache_queries",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "num_preemptions",
    ),
    "histogram": (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
        "e2e_request_latency_seconds",
    ),
}
OURS = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}


def scrape(site: Site) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(site.http.get("/metrics").text)}


def values(family: Metric) -> dict[Any, float]:
    """The samples of a metric by what follows its name, and labels."""
    return {(s.name.removeprefix(family.name), tuple(sorted(s.labels.items()))): s.value for s in family.samples}


def test_metrics_have_the_names_that_routers_read(make_site: Callable[..., Site]) -> None:
    site = make_site(lora=("tales=/a", "songs=/b"), max_loras=3)
    served: ServedAdapters = site.server.client.adapters
    site.complete(max_tokens=4)
    site.engine.send(Stats(2, 3, 10, 40, 100, 50, 1, 1000, 2000, 30, 0.004, [1, 2, 300]))
    wait_for(lambda: site.http.get("/stats").json()["waiting"] == 3)
    served.paths.update(tales="/a", songs="/b")
    families = scrape(site)
    for kind, names in READ.items():
        for name in names:
            theirs, ours = families[f"vllm:{name}"], families[f"rung:{OURS.get(name, name)}"]
            assert theirs.type == ours.type == kind and values(theirs) == values(ours), name
            assert any(values(theirs).values()), name
    # The dashboard leaves out what is in labels, as docs/deploy.md says.
    ours = {name.removeprefix("rung:") for name in families if name.startswith("rung:")}
    panels = (ROOT / "deploy" / "grafana" / "rung.json").read_text()
    assert {name for name in ours if f"rung:{name}" not in panels} == {"cache_config_info", "lora_requests_info"}
    samples = {name: families[f"vllm:{name}"].samples[0] for name in ("cache_config_info", "lora_requests_info")}
    assert samples["cache_config_info"].labels == {"model_name": "tiny-hybrid", "block_size": "16", "num_gpu_blocks": "100"}
    adapters = {"max_lora": "3", "running_lora_adapters": "tales,songs", "waiting_lora_adapters": ""}
    assert samples["lora_requests_info"].labels == {"model_name": "tiny-hybrid", **adapters}
    assert samples["lora_requests_info"].value > 1.7e9, "readers take the series with the newest time"


def test_what_sglangs_router_asks(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key=("right",))
    for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        refused = site.http.get(path)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    site.http.headers["authorization"] = "Bearer right"
    info, same = (site.http.get(path).json() for path in ("/server_info", "/get_server_info"))
    replies.ServerInfo.model_validate(info)
    assert info["served_model_name"] == "tiny-hybrid" and info["max_total_tokens"] == 1600 and info == same
    model, same = (site.http.get(path).json() for path in ("/model_info", "/get_model_info"))
    replies.ModelInfo.model_validate(model)
    config = json.loads((MODEL / "config.json").read_text())
    assert model["is_generation"] and model == same
    assert all(model[name] == config.get(name) for name in ("model_type", "architectures"))

    site.engine.hold = True
    reader = threading.Thread(target=lambda: site.complete(prompt=[5] * 20, n=3, max_tokens=2))
    reader.start()
    with httpx.Client(base_url=site.url, timeout=120) as router:  # without a key
        load = TypeAdapter(list[replies.RankLoad])
        wait_for(lambda: load.validate_python(router.get("/get_load").json())[0].num_reqs == 3)
        assert router.get("/get_load").json()[0]["num_tokens"] == 60
        site.engine.hold = False
        reader.join()
        wait_for(lambda: router.get("/get_load").json()[0]["num_tokens"] == 0)

        health = router.get("/health_generate")
        assert health.json() == {"status": "ready"} and "connection" not in health.headers
        site.server.service.draining = True
        refused = site.http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (503, "1", "close")
        health = router.get("/health")
        assert (health.status_code, health.headers["connection"]) == (503, "close")


def test_a_model_named_by_its_weights_file_is_described(tmp_path: Path, make_site: Callable[..., Site]) -> None:
    shutil.copy(MODEL / "config.json", tmp_path)
    (tmp_path / "model.pth").touch()
    described = make_site(model=str(tmp_path / "model.pth")).http.get("/model_info").json()
    assert described["model_type"] == json.loads((MODEL / "config.json").read_text())["model_type"]


@pytest.mark.parametrize("router", sorted(path.stem for path in FIXTURES.glob("*.json")))
def test_what_routers_send_is_served(site: Site, router: str) -> None:
    for sent in json.loads((FIXTURES / f"{router}.json").read_text()):
        answer = site.http.request(sent["method"], sent["path"], json=sent["body"])
        assert answer.status_code == sent["status"], (sent, answer.text)
        assert "x-rung-ignored" not in answer.headers, "--strict-requests would refuse it"
