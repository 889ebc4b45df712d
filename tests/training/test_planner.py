"""The planner: memory, time, the search, what other systems would do, and the placement of nodes."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints.presets import preset
from comms import Done, Local, Residual
from comms.cluster import load_cluster
from config import Experts, ModelConfig, with_variant
from errors import UserError
from layers.attention import Causal
from model import Transformer
from tests.support.models import randomize
from training import losses
from training.batches import Batch
from training.planner.collectives import Profile, synthesize
from training.planner.cost import communication, exposed, forward_flops, predict
from training.planner.memory import activations, layer_activations, loss_activations, memory
from training.planner.node_order import node_order, order_for_groups, read_leaves, spans
from training.planner.search import OBJECTIVES, alternatives, choose, filtered_meshes, shardings
from training.planner.workload import Workload, layer_matrices, tables
from training.sharding import OVERLAPS, Mesh, Sharding

A800 = load_cluster("a800")
NOBODY_HIDES = frozenset[str]()


class Counted(Profile):
    """Every collective takes 1 s for each of `seconds`' operation, whatever it moves; keeps what was asked."""

    def __init__(self, **seconds: float) -> None:
        super().__init__("counted", 8, [])
        self.given = {name.replace("_", "-"): value for name, value in seconds.items()}
        self.asked: list[tuple[str, float, Mesh]] = []

    def seconds(self, operation: str, size: float, mesh: Mesh) -> float:
        self.asked.append((operation, size, mesh))
        return self.given.get(operation, 0.0) if mesh.size > 1 else 0.0


def small() -> ModelConfig:
    return replace(preset("tiny"), n_layers=3, hidden_size=64, n_heads=4, n_kv_heads=2, head_dim=16, intermediate_size=96)


def sparse(draw: random.Random) -> ModelConfig:
    experts = Experts(count := draw.randint(1, 9), draw.randint(1, count), draw.random() < 0.5)
    return replace(small(), family="mixtral", experts=experts)


def workload(mesh: Mesh, profile: Profile | None = None, **more: Any) -> Workload:
    plain = Workload(small(), mesh, A800, profile or synthesize(A800, mesh.nodes), sequence_length=128, overlap=NOBODY_HIDES)
    micro_batches = more.pop("micro_batches", 1)
    plain = replace(plain, **more)
    return replace(plain, global_batch=micro_batches * mesh.size * plain.tokens)


# --- memory ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "bytes_each"), [("bfloat16", (2, 2, 12)), ("float32", (4, 4, 8))])
def test_model_states_by_hand(precision: str, bytes_each: tuple[int, int, int]) -> None:
    psi = preset("llama-7b").parameter_count()
    big = Workload(preset("llama-7b"), Mesh(8, 4), A800, synthesize(A800, 4), precision=precision)
    held = memory(big, Sharding.parse("2,4,8x2"))
    p, g, o = bytes_each
    assert (held.parameters, held.gradients, held.optimizer) == (p * psi / 2, g * psi / 4, o * psi / 16)
    assert held.total == pytest.approx(
        sum((held.parameters, held.gradients, held.optimizer, held.activations, held.buffers, 2e9))
    )


