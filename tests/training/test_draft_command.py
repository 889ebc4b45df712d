"""`python -m training.draft`: a head learns the model's predictions in chains, is written in the published layout, and resumes."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoints.eagle import EagleConfig, EagleHead, read_head
from checkpoints.presets import preset
from checkpoints.weights import load_model
from comms import Local
from config import Experts, ModelConfig, with_variant
from errors import UserError
from layers.attention import Causal
from model import Transformer
from scripts.corpus.train_drafts import accepted_lengths
from tests.support.models import ALONE, CPU, save_random
from tests.support.paged import CachedSequences
from tests.support.ranks import Ranks
from tp import World
from training import draft as command
from training.batches import IGNORED, Batch, GlobalBatches
from training.chains import chain_loss
from training.token_file import open_tokens, write_tokens

VOCAB, LENGTH = 50, 16


def tiny(variant: str) -> ModelConfig:
    sizes = dict(hidden_size=32, n_layers=7, n_heads=4, n_kv_heads=2, head_dim=8, intermediate_size=36, vocab_size=VOCAB)
    return with_variant(replace(preset("tiny"), **sizes), variant)  # type: ignore[arg-type]


# --- chains, against chains that begin at one row and use a cache as the engine does ---------------------------------------


def random_pair(drafted: int) -> tuple[Transformer, EagleHead]:
    base = tiny(random.choice(["standard", "ladder"]))
    layer = replace(base, n_layers=1, variant="standard", ladder_layers=(), windows=random.choice([(), (5,)]), family="mistral")
    config = EagleConfig(layer, base.hidden_size, drafted, (1, 3, 7), random.random() < 0.5)
    model, head = Transformer(base, Local(), CPU, torch.float32), EagleHead(config, Local(), CPU, torch.float32)
    for parameter in [*model.parameters(), *head.parameters()]:
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1 if parameter.dim() == 1 else 0.3)
    head.targets.copy_(torch.randperm(VOCAB)[:drafted].sort().values)
    return model.requires_grad_(False), head


def is_near_tie(logits: Tensor) -> bool:
    """Whether rounding may decide which of the two best tokens is the best one."""
    first, second = logits.topk(2).values.tolist()
    return first - second < 1e-4


class OneChain:
    """The chain of a head from row `start` of one sequence."""

    def __init__(self, model: Transformer, head: EagleHead, tokens: Tensor, start: int) -> None:
        self.model, self.head, c = model, head, head.config.layer
        described = SimpleNamespace(attention_slots=1, n_kv_heads=c.n_kv_heads, config=c, norm=head.norm)
        self.cached = CachedSequences(described, 1, start + 9)  # type: ignore[arg-type]
        known = tokens[None, : start + 1]
        streams = model.hidden_and_streams(known, Causal(start + 1, CPU), head.config.stream_layers)[1]
        self.hidden = self.step(tokens[None, 1 : start + 2], head.fuse(streams))

    def step(self, tokens: Tensor, features: Tensor) -> Tensor:
        """The last row's output."""
        self.hidden = self.head(self.head.embed(tokens, self.model), features, self.cached.context(tokens.shape[1]))[:, -1:]
        return self.hidden


@torch.no_grad()
def test_the_loss_is_that_of_single_chains(seed: int) -> None:
    drafted, steps = random.choice([20, VOCAB]), 3
    model, head = random_pair(drafted)
    tokens = torch.randint(VOCAB, (2, 10))
    batch = Batch(tokens[:, :-1], tokens[:, 1:].masked_fill(torch.rand(2, 9) < 0.3, IGNORED))
    found = chain_loss(head, model, batch, steps)
    losses, counted, agreed, supervised = torch.zeros(4, steps, dtype=torch.float64)
    clear = torch.ones(steps, dtype=torch.bool)
    for window, targets in zip(batch.inputs, batch.targets, strict=True):
        wanted = model(window[None], Causal(9, CPU))[0].double()
        for row in range(9 - steps):
            chain = OneChain(model, head, window, row)
            for step in range(steps):
                logits, there = head.logits(chain.hidden)[0, 0].double(), row + 1 + step
                best = wanted[there].argmax()
                clear[step] &= not is_near_tie(wanted[there]) and not is_near_tie(logits)
                supervised[step] += targets[there] != IGNORED
                if targets[there] != IGNORED and best in head.targets:
                    losses[step] -= wanted[there][head.targets].softmax(-1) @ logits.log_softmax(-1)
                    agreed[step] += head.targets[logits.argmax()] == best
                    counted[step] += 1
                if step + 1 < steps:
                    chain.step(window[None, there + 1 : there + 2], chain.hidden)
    assert torch.allclose(found.losses.double()[clear], losses[clear], rtol=1e-4)
    assert torch.equal(found.agreed.double()[clear], agreed[clear])
    assert torch.equal(found.counted.double()[clear], counted[clear])
    assert torch.equal(found.supervised.double(), supervised)
    weights = 0.8 ** torch.arange(steps)
    expected = [float((weights * sums).sum()) for sums in (losses, counted)]
    assert torch.stack(found.weighted()).tolist() == pytest.approx(expected, rel=1e-4) or not clear.all()


