"""Compare the planner for serving with measured servers and steps.

    python -m scripts.report.plan_serving            # plan-serving.json and .md in out
    python -m scripts.report.plan_serving --write    # the same in docs/results, whose files are tracked

`make sweep` and scripts/bench/serving/load.py write the files of docs/results/GPU-N that it reads.

Servers: the measured arrivals are simulated with step times from the sweeps; no figure is fitted to these servers. Their steps:
the times between the tokens of all clients, and what is predicted for the same sequences. Engines: the same for all requests at once, without HTTP; one figure of the planner, MIXED_SHARE, was fitted to those of Llama-8B. Steps: the
times of each set of equal layers from all other rows, as for a model or a number of ranks that was not measured.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from cli import Parser, run
from errors import UserError
from scripts.lib.client_steps import SeenStep, seen_steps
from scripts.lib.markdown import table_lines
from scripts.lib.results import RESULTS, add_write_option, results_folder, write_table, write_text
from server.plan.choice import measured
from server.plan.load import LEAD, serve, simulate
from server.plan.steps import READ, Steps, Tables, gpu, setup_of

LOADS = (
    "h100-2/load-llama-3-8b-standard.json",
    "h100-2/load-llama-3-70b-16-standard.json",
    "h100-2/load-llama-3-70b-16-ladder.json",
    "h200-1/load-llama-3-8b-standard.json",
    "h200-2/load-llama-3-70b-16-standard.json",
    "h200-2/load-llama-3-70b-16-ladder.json",
    "h200-4/load-standard.json",
    "h200-4/load-ladder.json",
)
EARLY_LOADS = (  # of servers that scheduled each step when the one before began
    "h100-1/load-llama-3-8b-standard.json",
    "h200-1/load-llama-3-8b-standard-8192.json",
)
OFFLINE = (  # file, model, variant, ranks, --max-batch-tokens; a file of several lines has one for each entry
    ("h200-1/offline-4096.json", "llama-3-8b", "standard", 1, 4096),
    ("h200-1/offline-8192.json", "llama-3-8b", "standard", 1, 8192),
    ("h200-4/offline.jsonl", "llama-3-70b:16", "standard", 4, 2048),
    ("h200-4/offline.jsonl", "llama-3-70b:16", "ladder", 4, 2048),
)
GOAL = 15.0  # %
KINDS = {"without prompts": 0, "with a prompt": 1}  # of steps, and how many prompts they finish


def error(measured: float, predicted: float) -> float:
    """In %, with its sign."""
    return round(100 * (predicted / measured - 1), 1)


def compared(pairs: dict[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    return {name: {"measured": round(a, 2), "predicted": round(b, 2), "error": error(a, b)} for name, (a, b) in pairs.items()}


def gpu_name(record: dict[str, Any]) -> str:
    return next(name for name in READ if name.upper() in record["machine"]["gpus"])


def loads() -> Iterable[tuple[str, dict[str, Any]]]:
    """The names and the contents of the files of servers."""
    return ((name, json.loads((RESULTS / name).read_text())) for name in (*LOADS, *EARLY_LOADS))


def lead_of(name: str) -> float:
    """Seconds before the end of a step at which the server of a file scheduled the next one."""
    return math.inf if name in EARLY_LOADS else LEAD


def steps_for(tables: Tables, record: dict[str, Any]) -> Steps:
    """Of the server of a load's file."""
    settings = record["settings"]
    setup = setup_of(settings["model"], gpu(gpu_name(record)), settings["variant"] or "standard", settings["ranks"], None)
    return Steps(tables, setup, settings["max_num_seqs"], settings.get("max_batch_tokens") or 2048)


def servers(tables: Tables) -> list[dict[str, Any]]:
    """A row for each measured rate."""
    rows = []
    for name, record in loads():
        settings, steps = record["settings"], steps_for(tables, record)
        (prompt, _), (answer, _) = settings["prompt_length"], settings["new_tokens"]
        for rate in record["rates"]:
            row = _row(name, record, steps, rate) | {"full": rate is record["rates"][-1]}
            rows.append(row | compared(_of_rate(steps, rate["answers"], prompt, answer, lead_of(name))))
    return rows


def _row(name: str, record: dict[str, Any], steps: Steps, rate: dict[str, Any]) -> dict[str, Any]:
    """What names the row of a measured rate."""
    settings = record["settings"]
    row = {"file": name, "gpus": f"{settings['ranks']} x {gpu_name(record)}", "model": settings["model"]}
    return row | {"variant": steps.setup.variant, "max_batch_tokens": steps.budget, "offered": rate["rate"]}


