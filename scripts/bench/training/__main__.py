"""Measure the training speed of our executor with several shardings, and of torch's FSDP2, on the same model, data and machine.

    python -m scripts.bench.training --models ladder-1b ladder-3b llama-7b --ranks 8 --write
    python -m scripts.bench.training --models llama-7b --ranks 8 --two-nodes --write
    python -m scripts.bench.training --models llama-7b --ranks 8 --ablation --micro-batches 1 2 4 8 --write
    python -m scripts.bench.training --models tiny --ranks 2 --steps 3 --device cpu           # a test with gloo ranks
    python -m scripts.bench.training --models llama-30b --ranks 8 --write -- --recompute --compile
    python -m scripts.bench.training --models ladder-1b llama-7b --micro-batch 4 1 --ranks 8 --write --one-launch --timeout 300

Systems: the planner's choices for the shortest step and for the least communication; ZeRO-1, -2, -3 and MiCS (the best mesh
that fits) on our executor; FSDP2 over all ranks, FSDP2 with one gradient reduction per step, and HSDP. Weights and tokens are
random.

Each configuration is one launch of ranks. If it runs out of memory, crashes or takes too long, its row holds the error. Each row
is written to --out as soon as it is measured, with all raw samples, so that the same command resumes a stopped run.
--one-launch measures all configurations in the same processes, which saves start-up time. After a crash, a new launch continues
with the next configuration. Configurations that --timeout leaves no time for get a row with that error. Traces are recorded
after all timings, because a profiler may slow down later steps of its process.

--two-nodes simulates two hosts: NCCL_HOSTID differs between the halves of the ranks, so that NCCL uses sockets over loopback
between them, and neither NVLink nor shared memory. Every mesh counts the halves as nodes. The first launch measures the speed of
that link. CPU ranks get the same meshes but no slower link.

On GPUs the first launch measures the collectives, so that the planner predicts for this machine's links; --links names a file
to use instead. On a CPU there are no predictions unless `-- --cluster NAME` names a cluster, and then they are for that cluster.

--ablation measures table V of AMSP (arXiv:2311.00257) over the number of micro-batches: everything overlapped, all but the
updates, all but updates and gradients, and nothing overlapped.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from cli import Parser, note, run
from config import preset
from errors import UserError
from figures import BLUE, CYCLE, GREY
from processes import on_ranks
from scripts.bench.training.rank import SYSTEMS, TRACED, TUNING
from scripts.lib.machine import describe, machine
from scripts.lib.results import RESULTS, ROOT, made, write_json, write_text
from training.data import write_tokens
from training.planner.workload import OVERLAPS

MODELS = ("ladder-1b", "ladder-3b", "llama-7b")
EXPOSED: dict[str, tuple[str, ...]] = {  # rows of the ablation, and what each does not overlap
    "all overlapped": (),
    "without updates": ("updates",),
    "without updates and gradients": ("gradients", "updates"),
    "nothing overlapped": OVERLAPS,
}
BATCHES = 4  # distinct global batches in the data
GRACE = 40.0  # seconds that the launcher gets to end; it gives its ranks 30
STOPPED = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:[\w.]*(?:Error|Exception)|error): .*)")

Row = dict[str, Any]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=f"presets (default: {' '.join(MODELS)})")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="default: all; with --ablation the planner's choice")
    parser.add_argument("--ranks", type=int, default=8, help="one GPU each (default: 8)")
    parser.add_argument("--two-nodes", action="store_true", help="two groups of half the ranks with a slow link between them")
    parser.add_argument("--ablation", action="store_true", help="what each overlap is worth, instead of comparing systems")
    parser.add_argument(
        "--micro-batch",
        type=int,
        nargs="+",
        default=[1],
        metavar="WINDOWS",
        help="that a rank computes at once: one number for all models, or one for each (default: 1)",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        nargs="+",
        metavar="N",
        help="of a rank's step (default: 4, on a CPU 2; with --ablation 1 2 4 8)",
    )
    parser.add_argument("--sequence-length", type=int, metavar="TOKENS", help="of a window (default: 2048, on a CPU 64)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="measured steps (default: 20)")
    parser.add_argument("--unmeasured", type=int, metavar="N", help="steps before them (default: 5, on a CPU 1)")
    parser.add_argument(
        "--traced", type=int, default=TRACED, metavar="N", help=f"steps in a trace (default: {TRACED}; 0: none)"
    )
    parser.add_argument(
        "--tuning",
        type=int,
        default=TUNING,
        metavar="N",
        help=f"steps of FSDP2 with each depth of prefetching before the fastest is measured (default: {TUNING}; 0: its own order)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA if there is any")
    parser.add_argument("--links", type=Path, metavar="FILE", help="what make profile-collectives measured, for the planner")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-training", metavar="DIR", help="for rows.jsonl")
    parser.add_argument("--one-launch", action="store_true", help="measure all configurations in the same processes")
    parser.add_argument(
        "--timeout", type=float, default=1200, metavar="SECONDS", help="of a launch, or of --one-launch in all (default: 1200)"
    )
    parser.add_argument("--retry", action="store_true", help="launch again what failed before")
    parser.add_argument("--write", action="store_true", help="write docs/results/training-*.md, .png and .json")
    parser.add_argument(
        "more", nargs="*", help="behind --: execution options of python -m training.train, such as --recompute --compile"
    )
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cuda = args.device == "cuda"  # defaults: for a measurement on GPUs, for a short test on a CPU
    args.sequence_length = (2048 if cuda else 64) if args.sequence_length is None else args.sequence_length
    args.unmeasured = (5 if cuda else 1) if args.unmeasured is None else args.unmeasured
    args.micro_batches = args.micro_batches or ([1, 2, 4, 8] if args.ablation else [4 if cuda else 2])
    args.systems = args.systems or (["planner"] if args.ablation else list(SYSTEMS))
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Raise UserError for arguments that no launch could use."""
    for model in args.models:
        preset(model)
    counts = {"--ranks": args.ranks, "--micro-batch": min(args.micro_batch), "--micro-batches": min(args.micro_batches)}
    counts |= {"--sequence-length": args.sequence_length, "--steps": args.steps, "--unmeasured": args.unmeasured}
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    if len(args.micro_batch) not in (1, len(args.models)):
        raise UserError(
            f"{len(args.micro_batch)} numbers of --micro-batch for {len(args.models)} models; give 1, or 1 for each"
        )
    if args.ranks < 2 or (args.two_nodes and args.ranks % 2):
        raise UserError(f"--ranks {args.ranks}: training is compared on at least 2 ranks, and on an even number as two nodes")
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and args.ranks > gpus:
        raise UserError(f"--ranks {args.ranks} need a GPU each, but this host has {gpus}; lower --ranks, or try --device cpu")
    ours = [system for system in args.systems if not system.startswith("fsdp2")]
    if args.ablation and ours != args.systems:
        raise UserError("--ablation switches off parts of our executor; leave FSDP2 out of --systems")
    if args.links and not args.links.is_file():
        raise UserError(f"--links {args.links} is no file; write it with make profile-collectives, or leave --links out")


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


