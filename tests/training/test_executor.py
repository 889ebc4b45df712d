"""Training with every sharding, against plain training with AdamW in a single process."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoints.hf_config import read_config
from checkpoints.presets import preset
from checkpoints.weights import load_model
from comms import Local
from config import ModelConfig, with_variant
from errors import UserError
from layers.attention import Causal
from tests.support.ranks import Ranks
from tp import World
from training.executor import Execution, Executor
from training.initialize import empty_model, materializer
from training.optimizer import AdamSettings, Optimizer, Schedule
from training.sharding import OVERLAPS, Mesh, Sharding
from training.step import Trainer
from training.weights import Weight, balance

CPU = torch.device("cpu")
VARIANTS = ("standard", "parallel", "ladder", "hybrid:2", "desync-2x:4", "desync-4x:2")
BATCH, LENGTH = 8, 12  # windows in a global batch, tokens in a window
SCHEDULE = Schedule(peak=1e-3, steps=20, warmup=3)


@dataclass(frozen=True)
class Run:
    variant: str
    cluster: Mesh
    sharding: Sharding
    accumulation: int = 1
    execution: Execution = field(default_factory=lambda: Execution(bucket_bytes=3000))
    seed: int = 0
    steps: int = 4  # one more than the warm-up
    # eps is above the rounding noise of the gradients
    settings: AdamSettings = field(default_factory=lambda: AdamSettings(eps=1e-6, clip=0.5))
    dtype: torch.dtype = torch.float32
    tie: bool = False


def tiny(run: Run) -> ModelConfig:
    base = replace(
        preset("tiny"), hidden_size=32, n_layers=3, n_heads=4, n_kv_heads=4, head_dim=8, intermediate_size=36, vocab_size=50
    )
    return replace(with_variant(base, run.variant), tie_embeddings=run.tie, qkv_bias=run.tie)


def batch(run: Run, step: int, device: torch.device = CPU) -> Tensor:
    generator = torch.Generator().manual_seed(run.seed * 1000 + step)
    return torch.randint(0, 50, (BATCH, LENGTH + 1), generator=generator).to(device)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / (BATCH * LENGTH)


def plain(run: Run, device: torch.device = CPU) -> tuple[list[float], dict[str, Tensor]]:
    """The reference: one process, the whole batch at once, torch's AdamW and clipping. Returns the losses and final weights."""
    model = empty_model(tiny(run), device, run.dtype)
    fill = materializer(model, None, run.seed)
    for name in [n for n, _ in model.named_parameters()]:
        fill(name)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [dict(params=decayed, weight_decay=run.settings.weight_decay), dict(params=rest, weight_decay=0.0)]
    adam = torch.optim.AdamW(groups, betas=run.settings.betas, eps=run.settings.eps)
    losses = []
    for step in range(run.steps):
        for group in adam.param_groups:
            group["lr"] = SCHEDULE.rate(step)
        tokens = batch(run, step, device)
        loss = loss_of(model(tokens[:, :-1], Causal(LENGTH, device)), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.settings.clip)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def sharded(world: World, run: Run) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """The same training with the executor. Returns losses, whole weights, and how many elements of P and OS this rank keeps."""
    executor = executor_of(world, run)
    optimizer = Optimizer(executor.weights, executor.vectors, executor.groups.copy, run.settings)
    mine = BATCH // world.world_size // run.accumulation
    losses = []
    for step in range(run.steps):
        total = torch.zeros((), device=world.device)
        for micro in range(run.accumulation):
            first = (micro * world.world_size + world.rank) * mine
            tokens = batch(run, step, world.device)[first : first + mine]
            loss = loss_of(executor.model.head(executor.forward(tokens[:, :-1])), tokens)
            executor.backward(loss, last=micro == run.accumulation - 1)
            total += loss.detach()
        optimizer.step(executor.take_gradients(), SCHEDULE.rate(step))
        losses.append(world.comm.all_reduce(total).item())
    kept = [sum(w.shard.numel() for w in executor.weights), sum(s["master"].numel() for s in optimizer.states.values())]
    return losses, whole_weights(executor), kept


