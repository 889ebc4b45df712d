"""Reports on a run: a progress bar, metrics as JSON lines, and a plot of the loss."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from cli import note
from errors import UserError
from figures import CYCLE, VARIANT_COLOURS, new_figure
from files import writing
from training.step import Trainer, total


@dataclass(frozen=True)
class Measured:
    """One line of `metrics.jsonl`, about several steps. Times and speeds are averages over these steps; `step`, `loss`,
    `gradient_norm` and `learning_rate` are those of the last one."""

    step: int  # steps done
    loss: float  # nats per supervised token
    gradient_norm: float  # before clipping
    learning_rate: float
    step_ms: float
    tokens_per_second: float  # over all ranks
    tokens_per_gpu_second: float  # tokens_per_second / ranks, which AMSP calls TGS
    mfu: float | None  # None if the device's peak is unknown
    peak_memory_gb: float | None  # of rank 0's GPU
    exposed_ms: float  # time per step in which rank 0 computed nothing because it waited for communication


class Meter:
    """Collects the results of steps on the device and reads them every `every` steps, so that the host does not wait in
    each step."""

    def __init__(
        self, trainer: Trainer, path: Path, every: int, steps: int, step_flops: float, peak_flops: float | None
    ) -> None:
        """step_flops: FLOPs of a step, over all ranks. peak_flops: FLOP/s of one device; None if unknown."""
        self.trainer, self.path, self.every = trainer, path, every
        self.step_flops, self.peak_flops = step_flops, peak_flops
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.started = time.perf_counter()
        first = trainer.rank == 0
        if first:
            cut_after(path, trainer.step)
        self.bar = tqdm(total=steps, initial=trainer.step, desc="training", unit="step", disable=not first, mininterval=1)

    def add(self, share: Tensor, norm: Tensor) -> None:
        self.pending.append((share, norm))
        self.bar.update()
        if len(self.pending) >= self.every:
            self.flush()

    def flush(self) -> None:
        """Read and log the pending results. Collective. Raises UserError if the loss or the gradient's norm is no longer
        finite."""
        if not self.pending:
            return
        trainer, count = self.trainer, len(self.pending)
        shares = total(torch.stack([share for share, _ in self.pending]), trainer.executor.whole_groups.replicas).tolist()
        norms = torch.stack([norm for _, norm in self.pending]).tolist()
        self.pending.clear()
        seconds = (time.perf_counter() - self.started) / count
        exposed = trainer.executor.exposed.take() / count
        self.started = time.perf_counter()
        for i, (loss, norm) in enumerate(zip(shares, norms, strict=True)):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise UserError(
                    f"step {trainer.step - count + i + 1}: the loss is {loss} and the gradient's norm {norm}; "
                    "resume from the last snapshot with a lower --learning-rate and --other-recipe, or start again"
                )
        if trainer.rank == 0:
            measured = self._measured(shares[-1], norms[-1], seconds, exposed)
            with writing(self.path), self.path.open("a") as file:
                file.write(json.dumps(asdict(measured)) + "\n")
            shown = {"loss": f"{measured.loss:.3f}", "TGS": f"{measured.tokens_per_gpu_second:,.0f}"}
            self.bar.set_postfix(shown | ({"MFU": f"{measured.mfu:.0%}"} if measured.mfu else {}))

    def _measured(self, loss: float, norm: float, seconds: float, exposed: float) -> Measured:
        trainer = self.trainer
        tokens = trainer.batches.size * trainer.batches.length / seconds
        cuda = trainer.device.type == "cuda"
        mfu = self.step_flops / seconds / trainer.world_size / self.peak_flops if self.peak_flops else None
        return Measured(
            step=trainer.step,
            loss=loss,
            gradient_norm=norm,
            learning_rate=trainer.schedule.rate(trainer.step - 1),
            step_ms=seconds * 1e3,
            tokens_per_second=tokens,
            tokens_per_gpu_second=tokens / trainer.world_size,
            mfu=mfu,
            peak_memory_gb=torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
            exposed_ms=exposed * 1e3,
        )

    def close(self) -> None:
        self.bar.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, without a last line that is incomplete because the run was killed."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def seconds_of(lines: Sequence[dict[str, Any]]) -> float:
    """The time of all steps, seconds. Of a run that was resumed, also of the steps before; without those that were lost."""
    starts = [0, *(line["step"] for line in lines)]
    return sum((line["step"] - start) * line["step_ms"] / 1e3 for start, line in zip(starts, lines, strict=False))


def cut_after(path: Path, step: int) -> None:
    """Remove the lines that a run wrote after step `step`, the snapshot from which it resumes."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    with writing(path):
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))


def plot_run(folder: Path) -> None:
    """Draw the metrics of the run in a folder into its loss.png, or say why that is impossible."""
    try:
        draw_losses([(folder.name, read_metrics(folder / "metrics.jsonl"))], folder / "loss.png")
    except UserError as e:
        note(f"no loss.png: {e}")


def draw_losses(runs: Sequence[tuple[str, Sequence[dict[str, Any]]]], out: Path) -> None:
    """Draw the loss over steps of each run, given as its label and metrics, into `out` (.png, .svg or .pdf). A label that names a
    variant gets that variant's colour."""
    figure = new_figure(5, 3.4)
    axes = figure.subplots()
    for i, (label, lines) in enumerate(runs):
        look: dict[str, Any] = {
            "color": VARIANT_COLOURS.get(label.partition(":")[0], CYCLE[i % len(CYCLE)]),
            "linewidth": 1.2,
            "label": label,
        }
        axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], **look)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    if len(runs) > 1:
        axes.legend()
    with writing(out):
        figure.savefig(out, dpi=150)