class FusedNorm(torch.autograd.Function):
    """RMSNorm as CUDA has it: keeps its input, where the CPU's keeps two more tensors of that size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.square().mean(-1, keepdim=True).rsqrt()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise AssertionError("not needed")


@pytest.mark.parametrize("variant", ["standard", "ladder", "parallel", "desync-2x:2", "desync-4x:4", "sparse"])
@pytest.mark.parametrize(("dtype", "element"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_activations_are_what_autograd_keeps(
    seed: int, monkeypatch: pytest.MonkeyPatch, variant: str, dtype: torch.dtype, element: int
) -> None:
    """Count the storages that layers of the real model keep, weights and the shared rotary tables left out."""
    draw = random.Random(seed)
    heads, tokens = 8 * draw.randint(1, 2), draw.randint(40, 90)
    shape = dict(n_heads=heads, n_kv_heads=heads // 2, head_dim=16, hidden_size=16 * draw.randint(3, 9))
    plain = sparse(draw) if variant == "sparse" else with_variant(small(), variant)
    config = replace(plain, intermediate_size=8 * draw.randint(5, 30), **shape)  # type: ignore[arg-type]
    monkeypatch.setattr("kernels.norm.rms_norm_reference", lambda x, weight, eps: FusedNorm.apply(x))
    model = Transformer(config, Local(), torch.device("cpu"), dtype)
    randomize(model)
    context = Causal(tokens, torch.device("cpu"))
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x, before = (torch.randn(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True) for _ in range(2))
    streams = config.kind.streams
    stream: Any = [Residual(x, Local())] * len(model.shards) if streams else Residual(x, Local(), (Done(before),))
    for number, layer in enumerate(model.layers):
        earlier = set(kept)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            stream = layer(stream, model.frequencies, context)
        shared = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *(context._rotations or {0: ()})[0])} | earlier
        found = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in shared)
        assert found == layer_activations(config, tokens, element, number)


def test_recomputing_keeps_the_layers_inputs_and_one_layer() -> None:
    plain, again = workload(Mesh(2, 1)), workload(Mesh(2, 1), recompute=True)
    layer, loss = layer_activations(small(), 128, 2, 0), loss_activations(small(), 128, 2)
    assert activations(plain) == 3 * layer + loss
    assert activations(again) == 3 * 128 * 64 * 2 + max(layer, loss)
    desync = replace(again, config=with_variant(small(), "desync-4x:2"))  # whose second layer reads two streams
    assert activations(desync) == 4 * 128 * 64 * 2 + max(layer_activations(desync.config, 128, 2, 1), loss)
    assert activations(replace(plain, micro_batch=5)) == 5 * 3 * layer + loss_activations(small(), 5 * 128, 2)
    head, logits = 1024 * 64 * (4 + 2 + 2), 1024 * (2 + 3 * 4)
    assert loss == 3 * 2 * 128 * 64 + head + 128 * logits
    assert loss_activations(small(), 100_000, 2) == 3 * 2 * 100_000 * 64 + head + 65_536 * logits  # a chunk at a time


def test_the_logits_counted_are_those_of_the_losses_chunks(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With few positions and with many, and vocabularies on both sides of the size from which chunks have the fewest rows."""
    monkeypatch.setattr(losses, "CHUNK", least := random.randint(3, 9))
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 20 * least)
    for vocabulary, tokens in itertools.product((random.randint(8, 19), random.randint(21, 99)), (random.randint(1, 3), 100)):
        config, rows = replace(small(), vocab_size=vocabulary), list[int]()
        model = Transformer(config, Local(), torch.device("cpu"), torch.float32)
        ids = torch.zeros(1, tokens, dtype=torch.long)
        monkeypatch.setattr(losses, "log_softmax", lambda x, rows=rows: rows.append(len(x)) or x)
        losses.cross_entropy(model, torch.randn(1, tokens, config.hidden_size), Batch(ids, ids))
        counted = loss_activations(config, tokens, 4) - 3 * 4 * tokens * 64 - (4 + 2 * 4) * vocabulary * 64
        assert counted == (4 + 12) * vocabulary * max(rows)


def test_buffers_are_there_for_what_is_sharded() -> None:
    config, here = small(), workload(Mesh(2, 2), bucket_bytes=1000)
    layer, largest = sum(layer_matrices(config)), max(*layer_matrices(config), *tables(config))
    assert memory(here, Sharding.parse("1,1,1")).buffers == 2000
    both = memory(here, Sharding.parse("2,2,2")).buffers
    assert both == 2000 + 2 * (2 * max(layer, largest) + 2 * largest)
    assert memory(here, Sharding.parse("2x2,2x2,2x2")).buffers == both - 2000  # no all-reduce


