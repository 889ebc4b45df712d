"""The runner as on a GPU, tested on a CPU. References replace the kernels, and calling the step again replaces the replay of a
graph. Layout, buckets, padding and the state that one step leaves for the next are the real ones."""

import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import engine.core
import engine.paged_cache
from engine.core import Engine, EngineLimits
from engine.graphs import Graphs
from engine.paged_cache import PagedCache
from engine.protocol import Submit
from engine.runner import LARGEST_GRAPH, Runner, decode_buckets, prefill_buckets
from engine.step_inputs import PINNED, Capacity
from model import Transformer
from tests.engine.test_engine import (
    ALONE,
    PLAIN,
    WINDOWS,
    Answer,
    assert_logprobs,
    assert_same,
    config_of,
    load,
    plain_logits,
    random_model,
    random_params,
    random_submits,
    serve,
)
from tests.support.ranks import Ranks
from tp import World
from training.export import save_checkpoint


class CalledAgain(Graphs):
    """Replays a graph by running the step again. The results go into the tensors that the graph would write."""

    def capture(self, key: Hashable, step: Callable[[], Any]) -> None:
        step()
        output = step()

        def replay() -> None:
            for old, new in zip(vars(output).values(), vars(step()).values(), strict=True):
                old.copy_(new)

        self._captured[key] = replay, output


class Happened:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class WithGraphs(Runner):
    def __init__(self, model: Transformer, cache: PagedCache, text_ids: int, capacity: Capacity) -> None:
        super().__init__(model, cache, text_ids, capacity)
        self.graphs = CalledAgain(self.device)
        self._pinned = [torch.zeros(capacity.sequences, dtype=torch.int64) for _ in range(PINNED)]
        if random.random() < 0.5:
            self.capture()


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Engines get runners with graphs, and contexts call the kernels, whose references serve."""
    with (
        patch.object(torch.cuda, "Event", Happened),
        patch.object(engine.core, "Runner", WithGraphs),
        patch.object(engine.paged_cache, "on_gpu", lambda x: True),
    ):
        yield


@pytest.fixture(autouse=True)
def _everywhere() -> Iterator[None]:
    with as_on_a_gpu():
        yield


def engine_of(model: Transformer, blocks: int | None = None, **limits: Any) -> Engine:
    block_size = limits.setdefault("block_size", 8)
    size = PagedCache.bytes_per_block(model.attention_slots, block_size, model.n_kv_heads, model.config.head_dim, torch.float32)
    made = Engine(model, None, EngineLimits(**limits, kv_memory=(blocks or 100) * size + 1), ALONE)
    made.look_ahead = random.random() < 0.7
    return made


@pytest.mark.parametrize("name", PLAIN + WINDOWS)
def test_requests_of_every_kind_get_what_they_get_alone(name: str, seed: int) -> None:
    model = random_model(config_of(name))
    submits = random_submits(6)
    little, short = dict(blocks=9, max_num_seqs=7, max_batch_tokens=90), dict(max_batch_tokens=24, max_num_seqs=5)
    for limits, at_once in ((dict(max_num_seqs=20, max_batch_tokens=300), 1000), (short, 2), (little, 3)):
        made = engine_of(model, **limits)
        for order in (submits, submits[::-1]):  # the second time, prompts are in the cache
            answers = serve(made, order, at_once)
            for submit in submits:
                assert_same(model, submit, answers[submit.request_id].tokens)
                assert answers[submit.request_id].finish_reason == "length"


def test_plain_requests_are_looked_ahead_of(seed: int) -> None:
    """Greedy and sampled requests that end at stop tokens, after the next step has already been launched."""
    model = random_model(config_of("hybrid:2"))
    submits = random_submits(8, top_k=0, top_p=1.0, min_p=0.0, stop_token_ids=list(range(0, 101, 7)), max_tokens=20)
    made = engine_of(model, max_num_seqs=6)
    made.look_ahead = True
    launched: list[bool] = []
    launch = made.runner.launch

    def counted(chunks: Any, after: Any = None) -> Any:
        launched.append(after is not None)
        return launch(chunks, after)

    made.runner.launch = counted  # type: ignore[method-assign]
    aborts = {4: "r0", 6: "r3"}
    answers = serve(made, submits, 3, aborts)
    for submit in submits:
        answer = answers[submit.request_id]
        aborted = submit.request_id in aborts.values() and answer.finish_reason is None
        assert_same(model, submit, answer.tokens, aborted=aborted)
    assert 0 < sum(launched) < len(launched), seed


def assert_all_logprobs(model: Transformer, submits: list[Submit], answers: dict[str, Answer]) -> None:
    """Check the log-probabilities of requests with logprobs=3 and prompt_logprobs=2 against the plain model."""
    for submit in submits:
        answer = answers[submit.request_id]
        logits = plain_logits(model, submit.prompt_ids + answer.tokens)
        assert answer.prompt_logprobs is not None
        for i, entry in enumerate(answer.prompt_logprobs[1:]):
            assert entry is not None
            assert_logprobs(entry, logits[i], submit.prompt_ids[i + 1], 2)
        for i, entry in enumerate(answer.logprobs):
            assert_logprobs(entry, logits[len(submit.prompt_ids) - 1 + i], answer.tokens[i], 3)


def submits_with_logprobs() -> list[Submit]:
    return [Submit(str(i), list(range(i + 2, 3 * i + 5)), random_params(logprobs=3, prompt_logprobs=2)) for i in range(4)]


def test_log_probabilities(seed: int) -> None:
    model, submits = random_model(config_of("standard")), submits_with_logprobs()
    assert_all_logprobs(model, submits, serve(engine_of(model, max_batch_tokens=9), submits))


@pytest.mark.parametrize("most", [1, 2, 7, 16, 64, 100, 256, 2048, 5000])
def test_buckets_hold_every_step(most: int) -> None:
    for buckets, largest in ((decode_buckets(most), most), (prefill_buckets(most), min(most, LARGEST_GRAPH))):
        assert buckets == sorted(set(buckets)), buckets
        assert buckets[0] >= 1
        assert buckets[-1] == largest


def rank_serves(world: World, directory: Path, submits: list[Submit], seed: int) -> dict[str, Answer]:
    random.seed(seed)  # so that either all ranks capture graphs or none does
    with as_on_a_gpu():
        limits = EngineLimits(max_num_seqs=5, max_batch_tokens=24, kv_memory=1e6, block_size=8)
        made = Engine(load(world, directory), None, limits, world)
        made.look_ahead = True
        return serve(made, submits, 2)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", ["parallel", "hybrid:2", "desync-4x:4"])
def test_ranks_draw_from_their_parts_of_the_vocabulary(name: str, n: int, ranks: Ranks, tmp_path: Path, seed: int) -> None:
    model = random_model(replace(config_of(name), n_kv_heads=4))
    save_checkpoint(model, tmp_path, torch.float32)
    submits = random_submits(5)
    for answers in ranks.run(n, rank_serves, tmp_path, submits, seed):
        for submit in submits:
            assert_same(model, submit, answers[submit.request_id].tokens)
