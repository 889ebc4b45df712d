"""On GPUs a ladder's modules finish while the all-reduce of the previous module is in flight; a standard model's do not.

The test checks which operation waits for which, not speed: see gpu_overlap_rank.py. Skipped without two GPUs.
"""

import json
import subprocess
import sys

import pytest

from tests import ROOT
from tests.support.gpus import most_ranks


@pytest.mark.skipif(most_ranks() < 2, reason="needs 2 GPUs")
def test_a_ladder_s_modules_do_not_wait_for_the_sum_before() -> None:
    names = ["nccl", "one-shot", "two-shot", "int8"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = subprocess.run(
        [*command, "-m", "tests.comm.gpu_overlap_rank", *names], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(names) * 3 * 2
    for case in found:
        hidden = case["variant"] == "ladder" or (case["variant"] == "hybrid:2" and case["layer"] > 0)
        assert case["over"] == hidden, case
        assert case["same"], case