def executor_of(world: World, run: Run) -> Executor:
    model = empty_model(tiny(run), world.device, run.dtype)
    return Executor(model, materializer(model, None, run.seed), world.rank, run.sharding, run.cluster, run.execution)


def whole_weights(executor: Executor) -> dict[str, Tensor]:
    """The parameters, gathered; the executor is closed."""
    executor.synchronize()
    for weight in executor.weights:
        weight.gather()
        weight.wait()
    executor.close()
    return {name: p.detach().clone() for name, p in executor.model.named_parameters()}


def assert_equal(ranks: Ranks, run: Run, tolerance: float = 1e-5) -> None:
    expected_losses, expected = plain(run)
    for losses, weights, _ in ranks.run(run.cluster.size, sharded, run):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=tolerance, atol=0)
        assert_close(weights, expected, tolerance, run)


def assert_close(weights: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, run: Run) -> None:
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        error = (weights[name] - value).norm() / value.norm()
        assert error < tolerance, f"{name}: relative error {error:.2e} under {run}"


def shardings(cluster: Mesh) -> list[Sharding]:
    """Every sharding whose meshes nest and tile the cluster."""

    def chains(n: int) -> list[tuple[int, int, int]]:
        divisors = [d for d in range(1, n + 1) if n % d == 0]
        return [c for c in itertools.product(divisors, repeat=3) if c[1] % c[0] == 0 and c[2] % c[1] == 0]

    return [
        Sharding(*(Mesh(a, b) for a, b in zip(gpus, nodes, strict=True)))
        for gpus in chains(cluster.gpus)
        for nodes in chains(cluster.nodes)
    ]


def options(rng: random.Random) -> Execution:
    return Execution(
        overlap=frozenset(name for name in OVERLAPS if rng.random() < 0.7),
        intra_tensor=rng.random() < 0.5,
        recompute=rng.random() < 0.5,
        bucket_bytes=rng.choice([1, 3000, 10**9]),
    )


@pytest.mark.parametrize("place", range(4))
def test_shardings_of_two_nodes_equal_plain_training(
    ranks: Ranks, in_turn: Callable[..., Sharding], seed: int, place: int
) -> None:
    """4 of the 16 shardings, by turns: each splits P, G and OS over the GPUs of a node in another way."""
    every, rng = shardings(Mesh(2, 2)), random.Random(seed)
    sharding = in_turn(every[4 * place : 4 * place + 4], place)
    run = Run(rng.choice(VARIANTS), Mesh(2, 2), sharding, rng.choice([1, 2]), options(rng), seed % 1000)
    assert_equal(ranks, run)


CLUSTERS = [Mesh(2, 2), Mesh(4, 1), Mesh(1, 4), Mesh(8, 1), Mesh(4, 2), Mesh(2, 4), Mesh(1, 8)]
EVERY = [(cluster, sharding) for cluster in CLUSTERS for sharding in shardings(cluster)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("cluster", "sharding"), EVERY, ids=str)
def test_every_sharding_equals_plain_training(ranks: Ranks, seed: int, cluster: Mesh, sharding: Sharding) -> None:
    rng = random.Random(seed)
    assert_equal(
        ranks,
        Run(
            rng.choice(VARIANTS),
            cluster,
            sharding,
            rng.choice([1, 1, 2]) if cluster.size == 4 else 1,
            options(rng),
            seed % 1000,
        ),
    )


@pytest.mark.parametrize("place", range(3))
def test_every_variant_equals_plain_training(ranks: Ranks, in_turn: Callable[..., str], seed: int, place: int) -> None:
    rng = random.Random(seed)
    variant = in_turn(VARIANTS[2 * place : 2 * place + 2], place)
    cluster = rng.choice([Mesh(4, 1), Mesh(1, 4)])
    sharding = rng.choice([s for s in shardings(cluster) if s.parameters.size > 1])
    execution = replace(options(rng), recompute=True)
    assert_equal(ranks, Run(variant, cluster, sharding, 2, execution, seed % 1000, tie=rng.random() < 0.5))


