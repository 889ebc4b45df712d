"""Values and gradients of the chunked losses, against torch's losses on whole logits in fp64."""

import dataclasses
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoints.presets import preset
from comms import Local
from model import Transformer
from training import losses
from training.batches import IGNORED, Batch
from training.optimizer import Schedule

CPU = torch.device("cpu")


def make_model(hidden: int, vocab: int, dtype: torch.dtype, tied: bool = False) -> Transformer:
    """A one-layer model. Only its head is used here."""
    config = dataclasses.replace(preset("tiny:1"), hidden_size=hidden, vocab_size=vocab, tie_embeddings=tied)
    model = Transformer(config, Local(), CPU, dtype)
    torch.nn.init.normal_(model.head.weight, std=0.3)
    return model


def make_batch(sequences: int, length: int, vocab: int, ignored: float) -> Batch:
    tokens = torch.randint(vocab, (sequences, length + 1))
    targets = tokens[:, 1:].masked_fill(torch.rand(sequences, length) < ignored, IGNORED)
    targets[0, 0] = tokens[0, 1]  # at least one target counts
    return Batch(tokens[:, :-1], targets)


def whole_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor, vocab: int) -> Tensor:
    logits = (hidden @ head.t())[..., :vocab]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def whole_divergence(student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """The definition: the sum of p log(p / q) over the vocabulary and the counted positions."""
    p, q = (logits.softmax(-1)[targets != IGNORED] for logits in (teacher, student))
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize("chunk", [1, 5, 12, 100])
@pytest.mark.parametrize("tied", [False, True])
def test_cross_entropy(chunk: int, tied: bool, seed: int) -> None:
    vocab, size = random.randint(5, 40), 16
    model, batch = make_model(size, vocab, torch.float64, tied), make_batch(3, 4, vocab, 0.4)
    hidden = torch.randn(3, 4, size, dtype=torch.float64, requires_grad=True)
    factor = random.uniform(0.1, 3.0)

    (losses.cross_entropy(model, hidden, batch, chunk) * factor).backward()
    found = losses.cross_entropy(model, hidden, batch, chunk)
    assert model.head.weight.grad is not None and hidden.grad is not None
    gradients = hidden.grad.clone(), model.head.weight.grad.clone()

    reference_hidden, reference_head = (t.detach().clone().requires_grad_() for t in (hidden, model.head.weight))
    expected = whole_cross_entropy(reference_hidden, reference_head, batch.targets, vocab)
    (expected * factor).backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, (reference_hidden.grad, reference_head.grad))


@pytest.mark.parametrize(("chunk", "share"), [(5, 1.0), (5, 0.3), (100, 0.8)])
def test_distillation(chunk: int, share: float, seed: int) -> None:
    vocab = random.randint(5, 40)
    model, teacher = make_model(16, vocab, torch.float64), make_model(24, vocab, torch.float64)
    batch = make_batch(2, 7, vocab, 0.3)
    hidden = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    teacher_hidden = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    found = losses.distillation(model, hidden, teacher, teacher_hidden, batch, share, chunk)
    found.backward()

    reference_hidden, reference_head = (t.detach().clone().requires_grad_() for t in (hidden, model.head.weight))
    teacher_logits = (teacher_hidden @ teacher.head.weight.t())[..., :vocab].detach()
    student_logits = (reference_hidden @ reference_head.t())[..., :vocab]
    divergence = whole_divergence(student_logits, teacher_logits, batch.targets)
    surprise = F.cross_entropy(student_logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    expected = share * divergence + (1 - share) * surprise
    expected.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close((hidden.grad, model.head.weight.grad), (reference_hidden.grad, reference_head.grad))
    assert teacher.head.weight.grad is None and teacher_hidden.grad is None, "the teacher is not trained"


def test_bfloat16_gradients_are_as_good_as_those_of_whole_logits(seed: int) -> None:
    """The error against fp64 is at most twice that of plain torch in the same precision. The loss itself is fp32."""
    model, batch = make_model(32, 50, torch.bfloat16), make_batch(8, 64, 50, 0.2)
    hidden = torch.randn(8, 64, 32).bfloat16().requires_grad_()
    factor = 0.541015625  # half-way between two bf16 values: rounding it would change all gradients by 0.36%
    loss = losses.cross_entropy(model, hidden, batch, chunk=16)
    (loss * factor).backward()
    assert loss.dtype == torch.float32 and model.head.weight.grad is not None and hidden.grad is not None

    def gradients(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, model.head.weight)]
        logits = F.linear(*leaves)[..., :50]
        logits = logits.float() if dtype == torch.bfloat16 else logits
        whole = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")
        (whole * factor).backward()
        return leaves[0].grad.double(), leaves[1].grad.double()  # type: ignore[union-attr]

    exact, plain = gradients(torch.float64), gradients(torch.bfloat16)
    for found, true, usual in zip((hidden.grad, model.head.weight.grad), exact, plain, strict=True):
        assert (found.double() - true).norm() <= 2 * (usual - true).norm()
        assert abs((found.double() * true).sum() / true.square().sum() - 1) < 1.5e-3, "biased"


def test_no_logits_of_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    model, batch = make_model(16, 30, torch.float32), make_batch(4, 16, 30, 0.0)
    rows: list[int] = []
    plain = losses.head_logits
    monkeypatch.setattr(losses, "head_logits", lambda model, x, head: rows.append(len(x)) or plain(model, x, head))
    losses.cross_entropy(model, torch.randn(4, 16, 16, requires_grad=True), batch, chunk=10).backward()
    assert sum(rows) == 64 and max(rows) == 10, "every row once, forward and backward together"


def test_the_learning_rate_by_hand() -> None:
    """Linear up to the peak at the end of the warm-up, half of the way down in the middle, and the final share behind the end."""
    schedule = Schedule(peak=2.0, steps=14, warmup=4, final=0.1)
    rates = [schedule.rate(step) for step in range(15)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[9] == pytest.approx(2.0 * (0.1 + 0.9 / 2)) and rates[14] == pytest.approx(0.2) == schedule.rate(99)
    assert all(one > other for one, other in itertools.pairwise(rates[4:]))
    assert Schedule(peak=2.0, steps=3, warmup=0).rate(0) == 2.0
