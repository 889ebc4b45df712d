"""Write the Grafana dashboard deploy/grafana/rung.json from the metrics that the server has (server/metrics.py).

python -m scripts.report.dashboard            # exits with 2 if the file is not what the metrics give
python -m scripts.report.dashboard --write

`ROWS` says what is shown first. Every metric of `Metrics` that no panel there uses gets a panel in the last row; the infos of
server/routers.py, whose content is in their labels, get none. A panel's description is the help text of its metrics, and a name
that the server does not have is an error.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric

from cli import Parser, run
from errors import UserError
from scripts.lib.results import ROOT
from server.metrics import Metrics

PATH = ROOT / "deploy" / "grafana" / "rung.json"
PREFIX = "rung:"
SELECT = '{model_name=~"$model",instance=~"$instance"}'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, COLUMNS = 8, 7, 24  # of a panel and of the page, in Grafana's units
QUANTILES = (0.5, 0.95, 0.99)

Curve = tuple[str, str]  # legend, expression


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str  # one of Grafana's: s, short, percentunit, ops (a second)
    curves: Sequence[Curve]


def gauge(name: str, legend: str = "") -> Curve:
    return f"{{{{instance}}}} {legend}".strip(), f"{PREFIX}{name}{SELECT}"


def increase(name: str, legend: str) -> Curve:
    """How much a counter grew, by server, in the time of one point of the plot."""
    return f"{{{{instance}}}} {legend}".strip(), f"increase({PREFIX}{name}_total{SELECT}[$__rate_interval])"


def rate(name: str, legend: str, by: str = "") -> Curve:
    """A counter's growth a second over all servers, by the label `by`. A histogram's counter is NAME_count or NAME_sum."""
    return f"{{{{{by}}}}} {legend}".strip() if by else legend, f"sum{f' by ({by})' if by else ''} ({_growth(name)})"


def ratio(part: str, whole: str, legend: str, by: str = "") -> Curve:
    name, above = rate(part, legend, by)
    return name, f"{above} / {rate(whole, '', by)[1]}"


def quantiles(name: str) -> list[Curve]:
    buckets = f"sum by (le) ({_growth(name + '_bucket')})"
    return [(f"p{100 * q:g}", f"histogram_quantile({q}, {buckets})") for q in QUANTILES]


def _growth(name: str) -> str:
    suffix = "" if name.endswith(("_count", "_sum", "_bucket")) else "_total"
    return f"rate({PREFIX}{name}{suffix}{SELECT}[$__rate_interval])"


ROWS: dict[str, list[Panel]] = {
    "Latency": [
        Panel("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        Panel("Between tokens (ITL)", "s", quantiles("inter_token_latency_seconds")),
        Panel("Time in the queue", "s", quantiles("request_queue_time_seconds")),
    ],
    "Load": [
        Panel("Requests", "short", [gauge("num_requests_running", "running"), gauge("num_requests_waiting", "waiting")]),
        Panel("Tokens a second", "ops", [rate("generation_tokens", "generated"), rate("prompt_tokens", "of prompts")]),
        Panel(
            "Batch: tokens in a step",
            "short",
            [ratio("iteration_tokens_total_sum", "iteration_tokens_total_count", "mean"), *quantiles("iteration_tokens_total")],
        ),
        Panel("KV cache in use", "percentunit", [gauge("kv_cache_usage_perc")]),
        Panel(
            "Prefix cache: found prompt tokens", "percentunit", [ratio("prefix_cache_hits", "prefix_cache_queries", "found")]
        ),
        Panel("Preemptions a second", "ops", [rate("num_preemptions", "", "instance")]),
    ],
    "Steps and ranks": [
        Panel("Time of a step", "s", [gauge("step_time_seconds")]),
        Panel("All-reduces' share of a step", "percentunit", [gauge("all_reduce_time_share")]),
        Panel(
            "GPU's share of waiting for the host",
            "percentunit",
            [gauge("gpu_idle_share"), ratio("gpu_idle_seconds", "engine_step_seconds", "mean")],
        ),
    ],
    "Outcomes and faults": [
        Panel("Sequences that ended, a second", "ops", [rate("request_success", "", "finished_reason")]),
        Panel("HTTP responses a second", "ops", [rate("http_responses", "", "status")]),
        Panel("Recoveries", "short", [increase("recoveries", "starts"), increase("recovery_seconds", "seconds down")]),
    ],
    "Speculation": [
        Panel(
            "Accepted share of drafted tokens",
            "percentunit",
            [ratio("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens", "", "source")],
        ),
        Panel(
            "Accepted tokens of a draft",
            "short",
            [ratio("spec_decode_num_accepted_tokens", "spec_decode_num_drafts", "", "source")],
        ),
    ],
}


def families() -> dict[str, Metric]:
    """The server's metrics by name, without prefix. A counter's name is without _total. Copies under other prefixes are left out."""
    found = Metrics("any").registry.collect()
    return {m.name.removeprefix(PREFIX): m for m in found if m.name.startswith(PREFIX)}


def used(panel: Panel, metrics: dict[str, Metric]) -> list[str]:
    """The names of a panel's metrics in order. Raises UserError for one that does not exist or is of another type."""
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    samples = {m + suffix: m for m, metric in metrics.items() for suffix in suffixes[metric.type]}
    names = re.findall(PREFIX + r"(\w+)", " ".join(expression for _, expression in panel.curves))
    if unknown := [name for name in names if name not in samples]:
        raise UserError(f"panel {panel.title!r} uses {PREFIX}{unknown[0]}, which server/metrics.py does not have; change ROWS")
    return list(dict.fromkeys(samples[name] for name in names))


