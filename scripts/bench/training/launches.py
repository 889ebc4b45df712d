"""The configurations of the training benchmark, and the launches of ranks that measure them."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from checkpoints.presets import preset
from cli import note
from errors import UserError
from ranks.processes import on_ranks
from scripts.lib.failures import reason
from scripts.lib.process_tree import end
from scripts.lib.results import ROOT
from scripts.lib.rows import whole_lines
from training.planner.workload import OVERLAPS
from training.token_file import write_tokens

EXPOSED: dict[str, tuple[str, ...]] = {  # rows of the ablation, and what each does not overlap
    "all overlapped": (),
    "without updates": ("updates",),
    "without updates and gradients": ("gradients", "updates"),
    "nothing overlapped": OVERLAPS,
}
BATCHES = 4  # distinct global batches in the data

Row = dict[str, Any]


def configurations(args: argparse.Namespace) -> list[Row]:
    """The settings of all configurations, in the order in which they are measured."""
    shared = {
        "ranks": args.ranks,
        "gpus_per_node": args.ranks // 2 if args.two_nodes else args.ranks,
        "two_nodes": args.two_nodes,
        "sequence_length": args.sequence_length,
        "steps": args.steps,
        "unmeasured": args.unmeasured,
        "traced": args.traced,
        "tuning": args.tuning,
        "device": args.device,
        "more": args.more,
    }
    rows = EXPOSED.values() if args.ablation else [()]
    windows = args.micro_batch * (len(args.models) if len(args.micro_batch) == 1 else 1)
    return [
        {"model": model, "system": system, "micro_batch": micro, "micro_batches": count, "no_overlap": list(exposed), **shared}
        for model, micro in zip(args.models, windows, strict=True)
        for system in args.systems
        for count in args.micro_batches
        for exposed in rows
    ]


def arguments(settings: Row, data: Path, result: Path, links: Path | None) -> list[str]:
    """The command-line arguments of rank.py for a configuration."""
    batch = settings["ranks"] * settings["micro_batch"] * settings["micro_batches"]
    line: list[object] = ["--model", settings["model"], "--system", settings["system"]]
    line += ["--traced", settings["traced"], "--tuning", settings["tuning"]]
    line += ["--data", data, "--result", result, "--device", settings["device"], "--unmeasured", settings["unmeasured"]]
    line += ["--steps", settings["steps"] + settings["unmeasured"], "--sequence-length", settings["sequence_length"]]
    line += ["--micro-batch", settings["micro_batch"], "--global-batch", batch, "--gpus-per-node", settings["gpus_per_node"]]
    line += ["--two-nodes"] * settings["two_nodes"]
    line += ["--no-overlap", *settings["no_overlap"]] if settings["no_overlap"] else []
    line += ["--profile-collectives", links] if links else []
    return [str(word) for word in (*line, *settings["more"])]


def launch(line: list[str], timeout: float, log: Path | None = None) -> str | None:
    """Run a command in the repository with one thread per rank and its output in `log`. Returns why it failed, or None."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    with tempfile.TemporaryFile("w+") if log is None else log.open("w+") as output:
        process = subprocess.Popen(
            line, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            process.wait(timeout)
        except BaseException as e:
            end(process)
            if isinstance(e, subprocess.TimeoutExpired):
                return f"not done after {timeout:.0f} s (--timeout)"
            raise
        output.seek(0)
        return reason(output.read()) if process.returncode else None


def measure(settings: Row, data: Path, links: Path | None, timeout: float) -> Row:
    """Run one launch. Returns what rank 0 measured, or the `error`."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        line = [*on_ranks(settings["ranks"]), "-m", "scripts.bench.training.rank", *arguments(settings, data, result, links)]
        error = launch(line, timeout)
        row: Row = {"error": error} if error else json.loads(result.read_text())
    return row


def links_of(args: argparse.Namespace) -> Path | None:
    """The file with the times of these ranks' collectives, or None if nothing is predicted."""
    if args.links or args.device != "cuda":
        return args.links
    path: Path = args.out / f"links-{args.ranks}{'-two-nodes' if args.two_nodes else ''}.json"
    return path


def measure_links(path: Path, settings: Row, data: Path, timeout: float) -> None:
    """Measure the collectives' times on these ranks and write them to `path`. Raises UserError if that fails."""
    note(f"measuring the links of {settings['ranks']} ranks into {path}")
    line = [
        *on_ranks(settings["ranks"]),
        "-m",
        "scripts.bench.training.rank",
        *arguments(settings, data, path, None),
        "--links",
    ]
    error = launch(line, timeout)
    if error:
        raise UserError(f"the collectives could not be measured: {error}")


def measure_together(todo: list[Row], where: Row, data: dict[str, Path], links: Path | None, out: Path, timeout: float) -> None:
    """Append the rows of all configurations in `todo` to out/rows.jsonl. Launches ranks repeatedly until all rows exist.

    If a launch ends early, the configuration at which it ended gets the error, and the next launch starts with the one after it.
    The launches' output is kept in `out`.
    """
    rows, deadline = out / "rows.jsonl", time.monotonic() + timeout
    first, failed, everything = todo[0], [], todo

    def item(settings: Row, into: str, *more: str, links: Path | None = links, result: Path = out) -> Row:
        words = [*arguments(settings, data[settings["model"]], result, links), *more]
        return {"arguments": words, "row": _row(settings, where), "into": str(out / into)}

    while todo:
        wanted = [item(settings | {"traced": 0}, "rows.jsonl") | {"row": _row(settings, where)} for settings in todo]
        behind = [settings for settings in everything if settings["traced"] and settings not in failed]
        wanted += [item(settings, "traces.jsonl", "--only-trace") for settings in behind]
        if links is not None and not links.exists():
            wanted.insert(0, item(first, "rows.jsonl", "--links", links=None, result=links))
        (out / "list.json").write_text(json.dumps(wanted))
        line = [*on_ranks(first["ranks"]), "-m", "scripts.bench.training.session", str(out / "list.json")]
        line += ["--device", first["device"], "--gpus-per-node", str(first["gpus_per_node"])]
        line += ["--two-nodes"] * first["two_nodes"]
        before = len(read_rows(rows))
        error = launch(line, max(1.0, deadline - time.monotonic()), out / f"launch-{before}.log")
        todo = todo[len(read_rows(rows)) - before :]
        lost = todo if time.monotonic() >= deadline else todo[:1]
        for settings in lost:
            append(rows, _row(settings, where) | {"error": error or "no row came"})
        failed += lost
        todo = todo[len(lost) :]


def _row(settings: Row, where: Row) -> Row:
    return {"settings": settings, "machine": where}


def append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of JSON lines. An incomplete last line, left by a killed run, is removed from the file."""
    return [json.loads(line) for line in whole_lines(path)]


def measure_all(args: argparse.Namespace, where: Row) -> list[Row]:
    """The rows of all configurations. Those that the file does not have from this machine are measured."""
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = configurations(args)

    def known(name: str = "rows.jsonl") -> dict[str, Row]:
        return {json.dumps(row["settings"]): row for row in read_rows(args.out / name) if row["machine"] == where}

    good = {key for key, row in known().items() if not (args.retry and "error" in row)}
    todo = [settings for settings in wanted if json.dumps(settings) not in good]
    if todo:
        with tempfile.TemporaryDirectory() as folder:
            data = {model: random_tokens(args, model, Path(folder)) for model in args.models}
            links = links_of(args)
            if args.one_launch:
                measure_together(todo, where, data, links, args.out, args.timeout)
            else:
                measure_each(todo, where, data, links, args.out, args.timeout)
    rows, traces = known(), known("traces.jsonl")
    return [with_trace(rows[key], traces.get(key, {})) for key in map(json.dumps, wanted)]


def with_trace(row: Row, trace: Row) -> Row:
    """The row, with the exposed time of a trace that was recorded separately."""
    found = trace.get("traced_exposed_ms")
    return row if found is None or "error" in row else row | {"traced_exposed_ms": found}


def measure_each(todo: list[Row], where: Row, data: dict[str, Path], links: Path | None, out: Path, timeout: float) -> None:
    """Append the rows of all configurations in `todo` to out/rows.jsonl, with one launch per configuration."""
    if links is not None and not links.exists():
        measure_links(links, todo[0], data[todo[0]["model"]], timeout)
    bar = tqdm(todo, unit="launch")
    for settings in bar:
        bar.set_postfix_str(f"{settings['model']} {settings['system']}")
        row = _row(settings, where) | measure(settings, data[settings["model"]], links, timeout)
        append(out / "rows.jsonl", row)
        if "error" in row:
            bar.write(f"{settings['model']} {settings['system']}: {row['error']}", file=sys.stderr)


def random_tokens(args: argparse.Namespace, model: str, folder: Path) -> Path:
    """Write a file of random tokens of the model's vocabulary, enough for BATCHES global batches. Returns its path."""
    vocab_size, path = preset(model).vocab_size, folder / f"{model.replace(':', '-')}.bin"
    windows = BATCHES * args.ranks * max(args.micro_batch) * max(args.micro_batches)
    ids = np.random.default_rng(0).integers(0, vocab_size, windows * args.sequence_length + 1)
    write_tokens(path, ids, vocab_size, "random")
    return path
