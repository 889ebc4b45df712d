"""Shared by the commands that measure on several ranks: independent parts, a deadline, and random operands."""

import faulthandler
import random
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp import World

LONGEST_PART = 60  # seconds; a part that takes longer ends the process with a traceback


class Parts(ABC):
    """Runs parts on all ranks and collects their results (`found`) and errors (`errors`) by name.

    `random` draws different values on each rank; `draw` and `common` give the same on all.
    """

    dtype = torch.bfloat16

    def __init__(self, world: World, seed: int, seconds: float, wanted: str = "") -> None:
        """seconds: time after which `in_time` returns False. wanted: regular expression; only parts whose name it matches run."""
        self.world, self.deadline, self.wanted = world, time.monotonic() + seconds, re.compile(wanted)
        self.generator = torch.Generator(world.device).manual_seed(seed + world.rank)
        self.draw = random.Random(seed)
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
