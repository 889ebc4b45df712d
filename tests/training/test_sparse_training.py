"""Training of sparse models: gradients and losses of the routers, against transformers and the papers' formulas."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from checkpoints.hf_config import read_config
from config import with_variant
from errors import UserError
from tests.support.models import ALONE, load, save_random
from tests.support.ranks import Ranks
from tests.test_sparse import MODELS, save_theirs, sparse
from tests.test_tensor_parallel import base_config
from tests.training import test_adapt_command, test_train_command
from tp import World
from training import train as command
from training.batches import Batch
from training.loop import prepare, train
from training.losses import router_losses
from training.token_file import write_tokens

LENGTH, WINDOWS = 12, 4


@pytest.fixture
def tokens(tmp_path: Path, seed: int) -> Path:
    """Without 1, the padding of OLMoE, whose embedding transformers does not train."""
    rng, count = np.random.default_rng(seed), 5 * WINDOWS * (LENGTH + 1)
    write_tokens(tmp_path / "random.bin", rng.integers(2, 101, count), 101, "none", rng.integers(0, 2, count), LENGTH + 1)
    return tmp_path / "random.bin"


def arguments(model: Path, tokens: Path, out: Path, *more: object) -> list[str]:
    fixed = ["--device", "cpu", "--model", model, "--data", tokens, "--out", out, "--log-every", 1, "--warmup", 0]
    return [str(a) for a in (*fixed, "--sequence-length", LENGTH, "--global-batch", WINDOWS, "--micro-batch", 2, *more)]


def first_step(world: World, argv: Sequence[str]) -> tuple[dict[tuple[str, int], Tensor], dict[str, Any], list[Batch]]:
    """The gradients of this rank's elements by parameter and place, the line of metrics, and all micro-batches."""
    args = command.parse_args([*argv, "--steps", "1", "--metrics-only"])
    found, kept = command.setup(args), dict[tuple[str, int], Tensor]()
    trainer, snapshots = prepare(args, world, found)

    def keep(gradients: dict[Any, Tensor], rate: object) -> Tensor:
        for weight in gradients:
            kept.update({(name, start): gradients[weight][where].clone() for name, start, _, where in weight.pieces()})
        return torch.zeros(())

    trainer.optimizer.step = keep  # type: ignore[method-assign, assignment]
    batches = [trainer.batches.micro_batch(0, number, 2) for number in range(WINDOWS // 2)]
    train(args, world, trainer, snapshots, found)
    return kept, json.loads((args.out / "metrics.jsonl").read_text()), batches


@pytest.mark.parametrize("family", MODELS)
def test_gradients_are_those_of_transformers(
    family: str, in_turn: Callable[..., Any], ranks: Ranks, tokens: Path, tmp_path: Path, seed: int
) -> None:
    """Of the loss with both losses of the routers, on 1 and 2 ranks."""
    theirs = save_theirs(family, tmp_path / "theirs")
    balance, z = random.uniform(0.1, 2), random.uniform(0.01, 0.2)
    more: list[object] = ["--balance-loss", balance, "--router-z-loss", z, "--gpus-per-node"]
    more2 = [2, "--sharding", in_turn(["1,1,1", "2,2,2", "1,2,2"], list(MODELS).index(family))]
    more2 += random.choice([[], ["--recompute"]]) + random.choice([[], ["--intra-tensor"], ["--no-overlap", "parameters"]])
    found = [ranks.run(n, first_step, arguments(tmp_path / "theirs", tokens, tmp_path / str(n), *more, *options))
             for n, options in ((1, [1]), (2, more2))]  # fmt: skip
    batches = found[0][0][2]
    supervised, sums = sum(int((batch.targets >= 0).sum()) for batch in batches), torch.zeros(3)
    for batch in batches:
        out = theirs(batch.inputs, output_router_logits=True)
        loss = (
            F.cross_entropy(out.logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100, reduction="sum") / supervised
        )
        z_loss = torch.stack([logits.logsumexp(-1).square().mean() for logits in out.router_logits]).mean()
        parts = torch.stack((loss, out.aux_loss / len(batches), z_loss / len(batches)))
        (parts @ torch.tensor([1, balance, z])).backward()
        sums += parts.detach()
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")
    expected = dict(load(ALONE, tmp_path / "gradients").named_parameters())
    for results in found:
        line = results[0][1]
        torch.testing.assert_close(torch.tensor([line[key] for key in ("loss", "balance_loss", "router_z_loss")]), sums)
        ours = {name: torch.full((parameter.numel(),), torch.nan) for name, parameter in expected.items()}
        for kept, *_ in results:
            for (name, start), gradient in kept.items():
                ours[name][start : start + len(gradient)] = gradient
        for name, value in expected.items():
            assert (ours[name] - value.flatten()).norm() < 1e-4 * value.norm(), name


def test_the_routers_losses_by_their_formulas(seed: int) -> None:
    """Those of the papers, for one layer and one expert a token, and transformers' for several."""
    for layers, chosen in ((1, 1), (3, random.randint(1, 5))):
        logits = [torch.randn(20, 5) * 3 for _ in range(layers)]
        found = router_losses([(one, one.topk(chosen).indices) for one in logits])
        torch.testing.assert_close(found[0], load_balancing_loss_func(tuple(logits), 5, chosen))
        rows = torch.cat(logits).double()
        assert float(found[1]) == pytest.approx(sum(float(row.exp().sum().log()) ** 2 for row in rows) / len(rows), rel=1e-5)
        picked = [[sum(e in row.topk(chosen).indices for row in one) / 20 for e in range(5)] for one in logits]
        assert float(found[2]) == pytest.approx(max(map(max, picked)))
        if chosen == 1 == layers:
            mean = rows.softmax(-1).mean(0)
            assert float(found[0]) == pytest.approx(5 * sum(picked[0][e] * float(mean[e]) for e in range(5)), rel=1e-5)


def test_the_routers_losses_reach_only_what_is_before_a_router(tokens: Path, tmp_path: Path, seed: int) -> None:
    args = command.parse_args(arguments(save_random(sparse(), tmp_path / "model"), tokens, tmp_path / "out", "--steps", 1))
    trainer, _ = prepare(args, ALONE, command.setup(args))
    executor, model = trainer.executor, trainer.executor.model
    executor.forward(torch.randint(101, (2, LENGTH)))
    names = dict(model.named_parameters())
    for loss in router_losses(executor.routed)[:2]:
        gradients = torch.autograd.grad(loss, list(names.values()), retain_graph=True, allow_unused=True)
        reached = {name for name, gradient in zip(names, gradients, strict=True) if gradient is not None and gradient.any()}
        last = f"layers.{len(model.layers) - 1}.mlp.sparse"
        behind = {"norm.weight", "head.weight", f"{last}.w_gate_up.weight", f"{last}.w_down.weight"}
        assert names.keys() - reached == behind
    executor.close()


@pytest.mark.parametrize("variant", ["ladder", "parallel", "desync-2x:1"])
def test_a_sparse_model_of_any_variant_is_trained_and_resumed(
    variant: str, ranks: Ranks, tokens: Path, tmp_path: Path, seed: int
) -> None:
    """A run on 2 ranks, resumed on one, has the losses of one on one rank; all weights are trained."""
    base = arguments(save_random(with_variant(sparse(), variant), tmp_path / "model"), tokens, tmp_path / "out", "--steps", 4)
    whole = test_train_command.run(ALONE, [*base, "--out", str(tmp_path / "whole")])
    ranks.run(2, test_train_command.run, [*base, "--stop-after", "2", "--sharding", "2,2,2", "--gpus-per-node", "2"])
    resumed = test_train_command.run(ALONE, [*base, "--resume"])
    for one, other in zip(whole, resumed, strict=True):
        for key in ("loss", "balance_loss", "router_z_loss", "busiest_expert"):
            assert one[key] == pytest.approx(other[key], rel=1e-3), key
    before, after = (dict(load(ALONE, tmp_path / folder).named_parameters()) for folder in ("model", "whole/model"))
    assert all(not torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(UserError, match="another balance loss"):
        test_train_command.run(ALONE, [*base, "--resume", "--balance-loss", "1"])


def test_options_without_use_are_refused(tokens: Path, tmp_path: Path, seed: int) -> None:
    for model, more, part in (
        (save_random(base_config(), tmp_path / "dense"), ["--balance-loss", 0.1], "no use for --balance-loss"),
        (save_random(sparse(), tmp_path / "sparse"), ["--cuda-graph"], "leave it out"),
        (save_random(with_variant(sparse(), "desync-2x:2"), tmp_path / "streams"), [], "and routers"),
    ):
        with pytest.raises(UserError, match=part):
            test_train_command.run(ALONE, arguments(model, tokens, tmp_path / "out", "--steps", 1, *more))


def test_a_sparse_checkpoint_becomes_a_hybrid_ladder(tokens: Path, tmp_path: Path, seed: int) -> None:
    """Stopped and resumed, it has the losses of an undisturbed run; the result is a sparse hybrid."""
    base = arguments(save_random(sparse(), tmp_path / "model"), tokens, tmp_path / "out", "--ladder-layers", 2, "--steps", 20)
    run = test_adapt_command.run
    whole = run(ALONE, [*base, "--learning-rate", 1e-3, "--distill", 1, "--out", tmp_path / "whole"])
    losses = [line["loss"] for line in whole]
    assert sum(losses[-5:]) < sum(losses[:5]) and whole[0]["balance_loss"] > 0  # 5 batches are a pass
    run(ALONE, [*base, "--learning-rate", 1e-3, "--distill", 1, "--stop-after", 13])
    resumed = run(ALONE, [*base, "--learning-rate", 1e-3, "--distill", 1, "--resume"])
    assert [line["loss"] for line in resumed] == pytest.approx(losses, rel=1e-3)
    config = read_config(tmp_path / "out" / "model" / "config.json")
    assert config.description.startswith("hybrid ladder") and config.experts is not None
    load(ALONE, tmp_path / "out" / "model")
