"""The files of deploy/: the dashboard and the alerts name metrics that the server has, and the manifests agree with the server."""

import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.protocol import Drafted, Stats
from server.metrics import Metrics
from server.middleware import OPEN_PATHS
from server.settings import load_settings
from tests import ROOT

DEPLOY = ROOT / "deploy"


def scraped() -> dict[str, set[str]]:
    """The labels of each sample of a /metrics page on which every metric has a value."""
    metrics = Metrics("tiny")
    metrics.on_stats(Stats(idle_share=0.5, drafted={"ngram": Drafted(1, 7, 3)}))
    metrics.responses.labels("tiny", "/health", "200").inc()
    page = metrics.render().decode()
    return {sample.name: set(sample.labels) for family in text_string_to_metric_families(page) for sample in family.samples}


def dead(expression: str, known: dict[str, set[str]]) -> list[str]:
    """Names of metrics and of labels in a PromQL expression that no sample has."""
    names = re.findall(r"rung:\w+", expression)
    labels = {"instance", "job"}.union(*(known.get(name, ()) for name in names))
    used = re.findall(r"(\w+)=", expression) + re.findall(r"\w+", " ".join(re.findall(r"by \((.*?)\)", expression)))
    return [name for name in names if name not in known] + [label for label in used if label not in labels]


def test_every_metric_has_a_panel_of_the_dashboard_and_every_name_there_exists() -> None:
    stored = json.loads((DEPLOY / "grafana" / "rung.json").read_text())
    known = scraped()
    expressions = [target["expr"] for panel in stored["panels"] for target in panel.get("targets", ())]
    assert [e for e in expressions if dead(e, known) or "rung:" not in e] == []
    shown = set(re.findall(r"rung:\w+", " ".join(expressions)))
    bare = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown}
    assert {
        re.sub(r"_(total|bucket|sum|count)$", "", name) for name in known if name.startswith("rung:")
    } == bare  # none is left out
    places = [panel["gridPos"] for panel in stored["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))  # panels do not overlap
    assert max(x for x, _ in cells) < 24  # Grafana's columns


def test_alerts_name_metrics_that_exist() -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules if dead(rule["expr"], scraped())] == []


def pods() -> list[dict[str, Any]]:
    """The pod specifications of the manifests."""
    documents = [d for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for d in yaml.safe_load_all(path.read_text())]
    templates = [d["spec"]["template"] for d in documents if d["kind"] == "Deployment"]
    for group in (d["spec"]["leaderWorkerTemplate"] for d in documents if d["kind"] == "LeaderWorkerSet"):
        templates += [group["leaderTemplate"], group["workerTemplate"]]
    return [template["spec"] for template in templates]


def test_pods_agree_with_the_server() -> None:
    """Its flags, GPUs, port and open paths; and Kubernetes kills it only after the drain."""
    for pod in pods():
        assert pod["enableServiceLinks"] is False  # the cluster would set RUNG_PORT, which is --port
        (container,) = pod["containers"]
        flags, torchrun = container["args"], container.get("command") == ["torchrun"]
        ranks = next((flag.partition("=")[2] for flag in flags if flag.startswith("--nproc-per-node")), None)
        settings = load_settings(flags[flags.index("server") + 1 :] if torchrun else flags, environ={})
        assert container["resources"]["limits"]["nvidia.com/gpu"] == (ranks if torchrun else str(settings.tp))
        assert (
            pod["terminationGracePeriodSeconds"]
            >= container["lifecycle"]["preStop"]["sleep"]["seconds"] + settings.drain_timeout + 10
        )
        environment = {one["name"]: one.get("value") for one in container["env"]}
        assert not torchrun or float(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > settings.drain_timeout
        assert [port["containerPort"] for port in container.get("ports", ())] in ([], [settings.port])
        assert {probe["httpGet"]["path"] for name, probe in container.items() if name.endswith("Probe")} <= OPEN_PATHS


def test_the_image_has_every_package_that_the_server_imports() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    folders = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    files = [*ROOT.glob("*.py"), *(file for folder in folders & kept for file in (ROOT / folder).rglob("*.py"))]
    imported = {name for file in files for name in re.findall(r"^(?:from|import) (\w+)", file.read_text(), re.MULTILINE)}
    assert (imported & folders) - kept == set()


def in_image(path: str) -> bool:
    """Whether .dockerignore keeps a file of the repository: the last line that matches it or a folder above counts."""
    kept, above = True, [path, *map(str, Path(path).parents)]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").replace("**/", "*/")
            if any(len(one.split("/")) == len(pattern.split("/")) and fnmatch(one, pattern) for one in above):
                kept = line.startswith("!")
    return kept


def test_the_image_has_what_the_planner_reads(tmp_path: Path) -> None:
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    assert in_image("deploy/plan/steps.py") and not in_image("docs/deploy.md") and not in_image("tests/__init__.py")
    assert not re.search(r"^!.*/.*\*", (ROOT / ".dockerignore").read_text(), re.MULTILINE)  # buildah looks into no such folder
    assert {Path(name).suffix for name in tracked if name.startswith("docs/") and in_image(name)} == {".jsonl"}
    for name in filter(in_image, tracked):
        if not name.startswith("models/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    goals = "--model llama-3-8b --gpus 1 --gpu h100 --ttft 500 --itl 50 --widths bf16 --variants standard --json"
    command, alone = [sys.executable, "-m", "deploy.plan", *goals.split()], os.environ | {"PYTHONPATH": ""}
    planned = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["plans"][0]["times"] == "measured"