def test_eight_ranks_and_one_equal_plain_training(ranks: Ranks, seed: int) -> None:
    rng = random.Random(seed)
    cluster = rng.choice([Mesh(8, 1), Mesh(4, 2), Mesh(2, 4)])
    nested = [s for s in shardings(cluster) if 1 < s.parameters.size < s.optimizer.size]
    assert_equal(ranks, Run(rng.choice(VARIANTS), cluster, rng.choice(nested), 1, options(rng), seed % 1000))
    assert_equal(ranks, Run("ladder", Mesh(1, 1), Sharding.parse("1,1,1"), 2, Execution(recompute=True), seed % 1000))


@pytest.mark.long
def test_compiled_modules_equal_plain_training(ranks: Ranks, seed: int) -> None:
    execution = Execution(compile=True, bucket_bytes=3000)
    assert_equal(ranks, Run("hybrid:2", Mesh(2, 1), Sharding.parse("2,2,2"), 1, execution, seed % 1000))


@pytest.mark.parametrize("intra", [False, True])
@pytest.mark.parametrize("sharding", ["1,1,1", "1,2,2x2", "2,2,2x2", "2x2,2x2,2x2"])
def test_a_rank_keeps_its_share_only(ranks: Ranks, seed: int, sharding: str, intra: bool) -> None:
    run = Run("standard", Mesh(2, 2), Sharding.parse(sharding), 1, Execution(intra_tensor=intra), seed % 1000, steps=1)
    results = ranks.run(4, sharded, run)
    whole = sum(w.numel() for w in results[0][1].values())
    vectors = sum(w.numel() for w in results[0][1].values() if w.dim() == 1)
    for _, _, (parameters, _) in results:  # equal except for padding and the norms, which are not cut
        assert 0 <= parameters * run.sharding.parameters.size - whole <= vectors * 4 + 200
    copies = 4 // run.sharding.optimizer.size
    owned = [kept[1] for _, _, kept in results]
    assert 0 <= sum(owned) / copies - whole <= 400
    assert max(owned) - min(owned) <= 64 * 50  # one tensor, as balancing moves only whole tensors


def test_bfloat16_follows_fp32_and_copies_stay_equal(ranks: Ranks, seed: int) -> None:
    rng = random.Random(seed)
    run = Run("ladder", Mesh(2, 2), rng.choice(shardings(Mesh(2, 2))), 2, options(rng), seed % 1000, dtype=torch.bfloat16)
    expected, _ = plain(replace(run, dtype=torch.float32))
    results = ranks.run(4, sharded, run)
    for losses, weights, _ in results:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.01, atol=0)
        assert all(torch.equal(value, results[0][1][name]) for name, value in weights.items())


def exported(world: World, run: Run, directory: Path) -> tuple[dict[str, Tensor], list[int]]:
    """The whole weights of a model that was exported, and the bytes of whole matrices that this rank then holds."""
    executor = executor_of(world, run)
    Trainer.export(cast(Any, SimpleNamespace(executor=executor, rank=world.rank)), directory, None)
    held = [w.full.untyped_storage().size() for w in executor.weights if w.parts > 1]
    return whole_weights(executor), held


