"""Train the same model as every residual variant for a few hundred steps, and draw the loss curves in one plot.

    python -m scripts.quality.pretrain_variants --model ladder-1b --ranks 8               # on GPUs
    python -m scripts.quality.pretrain_variants --model tiny --ranks 2 --steps 40 --sequence-length 128 --streams 2 --dry-run

The data is the synthetic corpus, tokenized as for the embedded models. So the curves only compare the variants with each other.
The standard model is trained with each of --seeds, whose differences are the noise, and the others with the first one. At the end
each model is evaluated on the same held-out windows. Writes pretrain-MODEL.json, .md and .png into out, or with --write into
docs/results. The ranks train one model after the other. If one fails, as for want of GPU memory, they are started again for the
next ones. A command that was stopped goes on from the last snapshot, and tries again what has failed, also with another version of
the code, which the table then says. The snapshots of a model are removed once it is evaluated.
"""

import argparse
import gc
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from cli import Parser, note, run
from errors import UserError
from figures import new_figure
from files import check_folder
from options import whole_number
from presets import preset
from processes import on_ranks
from scripts.corpus.tokens import write_enough
from scripts.lib import results
from scripts.lib.machine import describe, machine
from scripts.lib.markdown import captioned
from scripts.lib.passed_on import check_passed_on
from scripts.lib.process_tree import end
from scripts.lib.rows import by_versions, code_digest, read_row, write_row
from scripts.lib.statistics import mean_error
from tp import World, init_world
from training.loop import prepare, take_steps, together
from training.metrics import loss_curves, read_metrics
from training.step import Trainer, total
from training.token_file import open_tokens
from training.train import parse_args as training_args
from training.train import setup
from variants import TRAINABLE

BASE = "standard"  # the variant with which the others are compared
LAST = 4  # log lines over which the training loss is averaged, because a single step's loss has the noise of its windows
TOKENIZER = results.ROOT / "models" / "tiny-standard"
LOG_EVERY = 5  # steps
WARMUP = 0.25  # of the steps; with fewer, the deeper variants diverge while Adam's second moments are still inaccurate
HELDOUT = "heldout.json"
HELDOUT_STEPS = 4  # global batches of held-out windows
OURS = (  # of training.train, or without the snapshots that are evaluated
    "--model", "--variant", "--seed", "--data", "--out", "--steps", "--sequence-length", "--log-every", "--resume", "--save-every",
    "--keep", "--global-batch", "--micro-batch", "--learning-rate", "--warmup", "--metrics-only", "--stop-after",
)  # fmt: skip
TRAIN = "--train"  # first word of the ranks' command line


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", default="ladder-1b", metavar="PRESET", help="default: ladder-1b")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--variants", nargs="+", choices=TRAINABLE, default=list(TRAINABLE), help="default: all")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2], help=f"of {BASE}; the others have the first (default: 1 2)"
    )
    parser.add_argument(
        "--streams",
        type=int,
        default=8,
        help="streams of the desync variants (default: 8). With 8, ladder-1b keeps twice the activations of the standard model: "
        "give GPUs of 80 GB a --micro-batch of at most 4",
    )
    parser.add_argument("--steps", type=int, default=300, help="default: 300")
    parser.add_argument("--sequence-length", type=int, default=2048, metavar="TOKENS", help="default: 2048")
    parser.add_argument("--global-batch", type=int, default=64, metavar="WINDOWS", help="default: 64")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="WINDOWS", help="default: 1")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="peak of the learning rate (default: 1e-4)")
    parser.add_argument(
        "--save-every", type=whole_number(1), default=100, metavar="STEPS", help="a stop loses at most so many (default: 100)"
    )
    parser.add_argument("--out", type=Path, help="default: out/pretrain-MODEL")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="time limit of the training; the results so far are shown"
    )
    parser.add_argument("--dry-run", action="store_true", help="write only to --out")
    results.add_write_option(parser)
    parser.add_argument("more", nargs="*", help="after --: further options of python -m training.train, such as --compile")
    args = parser.parse_args()
    check_passed_on(args.more, OURS)
    preset(args.model)
    args.seeds = list(dict.fromkeys(args.seeds))
    args.out = (args.out or results.ROOT / "out" / f"pretrain-{args.model.replace(':', '-')}").absolute()
    training_args(words(args, args.variants[0], args.out))  # refuses what no model can be trained with
    return args


# --- the ranks ------------------------------------------------------------------------------------------------------------