@torch.no_grad()
def test_accepted_lengths_are_those_of_the_engine(seed: int) -> None:
    model, head = random_pair(VOCAB)
    tokens = torch.randint(VOCAB, (14,))
    start, steps, position, expected = 5, 3, 5, []
    for _ in range(2):  # the second time, the text is what the head guesses, at least in part
        expected, position, clear = [], start, True
        while position < 13:
            chain, right = OneChain(model, head, tokens, position - 1), 0
            for step in range(steps):
                guess = head.guess(chain.hidden)
                clear &= not is_near_tie(head.logits(chain.hidden)[0, 0])
                if position + 1 + step > 13 or guess[0, 0] != tokens[position + 1 + step]:
                    break
                right += 1
                chain.step(guess, chain.hidden)
            expected.append(right)
            position += right + 1
        assert accepted_lengths(head, model, tokens.tolist(), start, steps) == expected or not clear
        chain = OneChain(model, head, tokens, start - 1)
        tokens[start + 1] = head.guess(chain.hidden)
        tokens[start + 2] = head.guess(chain.step(tokens[None, start + 1 : start + 2], chain.hidden))
    assert sum(expected) >= 2


def test_a_step_by_hand(seed: int) -> None:
    """Its loss and gradients are those of the whole batch, whose norm is clipped, at the rate of the step."""
    model, head = random_pair(30)
    windows = torch.randint(VOCAB, (4, LENGTH + 1))
    parts = SimpleNamespace(
        micro_batch=lambda step, i, size: Batch(*(w[i * size : (i + 1) * size] for w in (windows[:, :-1], windows[:, 1:])))
    )
    args: Any = SimpleNamespace(
        global_batch=4, micro_batch=2, chain=2, clip=random.choice([1e-3, 1e3]), weight_decay=0.3,
        learning_rate=0.1, steps=10, warmup=4, final_rate=0.1,
    )  # fmt: skip
    loss, rows = chain_loss(head, model, parts.micro_batch(0, 0, 4), 2).weighted()
    gradients = torch.autograd.grad(loss / rows, [*head.parameters()])
    norm = torch.stack([g.norm() for g in gradients]).norm()
    shrunk = min(1.0, args.clip / float(norm))
    expected = [p.detach() - 0.1 * 2 / 4 * shrunk * g for p, g in zip(head.parameters(), gradients, strict=True)]
    found = command.train_step(args, head, model, cast(Any, parts), torch.optim.SGD(head.parameters(), lr=9.0), 1)
    assert found[:2].tolist() == pytest.approx([float(loss.detach() / rows), float(norm)], rel=1e-4)
    torch.testing.assert_close([*head.parameters()], expected, rtol=1e-3, atol=1e-6)
    decayed = {
        p.dim(): group["weight_decay"] for group in command.make_optimizer(args, head).param_groups for p in group["params"]
    }
    assert decayed == {1: 0.0, 2: 0.3}


# --- the command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path, seed: int) -> Path:
    """Text that repeats a few phrases."""
    rng = np.random.default_rng(seed)
    phrases = rng.integers(0, VOCAB, (6, 8))
    path = tmp_path / "text.bin"
    write_tokens(path, phrases[rng.integers(0, 6, 400)].ravel(), VOCAB, "none")
    return path


def run(world: World, argv: Sequence[object]) -> list[dict[str, Any]]:
    args = command.parse_args([str(a) for a in argv])
    command.train_head(args, world)
    return [json.loads(line) for line in (args.out / "metrics.jsonl").read_text().splitlines()]


def arguments(model: Path, tokens: Path, out: Path, *more: object) -> list[object]:
    sizes = ["--sequence-length", LENGTH, "--global-batch", 8, "--micro-batch", 4, "--log-every", 5, "--warmup", 5]
    return ["--device", "cpu", "--model", model, "--data", tokens, "--out", out, "--learning-rate", 1e-2, *sizes, *more]


