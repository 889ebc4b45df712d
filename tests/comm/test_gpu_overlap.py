"""On GPUs a ladder's modules finish while the all-reduce of the previous module is in flight; a standard model's do not.

The test checks which operation waits for which, not speed: see gpu_overlap_rank.py. Skipped without two GPUs.
"""

import json

import pytest

from tests.support.gpus import most_ranks, torchrun


@pytest.mark.skipif(most_ranks() < 2, reason="needs 2 GPUs")
def test_a_ladder_s_modules_do_not_wait_for_the_sum_before() -> None:
    names = ["nccl", "one-shot", "two-shot", "int8"]
    printed = torchrun(2, "-m", "tests.comm.gpu_overlap_rank", *names, timeout=240)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(found) == len(names) * 3 * 2
    for case in found:
        hidden = case["variant"] == "ladder" or (case["variant"] == "hybrid:2" and case["layer"] > 0)
        assert case["over"] == hidden, case
        assert case["same"], case
