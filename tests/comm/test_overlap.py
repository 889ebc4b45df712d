"""When all-reduces begin and when they are waited for: hidden behind the next module in a ladder, never in a standard model."""

import random
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from checkpoints.weights import random_weights
from comms import Communicator, Local, NoCommunication, PendingAllReduce
from comms.interface import Schedule
from config import ModelConfig, Reduces, with_variant
from layers.attention import Causal
from layers.linear import ShardedLinear
from model import MLP, Attention, ParallelBlock, Transformer
from tests.support.paged import CachedSequences

CPU = torch.device("cpu")
LAYERS = 4
MODULES = 2 * LAYERS

Event = tuple[str, int]  # what happened, and to which module of 1 … 2L (or layer of 1 … L)


class Recorder(Communicator):
    """One rank that records when an all-reduce begins, whether it is overlapped, and when it is waited for.

    It keeps a copy of the partial sum until then, and overwrites the partial sum with NaN, as a communicator may.
    """

    name, rank, world_size = "recorder", 0, 1

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.current = 0  # the module that computed last

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> "RecordedAllReduce":
        total = partial.clone()
        partial.fill_(torch.nan)
        self.events += [("start", self.current), ("overlapped" if overlap else "blocking", self.current)]
        return RecordedAllReduce(self, self.current, total)

    def all_gather(self, shard: Tensor) -> Tensor:
        return shard

    def watch(self, module: nn.Module, number: int) -> None:
        """From the first of the module's linear layers to the last."""
        first, *_, last = (child for child in module.children() if isinstance(child, ShardedLinear))

        def enter(*_: object) -> None:
            self.current = number
            self.events.append(("begin", number))

        def leave(*_: object) -> None:
            self.current = number
            self.events.append(("end", number))

        first.register_forward_pre_hook(enter)
        last.register_forward_hook(leave)


class RecordedAllReduce(PendingAllReduce):
    def __init__(self, recorder: Recorder, number: int, total: Tensor) -> None:
        self.recorder, self.number, self.total = recorder, number, total

    def wait(self) -> Tensor:
        self.recorder.events.append(("wait", self.number))
        return self.total


def tiny(variant: str) -> ModelConfig:
    shape = dict(vocab_size=50, hidden_size=32, n_layers=LAYERS, n_heads=4, n_kv_heads=4, head_dim=8)
    return with_variant(ModelConfig(**shape, intermediate_size=32, max_seq_len=64), variant)


def recorded(config: ModelConfig, schedule: Schedule = "overlapped") -> list[list[Event]]:
    """What happens in a forward pass without a cache, in a prefill, and in a decode step. A desync model's streams are
    watched at the last one's modules."""
    recorder = Recorder()
    recorder.use(schedule)
    model = Transformer(config, recorder, CPU, torch.float32).eval().requires_grad_(False)
    random_weights(model, random.randrange(1000))
    twin = Transformer(config, Local(), CPU, torch.float32)
    twin.load_state_dict(model.state_dict())
    for i, layer in enumerate(model.layers):
        if isinstance(layer, ParallelBlock):
            recorder.watch(layer, i + 1)
            continue
        for module, number in ((layer.attention, 2 * i + 1), (layer.mlp, 2 * i + 2)):
            recorder.watch(module[-1] if isinstance(module, nn.ModuleList) else module, number)

    tokens = torch.randint(config.vocab_size, (2, 6))
    both = [CachedSequences(one, 1, 6) for one in (model, twin)]
    passes = []
    with torch.inference_mode():
        for part, contexts in (
            (tokens, [Causal(6, CPU), Causal(6, CPU)]),
            (tokens[:1, :5], [one.context(5) for one in both]),
            (tokens[:1, 5:], [one.context(1) for one in both]),
        ):
            recorder.events = []
            assert torch.equal(model(part, contexts[0]), twin(part, contexts[1])), "the results of all-reduces are used wrongly"
            passes.append(recorder.events)
    return passes


def assert_each_once(events: list[Event], sums: list[int]) -> None:
    """Each module of `sums` starts one all-reduce, after its own computation, and each all-reduce is waited for once."""
    assert [number for kind, number in events if kind == "start"] == sums
    assert sorted(number for kind, number in events if kind == "wait") == sums
    for number in sums:
        assert events.index(("end", number)) < events.index(("start", number)) < events.index(("wait", number))


def overlapped(events: list[Event]) -> list[int]:
    """The modules whose all-reduces begin at once on a side stream. The others may begin when they are waited for."""
    return [number for kind, number in events if kind == "overlapped"]


def overlaps_next(events: list[Event], i: int) -> bool:
    """Whether module i + 1 computes while the all-reduce of module i is in flight."""
    start, wait = events.index(("start", i)), events.index(("wait", i))
    begin, end = events.index(("begin", i + 1)), events.index(("end", i + 1))
    assert start < begin, "a module computes before the previous module's all-reduce has begun"
    assert wait < begin or wait > end, "the wait is inside a module"
    return wait > end


EVERY = tuple(range(LAYERS))


