"""The runner as on a GPU, tested on a CPU. References replace the kernels, and calling the step again replaces the replay of a
graph. Layout, buckets, padding and the state that one step leaves for the next are the real ones."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch

import engine.core
import engine.paged_cache
import engine.runner
import engine.speculation
from checkpoints.export import save_checkpoint
from comms.table import bucket
from engine.core import Engine
from engine.draft_costs import Costs
from engine.limits import EngineLimits
from engine.protocol import SamplingParams, Submit, ThinkingBudget
from engine.runner import LARGEST_GRAPH, Runner, decode_buckets, largest_graph, long_steps, prefill_buckets
from engine.schedules import Captured, Graphs
from engine.sequence import Sequence
from engine.step_inputs import ROUND
from model import Transformer
from tests.engine.test_drafts import JSON, check_drafts_of_head, random_head
from tests.engine.test_engine import (
    ALONE,
    KINDS,
    Answer,
    assert_same,
    assert_scores,
    cheap,
    config_of,
    load,
    random_model,
    random_params,
    random_submits,
    serve,
    tiny_tokenizer,
)
from tests.engine.test_engine import engine_of as engine_of_tokens
from tests.support.ranks import Ranks
from tp import World


class CalledAgain(Graphs):
    """Replays a graph by running the step again. The results go into the tensors that the graph would write."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model.norm.weight.device)
        self.comm = model.comm

    def capture(self, step: Callable[[], Any]) -> Captured:
        schedule = self.comm.schedule
        step()
        output = step()

        def replay() -> None:
            self.comm.use(schedule)
            for old, new in zip(tensors(output), tensors(step()), strict=True):
                old.copy_(new)

        return Captured(replay, output)


def tensors(output: Any) -> list[torch.Tensor]:
    """What a graph writes."""
    each = (value if isinstance(value, list) else [value] for value in vars(output).values())
    return [tensor for values in each for tensor in values if tensor is not None]


class Happened:
    def __init__(self, enable_timing: bool) -> None: ...

    def record(self) -> None: ...

    def elapsed_time(self, end: "Happened") -> float:
        return 2.0

    def query(self) -> bool:
        return random.random() < 0.5

    def synchronize(self) -> None: ...


