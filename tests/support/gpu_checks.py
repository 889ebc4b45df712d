"""What the checks of kernels on several GPUs share: values of all ranks, and the replays of a CUDA graph that checks itself."""

import random
import time
from collections.abc import Callable
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from tp import World


class OnAllRanks:
    """Added to a class of `Parts`: choices that are the same on all ranks, and what the ranks have."""

    world: World
    seed: int

    @cached_property
    def draw(self) -> random.Random:
        """Draws the same on all ranks."""
        return random.Random(self.seed)

    def everyones(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.world.world_size)]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)


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
