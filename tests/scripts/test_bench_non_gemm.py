"""What the benchmark of attention compares with: its sampled reference and PyTorch's attention of a prompt's last chunk."""

import random

import torch

from scripts.bench.kernels.non_gemm import attend, prefill_rows_exact, unpaged
from tests.kernels.test_attention import Pages, Shape, attend64


def test_references_of_a_prompts_last_chunk(seed: int) -> None:
    span, length = random.randint(3, 20), random.randint(20, 60)
    pages = Pages.of(Shape(4, 2, 16, 4, None), [length, length], "cpu", torch.float32)
    q = torch.randn(2 * span, 4, 16)
    whole = torch.cat([attend64(q[s * span :][:span], *pages.sequences[s], None) for s in range(2)])
    rows, starts, lengths = torch.randperm(2 * span)[:7], torch.tensor([0, span, 2 * span]), torch.tensor([length, length])
    got = prefill_rows_exact(rows, span, q, pages.keys, pages.values, pages.tables, starts, lengths, None, span)
    torch.testing.assert_close(got.double(), whole[rows], atol=1e-5, rtol=1e-5)
    q, k, v = unpaged(q, pages.keys, pages.values, pages.tables)
    torch.testing.assert_close(attend(q, k[:, :length], v[:, :length], causal=True).double(), whole, atol=1e-5, rtol=1e-5)