def _of_rate(
    steps: Steps, answers: Sequence[dict[str, Any]], prompt: int, answer: int, lead: float
) -> dict[str, tuple[float, float]]:
    """Measured and predicted figures of the answers that were complete."""
    count, done = len(answers), np.array([one["outcome"] == "complete" for one in answers])
    arrivals = [one["arrival"] for one in answers]
    found = serve(steps, arrivals, [prompt] * count, [answer] * count, lead)
    complete = [a for a in answers if a["outcome"] == "complete"]
    first = np.array([one["first"] for one in complete])
    gap = (np.array([one["end"] for one in complete]) - first) / (answer - 1)
    tokens, last = done.sum() * answer, max(one["arrival"] + one["end"] for one in complete)
    pairs = {"tokens_per_second": (tokens / last, tokens / found.end[done].max())}
    for p in (50, 90):
        pairs[f"ttft_p{p}"] = _ms(first, found.first[done], p)
        pairs[f"itl_p{p}"] = _ms(gap, found.mean_gap[done], p)
    return pairs


def steps_of_servers(tables: Tables) -> list[dict[str, Any]]:
    """A row for each measured rate that the server keeps up with, if the file has the times of all tokens: the medians of its steps
    without prompts, and of those that finish one."""
    rows = []
    for name, record in loads():
        settings, steps = record["settings"], steps_for(tables, record)
        (prompt, _), (answer, _) = settings["prompt_length"], settings["new_tokens"]
        for rate in record["rates"][:-1]:
            answers = rate["answers"]
            if "gaps_us" not in answers[0]:
                continue
            count, arrivals = len(answers), [one["arrival"] for one in answers]
            heated = steps.heated(simulate(steps, arrivals, [prompt] * count, [answer] * count, lead_of(name)).prompt_share)
            seen = seen_steps(answers, prompt)
            pairs = {kind: _of_steps(heated, seen, prompt, prompts) for kind, prompts in KINDS.items()}
            rows.append(_row(name, record, steps, rate) | compared(pairs))
    return rows


def _of_steps(steps: Steps, seen: Sequence[SeenStep], prompt: int, prompts: int) -> tuple[float, float]:
    """Medians in ms, measured and predicted, of the steps that finish so many prompts."""
    some = [step for step in seen if step.prompts == prompts]
    predicted = [steps.seconds(s.decoding, s.context, prompt * prompts, prompts * prompt**2 / 2) for s in some]
    return _ms([s.seconds for s in some], predicted, 50)


def _ms(measured: Any, predicted: Any, p: int) -> tuple[float, float]:
    return float(np.percentile(measured, p)) * 1e3, float(np.percentile(predicted, p)) * 1e3


def engines(tables: Tables) -> list[dict[str, Any]]:
    """A row for each run of all requests at once."""
    found = [(name, record["offline"], steps_for(tables, record)) for name, record in loads() if "offline" in record]
    lines = {name: iter((RESULTS / name).read_text().splitlines()) for name, *_ in OFFLINE}
    for name, model, variant, ranks, budget in OFFLINE:
        setup = setup_of(model, gpu("h200"), variant, ranks, None)
        found.append((name, json.loads(next(lines[name])), Steps(tables, setup, 256, budget)))
    rows = []
    for name, run_, steps in found:
        n = run_["requests"]
        end = serve(steps, [0.0] * n, [run_["prompt_length"]] * n, [run_["new_tokens"]] * n).end.max()
        row = {
            "file": name,
            "gpus": f"{steps.setup.tp} x {steps.setup.gpu.name}",
            "variant": steps.setup.variant,
            "max_num_seqs": steps.most,
            "max_batch_tokens": steps.budget,
        }
        rows.append(row | compared({"seconds": (run_["seconds"], float(end))}))
    return rows


