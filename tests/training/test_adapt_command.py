"""`python -m training.adapt`: converts a standard checkpoint to a hybrid ladder and trains it. The result loads."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from checkpoints.hf_config import read_config
from checkpoints.presets import model_config, preset
from checkpoints.weights import load_model
from config import ModelConfig, with_variant
from errors import UserError
from layers.attention import Causal
from tests.support.models import ALONE, save_random
from tests.support.ranks import Ranks
from tp import World
from training import adapt as command
from training.batches import GlobalBatches
from training.loop import prepare, train
from training.token_file import open_tokens, write_tokens

LENGTH, BATCH = 16, 8


def tiny(variant: str) -> ModelConfig:
    sizes = dict(hidden_size=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, intermediate_size=36, vocab_size=50)
    return with_variant(replace(preset("tiny"), **sizes), variant)  # type: ignore[arg-type]


@pytest.fixture
def standard(tmp_path: Path, seed: int) -> Path:
    return save_random(tiny("standard"), tmp_path / "standard")


@pytest.fixture
def tokens(tmp_path: Path, seed: int) -> Path:
    """A token file with a random loss mask: about half of the tokens count, as the answers of a chat do."""
    rng = np.random.default_rng(seed)
    path = tmp_path / "random.bin"
    write_tokens(path, rng.integers(0, 50, 60 * (LENGTH + 1)), 50, "none", rng.integers(0, 2, 60 * (LENGTH + 1)), LENGTH + 1)
    return path


def run(world: World, argv: Sequence[object]) -> list[dict[str, Any]]:
    args = command.parse_args([str(a) for a in argv])
    found = command.setup(args, world)
    trainer, snapshots = prepare(args, world, found)
    train(args, world, trainer, snapshots, found)
    return [json.loads(line) for line in (args.out / "metrics.jsonl").read_text().splitlines()]


def arguments(model: Path, tokens: Path, out: Path, *more: object) -> list[object]:
    sizes = ["--sequence-length", LENGTH, "--global-batch", BATCH, "--log-every", 1, "--warmup", 0]
    return ["--device", "cpu", "--model", model, "--data", tokens, "--out", out, *sizes, *more]


def first_loss(directory: Path, tokens: Path, share: float) -> float:
    """The loss of the converted, untrained hybrid on the first batch, computed from its definition."""
    original = load_model(str(directory), model_config(str(directory), None, 1), ALONE, torch.float32)
    hybrid = load_model(str(directory), model_config(str(directory), "hybrid:2", 1), ALONE, torch.float32)
    batch = GlobalBatches(open_tokens(tokens, 50), LENGTH, BATCH, 0).micro_batch(0, 0, BATCH)
    context = Causal(LENGTH, torch.device("cpu"))
    wanted, given = (model(batch.inputs, context).double().log_softmax(-1) for model in (original, hybrid))
    counted = batch.targets >= 0
    divergence = (wanted.exp() * (wanted - given)).sum(-1)[counted].mean()
    surprise = F.nll_loss(given[counted], batch.targets[counted])
    return float(share * divergence + (1 - share) * surprise)


@pytest.mark.parametrize(
    ("flags", "share"), [(["--distill", 0], 0.0), (["--distill", 0.3], 0.3), (["--distill", 1], 1.0), ([], 0.5)], ids=str
)
def test_the_loss_is_the_mixture_that_was_asked_for(
    standard: Path, tokens: Path, tmp_path: Path, flags: list[object], share: float
) -> None:
    lines = run(ALONE, arguments(standard, tokens, tmp_path / "out", "--ladder-layers", 2, "--steps", 1, *flags))
    assert lines[0]["loss"] == pytest.approx(first_loss(standard, tokens, share), rel=1e-4)


def test_without_steps_it_passes_four_times_over_the_data_and_warms_up_in_a_twentieth(
    standard: Path, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The 60 windows are 10 batches of 6 in a pass. Resumed, the numbers are the same."""
    base = arguments(standard, tokens, tmp_path / "out", "--ladder-layers", 2, "--global-batch", 6, "--learning-rate", 1e-3)
    place = base.index("--warmup")
    del base[place : place + 2]
    lines = run(ALONE, base)
    assert "40 steps, 4.0 passes over the data; a warm-up of 2 steps" in capsys.readouterr().err and lines[-1]["step"] == 40
    assert [line["learning_rate"] for line in lines[:2]] == pytest.approx([5e-4, 1e-3])
    assert lines[3]["learning_rate"] < lines[2]["learning_rate"] <= 1e-3
    (tmp_path / "out" / "model" / "config.json").unlink()
    run(ALONE, [*base, "--resume"])
    assert (tmp_path / "out" / "model" / "config.json").exists()


