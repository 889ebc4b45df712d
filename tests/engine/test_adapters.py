"""The engine with adapters: each request of a mixed batch gets the tokens or the embedding of the base with its adapter's weights
merged, alone, while other adapters come and go."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import comms
from checkpoints.lora import LoraLimits
from checkpoints.presets import model_config
from checkpoints.weights import load_model
from engine.adapters import Adapters
from engine.core import Engine
from engine.draft_costs import Costs
from engine.limits import EngineLimits
from engine.protocol import Abort, LoadAdapter, Pooling, SamplingParams, Submit, UnloadAdapter
from layers.attention import Causal
from model import Transformer
from tests.engine.test_embeddings import check, embeddings
from tests.engine.test_engine import ALONE, assert_same, config_of, load, random_submits
from tests.engine.test_runner import as_on_a_gpu
from tests.support.adapters import PARTS, merged, write_adapter
from tests.support.models import save_random
from tests.support.ranks import Ranks
from tp import World

POOLINGS: tuple[Pooling, ...] = ("mean", "last")
PROMPT = list(range(20, 33))
replaced = msgspec.structs.replace


def engine_with(world: World, base: Path, adapters: dict[str, Path], drafts: int, slots: int = 3) -> Engine:
    """An engine with few blocks. drafts: most tokens of a draft, the same on all ranks."""
    model = load_model(str(base), model_config(str(base), None, world.world_size), world, torch.float32)
    loaded = Adapters(model, LoraLimits(slots, 9), world)
    loaded.load_now([(name, str(path)) for name, path in adapters.items()])
    size = 4 * 2 * model.attention_slots * model.n_kv_heads * model.config.head_dim * 4  # bytes of a block
    limits = EngineLimits(max_batch_tokens=24, max_num_seqs=5, kv_memory=30.5 * size, block_size=4, draft_tokens=drafts)
    engine = Engine(model, None, limits, world, adapters=loaded)
    engine.speculation.costs = Costs({1: 1.0, 2: 1.0})  # what steps take must not decide what is tested
    return engine


def mixed(names: list[str]) -> list[Submit]:
    """The same prompts for all, so that each finds only its own blocks in the cache."""
    submits = random_submits(4)
    pooled = [
        Submit(f"{kind} {s.request_id}", s.prompt_ids, SamplingParams(pooling=kind)) for s in submits for kind in POOLINGS
    ]
    return [replaced(s, request_id=f"{s.request_id}-{name}", adapter=name) for s in submits + pooled for name in names]


def check_answers(engine: Engine, models: dict[str, Transformer], submits: list[Submit], rounding: float) -> None:
    """Twice, the second time with prompts in the cache."""
    for order in (submits, submits[::-1]):
        vectors, tokens = embeddings(engine, order, preempt=True)
        for name, model in models.items():
            own = [s for s in order if s.adapter == name]
            # the norm magnifies the rounding of a vector that is nearly zero
            check({s.request_id: vectors[s.request_id] for s in own if s.params.pooling}, model, own, 10 * rounding)
            for submit in own:
                if submit.params.pooling is None:
                    assert_same(model, submit, tokens[submit.request_id], rounding)


def save_all(folder: Path, name: str) -> tuple[Path, dict[str, Path], dict[str, Transformer]]:
    """A base, adapters, and the models that must answer, by the adapter's name."""
    base = save_random(replace(config_of(name), head_dim=16), folder / "base")
    adapters = {str(i): write_adapter(folder / str(i), base) for i in range(2)}
    own = {k: load(ALONE, merged(folder / f"merged-{k}", base, path)) for k, path in adapters.items()}
    return base, adapters, {"": load(ALONE, base)} | own


@pytest.mark.parametrize("place", range(2))
def test_mixed_batches(place: int, in_turn: Callable[..., Any], tmp_path: Path, seed: int) -> None:
    base, adapters, models = save_all(tmp_path, ("hybrid:2", "parallel")[place])
    with as_on_a_gpu() if in_turn((True, False), place) else nullcontext():
        check_answers(engine_with(ALONE, base, adapters, random.choice([0, 3])), models, mixed(list(models)), 1e-5)