class WithGraphs(Runner):
    def __init__(self, model: Transformer, *more: Any, **options: Any) -> None:
        super().__init__(model, *more, **options)
        self.graphs = CalledAgain(model)
        if random.random() < 0.5:
            self.capture()


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Engines get runners with graphs, and contexts call the kernels, whose references serve. What steps cost is measured twice, not
    twenty times, because `Happened` always tells the same time."""
    with (
        patch.object(torch.cuda, "Event", Happened),
        patch.object(engine.speculation, "ROUNDS", (2, 2)),
        patch.object(engine.core, "Runner", WithGraphs),
        patch.object(engine.paged_cache, "on_gpu", lambda x: True),
    ):
        yield


@pytest.fixture(autouse=True)
def _everywhere() -> Iterator[None]:
    with as_on_a_gpu():
        yield


def engine_of(model: Transformer, **limits: Any) -> Engine:
    made = engine_of_tokens(model, **dict(block_size=8) | limits)
    made.look_ahead = random.random() < 0.7
    return made


# Limits of an engine, and the number of requests that arrive before each step.
LIMITS: list[tuple[dict[str, Any], int]] = [
    (dict(max_num_seqs=20, max_batch_tokens=300), 1000),
    (dict(max_num_seqs=5, max_batch_tokens=24), 2),
    (dict(max_num_seqs=7, max_batch_tokens=90, n_blocks=9), 3),
]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_requests_of_every_kind_get_what_they_get_alone(kind: int, in_turn: Callable[..., Any], seed: int) -> None:
    model = random_model(config_of(in_turn(KINDS[kind], 1)))
    submits = random_submits(4, logprobs=random.choice([None, 3]), prompt_logprobs=random.choice([None, 2]))
    limits, at_once = in_turn(LIMITS, kind)
    made = engine_of(model, **limits)
    for order in (submits, submits[::-1]):  # the second time, prompts are in the cache
        answers = serve(made, order, at_once)
        for submit in submits:
            assert_same(model, submit, answers[submit.request_id].tokens)
            assert_scores(model, submit, answers[submit.request_id])
            assert answers[submit.request_id].finish_reason == "length"


LINES = r"start: /([^eai]*\n)*/"  # forbids many tokens, and to end within a line
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0.0),
    "sampled": dict(temperature=0.9),
    "filtered": dict(top_k=20, top_p=0.9, min_p=0.01),
    "penalties": dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "bias": dict(logit_bias={5: 4.0, 9: -100.0}),
    "allowed ids": dict(allowed_token_ids=list(range(3, 90))),
    "banned": dict(logit_bias={5: 9.0}, banned=[[5, 5], [5, 7, 5], [9]]),
    "reasoning": dict(thinking=ThinkingBudget(4, "", "</think>", [32, 19, 561, 968, 34])),
    "least length": dict(min_tokens=6, stop_token_ids=list(range(3, 800))),
    "log-probabilities": dict(logprobs=3, prompt_logprobs=2),
    "grammar": dict(grammar=JSON),
    "late grammar": dict(grammar=LINES, late_grammar=True),
    "all at once": dict(top_k=200, repetition_penalty=1.1, min_tokens=3, logprobs=1, grammar=JSON, temperature=0.8),
}


def recorded(made: Engine) -> list[bool]:
    """Whether each launch from now on follows a step in flight."""
    launched: list[bool] = []
    launch = made.runner.launch

    def counted(chunks: Any, after: Any = None) -> Any:
        launched.append(after is not None)
        return launch(chunks, after)

    made.runner.launch = counted  # type: ignore[method-assign]
    return launched


def with_tokenizer(model: Transformer, look_ahead: bool, draft_tokens: int = 0) -> Engine:
    limits = EngineLimits(max_num_seqs=20, max_batch_tokens=40, kv_memory=1e7, draft_tokens=draft_tokens)
    made = Engine(model, tiny_tokenizer(), limits, ALONE)
    made.look_ahead = look_ahead
    made.speculation.prepare()  # must leave nothing behind
    made.speculation.costs = Costs({1: 1.0, 2: 1.0})
    return made


def test_a_request_gets_the_same_ahead_and_in_turn(seed: int) -> None:
    """One request at a time, so that both compute the same steps, with the same rounding."""
    model = cheap()
    both = [with_tokenizer(model, ahead) for ahead in (True, False)]
    for kind in PARAMETERS:
        prompt = [random.randrange(3, 300) for _ in range(random.randint(1, 60))]
        stops = random.sample(range(3, 1000), 40)
        submit = Submit("one", prompt, random_params(max_tokens=14, **{"stop_token_ids": stops} | PARAMETERS[kind]))
        ahead, in_turn = (serve(made, [submit])["one"] for made in both)
        assert ahead == in_turn, kind


def test_steps_of_prompts_are_launched_ahead_before_a_decode_graph_is_captured(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first step, and the one that captures a graph, follow none. The pace hears of each step and of the next one."""
    monkeypatch.setattr(WithGraphs, "capture", lambda self: None)
    made = engine_of(cheap(), max_num_seqs=4, max_batch_tokens=8)
    made.look_ahead, launched, followed = True, recorded(made), list[tuple[Any, Any]]()
    monkeypatch.setattr(made.pace, "follow", lambda step, after: followed.append((step, after)))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    serve(made, [Submit(str(i), [random.randrange(3, 90) for _ in range(16)], params) for i in range(4)])
    prompts = next(i for i, (step, _) in enumerate(followed) if step.launches[0] == "decode")
    assert (
        prompts >= 8
        and launched[: prompts + 1] == [False, *[True] * (prompts - 1), False]
        and all(launched[prompts + 1 : prompts + 6])
    )
    assert all(after is step for (_, after), (step, _) in itertools.pairwise(followed) if after is not None)
    assert len(followed) == len(launched)