def test_a_head_learns_and_can_be_read(ranks: Ranks, tokens: Path, tmp_path: Path, seed: int) -> None:
    """On 2 ranks, with a draft vocabulary. The result is that of one rank, up to rounding."""
    base = tiny(random.choice(["ladder", "hybrid"]))
    base = random.choice([base, replace(base, family="mixtral", experts=Experts(4, 3, True), intermediate_size=20)])
    model = save_random(base, tmp_path / "model")
    more = ["--steps", 25, "--draft-vocab", 40, "--chain", 3]
    lines = ranks.run(2, run, arguments(model, tokens, tmp_path / "two", *more))[0]
    assert [line["step"] for line in lines] == [5, 10, 15, 20, 25]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1  # 25 seeds gave 0.34 to 0.62
    assert all(0 <= share <= 1 for line in lines for share in line["agreement"]) and len(lines[0]["agreement"]) == 3
    assert run(ALONE, arguments(model, tokens, tmp_path / "one", *more))[0]["loss"] == pytest.approx(lines[0]["loss"], rel=1e-3)

    head = read_head(tmp_path / "two", base, ALONE, torch.float32)
    assert head.config.layer.intermediate_size == (60 if base.experts else 36)
    assert head.config.stream_layers == (2, 3, 4) and head.config.draft_vocab_size == 40
    raw = json.loads((tmp_path / "two" / "config.json").read_text())
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    frequency = np.bincount(np.fromfile(tokens, "<u2"), minlength=VOCAB)
    assert frequency[head.targets.numpy()].sum() == np.sort(frequency)[-40:].sum()


def test_every_row_counts_the_same_in_any_micro_batch(tokens: Path, tmp_path: Path, seed: int) -> None:
    """Of the 8 windows of a step, each has another number of tokens that the loss counts, the first none and the last all."""
    model = save_random(tiny("standard"), tmp_path / "model")
    ids = np.fromfile(tokens, "<u2")[: 8 * (LENGTH + 1)]
    mask = np.concatenate([np.arange(LENGTH + 1) > LENGTH - count for count in (0, 1, 3, 6, 9, 12, 14, LENGTH + 1)])
    data = write_tokens(tmp_path / "uneven.bin", ids, VOCAB, "none", mask, LENGTH + 1).path
    found = [
        run(ALONE, arguments(model, data, tmp_path / str(count), "--steps", 1, "--micro-batch", count))[0]
        for count in (8, 4, 1)
    ]
    for key in ("loss", "gradient_norm"):
        assert [line[key] for line in found] == pytest.approx([found[0][key]] * 3, rel=1e-4), key


