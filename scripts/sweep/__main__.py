"""Measure every combination of models, variants, ranks, batch sizes, communicators, interconnects and lengths.

    python -m scripts.sweep --models llama-3-70b --variants standard ladder upper-bound --tp 8 --batch-sizes 1 4 16
    python -m scripts.sweep --grid ladder --models llama-3-70b:16 --tp 8      # what would a ladder buy here?
    python -m scripts.sweep --grid table-2                    # the configurations of the paper's table 2
    python -m scripts.sweep --grid latency --interconnects 10ms,100MB/s      # on a CPU

The sweep appends one JSON line per configuration to --out: settings, all raw samples, machine and versions. Configurations
that are already in the file are not run again (failed ones are, with --retry), so a stopped sweep can be resumed.
Configurations with the same ranks and environment share one launch and run one after another; the variants of a configuration
run consecutively. A crash or an out-of-memory error is recorded as a row with the error. --seeds repeats everything with other
weights and prompts; tables and plots pool the runs of all seeds. Every run calls `engine.offline.generate`, as generate.py
does. Defaults depend on the device: Llama-3 8B with 1024 + 512 tokens on a GPU, the preset `tiny` with 64 + 32 on a CPU.

--variants vllm measures vLLM on the same lengths. --vllm-python names the Python of an environment with vLLM. Weights are
random, sampling is greedy, and one engine serves all batch sizes of a model.

--interconnects: `default`; `no-p2p` (NCCL_P2P_DISABLE=1, the paper's "No NVLink"); `two-hosts` (scripts/two_hosts.py: two
simulated hosts with half of the GPUs each, connected by sockets); NAME=VALUE[;NAME=VALUE] for the ranks' environment; or, on
a CPU, a simulated link LATENCY,BANDWIDTH.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from checkpoint import DTYPES, model_config, open_source
from cli import Parser, note, run
from comm import KNOWN, choose
from config import PRESETS, config_to_hf, has_random_weights
from errors import UserError
from processes import on_ranks
from scripts.lib.machine import machine
from scripts.lib.results import ROOT, check_output, unwritable
from scripts.quality.embedded import quality
from scripts.sweep.rows import VLLM, Row, Setting, finished, interconnect, ratio, read_rows, row_line
from scripts.sweep.worker import MARK

DEFAULTS: dict[str, Any] = {
    "models": ["llama-3-8b"],
    "variants": ["standard", "ladder", "upper-bound"],
    "tp": [max(1, torch.cuda.device_count())],
    "batch_sizes": [1, 4, 16, 64],
    "comms": [None],
    "interconnects": ["default"],
    "prompt_lengths": [1024],
    "new_tokens": [512],
}
# replaces DEFAULTS on a CPU; takes about a minute
ON_CPU = {"models": ["tiny"], "tp": [2], "batch_sizes": [1, 4], "prompt_lengths": [64], "new_tokens": [32]}

PAPER = {"tp": [8], "prompt_lengths": [1024], "new_tokens": [512], "interconnects": ["default", "no-p2p"]}
GRIDS: dict[str, dict[str, Any]] = {
    "latency": {"variants": ["standard", "parallel", "ladder", "desync-2x", "desync-4x", "upper-bound"], "batch_sizes": [1]},
    # how much a ladder would gain at batch 1: between the standard model and one without all-reduces
    "ladder": {"variants": ["standard", "ladder", "upper-bound"], "batch_sizes": [1]},
    "table-1": {
        **PAPER,
        "models": ["ladder-1b", "ladder-3b", "llama-3-8b", "llama-34b", "llama-3-70b", "bloom-176b"],
        "variants": ["standard", "ladder"],
        "batch_sizes": [4],
    },
    "table-2": {
        **PAPER,
        "models": ["llama-3-70b"],
        "variants": ["standard", "parallel", "ladder", "upper-bound"],
        "batch_sizes": [1],
    },
    "table-6": {
        **PAPER,
        "models": ["llama-3-8b"],
        "variants": ["standard", "ladder", "desync-2x", "desync-4x", "upper-bound"],
        "batch_sizes": [64],
    },
    "figure-2": {
        **PAPER,
        "models": ["llama-3-70b"],
        "variants": ["standard", "parallel", "ladder"],
        "tp": [1, 2, 4, 8],
    },
}


# --- the configurations --------------------------------------------------------------------------------------------------


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """The product of all axes. Variants vary fastest, so that the variants of one configuration are measured close in time.

    Raises UserError for an axis with a bad value.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    grid = DEFAULTS | (ON_CPU if device == "cpu" else {}) | GRIDS.get(args.grid, {})
    axes = {name: getattr(args, name) or grid[name] for name in DEFAULTS}
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    if min(*axes["tp"], *axes["batch_sizes"], *axes["prompt_lengths"], *axes["new_tokens"], args.runs) < 1:
        raise UserError("--tp, --batch-sizes, --prompt-lengths, --new-tokens and --runs must be at least 1")
    for comm, link in product(axes["comms"], axes["interconnects"]):
        choose(device, comm, interconnect(link).link)
    for model, variant, tp in product(axes["models"], axes["variants"], axes["tp"]):
        model_config(model, None if variant == VLLM else variant, tp)
    for model in axes["models"]:
        if not has_random_weights(model):
            open_source(model, model_config(model, None, 1))
    if any(interconnect(link).hosts > 1 for link in axes["interconnects"]) and any(tp % 2 for tp in axes["tp"]):
        raise UserError("--interconnects two-hosts needs an even number of ranks; leave the odd ones out of --tp")
    refuse_vllm_where_it_cannot_run(axes, device, args.vllm_python)
    order = ("tp", "interconnects", "models", "comms", "prompt_lengths", "new_tokens", "batch_sizes", "variants")
    settings = [
        Setting(model, variant, tp, batch, prompt, new, comm, link, device, dtype, args.compile, seed, args.runs, args.profile)
        for seed, (tp, link, model, comm, prompt, new, batch, variant) in product(
            dict.fromkeys(args.seeds), product(*(dict.fromkeys(axes[name]) for name in order))
        )
    ]  # fmt: skip
    # vLLM has its own all-reduce, so --comms does not apply to it
    return list(dict.fromkeys(replace(s, comm=None, profile=False) if s.variant == VLLM else s for s in settings))


