"""Hierarchical all-reduces on GPUs: four ranks as two hosts of two, which share GPUs with RUNG_SHARE_GPUS=1. Skipped without four."""

import json
import subprocess
import sys

import pytest

from tests import ROOT
from tests.support.gpus import most_ranks

ERROR = {"float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}  # of a sum of four, added in its dtype, to the largest sum


@pytest.mark.skipif(most_ranks() < 4, reason="needs 4 GPUs, or 1 with RUNG_SHARE_GPUS=1")
@pytest.mark.parametrize(("comm", "built"), [("hierarchical", "HierarchicalCommunicator"), ("auto", "NcclCommunicator")])
def test_on_gpus_sums_are_those_of_fp64_also_in_graphs_and_beside_other_collectives(comm: str, built: str, seed: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    result = subprocess.run(
        [*command, "-m", "tests.comm.gpu_hierarchical_rank", comm, str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    *cases, last = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert last == {"comm": built}
    assert [case["case"] for case in cases] == [*(["sum"] * 4 + ["all-gather"]) * 3, "graph", "beside"]
    for case in cases:
        assert case["same"] and case["error"] <= ERROR[case["dtype"]], case