def train(world: World, words: list[str], heldout: Path) -> None:
    """Train one variant from its last snapshot, and write its loss on the token file `heldout`. words: the command line of
    training.train. Collective."""
    args = training_args(words)
    found = together(world, lambda: setup(args))
    trainer, snapshots = prepare(args, world, found)
    take_steps(args, world, trainer, snapshots, found)
    loss = heldout_loss(trainer, heldout)
    trainer.executor.close()
    if world.rank == 0:
        write_row(args.out / HELDOUT, {"loss": loss, "machine": describe(machine())})
        shutil.rmtree(args.out / "snapshots")


def heldout_loss(trainer: Trainer, data: Path) -> float:
    """The mean loss of a token over HELDOUT_STEPS global batches, which are the same for all models. Collective."""
    tokens = open_tokens(data, trainer.executor.model.config.vocab_size)
    batches, loss = replace(trainer.batches, tokens=tokens, seed=0), torch.zeros((), device=trainer.device)
    for step in range(HELDOUT_STEPS):
        loss += trainer.accumulate(trainer.micro_batches(batches, step), batches.supervised(step))
        trainer.executor.take_gradients()  # the backward pass only frees the weights that forward has gathered
    return float(total(loss, trainer.executor.whole_groups.replicas)) / HELDOUT_STEPS


def free() -> None:
    """Free modules and hooks, which refer to each other, and their GPU memory."""
    gc.collect()
    torch.cuda.empty_cache()


def on_rank(command_lines: list[list[str]], heldout: Path) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off unless the user turns it on
    world = init_world(training_args(command_lines[0]).device)
    for words in command_lines:
        train(world, words, heldout)
        free()


# --- the command ----------------------------------------------------------------------------------------------------------


def models(args: argparse.Namespace) -> dict[str, tuple[str, int]]:
    """Variant and seed of each model, by its label."""
    first, *more = args.seeds
    found = {}
    for variant in args.variants:
        found[variant] = variant, first
        if variant == BASE:  # its noise is needed for every difference
            found |= {f"{BASE}, seed {seed}": (BASE, seed) for seed in more}
    return found


def folder_of(args: argparse.Namespace, label: str) -> Path:
    path: Path = args.out / label.replace(", ", "-").replace(" ", "-")
    return path


def words(args: argparse.Namespace, label: str, data: Path) -> list[str]:
    """The command line of training.train for a model."""
    return [*recipe(args, label, data), "--resume", "--save-every", str(args.save_every), "--keep", "1"]


def recipe(args: argparse.Namespace, label: str, data: Path) -> list[str]:
    """The flags that all commands that train a model share."""
    variant, seed = models(args)[label]
    full = f"{variant}:{args.streams}" if variant.startswith("desync") else variant
    line = ["--model", args.model, "--variant", full, "--seed", seed, "--data", data, "--out", folder_of(args, label)]
    line += ["--steps", args.steps, "--sequence-length", args.sequence_length, "--log-every", LOG_EVERY]
    line += ["--global-batch", args.global_batch, "--micro-batch", args.micro_batch]
    line += ["--learning-rate", args.learning_rate, "--warmup", int(WARMUP * args.steps)]
    return [*map(str, line), *args.more]


def corpus(args: argparse.Namespace, split: str = "train") -> Path:
    """Write a token file with enough windows for all steps, unless there is one. Returns its path. Raises UserError."""
    steps = args.steps if split == "train" else HELDOUT_STEPS
    needed = steps * args.global_batch * (args.sequence_length + 1)  # a window has one more, its last target
    data: Path = args.out / f"{split}-{needed}.bin"
    write_enough(data, TOKENIZER, 1, needed, split)
    return data


def settings_file(args: argparse.Namespace, label: str) -> Path:
    return folder_of(args, label) / "settings.json"


def settings(args: argparse.Namespace, label: str, data: Path) -> dict[str, Any]:
    return {"recipe": recipe(args, label, data), "ranks": args.ranks}


def check_settings(args: argparse.Namespace, label: str, data: Path) -> None:
    """Raise UserError if the folder of a model has one of other settings."""
    row = read_row(settings_file(args, label))
    if row is not None and row.get("settings") != settings(args, label, data):
        raise UserError(f"{folder_of(args, label)} has a model of other settings; name another --out, or remove it")


