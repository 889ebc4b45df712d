"""Losses on hidden states, computed in chunks of positions so that the logits of a whole batch never exist at once.

Llama 3's logits of 8,192 positions take 4.2 GB in fp32, and their gradient takes as much again. Here forward computes both the
loss and the gradients of a chunk, and then frees its logits. Backward only scales the gradients, so nothing is computed twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import determinism
from kernels.linear import linear
from kernels.sampling import log_softmax
from model import Transformer, scaled
from training.batches import IGNORED, Batch

CHUNK = 2048  # positions
CHUNK_LOGITS = 1 << 26  # with a small vocabulary a chunk has more positions, so that a GPU gets fewer and larger kernels


def chunk_of(columns: int) -> int:
    """The rows of a chunk, of a matrix with so many columns, such as logits of a vocabulary."""
    return max(CHUNK, CHUNK_LOGITS // columns)


ChunkLoss = Callable[..., Tensor]
"""(logits (chunk, vocab_size), the chunk of each further tensor) to the sum of the loss over the chunk, a scalar."""


def cross_entropy(model: Transformer, hidden: Tensor, batch: Batch, chunk: int | None = None) -> Tensor:
    """Sum of the negative log-likelihoods of the counted targets, nats, fp32 scalar. hidden: (B, T, C) after the final norm."""
    return _by_chunks(model, hidden, _surprise, chunk, batch.targets.flatten())


def _surprise(logits: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(log_softmax(logits), targets, ignore_index=IGNORED, reduction="sum")


def distillation(
    model: Transformer,
    hidden: Tensor,
    teacher: Transformer,
    teacher_hidden: Tensor,
    batch: Batch,
    share: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """share * KL(teacher || model) + (1 - share) * cross entropy, summed over the counted positions, nats, fp32 scalar.

    hidden, teacher_hidden: (B, T, C) of each model, after its final norm. The teacher gets no gradient.
    """

    def loss(logits: Tensor, teacher_rows: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = head_logits(teacher, teacher_rows, teacher.head.weight).log_softmax(-1)
        divergence = F.kl_div(logits.log_softmax(-1), wanted, reduction="none", log_target=True)
        divergence = divergence.sum(-1).masked_fill(targets == IGNORED, 0.0).sum()
        return divergence if share == 1 else share * divergence + (1 - share) * _surprise(logits, targets)

    return _by_chunks(model, hidden, loss, chunk, teacher_hidden.detach().flatten(0, 1), batch.targets.flatten())


def router_losses(routed: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Of a sparse model, (3,) fp32: the load-balancing loss, the router z-loss, and the share of tokens of the busiest expert of a layer.

    routed: of each layer, the router's logits (T, E) and the chosen experts (T, K). The balance is E Σ f_i P_i with the share f_i of
    tokens that have expert i and the mean P_i of its probability (Switch Transformers, arXiv:2101.03961, eq. 4-6), both over the tokens of
    all layers, as in transformers; K if all experts are equally busy. The z-loss is the mean of logsumexp(logits)² (ST-MoE,
    arXiv:2202.08906, eq. 5).
    """
    logits = torch.stack([one for one, _ in routed])
    shares = torch.stack([F.one_hot(experts, logits.shape[-1]).sum(1).float().mean(0) for _, experts in routed])
    balance = logits.shape[-1] * (shares.mean(0) * logits.softmax(-1).mean((0, 1))).sum()
    return torch.stack((balance, logits.logsumexp(-1).square().mean(), shares.max()))


def head_logits(model: Transformer, rows: Tensor, head: Tensor) -> Tensor:
    """(n, C) to (n, vocab_size), in fp32 or a wider dtype."""
    logits = (linear if determinism.enabled() else F.linear)(rows, head)[:, : model.config.vocab_size]
    return scaled(logits.to(torch.promote_types(logits.dtype, torch.float32)), 1 / model.config.logits_scaling)


def _by_chunks(model: Transformer, hidden: Tensor, loss: ChunkLoss, chunk: int | None, *others: Tensor) -> Tensor:
    rows, head = hidden.flatten(0, 1), model.head.weight
    chunk = chunk or chunk_of(len(head))

    def loss_of(rows: Tensor, head: Tensor, *others: Tensor) -> Tensor:
        return loss(head_logits(model, rows, head), *others)

    return _SumOfChunks.apply(rows, head, loss_of, chunk, *others)


class _SumOfChunks(torch.autograd.Function):
    """The sum of a loss over chunks of rows. Forward already computes the gradients. The head's gradient is accumulated
    in fp32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, head: Tensor, loss_of: ChunkLoss, chunk: int, *others: Tensor) -> Tensor:
        rows_gradient = torch.empty_like(rows)
        head_gradient = torch.zeros_like(head, dtype=torch.promote_types(head.dtype, torch.float32))
        losses = []
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            leaves = [tensor.detach().requires_grad_() for tensor in (rows[part], head)]
            with torch.enable_grad():
                loss = loss_of(*leaves, *(other[part] for other in others))
            rows_gradient[part], of_head = torch.autograd.grad(loss, leaves)
            head_gradient += of_head
            losses.append(loss.detach())
        ctx.save_for_backward(rows_gradient, head_gradient.to(head.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (*(_scaled(saved, gradient) for saved in ctx.saved_tensors), *[None] * (len(ctx.needs_input_grad) - 2))


def _scaled(matrix: Tensor, factor: Tensor) -> Tensor:
    """matrix * factor, multiplied in the wider of the two dtypes, in chunks of rows. A factor such as 1 / tokens must not
    be rounded to bfloat16, which would bias all gradients by up to 0.4%."""
    product = torch.empty_like(matrix)
    rows = chunk_of(matrix.shape[1])
    for target, source in zip(product.split(rows), matrix.split(rows), strict=True):
        target.copy_(source.to(torch.promote_types(source.dtype, factor.dtype)) * factor)
    return product