def test_no_step_waits_for_the_tokens_of_the_step_before(seed: int) -> None:
    """Requests of all kinds come, end at stop tokens and are aborted beside one that lasts: only the first step follows none."""
    made = with_tokenizer(cheap(), look_ahead=True)
    made.runner.capture()
    launched = recorded(made)
    lasting = Submit("lasting", [3], SamplingParams(max_tokens=150, temperature=1.0, seed=seed % 1000, ignore_eos=True))
    kinds = [random.choice(list(PARAMETERS)) for _ in range(14)]
    stops = random.sample(range(3, 1000), 30)
    others = [
        Submit(
            str(i),
            [random.randrange(3, 300) for _ in range(random.randint(1, 60))],
            random_params(max_tokens=12, **{"stop_token_ids": stops} | PARAMETERS[kind]),
        )
        for i, kind in enumerate(kinds)
    ]
    answers = serve(made, [lasting, *others], 2, {5: "3", 9: "7"})
    assert len(answers["lasting"].tokens) == 150 and made.scheduler.preemptions == 0
    assert launched.count(False) == 1, launched
    # `Happened` says that the device was idle for 2 ms before each step but the first
    assert made.runner.idle_seconds == pytest.approx(0.002 * (len(launched) - 1)) and made.stats().idle_share is not None
    for i, submit in enumerate(others):
        tokens, params = answers[submit.request_id].tokens, submit.params
        assert tokens or i in (3, 7)
        assert not params.allowed_token_ids or set(tokens) <= set(params.allowed_token_ids)


@pytest.mark.parametrize("largest", [16, LARGEST_GRAPH])
def test_a_step_begins_when_its_inputs_are_laid_out(largest: int, seed: int) -> None:
    """With and without a graph: between the event and the step's own work, the host does nothing."""
    log: list[str] = []

    class Logged(Happened):
        def record(self) -> None:
            log.append("event")

    with patch.object(torch.cuda, "Event", Logged), patch.object(engine.runner, "LARGEST_GRAPH", largest):
        made = engine_of(random_model(config_of("standard")), max_batch_tokens=90)
        runner = made.runner
        runner.capture()
        graphs = runner.graphs
        assert graphs is not None
        owners = (runner.decode, "write"), (runner.spans, "write"), (runner, "_write_drawn"), (graphs, "replay")
        for owner, name in (*owners, (runner, "_span_step"), (runner, "launch")):
            patched = getattr(owner, name)

            def called(*args: Any, name: str = name, patched: Any = patched, **more: Any) -> Any:
                log.append(name)
                return patched(*args, **more)

            setattr(owner, name, called)
        long = Submit("long", [random.randrange(101) for _ in range(40)], SamplingParams(max_tokens=5))
        serve(made, [long, *random_submits(6)], 2)
    steps = [step.split() for step in " ".join(log).split("launch")[1:]]
    for step in steps:
        begin = step.index("event")
        assert step[begin + 1] in ("replay", "_span_step") and not {"write", "_write_drawn"} & set(step[begin:]), step
    assert any("_span_step" in step and "replay" not in step for step in steps) == (largest < 90)


def test_drafts_beside_other_requests(seed: int) -> None:
    """Requests of all kinds with predictions, which are wrong in places, beside ones that are launched ahead."""
    model = cheap()
    plain = with_tokenizer(model, look_ahead=False)
    kinds = [kind for kind in PARAMETERS if kind != "grammar"]
    submits = [
        Submit(str(i), [3, *random.sample(range(3, 300), 5)], random_params(max_tokens=16, ignore_eos=True, **PARAMETERS[kind]))
        for i, kind in enumerate(kinds)
    ]
    guesses = {name: answer.tokens for name, answer in serve(plain, submits).items()}
    made = with_tokenizer(model, look_ahead=True, draft_tokens=5)
    launched = recorded(made)
    lasting = Submit("lasting", [3], SamplingParams(max_tokens=50, temperature=1.0, seed=seed % 1000))
    predicted = []
    for submit in submits:
        guess = [token if random.random() < 0.85 else 7 for token in guesses[submit.request_id]]
        params = msgspec.structs.replace(submit.params, prediction=guess)
        predicted.append(msgspec.structs.replace(submit, params=params))
    answers = serve(made, [lasting, *predicted], 3)
    total = made.speculation.total["prediction"]
    assert total.accepted > 0 and made.meter.generation_tokens > len(launched)
    assert 0 < sum(launched) < len(launched), "steps without drafts are launched ahead, others are not"
    for submit in [lasting, *submits]:
        if submit.params.grammar is None and submit.params.allowed_token_ids is None:
            assert_same(made.runner.model, submit, answers[submit.request_id].tokens)


def drawn_again(made: Engine) -> list[str]:
    """The ids of sequences whose token is drawn again from now on, for each time."""
    ids: list[str] = []
    draw_again = made.scheduler.draw_again

    def counted(sequence: Sequence) -> None:
        ids.append(sequence.request_id)
        draw_again(sequence)

    made.scheduler.draw_again = counted  # type: ignore[method-assign]
    return ids