# --- launching ------------------------------------------------------------------------------------------------------------


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


def end(process: subprocess.Popen[str]) -> None:
    """Terminate the launcher. The ranks have their own sessions, so the launcher gets GRACE seconds to end them itself."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    process.kill()
    process.wait()


def reason(output: str) -> str:
    """The line of a launch's output that best explains its failure, at most 300 characters long."""
    found = [match[1] for match in map(STOPPED.match, output.splitlines()) if match]
    own = [line for line in found if "ChildFailedError" not in line]
    memory = [line for line in own if "OutOfMemoryError" in line or "out of memory" in line]
    first = [*memory, *own, *found, *output.splitlines()[-1:], "no output"][0]
    return first if len(first) <= 300 else first[:297] + "..."


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
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def sweep(args: argparse.Namespace, where: Row) -> list[Row]:
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
    return [_traced(rows[key], traces.get(key, {})) for key in map(json.dumps, wanted)]


def _traced(row: Row, trace: Row) -> Row:
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


# --- tables and plots -----------------------------------------------------------------------------------------------------


def quartiles(row: Row) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the step times, in ms."""
    low, middle, high = np.quantile(row["step_ms"], (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def speed(row: Row, milliseconds: float) -> float:
    """TGS (tokens per GPU and second) of a step that takes `milliseconds`."""
    return float(row["tokens_per_step"] / row["settings"]["ranks"] / milliseconds * 1e3)


def utilization(row: Row, milliseconds: float) -> float | None:
    """MFU (0 to 1) of a step that takes `milliseconds`. None if the device's peak is unknown."""
    if not row["peak_flops"]:
        return None
    return float(row["flops_per_step"] / row["settings"]["ranks"] / row["peak_flops"] / milliseconds * 1e3)


def label(row: Row) -> str:
    """The name of a row among the rows of its model."""
    name = SYSTEMS[row["settings"]["system"]]
    if row["settings"]["system"] == "planner" and "--sharding" in row["settings"]["more"]:
        name = "as asked"
    exposed = tuple(row["settings"]["no_overlap"])
    return name if not exposed else f"{name}, {next(n for n, e in EXPOSED.items() if e == exposed)}"


def cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def table_row(row: Row) -> str:
    settings = row["settings"]
    head = f"| {settings['model']} | {label(row)} | {settings['micro_batches']} |"
    if "error" in row:
        return f"{head} failed: {row['error'].replace('|', '/')} |" + " |" * 9
    low, middle, high = quartiles(row)
    predicted = row.get("predicted_ms")
    cells = [
        row["sharding"],
        f"{speed(row, middle):,.0f}",
        cell(utilization(row, middle), ".1%"),
        f"{middle:,.1f}",
        f"{low:,.1f} to {high:,.1f}",
        cell(row["peak_memory_gb"], ".1f"),
        cell(row["waited_ms"], ".1f"),
        cell(row["traced_exposed_ms"], ".1f"),
        cell(predicted, ",.1f"),
        cell(None if predicted is None else predicted / middle, ".2f"),
    ]
    return f"{head} {' | '.join(cells)} |"


