"""Shared by the commands that measure or check on several GPUs: their ranks and reports, independent parts, and random operands."""

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


def join_ranks(device: str | None) -> World:
    """Join the ranks, over NCCL on GPUs. device: as for `init_world`. Raises UserError if there is only one rank."""
    world = init_world(device, "nccl" if device != "cpu" and torch.cuda.is_available() else None)
    if world.world_size == 1:
        raise UserError("one rank has nothing to exchange: start several, as python launch.py --ranks 4 does")
    return world


class Parts(ABC):
    """Runs parts on all ranks and collects their results (`found`) and errors (`errors`) by name.

    `random` draws different values on each rank; `common` gives the same on all. Each run has a new `seed`.
    """

    dtype = torch.bfloat16

    def __init__(self, world: World, wanted: str = "") -> None:
        """Collective. wanted: regular expression; only parts whose name it matches run."""
        seeds = [random.SystemRandom().randrange(2**31)]
        dist.broadcast_object_list(seeds, group=world.control)
        self.seed = seeds[0]
        self.world, self.wanted = world, re.compile(wanted)
        self.generator = torch.Generator(world.device).manual_seed(self.seed + world.rank)
        self.found: dict[str, Any] = {}
        self.errors: dict[str, str] = {}

    @abstractmethod
    def check(self) -> None:
        """Raise RuntimeError if a kernel has given up waiting for another rank. Waits for the device."""

    def part(self, name: str, run: Callable[[], Any]) -> None:
        """Run one part on all ranks, if its name is wanted. Collective.

        The result is recorded in `found`, or the error of the lowest failing rank in `errors`.
        """
        if not self.wanted.search(name):
            return
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
            print(f"{name}: {time.monotonic() - begin:.1f} s {failed or ''}", file=sys.stderr, flush=True)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.world.device).to(dtype or self.dtype)

    def common(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The same random values on all ranks. Collective."""
        x = self.random(*shape, dtype=dtype)
        dist.broadcast(x, 0)
        return x

    def write_gpu_report(self, path: Path | None, **more: Any) -> None:
        """Print the results and `more` as JSON on rank 0, and write them to `path` if there is one. Raises UserError."""
        if self.world.rank == 0:
            machine = {"gpu": torch.cuda.get_device_name(), "ranks": self.world.world_size, "torch": torch.__version__}
            report = machine | {"seed": self.seed} | more | {"found": self.found, "errors": self.errors}
            text = json.dumps(report, indent=1, ensure_ascii=False)
            print(text)
            if path:
                write_text(path, text + "\n")