@pytest.mark.parametrize(
    ("layers", "schedule"),
    [((), "overlapped"), (EVERY, "overlapped"), (EVERY, "few-sms"), *(((k,), "overlapped") for k in (0, 3)),
     *((some, "overlapped") for some in ((2, 3), (0, 2), (1, 3)))],
)  # fmt: skip
def test_an_all_reduce_is_hidden_where_the_next_module_is_in_a_ladder_layer(
    layers: tuple[int, ...], schedule: Schedule, seed: int
) -> None:
    """Without ladder layers, which is the standard model, each is waited for at once."""
    config = replace(tiny("ladder"), ladder_layers=layers) if layers else tiny("standard")
    for events in recorded(config, schedule):
        assert_each_once(events, list(range(1, MODULES + 1)))
        assert overlapped(events) == [i for i in range(1, MODULES + 1) if min(i // 2, LAYERS - 1) in layers]
        for i in range(1, MODULES):
            assert overlaps_next(events, i) == (i // 2 in layers), f"module {i + 1} of layer {i // 2}"
        for i in range(1, MODULES - 1):  # and not two modules later: h_{i+2} reads x_i
            assert events.index(("wait", i)) < events.index(("begin", i + 2))


def test_no_module_is_left_without_hooks() -> None:
    """The tests of the order record every module that computes."""
    model = Transformer(tiny("desync-2x:2"), Local(), CPU, torch.float32)
    assert sum(isinstance(m, (Attention, MLP)) for m in model.modules()) == 2 * MODULES


@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (3,), (2, 3), (0,), (0, 2), (1, 3)])
def test_a_deferred_all_reduce_begins_when_it_is_read(layers: tuple[int, ...], seed: int) -> None:
    """With its module's last layer, after the next module's first one. The results are those of a ladder (`recorded`)."""
    for events in recorded(replace(tiny("ladder"), ladder_layers=layers), "deferred"):
        assert overlapped(events) == []
        for kind in ("start", "wait"):
            assert sorted(number for what, number in events if what == kind) == list(range(1, MODULES + 1))
        for i in range(1, MODULES + 1):
            start, deferred = events.index(("start", i)), min(i // 2, LAYERS - 1) in layers
            assert events[start - 1 : start + 2] == [("end", i), ("start", i), ("blocking", i)]
            assert not deferred or events[start + 2] == ("wait", i)
            assert i == MODULES or (start > events.index(("begin", i + 1))) == deferred
            assert i + 2 > MODULES or events.index(("wait", i)) < events.index(("begin", i + 2))


def test_parallel_has_one_sum_a_layer(seed: int) -> None:
    for events in recorded(tiny("parallel")):
        assert_each_once(events, list(range(1, LAYERS + 1)))
        assert [overlaps_next(events, i) for i in range(1, LAYERS)] == [False] * (LAYERS - 1)
        assert overlapped(events) == []


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_desync_sums_where_its_pattern_says(streams: int, seed: int) -> None:
    pattern = tuple(Reduces(random.random() < 0.5, random.random() < 0.5 or i == LAYERS - 1) for i in range(LAYERS))
    custom = replace(tiny("desync-2x"), desync_streams=streams, desync_pattern=pattern)
    named = [2 * i + 1 for i in range(LAYERS) if pattern[i].attention]
    named += [2 * i + 2 for i in range(LAYERS) if pattern[i].mlp]
    for config, sums in (
        (tiny(f"desync-2x:{streams}"), [2, 4, 6, 8]),
        (tiny(f"desync-4x:{streams}"), [4, 8]),
        (custom, sorted(named)),
    ):
        for events in recorded(config):
            assert_each_once(events, sums)
            assert overlapped(events) == []
            for i in sums:
                assert i == MODULES or not overlaps_next(events, i)


def test_upper_bound_starts_nothing(seed: int) -> None:
    for events in recorded(tiny("upper-bound")):
        assert [kind for kind, _ in events] == ["begin", "end"] * MODULES


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_without_communication_a_rank_has_its_own_logits_alone(rank: int) -> None:
    """At their place, so that only its own tokens are drawn."""
    comm = NoCommunication(rank, 3)
    shard = torch.randn(2, 4)
    whole = comm.all_gather(shard).unflatten(-1, (3, 4))
    assert torch.equal(whole[:, rank], shard) and whole[:, [r for r in range(3) if r != rank]].isneginf().all()
    keys = comm.all_gather(torch.arange(2)[:, None])
    assert keys.argmax(1).tolist() == [rank] * 2 and comm.all_reduce(shard) is shard


class Keeper(Recorder):
    """A recorder that holds every all-reduce for the whole pass, as the callers of blocks hold their streams."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[PendingAllReduce, weakref.ref[Tensor]]] = []

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> "RecordedAllReduce":
        pending = super().begin_all_reduce(partial, overlap)
        self.kept.append((pending, weakref.ref(pending.total)))
        return pending


@pytest.mark.parametrize(
    "config", [tiny("standard"), tiny("parallel"), tiny("ladder"), replace(tiny("ladder"), ladder_layers=(2,))]
)
@pytest.mark.parametrize("schedule", ["overlapped", "deferred"])
def test_a_step_frees_the_results_that_it_has_read(config: ModelConfig, schedule: Schedule, seed: int) -> None:
    """In inference mode. Otherwise a layer may be computed again for a backward pass, and read its results again."""
    keeper = Keeper()
    keeper.use(schedule)
    model = Transformer(config, keeper, CPU, torch.float32)
    random_weights(model, random.randrange(1000))
    for mode, freed in (torch.inference_mode(), True), (torch.no_grad(), False):
        keeper.kept.clear()
        with mode:
            model(torch.randint(config.vocab_size, (2, 6)), Causal(6, CPU))
        assert len(keeper.kept) in (LAYERS, MODULES)
        assert [total() is None for _, total in keeper.kept] == [freed] * len(keeper.kept)