def metrics(args: argparse.Namespace, label: str) -> list[dict[str, Any]]:
    """The lines of a model."""
    found: list[dict[str, Any]] = read_metrics(folder_of(args, label) / "metrics.jsonl")
    return found


def heldout(args: argparse.Namespace, label: str) -> float | None:
    """The held-out loss of a model, None if it has none yet."""
    row = read_row(folder_of(args, label) / HELDOUT)
    return None if row is None else float(row["loss"])


def machines(args: argparse.Namespace, labels: list[str], where: dict[str, Any]) -> str:
    """The machine on which these models were trained, or if there are several, each with its models. where: of those whose training
    has not ended."""
    found: dict[str, list[str]] = {}
    for label in labels:
        row = read_row(folder_of(args, label) / HELDOUT) or {}
        found.setdefault(row.get("machine", describe(where)), []).append(label)
    return next(iter(found)) if len(found) == 1 else ", ".join(f"{name} ({'; '.join(of)})" for name, of in found.items())


def codes(args: argparse.Namespace, label: str) -> set[str]:
    """The digests of the versions of the code that have trained a model."""
    row = read_row(settings_file(args, label))
    return set(row["codes"]) if row else set()


def begin(args: argparse.Namespace, label: str, data: Path) -> list[str]:
    """Note the settings of a model that is to be trained, and the code. Returns its command line."""
    versions = sorted({*codes(args, label), code_digest()})
    write_row(settings_file(args, label), {"settings": settings(args, label, data), "codes": versions})
    return words(args, label, data)


def seconds_left(args: argparse.Namespace) -> float | None:
    """Until all models are trained, by their step times so far. None before the first."""
    found = {label: metrics(args, label) for label in models(args)}
    times = {label: lines[-1]["step_ms"] / 1e3 for label, lines in found.items() if lines}
    if not times:
        return None
    usual = fmean(times.values())
    return sum((args.steps - (lines[-1]["step"] if lines else 0)) * times.get(label, usual) for label, lines in found.items())


def train_all(args: argparse.Namespace, data: Path) -> list[str]:
    """Train and evaluate all models that are not yet, until --timeout. Returns those that failed.

    A rank may fail alone and leave the others in a collective. So each failure ends the ranks, and the next launch leaves that model
    out."""
    deadline, failed = time.monotonic() + (args.timeout or math.inf), list[str]()

    def todo() -> list[str]:
        return [label for label in models(args) if label not in failed and heldout(args, label) is None]

    while labels := todo():
        if not launch(args, [begin(args, label, data) for label in labels], data, deadline):
            note(f"stopped after {args.timeout:.0f} s (--timeout)")
            break
        failed += todo()[:1]
    return failed


def launch(args: argparse.Namespace, todo: list[list[str]], data: Path, deadline: float) -> bool:
    """Train one model after the other in one launch of ranks, which ends at the first that fails. todo: their command lines.
    Returns whether it ended before `deadline`."""
    line = [*on_ranks(args.ranks), "-m", "scripts.quality.pretrain_variants"]
    process = subprocess.Popen([*line, TRAIN, json.dumps(todo), str(corpus(args, "heldout"))], cwd=results.ROOT)
    said = time.monotonic()
    try:
        while process.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            if now > deadline:
                return False
            if now > said + 20:
                said, left = now, seconds_left(args)
                note("no estimate before the first steps" if left is None else f"about {left / 60:.1f} min of training left")
    finally:
        end(process)
    return True


Lines = list[dict[str, Any]]


def common_step(found: dict[str, Lines]) -> int:
    """The last step that all models have logged."""
    return int(max(set.intersection(*({line["step"] for line in lines} for lines in found.values())), default=0))


def loss_at(lines: Lines, step: int) -> float:
    """The mean loss of the last LAST log lines up to `step`."""
    last = [line["loss"] for line in lines if line["step"] <= step][-LAST:]
    return sum(last) / len(last)


def differences(losses: dict[str, float]) -> tuple[dict[str, float], float]:
    """The held-out loss of each model less that of the first of BASE, nats; and the standard deviation of one difference between
    seeds: sqrt(2) times that of BASE over its seeds. NaN for one seed, and no differences without BASE."""
    if BASE not in losses:
        return {}, math.nan
    seeds = [loss for label, loss in losses.items() if label.partition(",")[0] == BASE]
    noise = math.sqrt(2 * len(seeds)) * mean_error(seeds)[1]
    return {label: loss - losses[BASE] for label, loss in losses.items() if label != BASE}, noise