def test_no_guess_outside_the_draft_vocabulary_agrees(
    tokens: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that guesses all it can agrees in the share of the rows whose best token it knows."""
    base, count = tiny("standard"), 20
    folder = save_random(base, tmp_path / "model")
    monkeypatch.setattr(command, "chain_loss", lambda *given: replace(found := chain_loss(*given), agreed=found.counted))
    more = ["--steps", 1, "--draft-vocab", count, "--chain", 2, "--micro-batch", 8]
    (line,) = run(ALONE, arguments(folder, tokens, tmp_path / "out", *more))
    data = open_tokens(tokens, VOCAB)
    model = load_model(str(folder), base, ALONE, torch.float32)
    best = model(GlobalBatches(data, LENGTH, 8, 0).micro_batch(0, 0, 8).inputs, Causal(LENGTH, CPU)).argmax(-1)
    known = torch.isin(
        best, torch.from_numpy(np.bincount(data.tokens, minlength=VOCAB)).argsort(stable=True, descending=True)[:count]
    )
    shares = [known[:, step : step + LENGTH - 2].double().mean().item() for step in (1, 2)]
    assert line["agreement"] == pytest.approx(shares, rel=1e-5)


class Stopped(Exception):
    pass


def test_a_stopped_run_resumes(tokens: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_random(tiny("standard"), tmp_path / "model")
    more = ["--steps", 12, "--save-every", 5]
    whole = run(ALONE, arguments(model, tokens, tmp_path / "whole", *more))
    again, step = arguments(model, tokens, tmp_path / "again", *more), command.train_step

    def stopping(*args: Any) -> Tensor:
        if args[-1] == 7:
            raise Stopped
        return step(*args)

    monkeypatch.setattr(command, "train_step", stopping)
    with pytest.raises(Stopped):
        run(ALONE, again)
    monkeypatch.setattr(command, "train_step", step)
    with pytest.raises(UserError, match="--resume"):
        run(ALONE, again)
    for more, part in ((["--chain", 2], r"another chain \(4, now 2\)"), (["--dtype", "bfloat16"], "another dtype")):
        with pytest.raises(UserError, match=part):
            run(ALONE, [*again, "--resume", *more])
    resumed = run(ALONE, [*again, "--resume"])
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]
    assert not (tmp_path / "again" / "snapshot.pt").exists()


@pytest.mark.parametrize("old", [False, True])
def test_a_snapshot_of_another_model_or_an_earlier_version_is_refused(
    old: bool, tokens: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = save_random(tiny("standard"), tmp_path / "model"), tmp_path / "out" / command.SNAPSHOT
    line = arguments(model, tokens, path.parent, "--steps", 4, "--save-every", 2)

    def stop(*_: Any) -> None:
        raise Stopped

    monkeypatch.setattr(command, "save_head", stop)
    with pytest.raises(Stopped):
        run(ALONE, line)
    if old:
        state = torch.load(path)
        del state["settings"]["weights"]
        torch.save(state, path)
    else:
        save_random(tiny("standard"), model)
    with pytest.raises(UserError, match="did not note the run's weights" if old else "another weights"):
        run(ALONE, [*line, "--resume"])


def test_no_snapshot_is_kept_of_a_loss_that_is_not_finite(
    tokens: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, step = save_random(tiny("standard"), tmp_path / "model"), command.train_step

    def overflowing(*args: Any) -> Tensor:
        return step(*args) * (random.choice([float("nan"), float("inf")]) if args[-1] == 2 else 1)

    monkeypatch.setattr(command, "train_step", overflowing)
    more = ["--steps", 12, "--save-every", 3, "--log-every", 10]
    with pytest.raises(UserError, match="--learning-rate"):
        run(ALONE, arguments(model, tokens, tmp_path / "out", *more))
    assert not (tmp_path / "out" / command.SNAPSHOT).exists()


def test_no_checkpoint_is_overwritten(tokens: Path, tmp_path: Path, seed: int) -> None:
    """Neither the model, which may be taken for the place of its head, nor a finished head."""
    model, steps = save_random(tiny("standard"), tmp_path / "model"), ["--steps", 2]
    run(ALONE, arguments(model, tokens, tmp_path / "head", *steps))
    for out in (model, tmp_path / "head"):
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        for more in ([], ["--resume"]):
            with pytest.raises(UserError, match="holds a finished head or another checkpoint"):
                run(ALONE, arguments(model, tokens, out, *steps, *more))
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("how", ["half", "text", "list"])
def test_a_damaged_snapshot_is_named(how: str, tokens: Path, tmp_path: Path, seed: int) -> None:
    model, path = save_random(tiny("standard"), tmp_path / "model"), tmp_path / "out" / command.SNAPSHOT
    path.parent.mkdir()
    torch.save({"settings": {}, "head": torch.randn(1000)} if how != "list" else [1], path)
    path.write_bytes({"half": path.read_bytes()[:2000], "text": b"hello", "list": path.read_bytes()}[how])
    with pytest.raises(UserError, match=rf"^[^\n]*{command.SNAPSHOT} is damaged[^\n]*; remove it[^\n]*$"):
        run(ALONE, arguments(model, tokens, path.parent, "--steps", 2, "--resume"))


def test_a_full_disk_keeps_the_last_snapshot(tokens: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, save = save_random(tiny("standard"), tmp_path / "model"), torch.save

    def full(state: dict[str, Any], path: Path) -> None:
        save(state, path)
        if state["step"] == 4:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0\nstack")

    monkeypatch.setattr(torch, "save", full)
    run_to = arguments(model, tokens, tmp_path / "out", "--steps", 6, "--save-every", 2)
    with pytest.raises(UserError, match=r"^[^\n]*snapshot\.pt cannot be written[^\n]*--resume$"):
        run(ALONE, run_to)
    assert torch.load(tmp_path / "out" / command.SNAPSHOT)["step"] == 2
    assert not list((tmp_path / "out").glob("*.partial"))
    monkeypatch.setattr(torch, "save", save)
    assert [line["step"] for line in run(ALONE, [*run_to, "--resume", "--log-every", 1])] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--model", "llama-3-8b"], "random weights"),
        (["--model", "no/such/folder"], "no/such/folder"),
        (["--data", "no.bin"], r"no\.json"),
        (["--streams", 1, 2, 8], "--streams"),
        (["--streams", 1, 1, 2], "--streams"),
        (["--draft-vocab", 51], "--draft-vocab"),
        (["--draft-vocab", 0], "--draft-vocab"),
        (["--chain", 16], "--chain"),
        (["--sequence-length", 100000], "--sequence-length"),
        (["--micro-batch", 3], "--micro-batch"),
        (["--learning-rate", 1e30], "--learning-rate"),
    ],
)
def test_bad_input(more: list[object], named: str, tokens: Path, tmp_path: Path, seed: int) -> None:
    model = save_random(tiny("standard"), tmp_path / "model")
    with pytest.raises(UserError, match=rf"^[^\n]*{named}[^\n]*$"):
        run(ALONE, arguments(model, tokens, tmp_path / "out", "--steps", 30, *more))
