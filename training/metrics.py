"""Reports on a run: a progress bar, metrics as JSON lines, and a plot of the loss."""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from cli import note
from errors import UserError
from files import writing
from training.optimizer import Schedule
from training.step import Trainer


@dataclass(frozen=True)
class Measured:
    """One line of `metrics.jsonl`, about several steps. Times and speeds are averages over these steps; `step` and `learning_rate`
    are those of the last one."""

    step: int  # steps done
    loss: float
    gradient_norm: float  # before clipping
    learning_rate: float
    step_ms: float  # without saves
    save_ms: float  # time that training waited for a snapshot before the first of these steps, 0 without one
    tokens_per_second: float  # over all ranks


@dataclass(frozen=True)
class ModelMeasured(Measured):
    """A line about a model's training. `loss` (nats per supervised token) and `gradient_norm` are those of the last step."""

    tokens_per_gpu_second: float  # tokens_per_second / ranks, which AMSP calls TGS
    mfu: float | None  # None if the device's peak is unknown
    peak_memory_gb: float | None  # of rank 0's GPU, since this run began
    exposed_ms: float  # time per step in which rank 0 computed nothing because it waited for communication
    # of a sparse model's last step, see `router_losses`
    balance_loss: float | None = None
    router_z_loss: float | None = None
    busiest_expert: float | None = None