def refuse_vllm_where_it_cannot_run(axes: dict[str, Any], device: str, python: str) -> None:
    """Raise UserError if vLLM is to be measured and these axes or this environment do not allow it."""
    if VLLM not in axes["variants"]:
        return
    if device != "cuda" or any(interconnect(link).hosts > 1 for link in axes["interconnects"]):
        raise UserError("--variants vllm needs GPUs of one host; leave it out")
    if not all(has_random_weights(model) for model in axes["models"]):
        raise UserError(
            "--variants vllm measures presets and a config.json alone, with random weights; leave it or the checkpoints out"
        )
    try:
        found = subprocess.run([python, "-c", "import vllm"], capture_output=True, text=True, check=False)
        said = found.stderr.strip().splitlines() if found.returncode else []
    except OSError as e:
        said = [e.strerror or str(e)]
    if said:
        raise UserError(
            f"{python} cannot import vllm ({said[-1]}); name the Python of an environment that holds it: --vllm-python"
        )


@dataclass(frozen=True)
class Start:
    """How one launch starts its ranks. All settings of a launch share these values."""

    ranks: int
    hosts: int
    device: str
    environment: tuple[tuple[str, str], ...]
    vllm: str = ""  # the model that vLLM measures (one per launch); empty: Rung is measured
    vllm_python: str = ""  # the Python of the environment with vLLM

    def command(self, job: Path) -> list[str]:
        """The command that measures the settings in the file `job`. For vLLM, the model's config.json is in the same folder."""
        if self.vllm:
            return [self.vllm_python, str(Path(__file__).with_name("vllm_worker.py")), str(job), str(job.parent)]
        worker = ["-m", "scripts.sweep.worker", str(job)]
        if self.hosts > 1:
            two_hosts = [sys.executable, "-m", "scripts.two_hosts", "--ranks", str(self.ranks), "--device", self.device]
            return [*two_hosts, *worker]
        return [*on_ranks(self.ranks), *worker]


def launches(settings: Iterable[Setting], vllm_python: str = "") -> Iterator[tuple[Start, list[Setting]]]:
    """Group the settings into launches: pairs of a `Start` and the settings that it measures."""

    def start(s: Setting) -> Start:
        between = interconnect(s.interconnect)
        environment = tuple(sorted(between.environment.items()))
        if s.variant == VLLM:
            return Start(s.tp, between.hosts, s.device, environment, s.model, vllm_python)
        return Start(s.tp, between.hosts, s.device, environment)

    for found, same in groupby(sorted(settings, key=lambda s: astuple(start(s))), key=start):
        yield found, list(same)


# --- running them --------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Versions of the software, and the environment variables that influence a measurement."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    found = {"rung": git.stdout.strip() or "unknown", "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    steering = ("NCCL_", "TORCH_NCCL_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    return found | {name: value for name, value in sorted(os.environ.items()) if name.startswith(steering)}