def unseen_steps(tables: Tables) -> list[dict[str, Any]]:
    """A row for each set of equal layers that the other rows can predict: median and largest errors of its steps."""
    rows = []
    for setup in {row.setup.layer: row.setup for row in tables.rows if row.setup.variant in ("standard", "ladder")}.values():
        try:
            others = tables.without(setup)
            errors = {
                kind: [
                    abs(error(row.seconds, float(others.seconds(row.setup, row.tokens))))
                    for row in tables.measured(setup)
                    if (row.tokens < 1000) == (kind == "decode")
                ]
                for kind in ("decode", "prefill")
            }
        except UserError:  # the only rows of their kind
            continue
        row = {"gpus": f"{setup.tp} x {setup.gpu.name}", "hidden": setup.config.hidden_size, "width": setup.width}
        row |= {"layers": setup.config.n_layers, "variant": setup.variant}
        rows.append(row | {kind: {"median": round(float(np.median(e)), 1), "max": max(e)} for kind, e in errors.items()})
    return rows


FIGURES = {
    "tokens_per_second": "tokens/s",
    "ttft_p50": "TTFT p50",
    "ttft_p90": "TTFT p90",
    "itl_p50": "mean ITL p50",
    "itl_p90": "mean ITL p90",
}
ROW = "GPUs", "model", "variant", "tokens a step", "offered, requests/s"
SERVERS = "Measured → predicted (error), latencies in ms, an answer's mean ITL. *full*: the highest rate of each server, with which it does not keep up."
STEPS = "Steps of servers that keep up, as their clients saw them: medians in ms, measured → predicted (error)."


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and largest error of each figure, in %."""
    errors = {name: [abs(row[name]["error"]) for row in rows] for name in FIGURES}
    return {name: {"median": round(float(np.median(e)), 1), "max": max(e)} for name, e in errors.items()}


def markdown(found: dict[str, Any]) -> str:
    lines = table_lines([*ROW, *FIGURES.values()], (_cells(row, FIGURES) for row in found["servers"]))
    lines += ["", SERVERS, "", *errors(found).splitlines()]
    lines += ["", *table_lines([*ROW, *KINDS], (_cells(row, KINDS) for row in found["steps"])), "", STEPS]
    head = ["engine, all requests at once", "GPUs", "variant", "tokens a step", "seconds"]
    cells = ([r["file"], r["gpus"], r["variant"], r["max_batch_tokens"], _arrow(r["seconds"])] for r in found["engines"])
    lines += ["", *table_lines(head, cells)]
    head = ["layers that were left out", "weights", "hidden size", "variant"]
    head += ["decode, %: median / max", "prefill, %: median / max"]
    cells = (
        [r["gpus"], r["width"], r["hidden"], r["variant"], *_two(r["decode"], r["prefill"])] for r in found["unseen_steps"]
    )
    lines += ["", *table_lines(head, cells), "", "Errors of step times where the planner has only the rows of other layers."]
    return "\n".join(lines) + "\n"


def errors(found: dict[str, Any]) -> str:
    """The table of the servers' errors."""
    heads = ["errors, %", *(f"{name}: median / max" for name in FIGURES.values())]
    sums = {"servers that keep up": found["keeping_up"], "full servers": found["full"], "all": found["all"]}
    rows = ([name, *(f"{e['median']} / {e['max']}" for e in one.values())] for name, one in sums.items())
    return "\n".join(table_lines(heads, rows)) + "\n"


def _two(*errors: dict[str, float]) -> Iterable[str]:
    return (f"{e['median']} / {e['max']}" for e in errors)


def _cells(row: dict[str, Any], figures: Iterable[str]) -> list[object]:
    offered = f"{row['offered']:g}" + (" *full*" if row.get("full") else "")
    return [row["gpus"], row["model"], row["variant"], row["max_batch_tokens"], offered, *(_arrow(row[f]) for f in figures)]


def _arrow(pair: dict[str, float]) -> str:
    digits = 0 if pair["measured"] >= 1000 else 1
    return f"{pair['measured']:,.{digits}f} → {pair['predicted']:,.{digits}f} ({pair['error']:+.1f} %)"


def main() -> None:
    parser = Parser(description=__doc__)
    add_write_option(parser)
    folder = results_folder(parser.parse_args())
    tables = measured()
    rows = servers(tables)
    sums = {"keeping_up": [r for r in rows if not r["full"]], "full": [r for r in rows if r["full"]], "all": rows}
    found: dict[str, Any] = {"goal": GOAL, **{name: summary(some) for name, some in sums.items()}}
    found |= {
        "servers": rows,
        "steps": steps_of_servers(tables),
        "engines": engines(tables),
        "unseen_steps": unseen_steps(tables),
    }
    raw = write_table("plan-serving", found, text := markdown(found), folder)
    write_text(folder / "plan-serving-errors.md", errors(found), raw)
    print(text)


if __name__ == "__main__":
    run(main)
