"""Communicators in models on GPUs, each by a program of ranks. Skipped without enough GPUs."""

import json

import pytest

from tests.support.gpus import most_ranks, needs_two, torchrun

ERROR = {"float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}  # of a sum of four, added in its dtype, to the largest sum
EXACT = ("one-shot", "two-shot", "fused", "auto")
FUSED = {"standard": 6, "hybrid:1": 3, "ladder": 0, "parallel": 0, "standard, with biases": 0}  # fused all-reduces in 3 layers


@pytest.mark.skipif(most_ranks() < 4, reason="needs 4 GPUs, or 1 with RUNG_SHARE_GPUS=1")
@pytest.mark.parametrize(("comm", "built"), [("hierarchical", "HierarchicalCommunicator"), ("auto", "BySize")])
def test_on_gpus_sums_are_those_of_fp64_also_in_graphs_and_beside_other_collectives(comm: str, built: str, seed: int) -> None:
    """Four ranks as two hosts of two, which share GPUs with RUNG_SHARE_GPUS=1."""
    printed = torchrun(4, "-m", "tests.comm.gpu_hierarchical_rank", comm, str(seed), timeout=280)
    *cases, last = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert last == {"comm": built}
    assert [case["case"] for case in cases] == [*(["sum"] * 4 + ["all-gather"]) * 3, "graph", "beside"]
    for case in cases:
        assert case["same"] and case["error"] <= ERROR[case["dtype"]], case


@needs_two
def test_every_exact_communicator_is_as_exact_as_nccl() -> None:
    """The error against the same weights in fp32 is at most 1.5 times NCCL's. Quantized all-reduces with fewer bits have a
    larger error."""
    names = ["nccl", *EXACT, "int8", "int4"]
    printed = torchrun(2, "-m", "tests.comm.gpu_logits_rank", *names, timeout=280)
    cases = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    error = {(case["comm"], case["variant"], case["tokens"]): case["error"] for case in cases}
    assert len(error) == len(names) * len(FUSED) * 2, error
    assert {case["variant"]: case["fused"] for case in cases if case["comm"] == "fused" and case["tokens"] > 8} == FUSED
    for (name, variant, tokens), found in error.items():
        nccl = error["nccl", variant, tokens]
        if name in EXACT:
            assert found <= 1.5 * nccl, (name, variant, tokens, error)
    for variant in FUSED:
        widths = [error[name, variant, 640] for name in ("nccl", "int8", "int4")]
        assert widths == sorted(widths) and widths[-1] < 1, (variant, widths)


@needs_two
def test_a_ladder_s_modules_do_not_wait_for_the_sum_before() -> None:
    """Which operation waits for which, not speed: see gpu_overlap_rank.py."""
    names = ["nccl", "one-shot", "two-shot", "int8"]
    printed = torchrun(2, "-m", "tests.comm.gpu_overlap_rank", *names, timeout=240)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(found) == len(names) * 3 * 2
    for case in found:
        hidden = case["variant"] == "ladder" or (case["variant"] == "hybrid:2" and case["layer"] > 0)
        assert case["over"] == hidden, case
        assert case["same"], case
