"""AdamW on the optimizer states that a rank owns, gradient clipping by the global norm, and the learning-rate schedule."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.groups import Group
from training.weights import Weight

CHUNK = 64 * 2**20  # elements that are updated at a time; only their gradients exist in fp32


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then a cosine down to `final` * `peak`."""

    peak: float = 3e-4
    steps: int = 1000
    warmup: int = 20
    final: float = 0.1

    def rate(self, step: int) -> float:
        """The learning rate of step 0 … steps - 1."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.peak * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class AdamSettings:
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # of the matrices only
    clip: float = 1.0  # largest global norm of the gradient


class Optimizer:
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101) on fp32 master weights.

    If the parameters are fp32, they are the master weights themselves. `step` begins to send each new value as soon as it
    is computed, in the order in which forward will need them.
    """

    def __init__(self, weights: list[Weight], undecayed: Weight, copy: Group, settings: AdamSettings) -> None:
        """undecayed: the weight without weight decay. copy: the ranks that together own every element once."""
        self.weights, self.copy, self.settings = weights, copy, settings
        self.masters: dict[Weight, nn.Parameter] = {}
        for weight in weights:
            mine = weight.shard[weight.owned]
            if mine.numel():
                self.masters[weight] = nn.Parameter(mine if mine.dtype == torch.float32 else mine.float())
        self.chunks = [_Chunk(part, undecayed, self.masters, settings) for part in _chunks(weights)]

    def step(self, gradients: dict[Weight, Tensor], rate: float | Tensor) -> Tensor:
        """Clip, update, and begin to send the new values to the other ranks. Collective.

        Removes what it uses from `gradients`. Returns the gradient's global norm before clipping, an fp32 scalar on the
        device. rate: a number, or an fp32 scalar on the device, which a CUDA graph can read.
        """
        norm = self._norm(gradients.values())
        scale = (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
        for chunk in self.chunks:
            chunk.step(gradients, scale, rate)
            for weight in chunk.weights:
                weight.spread()
        return norm

    def _norm(self, gradients: Iterable[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        device = self.weights[0].shard.device
        total = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
        if self.copy.size > 1:
            dist.all_reduce(total, group=self.copy.handle)
        return total.sqrt()

    def state(self) -> dict[Weight, dict[str, Tensor]]:
        """What a rank owns of each weight: `master`, `exp_avg`, `exp_avg_sq`, (owned elements,) fp32. These are the
        optimizer's own tensors; a restore writes into them."""
        return {w: c.state(w) for c in self.chunks for w in c.weights if w in self.masters}

    def restore(self, updates: int) -> None:
        """Set the number of updates so far, and begin to send the masters that were written into `state`. Collective."""
        for chunk in self.chunks:
            chunk.restore(updates)
            for weight in chunk.weights:
                weight.spread()


class _Chunk:
    """Some weights that are updated together. Only the gradients of one chunk exist in fp32 at a time."""

    def __init__(
        self, weights: list[Weight], undecayed: Weight, masters: dict[Weight, nn.Parameter], settings: AdamSettings
    ) -> None:
        self.weights = weights
        self.masters = {w: masters[w] for w in weights if w in masters}
        groups = [
            dict(params=[m], weight_decay=0.0 if w is undecayed else settings.weight_decay) for w, m in self.masters.items()
        ]
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True) if groups else None
        for master in self.masters.values():
            assert self.adam is not None
            self.adam.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def step(self, gradients: dict[Weight, Tensor], scale: Tensor, rate: float | Tensor) -> None:
        if self.adam is None:
            return
        scale = scale.reshape(1)  # type promotion ignores 0-d tensors; with (1,) one kernel reads bf16 and writes fp32
        for weight, master in self.masters.items():
            master.grad = gradients.pop(weight) * scale
        for group in self.adam.param_groups:
            group["lr"] = rate
            group["capturable"] = scale.is_cuda and torch.cuda.is_current_stream_capturing()
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self._publish()

    def _publish(self) -> None:
        """Copy the master weights into the parameters."""
        for weight, master in self.masters.items():
            if weight.shard.dtype != torch.float32:
                weight.shard[weight.owned].copy_(master.detach())

    def state(self, weight: Weight) -> dict[str, Tensor]:
        assert self.adam is not None
        master = self.masters[weight]
        adam = self.adam.state[master]
        return {"master": master.detach(), "exp_avg": adam["exp_avg"], "exp_avg_sq": adam["exp_avg_sq"]}

    def restore(self, updates: int) -> None:
        for master in self.masters.values():
            assert self.adam is not None
            self.adam.state[master]["step"].fill_(updates)
        self._publish()


def _chunks(weights: list[Weight]) -> list[list[Weight]]:
    """Split `weights` into runs of at most `CHUNK` owned elements. A larger weight is a run of its own."""
    chunks: list[list[Weight]] = [[]]
    size = 0
    for weight in weights:
        owned = weight.owned.stop - weight.owned.start
        if chunks[-1] and size + owned > CHUNK:
            chunks.append([])
            size = 0
        chunks[-1].append(weight)
        size += owned
    return chunks