def late_submits(kinds: list[str]) -> list[Submit]:
    """Requests with late grammars that forbid many tokens, and of the first one each token that is drawn without it."""
    submits, stops = [], list(range(1, 1000, 40))
    [forbidden] = tiny_tokenizer().encode("e", add_special_tokens=False)
    for i, kind in enumerate(kinds):
        late = dict(grammar=LINES, late_grammar=True, stop_token_ids=stops, max_tokens=20, allowed_token_ids=None)
        wrong = {} if i else dict(logit_bias=dict.fromkeys(stops, -1000.0) | {forbidden: 1000.0})
        params = random_params(**PARAMETERS[kind] | late | wrong)
        submits.append(Submit(str(i), [3, *random.sample(range(3, 300), 5)], params))
    return submits


def test_late_grammars(in_turn: Callable[..., Any], seed: int) -> None:
    """Requests of all kinds with a grammar that is checked behind the draw, in full batches that are launched ahead, with drafts,
    and where the cache is too small for all: each token is the one that is drawn without the mask, or with it if it must."""
    model, drafts, blocks = cheap(), in_turn([0, 4], 0), in_turn([200, 12], 1)
    endless = [Submit(name, [3] * 6, SamplingParams(max_tokens=50, ignore_eos=True)) for name in ("long 0", "long 1")]
    submits = endless + late_submits(random.sample([*PARAMETERS], 8))  # the first two take 14 blocks
    for look_ahead in (False, True):
        made = engine_of_tokens(model, blocks, tiny_tokenizer(), block_size=8, max_num_seqs=6, draft_tokens=drafts)
        made.look_ahead = look_ahead
        launched, again = recorded(made), drawn_again(made)
        answers = serve(made, submits, 3)
        assert len(again) > 10
        assert any(launched) == look_ahead or (look_ahead and drafts)  # steps with drafts are not launched ahead
        assert (made.scheduler.preemptions > 0) == (blocks < 50)
        for submit in submits:
            assert_same(model, submit, answers[submit.request_id].tokens)
        guesses = {s.request_id: answers[s.request_id].tokens for s in submits}
        submits = [
            msgspec.structs.replace(s, params=msgspec.structs.replace(s.params, prediction=guesses[s.request_id]))
            for s in submits
        ]


@pytest.mark.parametrize("most", [1, 2, 7, 16, 64, 100, 256, 2048, 5000, 9000])
def test_buckets_hold_every_step(most: int) -> None:
    prefill = [(prefill_buckets(most, ranks), min(most, largest_graph(ranks))) for ranks in (1, 2, 4, 8)]
    for buckets, largest in ((decode_buckets(most), most), *prefill):
        assert buckets == sorted(set(buckets)), buckets
        assert buckets[0] >= 1
        assert buckets[-1] == largest


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
def test_no_step_is_the_first_of_its_bucket_after_the_start(ranks: int, seed: int) -> None:
    """The first one may measure fused all-reduces, which takes seconds. Each bucket is tried once."""
    assert long_steps(2048, 2048) == []
    assert long_steps(2048, 8192) == [2560, 3072, 3584, 4096, 8192]
    for _ in range(20):
        most = ROUND * random.randint(1, 400)
        graphs = prefill_buckets(most, ranks)
        tried = long_steps(graphs[-1], most)
        steps = set(range(graphs[-1] + ROUND, most + 1, ROUND))
        assert {bucket(rows) for rows in steps} <= {bucket(rows) for rows in (graphs[-1], *tried)}, f"seed {seed}"
        assert set(tried) <= steps and len({bucket(rows) for rows in tried}) == len(tried), f"seed {seed}"


def test_a_rank_of_many_computes_no_more_in_a_graph() -> None:
    assert [largest_graph(ranks) for ranks in (1, 2, 3, 4, 6, 8)] == [2048, 2048, 2048, 4096, 6144, 8192]
    assert prefill_buckets(4096, 2) == prefill_buckets(2048, 8)
    assert max(b / a for a, b in itertools.pairwise(n for n in prefill_buckets(8192, 8) if n >= 1024)) <= 1.25