def table(rows: list[Row], args: argparse.Namespace) -> str:
    """A Markdown table of all rows, with a caption."""
    columns = ["model", "system", "micro-batches", "meshes", "TGS", "MFU", "step, ms", "quartiles", "peak memory, GB"]
    columns += ["waited, ms", "exposed in a trace, ms", "predicted, ms", "predicted / measured"]
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    precision = next((row["precision"] for row in rows if "error" not in row), "")
    nodes = ", as two nodes" + (" with sockets between them" if args.device == "cuda" else "") if args.two_nodes else ""
    more = f", {' '.join(args.more)}" if args.more else ""
    each = [f"{number} ({model})" for model, number in zip(args.models, args.micro_batch, strict=False)]
    windows = ", ".join(each) if len(args.micro_batch) > 1 else str(args.micro_batch[0])
    caption = (
        f"{args.ranks} ranks{nodes}, {precision}, windows of {args.sequence_length} tokens, {windows} in a micro-batch"
        f"{more}. Medians and quartiles of {args.steps} steps after {args.unmeasured}, of the slowest rank. Waited: our executor's "
        "time a step in which computation stood still for communication. Exposed in a trace: NCCL's kernels ran and no other, on "
        "rank 0. Peak memory is PyTorch's, of the fullest GPU. Predictions are the planner's, for our executor. Made on "
        f"{describe(rows[0]['machine'], args.device)}."
    )
    return "\n".join([head, *map(table_row, rows), "", caption, ""])


def figure_of(row: Row) -> tuple[float, float, float]:
    """The plotted values: the median, and its distances down and up to the quartiles. MFU in %, or TGS if the peak is unknown."""
    low, middle, high = (
        value * 100 if (value := utilization(row, ms)) is not None else speed(row, ms) for ms in reversed(quartiles(row))
    )
    return middle, middle - low, high - middle


def plot(rows: list[Row], args: argparse.Namespace, path: Path) -> None:
    """Plot bars of each model's systems, or with --ablation lines over micro-batches. The whiskers are quartiles."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    good = [row for row in rows if "error" not in row]
    unit = "MFU, %" if good and good[0]["peak_flops"] else "TGS, tokens a GPU and second"
    figure = Figure(figsize=(5, 2.7 * len(args.models) + (1.2 if args.ablation else 0.5)), layout="constrained")
    for axis, model in zip(figure.subplots(len(args.models), 1, squeeze=False)[:, 0], args.models, strict=True):
        mine = [row for row in good if row["settings"]["model"] == model]
        draw = draw_lines if args.ablation else draw_bars
        draw(axis, mine)
        axis.set_title(model, loc="left", fontsize=10)
        if not args.ablation:  # bars begin at 0
            axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
    figure.supylabel(unit, fontsize=10)
    figure.savefig(path, dpi=150)


def draw_bars(axis: Any, rows: list[Row]) -> None:
    several = len({row["settings"]["micro_batches"] for row in rows}) > 1
    for place, row in enumerate(rows):
        middle, down, up = figure_of(row)
        color = GREY if row["settings"]["system"].startswith("fsdp2") else BLUE
        axis.bar(place, middle, yerr=[[down], [up]], color=color, capsize=3)
    names = [f"{label(row)}, M = {row['settings']['micro_batches']}" if several else label(row) for row in rows]
    axis.set_xticks(range(len(rows)), names, rotation=20, ha="right", fontsize=8)


def draw_lines(axis: Any, rows: list[Row]) -> None:
    for name, color in zip(dict.fromkeys(map(label, rows)), cycle(CYCLE), strict=False):
        line = sorted((row["settings"]["micro_batches"], *figure_of(row)) for row in rows if label(row) == name)
        counts, middles, downs, ups = zip(*line, strict=True)
        axis.errorbar(counts, middles, yerr=[downs, ups], marker="o", markersize=4, capsize=3, label=name, color=color)
    axis.set_xscale("log", base=2)
    ticks = sorted({row["settings"]["micro_batches"] for row in rows})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xlabel("micro-batches of a step")
    if rows:
        axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))  # inside it would cover lines


def write(rows: list[Row], args: argparse.Namespace, where: Row, text: str) -> None:
    name = f"training-{args.ranks}{'-two-nodes' * args.two_nodes}{'-ablation' * args.ablation}"
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    raw = write_json(name, {"machine": where, "settings": settings, "rows": rows})
    write_text(RESULTS / f"{name}.md", text, raw)
    plot(rows, args, RESULTS / f"{name}.png")
    made(RESULTS / f"{name}.png", raw)
    note(f"wrote {name}.md, .png and .json in {RESULTS}")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `launch` then ends its processes
    args, where = parse_args(), machine()
    rows = sweep(args, where)
    text = table(rows, args)
    print(text)
    if args.write:
        write(rows, args, where, text)


if __name__ == "__main__":
    run(main)