def test_retraining_wins_back_what_the_conversion_lost(ranks: Ranks, standard: Path, tokens: Path, tmp_path: Path) -> None:
    """On 2 ranks with all states sharded, the divergence from the original shrinks. The result is a hybrid checkpoint."""
    flags = "--ladder-layers 2-3 --steps 60 --distill 1 --learning-rate 3e-3 --sharding 2,2,2 --micro-batch 4 --gpus-per-node 2"
    lines = ranks.run(2, run, arguments(standard, tokens, tmp_path / "out", *flags.split()))[0]
    losses = [line["loss"] for line in lines]
    assert sum(losses[-7:]) < 0.5 * sum(losses[:7])  # an epoch is 7 batches; 12 seeds gave 0.17 to 0.24
    config = read_config(tmp_path / "out" / "model" / "config.json")
    assert config == replace(tiny("standard"), variant="ladder", ladder_layers=(2, 3))
    load_model(str(tmp_path / "out" / "model"), config, ALONE, torch.float32)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--ladder-layers", 0], "give 1 to 4"),
        (["--ladder-layers", 5], "give 1 to 4"),
        (["--ladder-layers", "x"], "--ladder-layers takes"),
        (["--ladder-layers", "2-9"], "layers"),
        (["--ladder-layers", 2, "--distill", 1.5], "--distill must be between"),
        (["--ladder-layers", 2, "--sequence-length", 32], "was packed for --sequence-length 16"),
        (["--ladder-layers", 2, "--model", "nothing"], "--model nothing is no directory"),
        (["--ladder-layers", 2, "--model", "llama-3-8b"], "--model llama-3-8b is no directory"),
    ],
    ids=str,
)
def test_bad_settings_say_what_to_do(standard: Path, tokens: Path, tmp_path: Path, more: list[object], part: str) -> None:
    with pytest.raises(UserError, match=part):
        run(ALONE, arguments(standard, tokens, tmp_path / "out", "--steps", 1, *more))


def test_an_adapted_model_is_not_taken_for_one_of_another_distillation(standard: Path, tokens: Path, tmp_path: Path) -> None:
    base = arguments(standard, tokens, tmp_path / "out", "--ladder-layers", 2, "--steps", 1)
    run(ALONE, [*base, "--distill", 0.5])
    with pytest.raises(UserError, match="another distill"):
        run(ALONE, [*base, "--resume", "--distill", 0.25])


def test_a_run_goes_on_with_another_teacher_only_if_told_to(standard: Path, tokens: Path, tmp_path: Path, seed: int) -> None:
    base = arguments(standard, tokens, tmp_path / "out", "--ladder-layers", 2, "--steps", 4)
    run(ALONE, [*base, "--distill", 0.5, "--stop-after", 2])
    save_random(tiny("standard"), standard)
    with pytest.raises(UserError, match=r"another teacher.*--other-recipe"):
        run(ALONE, [*base, "--resume", "--distill", 0.5])
    assert len(run(ALONE, [*base, "--resume", "--distill", 0.5, "--other-recipe"])) == 4
