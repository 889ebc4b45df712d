"""Chains of a draft head (`checkpoints/eagle.py`) that begin at every row of a window at once.

In training the head sees what it will see in use: in the first step the model's features, in the next ones its own outputs (the
training-time test of EAGLE-3, arXiv:2503.01840, section 3). Shapes: B windows, R rows, H heads, D head_dim, V draft vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoints.eagle import EagleHead
from layers.attention import AttentionContext, Causal, Heads
from model import Transformer
from training.batches import IGNORED, Batch

DECAY = 0.8  # weight of a step's loss over that of the step before: a later token only counts if all before it are right


class ChainContext(AttentionContext):
    """Attention of one step of R chains. Row t sees rows 0 … t of the first step, and of each later step only row t, its own
    chain."""

    def __init__(self, rows: int, device: torch.device, before: "ChainContext | None" = None) -> None:
        """before: the context of the step before; None for the first step."""
        self.steps: list[ChainContext] = [*(before.steps if before else ()), self]
        self.rows = torch.arange(rows, device=device)
        self.positions = self.rows + len(self.steps) - 1
        self.keys: Tensor  # (B, H, R, D), after `attend`
        self.values: Tensor

    def attend(self, heads: Heads, qkv: Tensor, frequencies: Tensor) -> Tensor:
        """(B, R, (H + 2K) * D) to (B, R, H * D)."""
        q, k, v = (x.transpose(1, 2) for x in self.split(heads, qkv, frequencies))
        self.keys, self.values = (x.repeat_interleave(heads.n_heads // heads.n_kv_heads, 1) for x in (k, v))
        first, *later = self.steps
        seen = self.rows <= self.rows[:, None]
        if heads.window is not None:
            seen = seen & (self.rows > self.positions[:, None] - heads.window)
        q = q * heads.head_dim**-0.5
        scores = (q @ first.keys.mT).masked_fill(~seen, -torch.inf)
        own = [(q * step.keys).sum(-1, keepdim=True) for step in later]
        weights = torch.cat((scores, *own), -1).softmax(-1)
        out = weights[..., : len(self.rows)] @ first.values
        for i, step in enumerate(later, len(self.rows)):
            out = out + weights[..., i, None] * step.values
        return out.transpose(1, 2).flatten(-2)


@dataclass(frozen=True)
class ChainLoss:
    """The results of a batch, by step of the chains: sums over the rows that predict a supervised token."""

    losses: Tensor  # (steps,) nats, of the counted rows, with a gradient
    counted: Tensor  # (steps,) rows for which the model's best token is in the draft vocabulary
    agreed: Tensor  # (steps,) rows whose best token is the model's
    supervised: Tensor  # (steps,) all rows

    def weighted(self) -> tuple[Tensor, Tensor]:
        """The sum of the losses by the weights of their steps, and that of the weights of the counted rows: scalars. The loss to be
        minimized is the first over the second, each summed over all micro-batches."""
        weights = DECAY ** torch.arange(len(self.losses), device=self.losses.device)
        return (weights * self.losses).sum(), (weights * self.counted).sum()


def chain_loss(head: EagleHead, model: Transformer, batch: Batch, steps: int) -> ChainLoss:
    """Cross entropy of the head's guesses against the model's own predictions, in `steps` steps of chains that begin at every row.

    A chain goes on with the tokens of the window. The model's predictions are restricted to the draft vocabulary. Where the model's
    best token is outside it, a row has no loss, and no guess agrees.
    """
    device, length = batch.inputs.device, batch.inputs.shape[1]
    with torch.no_grad():
        last, streams = model.hidden_and_streams(batch.inputs, Causal(length, device), head.config.stream_layers)
        logits, embedded = model.logits(last), head.embed(batch.inputs, model).float()
        best = logits.argmax(-1)
        supervised = batch.targets != IGNORED
        drafted = torch.isin(best, head.targets) & supervised
        wanted = logits[..., head.targets].softmax(-1)
    rows, context = length - steps, None
    hidden = head.fuse([stream[:, :rows].float() for stream in streams])
    sums = []
    for step in range(1, steps + 1):
        there = slice(step, step + rows)
        context = ChainContext(rows, device, context)
        hidden = head(embedded[:, there], hidden, context)
        guessed = head.logits(hidden)
        surprise = F.cross_entropy(guessed.flatten(0, 1), wanted[:, there].flatten(0, 1), reduction="none")
        counts = drafted[:, there]
        agrees = (head.targets[guessed.detach().argmax(-1)] == best[:, there]) & counts
        sums.append(((surprise * counts.flatten()).sum(), counts.sum(), agrees.sum(), supervised[:, there].sum()))
    return ChainLoss(*map(torch.stack, zip(*sums, strict=True)))