def plain(name: str, metric: Metric) -> Panel:
    """The panel of a metric that has no place in `ROWS`."""
    title, unit = name.replace("_", " "), "s" if name.endswith("_seconds") else "short"
    if metric.type == "histogram":
        return Panel(title, unit, quantiles(name))
    if metric.type == "gauge":
        return Panel(title, unit, [gauge(name)])
    return Panel(f"{title} a second", "ops", [rate(name, "all")])


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model, https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model."""
    metrics = families()
    shown = {name for panels in ROWS.values() for panel in panels for name in used(panel, metrics)}
    rest = [plain(name, metric) for name, metric in metrics.items() if name not in shown]
    parts: list[dict[str, Any]] = []
    y = 0
    for title, panels in (ROWS | {"Everything else": rest}).items():
        parts.append({"type": "row", "title": title, "collapsed": False, "gridPos": _place(0, y, COLUMNS, 1), "panels": []})
        for i, panel in enumerate(panels):
            row, column = divmod(i * WIDTH, COLUMNS)
            parts.append(_panel(panel, metrics, _place(column, y + 1 + row * HEIGHT, WIDTH, HEIGHT)))
        y += 1 + HEIGHT * -(-len(panels) * WIDTH // COLUMNS)
    return {
        "uid": "rung",
        "title": "Rung",
        "tags": ["rung"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "panels": [{"id": i} | part for i, part in enumerate(parts, 1)],
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, metrics: dict[str, Metric], place: dict[str, int]) -> dict[str, Any]:
    bounds = {"min": 0, "max": 1} if panel.unit == "percentunit" else {"min": 0}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": ". ".join(f"`{PREFIX}{name}`: {metrics[name].documentation}" for name in used(panel, metrics)),
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, **bounds, "custom": {"fillOpacity": 8, "showPoints": "never"}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(panel.curves)
        ],
    }  # fmt: skip


def _variables() -> list[dict[str, Any]]:
    choices: dict[str, Any] = {"type": "query", "datasource": DATASOURCE, "refresh": 2, "multi": True, "includeAll": True}
    choices |= {"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}}
    source = f"{PREFIX}num_requests_running"
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        choices | {"name": "model", "label": "Model", "query": f"label_values({source}, model_name)"},
        choices | {"name": "instance", "label": "Server", "query": f'label_values({source}{{model_name=~"$model"}}, instance)'},
    ]


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PATH.relative_to(ROOT)}")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if parser.parse_args().write:
        PATH.write_text(text)
    elif not PATH.exists() or PATH.read_text() != text:
        raise UserError(f"{PATH.relative_to(ROOT)} is not what server/metrics.py gives; run make dashboard")


if __name__ == "__main__":
    run(main)