class Meter(ABC):
    """Collects the results of steps on the device and reads them every `every` steps, so that the host does not wait in
    each step."""

    advice: str  # what the user can do about a loss that is not finite

    def __init__(self, path: Path, every: int, step: int, steps: int, schedule: Schedule, tokens: int, is_first: bool) -> None:
        """step: those done. steps: of the whole run. tokens: of a step, over all ranks. is_first: whether this is rank 0."""
        self.path, self.every, self.step, self.schedule = path, every, step, schedule
        self.tokens, self.is_first = tokens, is_first
        self.pending: list[Tensor] = []
        self.save_seconds = 0.0
        if is_first:
            cut_after(path, step)
        self.bar = tqdm(total=steps, initial=step, desc="training", unit="step", disable=not is_first, mininterval=1)
        self.started = time.perf_counter()

    def add(self, result: Tensor) -> None:
        """result: of a step, its loss, its gradient's norm, and what else is measured, (n,) fp32."""
        self.pending.append(result)
        self.step += 1
        self.bar.update()
        if len(self.pending) >= self.every:
            self.flush()

    def flush(self) -> None:
        """Read and log the pending results. Collective. Raises UserError if a loss or a norm is not finite."""
        if not self.pending:
            return
        count = len(self.pending)
        results = self.whole(torch.stack(self.pending)).tolist()
        self.pending.clear()
        now = time.perf_counter()
        seconds, self.started = (now - self.started) / count, now
        for i, (loss, norm, *_) in enumerate(results, self.step - count + 1):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise UserError(f"step {i}: the loss is {loss} and the gradient's norm {norm}; {self.advice}")
        line, shown = self.line(results, seconds)
        self.save_seconds = 0.0
        if self.is_first:
            with writing(self.path), self.path.open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")
            self.bar.set_postfix(shown)

    def whole(self, results: Tensor) -> Tensor:
        """The results of all ranks together, from those of this one, both (steps, n)."""
        return results

    @abstractmethod
    def line(self, results: list[list[float]], seconds: float) -> tuple[Measured, dict[str, str]]:
        """What is logged of the results of some steps, `seconds` each, and what the bar shows of it."""

    def common(self, loss: float, norm: float, seconds: float) -> dict[str, Any]:
        """The fields of `Measured`."""
        return {
            "step": self.step,
            "loss": loss,
            "gradient_norm": norm,
            "learning_rate": self.schedule.rate(self.step - 1),
            "step_ms": seconds * 1e3,
            "save_ms": self.save_seconds * 1e3,
            "tokens_per_second": self.tokens / seconds,
        }

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a save, whose time is not that of a step. First reads the pending results, because a loss that is not finite must
        not be saved."""
        self.flush()
        began = time.perf_counter()
        yield
        self.started = time.perf_counter()
        self.save_seconds += self.started - began

    def close(self) -> None:
        self.flush()
        self.bar.close()


class ModelMeter(Meter):
    """The meter of a model's training."""

    advice = "resume from the last snapshot with a lower --learning-rate and --other-recipe, or start again"

    def __init__(
        self, trainer: Trainer, path: Path, every: int, steps: int, step_flops: float, peak_flops: float | None
    ) -> None:
        """step_flops: FLOPs of a step, over all ranks. peak_flops: FLOP/s of one device; None if unknown."""
        self.trainer, self.step_flops, self.peak_flops = trainer, step_flops, peak_flops
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # of a model before it in the same process
        tokens = trainer.batches.size * trainer.batches.length
        super().__init__(path, every, trainer.step, steps, trainer.schedule, tokens, trainer.rank == 0)

    def whole(self, results: Tensor) -> Tensor:
        norms = results[:, 1].clone()
        everyone = self.trainer.executor.whole_groups.replicas
        if everyone.size > 1:
            dist.all_reduce(results, group=everyone.handle)
        results[:, 1] = norms
        return results

    def line(self, results: list[list[float]], seconds: float) -> tuple[Measured, dict[str, str]]:
        trainer, (loss, norm, *routers) = self.trainer, results[-1]
        speed = self.tokens / seconds / trainer.world_size
        mfu = self.step_flops / seconds / trainer.world_size / self.peak_flops if self.peak_flops else None
        of_routers: dict[str, Any] = dict(zip(("balance_loss", "router_z_loss", "busiest_expert"), routers, strict=False))
        measured = ModelMeasured(
            **self.common(loss, norm, seconds),
            tokens_per_gpu_second=speed,
            mfu=mfu,
            peak_memory_gb=torch.cuda.max_memory_allocated() / 1e9 if trainer.device.type == "cuda" else None,
            exposed_ms=trainer.executor.exposed.take() / len(results) * 1e3,
            **of_routers,
        )
        shown = {"loss": f"{measured.loss:.3f}", "TGS": f"{speed:,.0f}"}
        return measured, shown | ({"MFU": f"{mfu:.0%}"} if mfu else {})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, without a last line that is incomplete because the run was killed."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def cut_after(path: Path, step: int) -> None:
    """Remove the lines that a run wrote after step `step`, the snapshot from which it resumes."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    with writing(path):
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))


def new_figure(width: float, height: float) -> Any:
    """A matplotlib Figure of so many inches. Raises UserError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing needs matplotlib; run `make setup-dev`, or pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def plain_log_axis(axis: Any) -> None:
    """Make `axes.xaxis` or `.yaxis` logarithmic, with few ticks and plain numbers, so that labels do not overlap."""
    from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    steps = (1.0, 2.0, 5.0) if high / low < 200 else (1.0, 3.0)
    few = high / low < 6  # with the steps there might be a single tick
    axis.set_major_locator(AutoLocator() if few else LogLocator(subs=steps, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axis.set_minor_formatter(NullFormatter())


def plot_run(folder: Path) -> None:
    """Draw the loss over the steps of the run in a folder into its loss.png, or say why that is impossible. The axis of losses is
    logarithmic: else the first steps hide how the last ones differ."""
    lines, out = read_metrics(folder / "metrics.jsonl"), folder / "loss.png"
    try:
        figure = new_figure(5, 3.4)
        axes = figure.subplots()
        axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], linewidth=1.2)
        axes.set(xlabel="step", ylabel="training loss, nats per token")
        plain_log_axis(axes.yaxis)
        axes.grid(alpha=0.3)
        with writing(out):
            figure.savefig(out, dpi=150)
    except UserError as e:
        note(f"no loss.png: {e}")
