"""A short run of scripts/bench/serving/transformers_cpu.py."""

import json
import sys
from pathlib import Path

import pytest
import torch

from scripts.bench.serving import transformers_cpu
from scripts.lib import results
from tests.support.command_line import MODELS


def test_a_short_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It shows a progress bar, checks that Rung and transformers decode the same tokens, and writes what it prints to `out`."""
    monkeypatch.setattr(transformers_cpu, "ROOT", tmp_path)
    monkeypatch.setattr(results, "OUT", tmp_path / "out")
    command = ["transformers_cpu.py", "--model", str(MODELS / "tiny-standard"), "--batch-size", "2", "--new-tokens", "8"]
    monkeypatch.setattr(sys, "argv", [*command, "--repeats", "3", "--threads", str(torch.get_num_threads())])
    transformers_cpu.main()
    output = capsys.readouterr()
    assert "batch 2: 100%" in output.err and "3/3" in output.err
    (row,) = json.loads((tmp_path / "out" / "bench-cpu.json").read_text())["rows"]
    assert row["batch"] == 2 and {len(times) for times in row["seconds"].values()} == {3}
    assert (tmp_path / "out" / "bench-cpu.md").read_text() in output.out
