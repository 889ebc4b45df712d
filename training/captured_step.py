"""A training step as one CUDA graph.

The host needs some microseconds to launch a kernel, and a step has thousands of kernels. Where these are shorter, as in a small
model, the GPU waits for the host; a graph is one launch. Only for one rank: with several, transfers of parameters overlap with the
following step.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from training.batches import Batch

EAGER_STEPS = 3  # before the capture: they compile kernels and choose algorithms, which is not possible during one

Compute = Callable[[Sequence[Batch], Tensor, Tensor], tuple[Tensor, Tensor]]
"""(micro-batches, supervised targets, learning rate), on the device, to two scalars. It never waits for the device."""


class CapturedStep:
    """Computes a few steps kernel by kernel, and then replays the graph of one, whose inputs are copied to the same addresses."""

    def __init__(self, compute: Compute, device: torch.device) -> None:
        self.compute, self.device = compute, device
        self.stream = torch.cuda.Stream(device)
        self.eager_steps = EAGER_STEPS  # that are left
        self.batches: list[Batch] = []
        self.supervised, self.rate = (torch.zeros((), device=device) for _ in range(2))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: tuple[Tensor, Tensor]

    def __call__(self, batches: Iterable[Batch], supervised: int, rate: float) -> tuple[Tensor, Tensor]:
        """compute's results. The next call overwrites them. batches: of equal shapes in all calls."""
        self._write([batch.to(self.device) for batch in batches], supervised, rate)
        if self.eager_steps:
            self.eager_steps -= 1
            return self._eagerly()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # threads that write a snapshot go on during the capture
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.result = self.compute(self.batches, self.supervised, self.rate)
        self.graph.replay()
        return self.result

    def _write(self, batches: list[Batch], supervised: int, rate: float) -> None:
        if not self.batches:
            self.batches = batches
        for mine, batch in zip(self.batches, batches, strict=True):
            mine.inputs.copy_(batch.inputs)
            mine.targets.copy_(batch.targets)
        self.supervised.fill_(supervised)
        self.rate.fill_(rate)

    def _eagerly(self) -> tuple[Tensor, Tensor]:
        """On the stream of the capture, because autograd remembers the stream of a parameter's gradient."""
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            result = self.compute(self.batches, self.supervised, self.rate)
        here.wait_stream(self.stream)
        return result
