"""make same-bits: ranks give the same vectors in every setting, and differences are found."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.export import save_checkpoint
from comms import Local, TreeCommunicator
from kernels import determinism
from scripts.quality import same_bits
from tests.engine.test_engine import config_of, random_model
from tests.support.ranks import Ranks
from tp import World

LENGTH = 320  # little more than a segment of attention, so that the test is fast
SETTINGS = [one for one in same_bits.SETTINGS if one.engine != "whole" or one.batch not in (2, 8, 32)]


def arguments(**more: Any) -> argparse.Namespace:
    values = {"items": 16, "tokens": 6, "dtype": "bfloat16", "device": "cpu", "fast": False, "tp": [2]}
    return argparse.Namespace(**values | more)


def worked(world: World, model: Path, path: Path, quantize: str | None) -> None:
    def init(device: str, overlap: str, deterministic: bool) -> World:
        determinism.enable(deterministic)
        return replace(world, comm=TreeCommunicator() if world.world_size > 1 else Local(), overlap=overlap)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(same_bits, "init_world", init)
            patch.setattr(same_bits, "LENGTH", LENGTH)
            patch.setattr(same_bits, "SETTINGS", SETTINGS)
            patch.setattr(same_bits, "LONG", (260, 300))
            same_bits.work(arguments(model=str(model), work=path, quantize=quantize))
    finally:
        determinism.enable(False)


@pytest.mark.long
def test_ranks_have_the_same_vectors_in_every_setting(
    ranks: Ranks, tmp_path: Path, seed: int, in_turn: Callable[..., Any]
) -> None:
    found, quantize = [], in_turn((None, "fp8"), 0)
    config = replace(config_of("hybrid-list"), n_layers=3, max_seq_len=LENGTH)
    save_checkpoint(random_model(config), tmp_path / "model", torch.bfloat16)
    for n in (1, 2):
        ranks.run(n, worked, tmp_path / "model", tmp_path / f"{n}.json", quantize)
        found.append(json.loads((tmp_path / f"{n}.json").read_text()))
    rows = same_bits.compared("tiny-hybrid", (1, 2), found)
    assert len(rows) == 2 * (len(SETTINGS) + (quantize is None))
    assert [(row["prompts"], row["differ"]) for row in rows] == [(16, [])] * len(rows)
    assert all(row["prefix_hits"] > 0 and row["preemptions"] > 0 and row["accepted"] > 0 for row in rows)
    assert len({whole for _, whole in found[0]["vectors"]["alone"]}) == 16, "each prompt has a vector of its own"


def test_other_tokens_and_other_log_probabilities_differ() -> None:
    a, b, c = same_bits.vector([1], [-0.5]), same_bits.vector([2], [-0.5]), same_bits.vector([1], [-0.50000006])
    plain = same_bits.vector([1], None), same_bits.vector([2], None), same_bits.vector([1], None)
    counts = {"prefix_hits": 1, "preemptions": 0, "steps": 1, "accepted": 1}
    one = {"vectors": {"alone": [a, a, a], "others": [a, b, c], "plain": plain}, "counts": counts}
    rows = same_bits.compared("m", (1,), [one])
    assert [row["differ"] for row in rows] == [[], [1, 2], [1]]
    assert "| m | 1 | others | 2 of 3 |" in same_bits.table(rows, arguments(), {"cores": 2, "cpu": "x", "torch": "y"})