def change_while_serving(
    world: World, base: Path, folders: dict[str, Path], drafts: int
) -> tuple[list[Any], dict[str, list[int]]]:
    """Load and unload adapters between the steps of answers. Returns what became of that, and the answers' tokens."""
    engine = engine_with(world, base, {"a": folders["a"]}, drafts, slots=2)
    adapters, tokens, done = engine.adapters, dict[str, list[int]](), list[Any]()
    assert adapters is not None
    params = SamplingParams(max_tokens=12, temperature=0)

    def ask(name: str, adapter: str) -> None:
        tokens[name] = []
        assert engine.submit(Submit(name, PROMPT, params, adapter=adapter)) is None

    def work(steps: int = 1000) -> None:
        """Go on until there is nothing to do, or for some steps."""
        while steps and (engine.has_work() or engine.preparing):
            engine.admit()
            if not engine.has_work():
                time.sleep(0.001)
                continue
            steps -= 1
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
        done.extend((d.name, d.error) for d in adapters.done)
        done.extend((refused.request_id, refused.message) for refused in engine.refused)
        adapters.done.clear()
        engine.refused.clear()

    def load(name: str, folder: str) -> None:
        engine.change_adapters(LoadAdapter("", name, str(folders[folder])))

    ask("first", "a")
    load("new", "b")
    load("new", "c")
    load("more", "c")  # no slot is left
    for i in range(3):
        ask(f"waits {i}", "new")
    engine.abort(Abort("waits 1"))
    work()
    ask("uses", "new")
    engine.change_adapters(UnloadAdapter("", "new"))  # it waits
    work(4)
    engine.change_adapters(UnloadAdapter("", "new"))  # it runs
    if engine._ahead is None:
        engine.scheduler._preempt(engine.scheduler.running[0])
    engine.change_adapters(UnloadAdapter("", "new"))
    work(3)
    ask("goes on", "a")
    engine.abort(Abort("uses"))  # a step that was launched ahead still has its row
    engine.change_adapters(UnloadAdapter("", "new"))
    load("new", "c")
    ask("again", "new")
    work()
    engine.change_adapters(UnloadAdapter("", "new"))
    if world.rank == world.world_size - 1:
        adapters._read = lambda files: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    load("new", "b")
    ask("refused", "new")
    work()
    assert not adapters.loading and engine.scheduler.blocks.used == 0
    return done, tokens


@pytest.mark.parametrize("count", [1, 2])
def test_adapters_come_and_go_beside_answers(count: int, ranks: Ranks, tmp_path: Path, seed: int) -> None:
    base = save_random(replace(config_of("standard"), head_dim=16), tmp_path / "base")
    folders = {name: write_adapter(tmp_path / name, base, PARTS) for name in "abc"}
    models = {name: load(ALONE, merged(tmp_path / f"merged {name}", base, path)) for name, path in folders.items()}
    logits = [model(torch.tensor([PROMPT]), Causal(len(PROMPT), torch.device("cpu"))) for model in models.values()]
    assert not any(torch.allclose(one, other) for one, other in combinations(logits, 2))
    drafts = random.choice([0, 3])
    if count == 1:
        with as_on_a_gpu():
            results = [change_while_serving(ALONE, base, folders, drafts)]
    else:
        results = ranks.run(count, change_while_serving, base, folders, drafts)
    for done, tokens in results:
        use = "1 running or waiting answers use the adapter 'new'; try again when they have ended"
        failed = done.pop(-2)
        assert done == [
            ("new", "an adapter 'new' is loaded already; unload it first"),
            ("more", "2 adapters are loaded, which is --max-loras; unload one first"),
            *[("new", error) for error in ("", use, use, use, "", "", "")],
            ("refused", "the adapter 'new' is not loaded"),
        ]
        assert failed[0] == "new" and ("ZeroDivisionError" in failed[1] or "another rank could not read" in failed[1])
        assert not tokens.pop("refused") and not tokens.pop("waits 1")
        used = {"first": "a", "goes on": "a", "again": "c", "waits 0": "b", "waits 2": "b", "uses": "b"}
        for name, found in tokens.items():
            submit = Submit(name, PROMPT, SamplingParams(max_tokens=12, temperature=0))
            assert_same(models[used[name]], submit, found, aborted=name == "uses")


def test_requests_that_wait_for_an_adapter_end_with_all_others(tmp_path: Path, seed: int) -> None:
    """Their frontend has ended. The adapter itself is loaded."""
    base = save_random(replace(config_of("standard"), head_dim=16), tmp_path / "base")
    engine, may_read = engine_with(ALONE, base, {}, 0), threading.Event()
    adapters = engine.adapters
    assert adapters is not None
    read = adapters._read
    adapters._read = lambda files: read(files) if may_read.wait(300) else []  # type: ignore[method-assign]
    engine.change_adapters(LoadAdapter("", "a", str(write_adapter(tmp_path / "a", base))))
    assert engine.submit(Submit("gone", PROMPT, SamplingParams(max_tokens=3), adapter="a")) is None
    engine.abort_all()
    may_read.set()
    while engine.preparing:
        engine.admit()
    assert list(adapters.known) == ["a"] and not engine.has_work() and not engine.refused


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["hybrid:2", "parallel", "desync-2x:4"])
def test_mixed_batches_on_a_gpu(name: str, tmp_path: Path, seed: int) -> None:
    base, adapters, models = save_all(tmp_path, name)
    world = World(0, 1, torch.device("cuda"), comms.Local())
    check_answers(engine_with(world, base, adapters, random.choice([0, 3])), models, mixed(list(models)), 1e-4)