@pytest.mark.parametrize("base", [small(), sparse(random.Random(1))], ids=["dense", "sparse"])
@pytest.mark.parametrize("variant", ["standard", "parallel"])
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_are_those_of_the_model(base: ModelConfig, variant: str, tied: bool) -> None:
    """And the active ones of a sparse model those that its config counts."""
    config = replace(with_variant(base, variant), tie_embeddings=tied)
    assert sum(layer_matrices(config, active=True)) == config.layer_parameter_count(active=True)
    flops = forward_flops(config, 8, 2) - 16 * 4 * 3 * 64 * 8  # without attention's
    assert flops == 2 * 16 * (3 * config.layer_parameter_count(active=True) + config.vocab_size * 64)
    model = Transformer(config, Local(), torch.device("meta"), torch.float32)
    real = sorted(p.numel() for p in model.parameters() if p.ndim == 2)
    assert sorted(config.n_layers * layer_matrices(config) + tables(config)) == real
    assert sum(real) == config.parameter_count()


# --- time ------------------------------------------------------------------------------------------------------------------


def test_parameters_gather_twice_and_scatter_once_a_matrix_and_micro_batch() -> None:
    """3 layers of 4 matrices and a tied table: 13; 5 micro-batches."""
    profile = Counted(all_gather=1.0, reduce_scatter=10.0)
    spent = communication(workload(Mesh(8, 2), profile, micro_batches=5), Sharding.parse("4,4,8x2"))
    assert (spent.gather_forward, spent.gather_backward, spent.scatter) == (5 * 13, 5 * 13, 50 * 13)
    asked = {(o, size) for o, size, mesh in profile.asked if o in ("all-gather", "reduce-scatter") and mesh == Mesh(4)}
    sizes = {2 * n for n in layer_matrices(small()) + tables(small())}
    assert asked == {(o, size) for o in ("all-gather", "reduce-scatter") for size in sizes}