class File:
    """The sweep's JSON-lines file: its existing rows, and appending new ones."""

    def __init__(self, path: Path) -> None:
        self.path, self.machine, self.versions = path, machine(), versions()
        check_output(path)
        if path.exists():
            text = path.read_text()
            path.write_text(text[: text.rfind("\n") + 1])  # drop an incomplete last line of a killed sweep
        self.rows = read_rows(path) if path.exists() else []
        if any(row.machine != self.machine for row in self.rows):
            raise UserError(f"{path} was made on another machine or torch; name another file with --out")

    def add(self, setting: Setting, **found: Any) -> None:
        row = Row(setting, self.machine, self.versions, **found)
        self.rows.append(row)
        try:
            with self.path.open("a") as file:
                file.write(row_line(row))
        except OSError as e:
            raise unwritable(self.path, e) from None

    def is_done(self, setting: Setting, retry: bool) -> bool:
        return any(row.setting == setting and not (row.error and retry) for row in self.rows)


def launch(
    command: Sequence[str], environment: dict[str, str], timeout: float, heard: Callable[[dict[str, Any]], None]
) -> str | None:
    """Run `command`, pass each marked line of its stdout to `heard`, and terminate it after `timeout` seconds without such a line.

    Returns None if it succeeded, else an error message: the timeout, or the exit code and the `cause` from stderr.
    """
    late = threading.Event()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None

        def stop() -> None:
            late.set()
            process.terminate()  # the launcher then terminates its ranks

        watch = threading.Timer(timeout, stop)
        watch.start()
        try:
            for line in process.stdout:
                if line.startswith(MARK):
                    watch.cancel()
                    heard(json.loads(line[len(MARK) :]))
                    watch = threading.Timer(timeout, stop)
                    watch.start()
            code = process.wait()
        finally:
            watch.cancel()
            if process.poll() is None:
                process.terminate()
                process.wait()
        errors.seek(0)
        said = errors.read()
    if late.is_set():
        return f"nothing happened for {timeout:.0f} s"
    return None if code == 0 else f"exit code {code}: {cause(said)}"


def cause(said: str) -> str:
    """The most informative line of a failed launch's stderr: a rank's own error rather than the launcher's report."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [
        line for line in lines if line.partition(":")[0].endswith(("error", "Error", "Exception")) and "ChildFailed" not in line
    ]
    return (telling or lines or ["no message"])[-1][:500]


def one_launch(file: File, start: Start, todo: list[Setting], timeout: float, bar: Any) -> tuple[Setting | None, str | None]:
    """Start the ranks on the settings in `todo`. Each result is written to the file and its setting removed from `todo`.

    Returns the setting that was begun last, and the error with which the ranks ended (None if there was none).
    """
    current: Setting | None = None

    def heard(event: dict[str, Any]) -> None:
        nonlocal current
        kind = next(iter(event))
        setting = Setting(**event.pop(kind))
        if kind == "begin":
            current = setting
            bar.set_postfix_str(setting.label)
        elif setting in todo:
            todo.remove(setting)
            file.add(setting, **event)
            bar.update()

    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "settings.json"
        job.write_text(json.dumps([json.loads(s.key) for s in todo]))
        if start.vllm:
            config = config_to_hf(model_config(start.vllm, None, start.ranks))
            (Path(folder) / "config.json").write_text(json.dumps(config))
        error = launch(start.command(job), dict(start.environment), timeout, heard)
    if error is None and todo:
        error = "the ranks ended without a result"
    return current, error


def run_all(file: File, start: Start, todo: list[Setting], timeout: float, bar: Any) -> None:
    """Launch ranks until each setting has a row.

    After a crash, the setting that was running gets the error and the others are launched again. If the ranks crash before any
    setting began, all settings get the error.
    """
    while todo:
        before = len(todo)
        current, error = one_launch(file, start, todo, timeout, bar)
        if error is None:
            return
        blamed = [current] if current is not None and current in todo else []
        if not blamed and len(todo) == before:
            blamed = list(todo)
        for setting in blamed:
            todo.remove(setting)
            file.add(setting, error=error)
            bar.update()


# --- the results ---------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with one line per configuration and variant. Ratios are relative to the standard model.

    Quality is that of the embedded model of the same variant (`quality.py`). Runs of all seeds are pooled.
    """
    head = (
        "| model | tp | batch | tokens | sums | variant | prefill, ms | decode, ms a token | tokens/s | over standard | "
        "twin's perplexity | twin's exact match, % | weights, GB/s | memory, GB | runs |"
    )
    lines = [head, "|" + "---|" * head.count(" | ") + "---|"]
    done = finished(rows)
    for row in done:
        s, gain = row.setting, ratio(row, done, "throughput")
        figures = [("prefill_ms", ".2f"), ("decode_ms_per_token", ".3f"), ("throughput", ".1f")]
        shown = [_shown(row.median(name), form) for name, form in figures]
        twin = quality(s)
        shown += [
            _shown(gain, ".2f"),
            _shown(twin.perplexity if twin else None, ".4f"),
            _shown(twin.exact_match * 100 if twin else None, ".1f"),
            _shown(row.median("weight_gb_per_second"), ".1f"),
            _shown(row.median("peak_memory_gb"), ".2f"),
            str(len(row.samples)),
        ]
        sums = (
            row.communicator
            if s.interconnect == "default" or s.interconnect in row.communicator
            else f"{row.communicator}, {s.interconnect}"
        )
        where = [s.model, str(s.tp), str(s.batch), f"{s.prompt_length} + {s.new_tokens}", sums, row.variant]
        lines.append(f"| {' | '.join(where + shown)} |")
    return "\n".join(lines)


