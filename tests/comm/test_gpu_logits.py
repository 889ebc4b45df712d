"""On GPUs the logits of a prompt are the same with every exact communicator, except for rounding. Skipped without two GPUs."""

import json

import pytest

from tests.support.gpus import most_ranks, torchrun

EXACT = ("one-shot", "two-shot", "fused", "auto")
FUSED = {"standard": 6, "hybrid:1": 3, "ladder": 0, "parallel": 0, "standard, with biases": 0}  # fused all-reduces in 3 layers


@pytest.mark.skipif(most_ranks() < 2, reason="needs 2 GPUs")
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