def test_gradients_and_updates_by_hand() -> None:
    """P over 2 GPUs, OS over 8 x 2: gradients of 2 Ψ / 2 bytes over the 4 x 4 ranks of 8 x 4 that share a part, updates of
    2 Ψ / 16 over 4 x 2, from each of 8 owners; G = OS: all-reduces over 4 x 2 between the 3 micro-batches."""
    profile, psi = Counted(all_reduce=1.0, broadcast=10.0), small().parameter_count()
    here = workload(Mesh(8, 4), profile, micro_batches=3, bucket_bytes=psi // 2)
    spent = communication(here, Sharding.parse("2,8x2,8x2"))
    assert spent.all_reduce == 2 and spent.gradients == 2 * 2 and spent.updates == 8 * 10
    reduced = [(size, mesh) for o, size, mesh in profile.asked if o == "all-reduce"]
    assert sorted(reduced) == [(psi / 2, Mesh(4, 2)), (psi / 2, Mesh(4, 4))]
    assert [(size, mesh) for o, size, mesh in profile.asked if o == "broadcast"] == [(psi / 8, Mesh(4, 2))]
    assert spent.total == pytest.approx(2 + 4 + 80)


def test_evenly_cut_tensors_are_all_gathered() -> None:
    """3 layers of 4 matrices and a tied table, each spread by itself; what every rank owns a part of, is reduce-scattered."""
    profile = Counted(all_gather=1.0, broadcast=100.0, all_reduce=10.0, reduce_scatter=3.0)
    here = workload(Mesh(8, 4), profile, intra_tensor=True, bucket_bytes=2 * small().parameter_count())
    spent = communication(here, Sharding.parse("1,1,8x2"))
    assert (spent.updates, spent.all_reduce) == (13.0, 10.0)
    asked = {size for o, size, mesh in profile.asked if (o, mesh) == ("all-gather", Mesh(8, 2))}
    assert asked == {2 * n for n in layer_matrices(small()) + tables(small())}
    assert communication(here, Sharding.parse("1,1,8x4")).all_reduce == 3.0
    assert communication(replace(here, intra_tensor=False), Sharding.parse("1,1,8x4")).all_reduce == 10.0


def test_a_secondary_copy_shortens_backward_s_gather_only() -> None:
    here = workload(Mesh(8, 4))
    full = Sharding.parse("8x4,8x4,8x4")
    plain, second = communication(here, full), communication(here, full, Mesh(8, 1))
    assert second.gather_forward == plain.gather_forward and second.scatter == plain.scatter
    assert second.gather_backward == communication(here, Sharding.parse("8,8,8")).gather_backward < plain.gather_backward
    extra = memory(here, full, Mesh(8, 1)).total - memory(here, full).total
    assert extra == pytest.approx(2 * small().parameter_count() / 8)


def test_flops_are_megatron_s() -> None:
    """72 B s l h² (1 + s / 6h + V / 12lh) for an MLP of 8 h² weights and as many KV heads as heads."""
    h, layers, vocab, s, b = 96, 5, 640, 48, 3
    shape = dict(hidden_size=h, n_layers=layers, vocab_size=vocab, n_heads=6, n_kv_heads=6, head_dim=16)
    config = replace(preset("tiny"), intermediate_size=8 * h // 3, **shape)  # type: ignore[arg-type]
    megatron = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert 3 * forward_flops(config, s, b) == pytest.approx(megatron, rel=1e-12)
    here = workload(Mesh(2, 1), config=config, sequence_length=s, micro_batch=b)
    for plan in (predict(one, Sharding.parse("1,1,1")) for one in (here, replace(here, recompute=True))):
        useful = plan.mfu * plan.step_seconds * A800.peak_flops(here.precision)
        assert useful == pytest.approx(here.micro_batches * megatron, rel=1e-12)


def test_what_hides_behind_computation() -> None:
    """Half of 10 s of forward and 20 s of backward can hide communication; 2 micro-batches, 4 buckets."""
    here = workload(Mesh(8, 2), micro_batches=2, bucket_bytes=small().parameter_count() // 2)
    speed = forward_flops(small(), 128, 1) / 10 / (A800.bfloat16_tflops * 1e12)
    here = replace(here, cluster=replace(A800, compute_efficiency=speed, overlap_share=0.5), overlap=frozenset(OVERLAPS))
    plan = Sharding.parse("1,8,8")
    spent = replace(
        communication(here, plan),
        gather_forward=8.0,
        gather_backward=10.0,
        scatter=4.0,
        gradients=5.0,
        all_reduce=9.0,
        updates=3.0,
    )
    # forward: 4 of 5 s hide a micro-batch's gathers; backward: 7 of 10, which leaves 3 s for an all-reduce
    waited = exposed(here, plan, spent)
    assert (waited.parameters, waited.gradients, waited.updates) == pytest.approx((0.0, 2.0 + 6.0, 2.0))
    # a short all-reduce still shows its last bucket
    assert exposed(here, plan, replace(spent, gradients=0.0, all_reduce=2.0)).gradients == pytest.approx(2.0 / 4)
    open_parameters = exposed(replace(here, overlap=frozenset({"gradients", "updates"})), plan, spent)
    assert (open_parameters.parameters, open_parameters.gradients) == pytest.approx((22.0, 5.0 / 4 + 9.0 / 4))
    nothing = exposed(replace(here, overlap=NOBODY_HIDES), plan, spent)
    assert nothing.total == pytest.approx(spent.total)


def test_a_batch_that_cannot_be_shared_names_one_that_can() -> None:
    with pytest.raises(UserError, match="a multiple of 2048, such as 6144"):
        predict(replace(workload(Mesh(8, 2)), global_batch=6000), Sharding.parse("1,1,1"))
    with pytest.raises(UserError, match="such as 2048"):
        predict(replace(workload(Mesh(8, 2)), global_batch=100), Sharding.parse("1,1,1"))


# --- the search ------------------------------------------------------------------------------------------------------------


def test_the_filters_keep_the_mesh_on_the_fewest_nodes() -> None:
    assert filtered_meshes(Mesh(8, 4)) == [Mesh(1), Mesh(2), Mesh(4), Mesh(8), Mesh(8, 2), Mesh(8, 4)]
    assert filtered_meshes(Mesh(6, 3)) == [Mesh(1), Mesh(2), Mesh(3), Mesh(6), Mesh(3, 3), Mesh(6, 3)]
    assert [str(s) for s in shardings([Mesh(1), Mesh(2)])] == [
        "P 1x1, G 1x1, OS 1x1",
        "P 1x1, G 1x1, OS 2x1",
        "P 1x1, G 2x1, OS 2x1",
        "P 2x1, G 2x1, OS 2x1",
    ]


def everything(cluster: Mesh) -> Iterator[Sharding]:
    """All triples of meshes that nest and tile, G = P or G = OS: no filter."""
    meshes = [Mesh(a, b) for a in range(1, cluster.gpus + 1) for b in range(1, cluster.nodes + 1)]
    for p, os in itertools.product(meshes, meshes):
        for g in {p, os}:
            try:
                Sharding(p, g, os).check(cluster)
            except UserError:
                continue
            yield Sharding(p, g, os)


@pytest.mark.parametrize("mesh", [Mesh(4, 4), Mesh(8, 2), Mesh(2, 8), Mesh(6, 4)], ids=str)
def test_the_filtered_search_finds_the_optimum_of_all(seed: int, mesh: Mesh) -> None:
    """Where a node's links are the faster ones (section V.B's reason for the filter), it loses nothing."""
    draw = random.Random(seed)
    for _ in range(6):
        model = preset(draw.choice(("llama-3.2-1b", "llama-3-8b", "llama-7b", "llama-13b")))
        network = draw.uniform(0.02, 0.9) * A800.link_gb_per_second
        cluster = replace(A800, gpus_per_node=mesh.gpus, node_gb_per_second=network)
        recompute, tokens, count = draw.random() < 0.5, 2 ** draw.randint(8, 12), draw.choice((1, 2, 8))
        here = Workload(
            model,
            mesh,
            cluster,
            synthesize(cluster, mesh.nodes),
            tokens,
            recompute=recompute,
            global_batch=count * mesh.size * tokens,
        )
        plans = [predict(here, sharding) for sharding in everything(mesh)]
        limit = draw.uniform(1.02, 3) * min(plan.memory.total for plan in plans)
        cheapest = min(plan.communication.total for plan in plans if plan.memory.total <= limit)
        chosen = choose(here, limit, "communication", tolerance=0.0)[0]
        assert chosen.memory.total <= limit
        assert chosen.communication.total == pytest.approx(cheapest, rel=1e-9)


def test_plans_are_ranked_and_fit() -> None:
    here = Workload(preset("llama-7b"), Mesh(8, 8), A800, synthesize(A800, 8))
    for objective, cost in OBJECTIVES.items():
        ranked = choose(here, 60e9, objective)
        assert all(plan.memory.total <= 60e9 for plan in ranked)
        costs = [cost(plan) for plan in ranked]
        assert costs[1:] == sorted(costs[1:]) and costs[0] <= 1.01 * min(costs)
        assert len({plan.sharding for plan in ranked}) == len(ranked)


def test_the_shortest_step_is_chosen_and_of_about_equal_ones_that_which_sends_least() -> None:
    """On one node everything hides behind large micro-batches, but a copy of the optimizer states on every GPU is updated for
    longer than a part of them."""
    here = Workload(preset("llama-3.2-1b"), Mesh(8, 1), A800, synthesize(A800, 1), 2048, micro_batch=8, global_batch=2**17)
    plans = [predict(here, sharding) for sharding in shardings(filtered_meshes(here.mesh))]
    chosen, shortest = choose(here, 1e12)[0], min(plan.step_seconds for plan in plans)
    assert chosen.step_seconds <= 1.01 * shortest
    close = [plan for plan in plans if plan.step_seconds <= 1.01 * shortest]
    assert chosen.communication.total <= 1.01 * min(plan.communication.total for plan in close)
    assert chosen.sharding.optimizer.size > 1 == choose(here, 1e12, "communication")[0].sharding.parameters.size
    assert choose(here, 1e12, "communication")[0].step_seconds > 1.01 * shortest


def test_of_equal_plans_g_equal_to_p_and_then_less_memory_decide() -> None:
    """With one micro-batch G is free, and who updates what inside a node costs nearly the same for 2 GPUs as for 8."""
    here = Workload(preset("llama-7b"), Mesh(8, 128), A800, synthesize(A800, 128))
    assert str(choose(here, 80e9, "communication")[0].sharding) == "P 1x1, G 1x1, OS 8x1"
    strict = choose(here, 80e9, "communication", tolerance=0.0)
    assert strict[0].communication.total == min(plan.communication.total for plan in strict)
    assert str(strict[0].sharding) != "P 1x1, G 1x1, OS 8x1"


@pytest.mark.parametrize(("recompute", "remedy"), [(False, "--recompute"), (True, "more GPUs")])
def test_where_nothing_fits_it_says_what_would_help(recompute: bool, remedy: str) -> None:
    here = Workload(preset("llama-13b"), Mesh(8, 1), A800, synthesize(A800, 1), recompute=recompute)
    with pytest.raises(UserError, match=r"needs \d+\.\d GB of 20\.0") as failed:
        choose(here, 20e9)
    assert remedy in str(failed.value)


def test_what_other_systems_do() -> None:
    here = Workload(preset("llama-30b"), Mesh(8, 128), A800, synthesize(A800, 128), recompute=True)
    found = {a.name: a for a in alternatives(here, 80e9, "communication")}
    assert {name: str(a.plan.sharding) for name, a in found.items() if name != "MiCS"} == {
        "data parallel": "P 1x1, G 1x1, OS 1x1",
        "ZeRO-1": "P 1x1, G 1x1, OS 8x128",
        "ZeRO-2": "P 1x1, G 8x128, OS 8x128",
        "ZeRO-3": "P 8x128, G 8x128, OS 8x128",
        "ZeRO++": "P 8x128, G 8x128, OS 8x128",
    }
    mics = found["MiCS"].plan.sharding
    assert mics.parameters == mics.gradients == mics.optimizer and found["MiCS"].fits
    assert found["ZeRO++"].plan.secondary is not None and not found["data parallel"].fits
    best = choose(here, 80e9, "communication", tolerance=0.0)[0].communication.total
    assert all(best <= a.plan.communication.total for a in found.values() if a.fits and not a.name.startswith("ZeRO-2"))


def test_the_best_subgroup_of_mics_is_the_smallest_that_is_cheapest() -> None:
    here = Workload(preset("llama-7b"), Mesh(8, 16), A800, synthesize(A800, 16))
    fitting = [predict(here, Sharding(m, m, m)) for m in filtered_meshes(here.mesh)[1:]]
    cheapest = min((p for p in fitting if p.memory.total <= 60e9), key=lambda p: p.communication.total)
    mics = next(a for a in alternatives(here, 60e9, "communication") if a.name == "MiCS")
    assert mics.plan == cheapest


# --- placement -------------------------------------------------------------------------------------------------------------


def fewest_spans(leaves: list[str], size: int) -> int:
    return min(spans(order, size) for order in set(itertools.permutations(leaves)))


def test_fewest_leaf_switches_as_of_all_permutations(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(12):
        size, groups = draw.choice(((2, 2), (2, 3), (2, 4), (3, 2), (4, 2)))
        leaves = [draw.choice("abcd"[: draw.randint(2, 4)]) for _ in range(size * groups)]
        order = order_for_groups(leaves, size)
        assert sorted(order) == list(range(len(leaves)))
        assert spans([leaves[i] for i in order], size) == fewest_spans(leaves, size), (leaves, size)


def test_three_leaves_that_fill_groups_together_are_found() -> None:
    """5 + 5 + 2 and 1 + 1 + 4 nodes fill groups of 6; taken by size they do not."""
    counts = dict(a=5, b=5, c=2, d=1, e=1, f=4)
    leaves = [name for name, count in counts.items() for _ in range(count)]
    order = order_for_groups(leaves, 6)
    # 6 leaves + 3 groups - sets: {5, 1}, {5, 1}, {2, 4} are three
    assert spans([leaves[i] for i in order], 6) == 6
    # 1, 1, 4 and 1, 1, 4: two sets of three leaves each, which no pairing finds
    leaves = [name for name, count in dict(a=1, b=1, c=1, d=1, e=4, f=4).items() for _ in range(count)]
    assert spans([leaves[i] for i in order_for_groups(leaves, 6)], 6) == 6 + 2 - 2
    leaves = [name for name, count in dict(a=3, b=3, c=4).items() for _ in range(count)]
    assert spans([leaves[i] for i in order_for_groups(leaves, 5)], 5) == 3 + 2 - 1


def test_many_uneven_leaves_are_placed_at_once(seed: int) -> None:
    draw = random.Random(seed)
    leaves = [f"leaf{i}" for i in range(40) for _ in range(draw.randint(1, 40))]
    leaves = leaves[: len(leaves) // 16 * 16]
    draw.shuffle(leaves)
    order = order_for_groups(leaves, 16)
    assert sorted(order) == list(range(len(leaves)))
    assert spans([leaves[i] for i in order], 16) <= len(set(leaves)) + len(leaves) // 16 - 1 < spans(leaves, 16)


def test_inner_groups_come_first() -> None:
    leaves = list("aabbaabb" + "abab")
    order = node_order(leaves, Sharding.parse("8x2,8x2,8x4"))
    placed = [leaves[i] for i in order]
    assert sorted(order) == list(range(12))
    assert spans(placed, 2) == 6  # none of the groups of P leaves its leaf
    assert spans(placed, 4) == fewest_spans_of_pairs(placed)
    assert node_order(leaves, Sharding.parse("8,8,8")) == list(range(12))
    leaves = list("aabbcd")
    assert spans([leaves[i] for i in node_order(leaves, Sharding.parse("8,8,8x3"))], 3) == 4 < spans(leaves, 3)


def fewest_spans_of_pairs(leaves: list[str]) -> int:
    pairs = [tuple(leaves[i : i + 2]) for i in range(0, len(leaves), 2)]
    return min(spans([x for pair in order for x in pair], 4) for order in set(itertools.permutations(pairs)))


def test_bad_leaf_files_say_what_to_write(tmp_path: Any) -> None:
    path = tmp_path / "leaves.txt"
    with pytest.raises(UserError, match="NODE LEAF"):
        read_leaves(path, 2)
    path.write_text("n1 a\nn2\n")
    with pytest.raises(UserError, match="line 2"):
        read_leaves(path, 2)
    path.write_text("n1 a\nn1 b\n")
    with pytest.raises(UserError, match="the plan needs 2, each once"):
        read_leaves(path, 2)
    path.write_text("n1 a\n\nn2 b\n")
    assert read_leaves(path, 2) == (["n1", "n2"], ["a", "b"])
    with pytest.raises(UserError, match="groups of 2"):
        order_for_groups(["a", "b", "c"], 2)