def draw(found: dict[str, Lines], path: Path) -> None:
    """Left, the training losses. Right, the last half of the steps: each loss less that of the first seed of BASE, if there is one,
    both as means of LAST log lines."""
    figure = new_figure(10, 3.4)
    left, right = figure.subplots(1, 2)
    loss_curves(left, list(found.items()))
    last = common_step(found)
    for lines, drawn in zip(found.values(), left.get_lines(), strict=True):
        steps = [line["step"] for line in lines if last / 2 <= line["step"] <= last and BASE in found]
        apart = [loss_at(lines, step) - loss_at(found[BASE], step) for step in steps]
        right.plot(steps, apart, color=drawn.get_color(), linewidth=1.2)
    right.set(xlabel="step", ylabel=f"against {BASE}, nats per token")
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def table(args: argparse.Namespace, found: dict[str, Lines], losses: dict[str, float], where: dict[str, Any]) -> str:
    """A Markdown table of each model's loss at the last common step, its held-out loss if it is known, the difference of that, and
    its median speed, with a caption."""
    step = common_step(found)
    lost, noise = differences(losses)
    head = ["variant", "steps", f"loss at step {step}, nats a token", "held-out loss", f"against {BASE}"]
    head += ["step, ms", "tokens a GPU and second"]
    rows: list[list[object]] = []
    for label, lines in found.items():
        steady = sorted(lines, key=lambda line: line["step_ms"])[len(lines) // 2]
        speed = [f"{steady['step_ms']:,.0f}", f"{steady['tokens_per_gpu_second']:,.0f}"]
        loss = f"{loss_at(lines, step):.4f}" if step else ""
        last = [f"{losses[label]:.4f}" if label in losses else "", f"{lost[label]:+.4f}" if label in lost else ""]
        rows.append([label, lines[-1]["step"], loss, *last, *speed])
    batch = f"{args.global_batch} windows of {args.sequence_length} tokens a step, {args.streams} desync streams"
    tokens = f"{step * args.global_batch * args.sequence_length / 1e6:,.1f}M tokens until step {step}"
    seeds = sum(label.partition(",")[0] == BASE for label in losses)
    known = f" The difference of two seeds of {BASE} has a standard deviation of {noise:.4f}, estimated from {seeds} seeds."
    missing = [label for label in models(args) if label not in losses]
    versions = set[str]().union(*(codes(args, label) for label in found))
    not_ready = f" Not ready, because its training failed or was stopped: {'; '.join(missing)}." if missing else ""
    caption = (
        f"{args.model} on {args.ranks} rank{'s' if args.ranks > 1 else ''}, {batch}, {tokens}, synthetic corpus. Training losses are means of up to "
        f"{LAST} log lines, {LOG_EVERY} steps apart. Held-out losses, after the last step, are of the same {HELDOUT_STEPS} batches of "
        f"windows for all models.{'' if math.isnan(noise) else known}{not_ready} Step times are medians. Made on "
        f"{machines(args, list(found), where)}{by_versions(versions)}."
    )
    return captioned(head, rows, caption)


def main() -> None:
    if sys.argv[1:2] == [TRAIN]:
        on_rank(json.loads(sys.argv[2]), Path(sys.argv[3]))
        return
    args, where = parse_args(), machine()
    check_folder(args.out)
    folder = None if args.dry_run else results.results_folder(args)
    data = corpus(args)
    for label in models(args):
        check_settings(args, label, data)
    failed = train_all(args, data)
    found = {label: lines for label in models(args) if (lines := metrics(args, label))}
    losses = {label: loss for label in found if (loss := heldout(args, label)) is not None}
    if found:
        text = table(args, found, losses, where)
        print(text)
    if found and folder:
        name = f"pretrain-{args.model.replace(':', '-')}"
        shown = {key: value for key, value in vars(args).items() if not isinstance(value, Path)}
        lost, noise = differences(losses)
        about = {"machine": where, "settings": shown, "common_step": common_step(found)}
        about |= {"heldout": losses, "differences": lost, "noise": noise}
        content = about | {"metrics": found}
        results.write_table(name, content, text, folder, lambda path: draw(found, path))
    if missing := [label for label in models(args) if label not in losses]:
        raise UserError(f"not ready: {'; '.join(missing)}. Failed: {'; '.join(failed) or 'none'}. The same command goes on")


if __name__ == "__main__":
    run(main)
