"""AdamW on the optimizer states that a rank owns, gradient clipping by the global norm, and the learning-rate schedule."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from training.groups import Group
from training.weights import Weight


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
        self.weights, self.undecayed, self.copy, self.settings = weights, undecayed, copy, settings
        # What this rank owns of each weight: `master`, `exp_avg`, `exp_avg_sq`, (owned elements,) fp32. A restore writes into them.
        self.states: dict[Weight, dict[str, Tensor]] = {}
        self.updates: dict[Weight, Tensor] = {}  # how many each weight has had, a scalar on the device
        for weight in weights:
            master = weight.shard[weight.owned].float()
            if master.numel():
                moments = {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}
                self.states[weight] = {"master": master, **moments}
                self.updates[weight] = torch.zeros((), dtype=torch.float32, device=master.device)

    def step(self, gradients: dict[Weight, Tensor], rate: float | Tensor) -> Tensor:
        """Clip, update, and begin to send the new values to the other ranks. Collective.

        Removes what it uses from `gradients`, so that only one weight's gradient exists in fp32. Returns the gradient's global norm
        before clipping, an fp32 scalar on the device. rate: a number, or an fp32 scalar on the device, which a CUDA graph can read.
        """
        norm = self._norm(gradients.values())
        scale = (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
        scale = scale.reshape(1)  # type promotion ignores 0-d tensors; with (1,) one kernel reads bf16 and writes fp32
        for weight in self.weights:
            if weight in self.states:
                self._update(weight, gradients.pop(weight) * scale, rate)
            weight.spread()
        return norm

    def restore(self, updates: int) -> None:
        """Set the number of updates so far, and begin to send the masters that were written into `states`. Collective."""
        for weight in self.weights:
            if weight in self.states:
                self.updates[weight].fill_(updates)
                self._publish(weight)
            weight.spread()

    def _norm(self, gradients: Iterable[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        device = self.weights[0].shard.device
        total = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
        if self.copy.size > 1:
            dist.all_reduce(total, group=self.copy.handle)
        return total.sqrt()

    def _update(self, weight: Weight, gradient: Tensor, rate: float | Tensor) -> None:
        state = self.states[weight]
        adamw(
            [state["master"]],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [self.updates[weight]],
            fused=True,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=rate,
            weight_decay=0.0 if weight is self.undecayed else self.settings.weight_decay,
            eps=self.settings.eps,
            maximize=False,
        )
        self._publish(weight)

    def _publish(self, weight: Weight) -> None:
        """Copy the master weight into the parameter."""
        if weight.shard.dtype != torch.float32:
            weight.shard[weight.owned].copy_(self.states[weight]["master"])
