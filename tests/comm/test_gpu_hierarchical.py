"""Hierarchical all-reduces on GPUs: four ranks as two hosts of two, which share GPUs with RUNG_SHARE_GPUS=1. Skipped without four."""

import json

import pytest

from tests.support.gpus import most_ranks, torchrun

ERROR = {"float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}  # of a sum of four, added in its dtype, to the largest sum


@pytest.mark.skipif(most_ranks() < 4, reason="needs 4 GPUs, or 1 with RUNG_SHARE_GPUS=1")
@pytest.mark.parametrize(("comm", "built"), [("hierarchical", "HierarchicalCommunicator"), ("auto", "BySize")])
def test_on_gpus_sums_are_those_of_fp64_also_in_graphs_and_beside_other_collectives(comm: str, built: str, seed: int) -> None:
    printed = torchrun(4, "-m", "tests.comm.gpu_hierarchical_rank", comm, str(seed), timeout=280)
    *cases, last = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert last == {"comm": built}
    assert [case["case"] for case in cases] == [*(["sum"] * 4 + ["all-gather"]) * 3, "graph", "beside"]
    for case in cases:
        assert case["same"] and case["error"] <= ERROR[case["dtype"]], case
