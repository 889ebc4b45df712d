"""Steps that are replayed as a CUDA graph: the same training as kernel by kernel, also when it is stopped and resumed."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from comms import Local
from errors import RankError, UserError
from tests import ROOT
from tp import World
from training import train as command
from training.loop import _check as check
from training.loop import prepare, train
from training.metrics import read_metrics
from training.step import Trainer
from training.token_file import write_tokens

STEPS = 12


@pytest.fixture
def tokens(tmp_path: Path, seed: int) -> Path:
    """With a mask, so that each step has another number of supervised targets."""
    path, generator = tmp_path / "tokens.bin", np.random.default_rng(seed)
    write_tokens(path, generator.integers(0, 100, 5000), 1024, "none", mask=generator.integers(0, 2, 5000))
    return path


def arguments(tokens: Path, out: Path, *more: object) -> argparse.Namespace:
    """Of training a model of random weights."""
    fixed = ["--model", ROOT / "models" / "tiny-standard" / "config.json", "--data", tokens, "--out", out, "--steps", STEPS]
    sizes = ["--warmup", 2, "--sequence-length", 64, "--global-batch", 4, "--micro-batch", 2, "--log-every", 1]
    return command.parse_args([str(a) for a in (*fixed, *sizes, "--dtype", "float32", "--learning-rate", 1e-3, *more)])


def run(device: str, tokens: Path, out: Path, *more: object) -> Any:
    """Train on one rank. Returns the trainer."""
    args = arguments(tokens, out, *more)
    world, found = World(0, 1, torch.device(device), Local()), command.setup(args)
    trainer, snapshots = prepare(args, world, found)
    train(args, world, trainer, snapshots, found)
    return trainer


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("variant", ["standard", "ladder", "parallel", "desync-2x:4"])
def test_the_training_is_the_same(variant: str, tokens: Path, tmp_path: Path) -> None:
    plain, graph = tmp_path / "plain", tmp_path / "graph"
    run("cuda", tokens, plain, "--variant", variant)
    run("cuda", tokens, graph, "--variant", variant, "--cuda-graph", "--stop-after", 7)
    trainer = run("cuda", tokens, graph, "--variant", variant, "--cuda-graph", "--resume")
    assert trainer.captured.graph is not None
    expected, found = (read_metrics(out / "metrics.jsonl") for out in (plain, graph))
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    losses = (torch.tensor([line["loss"] for line in lines]) for lines in (found, expected))
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    first, last = expected[0]["loss"], expected[-1]["loss"]
    assert last < first - 0.5  # there is something to learn, so that a step that changes nothing would be noticed
    weights, others = (load_file(out / "model" / "model.safetensors") for out in (graph, plain))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("device", "ranks", "more"), [("cpu", 1, []), ("cuda", 2, []), ("cuda", 1, ["--deterministic"])], ids=str
)
def test_a_graph_needs_one_gpu(device: str, ranks: int, more: list[str], tokens: Path, tmp_path: Path) -> None:
    args = arguments(tokens, tmp_path / "out", "--cuda-graph", *more)
    with pytest.raises(UserError, match="--cuda-graph needs one rank on a GPU, without --deterministic"):
        check(args, World(0, ranks, torch.device(device), Local()), command.setup(args))


def test_without_memory_it_says_that_the_graph_takes_some(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Trainer) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "train_step", full)
    args, world = arguments(tokens, tmp_path / "out"), World(0, 1, torch.device("cpu"), Local())
    found = command.setup(args)
    trainer, snapshots = prepare(args, world, found)
    args.cuda_graph = True  # which a CPU refuses before the first step
    with pytest.raises(RankError, match="leave out --cuda-graph, or use --recompute or a smaller --micro-batch"):
        train(args, world, trainer, snapshots, found)
