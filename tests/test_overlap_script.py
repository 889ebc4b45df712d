"""scripts/overlap.py: the paper's figures, and the whole command on CPU ranks."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install triton")

from scripts.overlap import Row, by_shape, markdown

ROOT = Path(__file__).resolve().parents[1]


def test_efficiency(seed: int) -> None:
    """Nothing hidden is 0, everything 1, slower than unfused below 0 (Flux, equation 2)."""
    gemm, exposed = random.uniform(1, 100), random.uniform(1, 100)

    def efficiency(overall: float) -> float | None:
        return Row("wo", True, 64, 8, 8, "spans", overall, gemm, gemm + exposed).efficiency

    assert efficiency(gemm + exposed) == 0, f"seed {seed}"
    assert efficiency(gemm) == 1, f"seed {seed}"
    assert efficiency(gemm + exposed / 4) == pytest.approx(0.75), f"seed {seed}"
    assert efficiency(gemm + 3 * exposed) == pytest.approx(-2), f"seed {seed}"
    assert Row("wo", True, 64, 8, 8, "spans", gemm, gemm, gemm).efficiency is None


def test_on_two_cpu_ranks(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "scripts/overlap.py", "--device", "cpu"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *command, "--rows", "8", "--replays", "2", "--out", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=200,
    )
    report = json.loads((tmp_path / "gemm-overlap.json").read_text())
    assert report["errors"] == {}
    assert report["replays"] == 2
    found = {(row["layer"], row["way"]) for row in report["rows"]}
    assert found == {(layer, way) for layer in ("tiny up", "tiny down") for way in ("unfused", "spans", "owners")}
    rows = [Row(*(row[name] for name in Row.__dataclass_fields__)) for row in report["rows"]]
    assert len(by_shape(rows)) == 2
    assert (tmp_path / "gemm-overlap.md").read_text().startswith(markdown(rows, "")[:20])
