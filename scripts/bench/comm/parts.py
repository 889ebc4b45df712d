"""Shared by the commands that measure on several ranks: their ranks and reports, independent parts, a deadline, random operands,
and the replays of a CUDA graph that checks itself."""

import argparse
import faulthandler
import json
import random
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from errors import UserError
from scripts.lib.results import write_text
from tp import World, init_world

LONGEST_PART = 60  # seconds; a part that takes longer ends the process with a traceback


def add_gpu_options(parser: argparse.ArgumentParser, replays: int, seconds: float) -> None:
    """Add the flags of commands that run on GPUs only, with the defaults `replays` and `seconds`."""
    parser.add_argument("--out", type=Path, help="write the report to this JSON file")
    parser.add_argument(
        "--replays", type=int, default=replays, help=f"replays of the CUDA graph of all-reduces (default {replays})"
    )
    parser.add_argument(
        "--seconds", type=float, default=seconds, help=f"start no further timing after this many seconds (default {seconds:g})"
    )


def join_ranks(device: str | None) -> World:
    """Join the ranks, over NCCL on GPUs. device: as for `init_world`. Raises UserError if there is only one rank."""
    world = init_world(device, "nccl" if device != "cpu" and torch.cuda.is_available() else None)
    if world.world_size == 1:
        raise UserError("one rank has nothing to exchange: start several, as python launch.py --ranks 4 does")
    return world


class Parts(ABC):
    """Runs parts on all ranks and collects their results (`found`) and errors (`errors`) by name.

    `random` draws different values on each rank; `draw` and `common` give the same on all. Each run has a new `seed`.
    """

    dtype = torch.bfloat16

    def __init__(self, world: World, seconds: float, wanted: str = "") -> None:
        """Collective. seconds: time after which `in_time` returns False. wanted: regular expression; only parts whose name it
        matches run."""
        seeds = [random.SystemRandom().randrange(2**31)]
        dist.broadcast_object_list(seeds, group=world.control)
        self.seed = seeds[0]
        self.world, self.deadline, self.wanted = world, time.monotonic() + seconds, re.compile(wanted)
        self.generator = torch.Generator(world.device).manual_seed(self.seed + world.rank)
        self.draw = random.Random(self.seed)
        self.found: dict[str, Any] = {}
        self.errors: dict[str, str] = {}

    @abstractmethod
    def check(self) -> None:
        """Raise RuntimeError if a kernel has given up waiting for another rank. Waits for the device."""

    def tell(self, name: str, seconds: float, failed: str | None) -> None:
        """Report a part's time in seconds and its error, if any. Called on rank 0."""
        print(f"{name}: {seconds:.1f} s {failed or ''}", file=sys.stderr, flush=True)

    def part(self, name: str, run: Callable[[], Any]) -> Any:
        """Run one part on all ranks and return its result, or None if it was left out or failed on any rank. Collective.

        The result is recorded in `found`, or the error of the lowest failing rank in `errors`.
        """
        if not self.wanted.search(name):
            return None
        faulthandler.dump_traceback_later(LONGEST_PART, exit=True)
        begin, error, result = time.monotonic(), "", None
        try:
            result = run()
            self.check()
        except Exception as e:
            error = f"{type(e).__name__}: {str(e)[:600]}"
        errors: list[str] = [""] * self.world.world_size
        dist.all_gather_object(errors, error, group=self.world.control)
        faulthandler.cancel_dump_traceback_later()
        failed = next((f"rank {rank}: {text}" for rank, text in enumerate(errors) if text), None)
        if failed:
            self.errors[name] = failed
        else:
            self.found[name] = result
        if self.world.rank == 0:
            self.tell(name, time.monotonic() - begin, failed)
        return None if failed else result

    def in_time(self) -> bool:
        """Whether rank 0 has time left. Collective: all ranks get the same answer."""
        answer = [time.monotonic() < self.deadline]
        dist.broadcast_object_list(answer, group=self.world.control)
        return answer[0]

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.world.device).to(dtype or self.dtype)

    def common(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The same random values on all ranks. Collective."""
        x = self.random(*shape, dtype=dtype)
        dist.broadcast(x, 0)
        return x

    def everyones(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.world.world_size)]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    def write_gpu_report(self, path: Path | None, **more: Any) -> None:
        """Print the results and `more` as JSON on rank 0, and write them to `path` if there is one. Raises UserError."""
        if self.world.rank == 0:
            machine = {"gpu": torch.cuda.get_device_name(), "ranks": self.world.world_size, "torch": torch.__version__}
            report = machine | {"seed": self.seed} | more | {"found": self.found, "errors": self.errors}
            text = json.dumps(report, indent=1, ensure_ascii=False)
            print(text)
            if path:
                write_text(path, text + "\n")


class Replays:
    """Replays of a CUDA graph whose steps have different inputs and check their own results. On a CPU the steps run without a
    graph.

    step: the number of the step, from 1, a scalar on the device. wrong: the number of wrong values that the steps found.
    """

    def __init__(self, device: torch.device) -> None:
        self.step, self.wrong = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))

    def run(self, body: Callable[[], None], count: int, between: Callable[[], None] | None = None, every: int = 1000) -> float:
        """Run `body` once, and then `count` times as replays of a graph. Returns the µs of a replay.

        body: one step, whose inputs depend on `step`; adds to `wrong`. between: runs outside of the graph after the first
        replay and then after each `every` replays. Raises AssertionError if a value was wrong or a step did not run.
        """
        replay = self._captured(body)
        begin = time.monotonic()
        for i in range(count):
            replay()
            if between and i % every == 0:
                between()
        wrong, steps = int(self.wrong), int(self.step)  # waits for the device
        seconds = time.monotonic() - begin
        assert wrong == 0, f"{wrong} wrong values in {steps} steps"
        assert steps == count + 1, f"{steps} steps"
        return seconds / max(1, count) * 1e6

    def _captured(self, body: Callable[[], None]) -> Callable[[], None]:
        """Run one step, and return a function that runs the next."""

        def step() -> None:
            self.step.add_(1)
            body()

        step()
        if self.step.device.type == "cpu":
            return step
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        return graph.replay