def latency_table(rows: Sequence[Row]) -> str | None:
    """A Markdown table for batch 1: one line per configuration, one column per variant, in ms per decode step.

    Cells hold the median run and, in parentheses, the lowest and highest run. None if there are no rows with batch 1.
    """
    single = [r for r in finished(rows) if r.setting.batch == 1 and r.values("decode_ms_per_token")]
    if not single:
        return None
    names = list(dict.fromkeys(r.setting.variant for r in single))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in single:
        s, values = row.setting, row.values("decode_ms_per_token")
        where = (s.model, str(s.tp), f"{s.prompt_length} + {s.new_tokens}", s.comm or "default", s.interconnect)
        text = f"{row.median('decode_ms_per_token'):.2f} ({min(values):.2f} to {max(values):.2f})"
        cells.setdefault(where, {})[s.variant] = text
    lines = [f"| model | tp | tokens | sums | interconnect | {' | '.join(names)} |", "|---" * (5 + len(names)) + "|"]
    lines += [f"| {' | '.join(where)} | {' | '.join(by.get(name, '') for name in names)} |" for where, by in cells.items()]
    return "\n".join(lines)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    axes = parser.add_argument_group("axes, each with one value or several")
    axes.add_argument("--grid", choices=GRIDS, help="a named set of axes; what else is given here replaces its values")
    axes.add_argument(
        "--models",
        nargs="+",
        metavar="MODEL",
        help=f"presets ({', '.join(PRESETS)}; PRESET:LAYERS), checkpoints, or a config.json alone",
    )
    axes.add_argument("--variants", nargs="+", metavar="NAME", help="as generate.py --variant takes them, or vllm")
    axes.add_argument("--tp", nargs="+", type=int, metavar="N", help="tensor-parallel ranks (default: all GPUs)")
    axes.add_argument("--batch-sizes", nargs="+", type=int, metavar="N", help="sequences (default: 1 4 16 64)")
    axes.add_argument("--comms", nargs="+", metavar="NAME", help=f"{KNOWN} (default: the device's)")
    axes.add_argument("--interconnects", nargs="+", metavar="NAME", help="see above (default: default)")
    axes.add_argument("--prompt-lengths", nargs="+", type=int, metavar="N", help="tokens (default: 1024)")
    axes.add_argument("--new-tokens", nargs="+", type=int, metavar="N", help="default: 512")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA if there is any")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on CUDA, float32 on CPU")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False, help="compile the modules")
    parser.add_argument("--runs", type=int, default=3, help="measured, behind one that warms up (default: 3)")
    parser.add_argument("--profile", action="store_true", help="one more run under the profiler: what of the sums is hidden")
    parser.add_argument(
        "--seeds", "--seed", nargs="+", type=int, default=[0], metavar="N", help="of weights and prompts (default: 0)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "sweep.jsonl", help="default: out/sweep.jsonl")
    parser.add_argument("--retry", action="store_true", help="run again what failed before")
    parser.add_argument(
        "--vllm-python",
        default=sys.executable,
        metavar="PYTHON",
        help="of an environment that holds vLLM (default: this one's)",
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run, loading included (default: 600)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    settings = settings_of(args)
    file = File(args.out)
    todo = [s for s in settings if not file.is_done(s, args.retry)]
    if len(todo) < len(settings):
        note(f"{len(settings) - len(todo)} of {len(settings)} configurations are in {args.out} already")
    with tqdm(total=len(todo), unit="configuration") as bar:
        try:
            for start, found in launches(todo, args.vllm_python):
                run_all(file, start, found, args.timeout, bar)
        except KeyboardInterrupt:
            bar.close()
            done = sum(file.is_done(s, args.retry) for s in settings)
            note(f"stopped: {done} of {len(settings)} configurations are in {args.out}; the same command goes on from there")
            raise
    rows = [row for row in read_rows(args.out) if row.setting in set(settings)] if args.out.exists() else []
    print(table(rows))
    if args.grid == "latency" and (single := latency_table(rows)):
        print(f"\nms of a decode step at batch 1, and the lowest and highest run:\n\n{single}")
    for row in rows:
        if row.error:
            note(f"failed: {row.setting.label}: {row.error}")
    note(f"wrote {args.out}")


if __name__ == "__main__":
    run(main)
