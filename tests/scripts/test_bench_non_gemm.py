"""What the benchmark of attention compares with: its sampled reference and PyTorch's attention of a prompt's last chunk. And the file
of the read ceiling."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch

from errors import UserError
from scripts.bench.kernels import read
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


def test_the_read_ceiling_is_written_into_a_new_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(read, "rates", lambda: {"one": 2e12, "other": 3e12})
    monkeypatch.setattr(sys, "argv", ["read", "--out", str(out := tmp_path / "new" / "read.json")])
    read.main()
    assert json.loads(out.read_text())["bytes_per_second"] == {"one": 2e12, "other": 3e12}
    monkeypatch.setattr(read, "rates", lambda: pytest.fail("measured what cannot be written"))
    monkeypatch.setattr(sys, "argv", ["read", "--out", str(tmp_path)])
    with pytest.raises(UserError, match=str(tmp_path)):
        read.main()
