"""make same-bits: ranks give the same vectors in every setting, differences are found, and a launch is not repeated."""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import determinism
from comm import Local, TreeCommunicator
from scripts.quality import same_bits
from tests.engine.test_engine import config_of, random_model
from tests.support.ranks import Ranks
from tp import World
from training.export import save_checkpoint


def arguments(**more: Any) -> argparse.Namespace:
    values = {"items": 6, "tokens": 3, "dtype": "bfloat16", "device": "cpu", "fast": False, "tp": 2, "seconds": 600}
    return argparse.Namespace(**values | more)


def worked(world: World, model: Path, path: Path) -> None:
    def init(device: str, overlap: str, deterministic: bool) -> World:
        determinism.enable(deterministic)
        return replace(world, comm=TreeCommunicator() if world.world_size > 1 else Local(), overlap=overlap)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(same_bits, "init_world", init)
            same_bits.work(arguments(model=str(model), work=path))
    finally:
        determinism.enable(False)


def test_ranks_have_the_same_vectors_in_every_setting(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    found = []
    config = replace(config_of("hybrid-list"), max_seq_len=same_bits.LENGTH)
    save_checkpoint(random_model(config), tmp_path / "model", torch.bfloat16)
    for n in (1, 2):
        ranks.run(n, worked, tmp_path / "model", tmp_path / f"{n}.json")
        found.append(json.loads((tmp_path / f"{n}.json").read_text()))
    rows = same_bits.compared("tiny-hybrid", (1, 2), found)
    assert len(rows) == 2 * (len(same_bits.SETTINGS) + 1)
    assert [(row["prompts"], row["differ"]) for row in rows] == [(6, [])] * len(rows)
    assert all(row["prefix_hits"] > 0 for row in rows)
    assert len({whole for _, whole in found[0]["vectors"]["in training"]}) == 6, "each prompt has a vector of its own"


def test_other_tokens_and_other_log_probabilities_differ() -> None:
    a, b, c = same_bits.vector([1], [-0.5]), same_bits.vector([2], [-0.5]), same_bits.vector([1], [-0.50000006])
    plain = same_bits.vector([1], None), same_bits.vector([2], None), same_bits.vector([1], None)
    counts = {"prefix_hits": 1, "preemptions": 0, "steps": 1}
    one = {"vectors": {"alone": [a, a, a], "others": [a, b, c], "plain": plain}, "counts": counts}
    rows = same_bits.compared("m", (1,), [one])
    assert [row["differ"] for row in rows] == [[], [1, 2], [1]]
    assert "| m | 1 | others | 2 of 3 |" in same_bits.table(rows, arguments(), {"cores": 2, "cpu": "x", "torch": "y"})


def test_a_launch_is_kept_and_there_is_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launches: list[float] = []

    def launch(command: list[str], cwd: Path, timeout: float) -> SimpleNamespace:
        launches.append(timeout)
        Path(command[command.index("--work") + 1]).write_text('{"vectors": {}, "counts": {}}')
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(same_bits, "OUT", tmp_path)
    monkeypatch.setattr(same_bits.subprocess, "run", launch)

    def call(ranks: int, seconds: float) -> dict[str, Any] | None:
        return same_bits.launched("m", "m", ranks, arguments(), time.monotonic() + seconds)

    assert call(1, 100) == call(1, 100) == {"vectors": {}, "counts": {}}
    assert len(launches) == 1 and launches[0] <= 100
    assert call(2, 1) is None and len(launches) == 1