def test_an_export_holds_one_weight_at_a_time(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    run = Run("standard", Mesh(2, 1), Sharding.parse("2,2,2"), seed=seed % 1000)
    for weights, held in ranks.run(2, exported, run, tmp_path):
        assert len(held) > 5 and not any(held)
        read = load_model(str(tmp_path), read_config(tmp_path / "config.json"), World(0, 1, CPU, Local()), run.dtype)
        assert all(torch.equal(parameter, weights[name]) for name, parameter in read.named_parameters())


def log_order(world: World, sharding: Sharding, execution: Execution) -> list[str]:
    """The order of events in one training step: starts of communication, and modules when they compute."""
    run = Run("standard", Mesh(world.world_size, 1), sharding, execution=execution)
    log: list[str] = []
    executor = executor_of(world, run)
    names = {id(m): n.removeprefix("layers.") for n, m in executor.model.named_modules()}
    for weight in executor.weights:
        name = weight.names[0].removeprefix("layers.").removesuffix(".weight")

        def gather(weight: Weight = weight, name: str = name, start: object = weight.gather) -> None:
            idle = weight.parts > 1 and weight.gathering is None and not weight.full.untyped_storage().size()
            log.extend([f"gather {name}"] if idle else [])
            start()  # type: ignore[operator]

        def scatter(flat: Tensor, name: str = name, start: object = weight.scatter) -> object:
            log.append(f"scatter {name}")
            return start(flat)  # type: ignore[operator]

        weight.gather, weight.scatter = gather, scatter  # type: ignore[method-assign, assignment]
    for unit in executor.units:
        name = names[id(unit.module)]
        unit.module.register_forward_pre_hook(lambda *_, name=name: log.append(f"forward {name}"))
        unit.module.register_full_backward_pre_hook(lambda *_, name=name: log.append(f"backward {name}"))
        unit.module.register_full_backward_hook(lambda *_, name=name: log.append(f"input gradient {name}"))
    tokens = batch(run, 0)
    executor.backward(loss_of(executor.model.head(executor.forward(tokens[:, :-1])), tokens), last=True)
    executor.close()
    return log


def test_communication_starts_before_what_hides_it(ranks: Ranks) -> None:
    sharding = Sharding.parse("2,2,2")
    log = ranks.run(2, log_order, sharding, Execution())[0]
    at = log.index
    # forward: weights are gathered one layer ahead, before the current layer computes
    assert at("gather 1.attention.wqkv") < at("gather 1.mlp.w_down") < at("forward 0.attention.wqkv")
    assert at("forward 0.mlp.w_down") < at("gather 2.attention.wqkv") < at("forward 1.attention.wqkv")
    assert at("gather embedding") < at("forward 0.attention.wqkv")
    assert at("gather head") < at("forward 2.attention.wqkv")
    # backward: one module ahead; the scatter of a gradient starts before the gradient of the input is computed
    again = log[at("scatter head") :]
    at = again.index
    assert (
        at("gather 2.attention.wqkv")
        < at("scatter 2.mlp.w_down")
        < at("input gradient 2.mlp.w_gate_up")
        < at("backward 2.attention.wo")
    )
    assert at("scatter 2.mlp.w_gate_up") < at("gather 1.mlp.w_down") < at("scatter 2.attention.wo")
    assert at("input gradient 2.attention.wqkv") < at("gather 1.attention.wqkv")  # and not more than one
    # no weight is gathered twice in one pass
    assert log.count("gather 1.mlp.w_down") == 2
    assert log.count("gather 2.mlp.w_down") == 1


def test_recomputation_keeps_what_it_gathered_and_without_overlap_every_transfer_stands_alone(ranks: Ranks) -> None:
    log = ranks.run(2, log_order, Sharding.parse("2,2,2"), Execution(recompute=True))[0]
    again = log[log.index("backward 2.mlp.w_down") :]
    at = again.index
    assert at("gather 1.attention.wqkv") < at("scatter 2.attention.wo")  # recomputation gathers a layer ahead
    assert log.count("gather 1.mlp.w_down") == 2
    log = ranks.run(2, log_order, Sharding.parse("2,2,2"), Execution(overlap=frozenset()))[0]
    assert log.index("forward 0.mlp.w_down") < log.index("gather 1.attention.wqkv")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("1,2", "P, G and OS"),
        ("2,1,2", "P (2x1)"),
        ("1,2,1", "G (2x1)"),
        ("1,1,4", "OS (4x1)"),
        ("1,1,0", "is not a mesh"),
        ("a,1,1", "is not a mesh"),
    ],
)
def test_a_sharding_that_does_not_nest_says_so(text: str, part: str) -> None:
    with pytest.raises(UserError) as raised:
        Sharding.parse(text).check(Mesh(2, 2))
    assert part in str(raised.value)


def test_balance_gives_each_part_its_share(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 100) for _ in range(rng.randrange(8, 60))]
    parts = (rng.choice([1, 2, 4]), rng.choice([1, 2, 4]))
    owners = balance(sizes, parts)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == part) for part in range(math.prod(parts))]
    assert max(loads) - min(loads) <= 2 * max(sizes)