@pytest.mark.parametrize("streams", [1, 64, 65, 96, 128, 192, 200, 256])
def test_a_prompt_of_1024_beside_streams_is_padded_little(streams: int) -> None:
    tokens = 1024 + streams
    assert 0 <= next(n for n in prefill_buckets(2048, 1) if n >= tokens) - tokens < 64


def rank_serves(
    world: World, directory: Path, submits: list[Submit], seed: int, tokenizer: bool = False
) -> tuple[dict[str, Answer], list[str]]:
    """The answers, and the ids of sequences whose token was drawn again."""
    random.seed(seed)  # so that either all ranks capture graphs or none does
    with as_on_a_gpu():
        limits = EngineLimits(max_num_seqs=5, max_batch_tokens=24, kv_memory=1e6, block_size=8)
        made = Engine(load(world, directory), tiny_tokenizer() if tokenizer else None, limits, world)
        made.look_ahead = True
        again = drawn_again(made)
        return serve(made, submits, 2), again


@pytest.mark.long
def test_ranks_draw_from_their_parts_of_the_vocabulary(
    in_turn: Callable[..., Any], ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    n, name = in_turn((2, 4), 0), in_turn(("parallel", "hybrid:2", "desync-4x:4"), 0)
    model = random_model(replace(config_of(name), n_kv_heads=4))
    save_checkpoint(model, tmp_path, torch.float32)
    submits = random_submits(2)[2 * (n > 2) :]  # without long ones: each step of more ranks than cores is slow
    for answers, _ in ranks.run(n, rank_serves, tmp_path, submits, seed):
        for submit in submits:
            assert_same(model, submit, answers[submit.request_id].tokens)


def test_ranks_draw_again_together(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    """Each rank checks late grammars itself, and drops and draws the same tokens as the other."""
    model = cheap()
    save_checkpoint(model, tmp_path, torch.float32)
    submits = late_submits(random.sample([*PARAMETERS], 4))
    (answers, again), (others, other_again) = ranks.run(2, rank_serves, tmp_path, submits, seed, True)
    assert answers == others and again == other_again and len(again) > 4
    for submit in submits:
        assert_same(model, submit, answers[submit.request_id].tokens)


@pytest.mark.parametrize("source", ["itself", "head"])
def test_drafts_of_models(source: str, in_turn: Callable[..., str], seed: int) -> None:
    """Draft steps are replays of decode graphs behind span or decode steps. However many tokens each draft has, the host writes inputs once
    and waits once."""
    model = random_model(config_of(in_turn(("standard", "hybrid:2", "desync-2x:4"), len(source))))
    head = random_head(model)
    submits = random_submits(4, max_tokens=14, top_k=0, top_p=1.0, min_p=0.0)
    made = Engine(
        model, None, EngineLimits(draft_tokens=4, max_num_seqs=4, kv_memory=1e7), ALONE, head if source == "head" else model
    )
    made.capture()
    made.speculation.costs = Costs({1: 1.0, 2: 1.0})
    room, drafter, lengths = made.scheduler.draft_room, made.speculation.model_drafter, set[int]()
    assert drafter is not None
    draft, runner = drafter.draft, drafter.runner
    link = drafter._draft_step

    def linking(going: list[Sequence], *more: Any) -> Any:
        assert (runner.decode.positions[len(going) :] == -1).all() or not runner.decode._rows, "a draft that ended goes on"
        return link(going, *more)

    def drafting(counts: dict[Sequence, int]) -> Any:
        with (
            patch.object(runner, "collect", wraps=runner.collect) as collect,
            patch.object(runner.decode, "write", wraps=runner.decode.write) as write,
            patch.object(drafter, "_draft_step", linking),
        ):
            found = draft(counts)
        assert collect.call_count == bool(found) and write.call_count <= 1
        lengths.add(len(set(map(len, found.values()))))
        return found

    shorter = lambda wanted: {s: random.randint(1, n) for s, n in room(wanted).items()}  # noqa: E731
    with patch.object(made.scheduler, "draft_room", shorter), patch.object(drafter, "draft", drafting):
        answers = check_drafts_of_head(made, model, head, submits, 3) if source == "head" else serve(made, submits, 3)
    assert max(lengths) > 1, "all drafts had the same length"
    for submit in submits:
        assert_same(model, submit, answers[submit.request_id].tokens)
    if source == "itself":
        total = made.speculation.total["model"]
        assert total.tokens > 50 and total.accepted >= 0.95 * total.tokens
