"""Measure every combination of models, variants, ranks, batch sizes, communicators, interconnects and lengths.

    python -m scripts.sweep --models llama-3-70b --variants standard ladder upper-bound --tp 8 --batch-sizes 1 4 16
    python -m scripts.sweep --grid ladder --models llama-3-70b:16 --tp 8      # what would a ladder buy here?
    python -m scripts.sweep --grid table-2                    # the configurations of the paper's table 2
    python -m scripts.sweep --grid latency --interconnects 10ms,100MB/s      # on a CPU

The sweep appends one JSON line per configuration to --out: settings, all raw samples, machine and versions. Configurations
that are already in the file are not run again (failed ones are, with --retry), so a stopped sweep can be resumed.
Configurations with the same ranks and environment share one launch and run one after another; the variants of a configuration
run consecutively. A crash or an out-of-memory error is recorded as a row with the error. --seeds repeats everything with other
weights and prompts; tables pool the runs of all seeds. Every run calls `LLM.stream`, as generate.py does. The
defaults below are those on GPUs, of Llama-3 8B; on a CPU they are the preset `tiny` on 2 ranks, batches of 1 and 4, and
64 + 32 tokens.

--variants vllm measures vLLM on the same lengths. --vllm-python names the Python of an environment with vLLM. Weights are
random, sampling is greedy, and one engine serves all batch sizes of a model and seed.

--interconnects: `default`; `no-p2p` (NCCL_P2P_DISABLE=1, the paper's "No NVLink"); `two-hosts` (two simulated
hosts with half of the GPUs each, connected by sockets); NAME=VALUE[;NAME=VALUE] for the ranks' environment; or, on a CPU, a
simulated link LATENCY,BANDWIDTH.
"""

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from checkpoints.presets import PRESETS
from cli import Parser, note, run
from comms.registry import KNOWN
from errors import UserError
from options import ModelOptions, add_options
from scripts.lib.results import ROOT
from scripts.lib.vllm_model import MEMORY, add_vllm_memory
from scripts.sweep.grids import GRIDS, settings_of
from scripts.sweep.launches import RowsFile, by_launch, run_all
from scripts.sweep.rows import read_rows
from scripts.sweep.tables import latency_table, table

# options of the model that axes take the place of, or that no setting has
AXES = ("model", "tp", "variant", "max_model_len", "comm", "comm_error_budget", "simulate_link")


def add_axes(parser: argparse.ArgumentParser) -> None:
    axes = parser.add_argument_group("axes, each with one value or several")
    axes.add_argument("--grid", choices=GRIDS, help="a named set of axes; other axes given here replace its values")
    axes.add_argument(
        "--models",
        nargs="+",
        metavar="MODEL",
        help=f"presets ({', '.join(PRESETS)}; PRESET:LAYERS), checkpoints, or a config.json alone",
    )
    axes.add_argument(
        "--variants", nargs="+", metavar="NAME", help="residual variants, as generate.py --variant takes them, or vllm"
    )
    axes.add_argument("--tp", nargs="+", type=int, metavar="N", help="tensor-parallel ranks (default: all GPUs)")
    axes.add_argument("--batch-sizes", nargs="+", type=int, metavar="N", help="sequences in a batch (default: 1 4 16 64)")
    axes.add_argument("--comms", nargs="+", metavar="NAME", help=f"all-reduce algorithms: {KNOWN} (default: the device's)")
    axes.add_argument("--interconnects", nargs="+", metavar="NAME", help="see above (default: default)")
    axes.add_argument("--prompt-lengths", nargs="+", type=int, metavar="N", help="prompt tokens (default: 1024)")
    axes.add_argument("--new-tokens", nargs="+", type=int, metavar="N", help="generated tokens (default: 512)")
    axes.add_argument(
        "--also",
        nargs=3,
        type=int,
        metavar=("BATCH", "PROMPT", "NEW"),
        help="one more batch size with its own lengths, measured in the same launch",
    )


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add_axes(parser)
    add_options(parser, ModelOptions, "how they are computed", without=AXES)
    parser.add_argument("--runs", type=int, default=3, help="measured runs, after one warm-up run (default: 3)")
    parser.add_argument(
        "--profile", action="store_true", help="one more run under the profiler, to see how much communication is hidden"
    )
    parser.add_argument(
        "--seeds",
        "--seed",
        nargs="+",
        type=int,
        default=[0],
        metavar="N",
        help="random seeds of weights and prompts (default: 0)",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "sweep.jsonl", help="file of the rows (default: out/sweep.jsonl)"
    )
    parser.add_argument("--retry", action="store_true", help="run failed configurations again")
    parser.add_argument(
        "--vllm-python", default=sys.executable, metavar="PYTHON", help="Python of an environment with vLLM (default: this one)"
    )
    add_vllm_memory(parser)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run, including loading (default: 600)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    settings = settings_of(args)
    file = RowsFile(args.out)
    todo = [s for s in settings if not file.is_done(s, args.retry)]
    if len(todo) < len(settings):
        note(f"{len(settings) - len(todo)} of {len(settings)} configurations are in {args.out} already")
    with tqdm(total=len(todo), unit="configuration") as bar:
        try:
            for start, found in by_launch(todo, args.vllm_python, args.vllm_memory or MEMORY):
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
    if all(row.error for row in rows):
        raise UserError("no configuration was measured, see above; --retry tries them again")


if __name__ == "__main__":
    run(main)
