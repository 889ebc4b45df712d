"""The training step, and what a run saves, restores and exports."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.export import save_checkpoint
from comms import Local
from errors import UserError
from model import Transformer
from training.batches import Batch, GlobalBatches
from training.executor import Executor
from training.losses import router_losses
from training.optimizer import Optimizer, Schedule
from training.snapshot import Piece, Snapshots
from training.snapshot_folder import read_manifest

EAGER_STEPS = 3  # before the capture: they compile kernels and choose algorithms, which is not possible during one

Compute = Callable[[Sequence[Batch], Tensor, Tensor], tuple[Tensor, ...]]
"""(micro-batches, supervised targets, learning rate), on the device, to scalars. It never waits for the device."""


class CapturedStep:
    """A step as one CUDA graph: a GPU with short kernels, as those of a small model, then does not wait for the host, which needs
    microseconds to launch each. Only for one rank: with several, transfers of parameters overlap with the following step.

    Computes a few steps kernel by kernel, and then replays the graph of one, whose inputs are copied to the same addresses.
    """

    def __init__(self, compute: Compute, device: torch.device) -> None:
        self.compute, self.device = compute, device
        self.stream = torch.cuda.Stream(device)
        self.eager_steps = EAGER_STEPS  # that are left
        self.batches: list[Batch] = []
        self.supervised, self.rate = (torch.zeros((), device=device) for _ in range(2))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: tuple[Tensor, ...]

    def __call__(self, batches: Iterable[Batch], supervised: int, rate: float) -> tuple[Tensor, ...]:
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

    def _eagerly(self) -> tuple[Tensor, ...]:
        """On the stream of the capture, because autograd remembers the stream of a parameter's gradient."""
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            result = self.compute(self.batches, self.supervised, self.rate)
        here.wait_stream(self.stream)
        return result


Loss = Callable[[Transformer, Tensor, Batch], Tensor]
"""(model, normed hidden states (B, T, C), batch) to the sum of the loss over the batch's supervised tokens, fp32."""


@dataclass
class Trainer:
    """The parts of a run on one rank. `step` is the number of steps done."""

    executor: Executor
    optimizer: Optimizer
    schedule: Schedule
    batches: GlobalBatches
    loss: Loss
    rank: int
    world_size: int
    micro_batch: int  # windows
    device: torch.device
    router_weights: tuple[float, float] | None = None  # of a sparse model's load-balancing loss and router z-loss
    step: int = 0
    captured: CapturedStep | None = None  # of `compute`

    @property
    def accumulation(self) -> int:
        """Micro-batches that each rank computes per step."""
        return self.batches.size // (self.world_size * self.micro_batch)

    def train_step(self) -> tuple[Tensor, ...]:
        """One step. Collective.

        Returns this rank's share of the loss per token (the sum over the ranks is the loss), the gradient's global norm, and of a sparse
        model this rank's shares of the means of `router_losses` over all micro-batches, all fp32 scalars on the device.
        """
        step = self.compute if self.captured is None else self.captured
        supervised, rate = self.batches.supervised(self.step), self.schedule.rate(self.step)
        numbers = range(self.rank, self.accumulation * self.world_size, self.world_size)  # of this rank's micro-batches
        batches = (self.batches.micro_batch(self.step, number, self.micro_batch) for number in numbers)
        result = step(batches, supervised, rate)
        if "updates" not in self.executor.overlap:
            self.executor.synchronize()
        self.step += 1
        return result

    def compute(self, batches: Iterable[Batch], supervised: int | Tensor, rate: float | Tensor) -> tuple[Tensor, ...]:
        """`train_step` of this rank's micro-batches, at a learning rate. supervised: targets that the loss counts, over all ranks.
        Both are numbers, or fp32 scalars on the device."""
        share = torch.zeros((), device=self.device)
        routers = torch.zeros(0 if self.router_weights is None else 3, device=self.device)
        for number, batch in enumerate(batches):
            batch = batch.to(self.device)
            hidden = self.executor.forward(batch.inputs)
            loss = self.loss(self.executor.model, hidden, batch) / supervised
            share += loss.detach()
            if self.router_weights is not None:
                found = router_losses(self.executor.routed) / (self.accumulation * self.world_size)
                routers += found.detach()
                loss = loss + self.router_weights[0] * found[0] + self.router_weights[1] * found[1]
            self.executor.backward(loss, last=number == self.accumulation - 1)
        return share, self.optimizer.step(self.executor.take_gradients(), rate), *routers

    # --- snapshots -------------------------------------------------------------------------------------------------------

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for w in self.executor.weights for name, shape in zip(w.names, w.shapes, strict=True)}

    def pieces(self) -> list[Piece]:
        """Views of this rank's optimizer states, by parameter and range of its flattened elements."""
        return [
            Piece(name, start, stop, {key: tensor[where] for key, tensor in self.optimizer.states[weight].items()})
            for weight in self.executor.weights
            for name, start, stop, where in weight.pieces()
        ]

    def save(self, snapshots: Snapshots, meta: dict[str, object]) -> None:
        """Begin to write a snapshot. Only the ranks of the first copy of the optimizer states write pieces. Collective."""
        first = self.executor.groups.coordinates.copy == 0
        snapshots.save(self.step, self.pieces() if first else [], self.shapes(), meta)

    def restore(self, snapshots: Snapshots, path: Path) -> None:
        """Load the states of a snapshot, which may be from any sharding. Collective. Raises UserError."""
        mine = self.pieces()
        loaded = snapshots.load(path, [(p.name, p.start, p.stop) for p in mine])
        for piece, found in zip(mine, loaded, strict=True):
            for key, tensor in piece.tensors.items():
                tensor.copy_(found[key])
        self.step = read_manifest(path)["step"]
        self.optimizer.restore(self.step)
        self.executor.synchronize()

    # --- the result ------------------------------------------------------------------------------------------------------

    def export(self, directory: Path, tokenizer_from: Path | None) -> None:
        """Write the model in the Hugging Face layout from rank 0, which needs host memory for the whole model. Collective."""
        self.executor.synchronize()
        config, dtype = self.executor.model.config, self.executor.embedding.shard.dtype
        copy = Transformer(config, Local(), torch.device("cpu"), dtype) if self.rank == 0 else None
        targets = dict(copy.named_parameters()) if copy is not None else {}
        for weight in self.executor.weights:
            weight.gather()
            weight.wait()
            for name, parameter in zip(weight.names, weight.parameters, strict=True):
                if copy is not None:
                    targets[name].data.copy_(parameter.data)
            weight.release()
        if copy is not None:
            save_checkpoint(copy, directory, dtype, tokenizer_from)


def check_batch(global_batch: int, world_size: int, micro_batch: int) -> None:
    """Raise UserError unless the global batch (windows) can be divided evenly."""
    unit = world_size * micro_batch
    if global_batch % unit:
        near = max(1, round(global_batch / unit)) * unit
        raise UserError(
            f"--global-batch of {global_batch} windows cannot be shared by {world_size} ranks with --micro-batch {micro_batch}; "
            f"give a multiple of {unit}, such as {near}"
        )
