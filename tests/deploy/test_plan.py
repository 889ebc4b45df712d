"""deploy/plan: the simulated replica against the real scheduler and queueing theory, step times against raw sweeps, memory, command."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from deploy.plan import __main__ as program
from deploy.plan.choice import RESERVE, largest_batch, measured
from deploy.plan.load import HOST_SECONDS, LEAD, Goals, largest_rate, poisson, simulate
from deploy.plan.steps import RESULTS, Steps, Tables, gpu, read_rows, setup_of
from engine.limits import EngineLimits, cache_memory
from engine.protocol import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import BlockManager, Chunk
from engine.sequence import Sequence as Request
from scripts.sweep.rows import Setting
from tests import MODELS, ROOT
from tests.support.command_line import Here

LLAMA = ("--model", "llama-3-8b", "--gpus", "1", "--ttft", "300", "--itl", "15")


@pytest.fixture(scope="module")
def tables() -> Tables:
    return measured()


def steps_of(tables: Tables, most: int = 256, budget: int = 2048, tp: int = 1) -> Steps:
    return Steps(tables, setup_of("llama-3-8b", gpu("h200"), "standard", tp, None), most, budget)


def scheduled(steps: Steps, arrivals: Sequence[float], prompts: Sequence[int], answers: Sequence[int]) -> tuple[Any, Any]:
    """When the first and the last token of each request come if the engine's own scheduler chooses each step, as `Engine.step` calls
    it: the next step is scheduled shortly before the end of this one, or when this one begins, if it follows none."""
    scheduler, unused = Scheduler(BlockManager(1 << 16, 16), steps.most, steps.budget, 1 << 20), iter(range(1 << 40))
    found, coming, now = [(0.0, 0.0)] * len(arrivals), 0, 0.0
    ahead: list[Chunk] = []

    def arrive(until: float) -> None:
        nonlocal coming
        while coming < len(arrivals) and arrivals[coming] <= until:
            ids = [next(unused) for _ in range(prompts[coming])]
            scheduler.add(Request(str(coming), ids, len(ids), SamplingParams(max_tokens=answers[coming])))
            coming += 1

    while coming < len(arrivals) or scheduler.has_work():
        if not scheduler.has_work():
            now = max(now, arrivals[coming])
        arrive(now)
        follows, step = bool(ahead), ahead or scheduler.schedule()
        decoding = [c for c in step if c.start >= c.sequence.prompt_length]
        reading = [c for c in step if c.start < c.sequence.prompt_length]
        tokens, pairs = sum(c.count for c in reading), sum(c.count * (c.start + c.count / 2) for c in reading)
        begin, now = now, now + steps.seconds(len(decoding), sum(c.stop for c in decoding), tokens, pairs)
        arrive(max(begin, now - LEAD) if follows else begin)
        ahead = scheduler.schedule(in_flight=True)
        for chunk in step:
            if chunk.samples:
                request, is_first = int(chunk.sequence.request_id), chunk.sequence.generated == 0
                scheduler.record(chunk.sequence, next(unused))
                found[request] = (now if is_first else found[request][0], now)
    return np.array(found).T


def test_a_simulated_replica_computes_the_steps_of_the_scheduler(tables: Tables, seed: int) -> None:
    for most, budget in ((4, 96), (random.randint(1, 40), random.randint(64, 4096))):
        steps, n = steps_of(tables, most, budget), 60
        arrivals = np.cumsum(np.random.default_rng(seed).exponential(random.choice((0.003, 0.03, 0.3)), n)).tolist()
        prompts, answers = ([random.randint(1, most) for _ in range(n)] for most in (1500, 60))
        first, end = scheduled(steps, arrivals, prompts, answers)
        found = simulate(steps, arrivals, prompts, answers)
        np.testing.assert_allclose(found.first, first - arrivals + HOST_SECONDS, rtol=1e-9)
        np.testing.assert_allclose(found.end, end + HOST_SECONDS, rtol=1e-9)


def test_answers_of_one_token_wait_as_in_a_queue_with_one_server(tables: Tables, seed: int) -> None:
    """Each prompt fills a step, so this is M/D/1: waiting times follow Lindley's recursion, and have the mean of Pollaczek and
    Khinchin, here for arrivals that are always the same."""
    steps = steps_of(tables)
    service = steps.seconds(0, 0, 2048, 2048**2 / 2)

    def waits(busy: float, n: int, seed: int) -> tuple[Any, Any]:
        arrivals = poisson(busy / service, n, seed)
        return arrivals, simulate(steps, arrivals.tolist(), [2048] * n, [1] * n).first - service - HOST_SECONDS

    arrivals, found = waits(random.uniform(0.2, 1.2), 1000, seed)
    expected = [0.0]
    for gap in np.diff(arrivals):
        expected.append(max(0.0, expected[-1] + service - gap))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert waits(0.5, 20_000, 1)[1].mean() == pytest.approx(0.5 * service / (2 - 2 * 0.5), rel=0.1)


def test_a_lone_request_takes_its_prefill_and_its_decode_steps(tables: Tables, seed: int) -> None:
    prompt, answer = random.randint(1, 6000), random.randint(2, 300)
    steps = steps_of(tables, tp=random.choice((1, 2, 4, 8)))
    parts = [(done, min(2048, prompt - done)) for done in range(0, prompt, 2048)]
    found = simulate(steps, [0.0], [prompt], [answer])
    assert found.first[0] == pytest.approx(HOST_SECONDS + sum(steps.seconds(0, 0, n, n * (d + n / 2)) for d, n in parts))
    assert found.mean_gap[0] == pytest.approx(np.mean([steps.seconds(1, prompt + i, 0, 0) for i in range(1, answer)]))


def test_measured_rows_are_predicted_as_measured(tables: Tables) -> None:
    """Decode steps of a raw file, read here once more, and prompts, whose steps have 64 x 1,024 tokens at most."""
    setup, bounds = setup_of("llama-3-8b", gpu("h100"), "standard", 1, None), dict[tuple[str, int], list[float]]()
    for path in (RESULTS / "h100-1").glob("sweep*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            setting = line["setting"]
            if (setting["model"], setting["variant"], setting.get("deterministic", False)) == ("llama-3-8b", "standard", False):
                for kind, key in (("decode", "decode_ms_per_token"), ("prefill", "prefill_ms")):
                    median = np.median([sample[key] for sample in line["samples"]])
                    steps = max(1, setting["batch"] // 64) if kind == "prefill" else 1
                    bounds.setdefault((kind, setting["batch"] // steps), []).append(float(median) / steps)
    assert len(bounds) == 9 + 7
    assert tables.source(setup) == "measured" and tables.source(replace(setup, tp=8)) == "roofline"
    for (kind, batch), times in bounds.items():
        predicted = Steps(tables, setup, batch, batch * 1024)
        work = (batch, batch * (1024 + 32), 0, 0.0) if kind == "decode" else (0, 0, batch * 1024, batch * 1024**2 / 2)
        found = predicted.seconds(*work) * 1e3
        assert min(times) * 0.999 <= found <= max(times) * 1.001, (kind, batch)


def test_a_prefill_is_divided_by_its_steps(tmp_path: Path, seed: int) -> None:
    """Those that a sample's `step_tokens` make of 64 prompts of 1,024 tokens; one in sweeps that do not say it."""
    setting = asdict(Setting("llama-3-8b", "standard", 1, 64, 1024, 32, device="cuda", dtype="bfloat16"))
    found = []
    for more in {}, {"step_tokens": 1 << 13}:
        samples = [{"decode_ms_per_token": 10.0, "prefill_ms": 2000.0} | more]
        (path := tmp_path / "rows.jsonl").write_text(
            json.dumps({"setting": setting, "samples": samples, "machine": {"gpus": "1 x H100"}})
        )
        found.append([(row.tokens, row.seconds) for row in read_rows([path])])
    path.write_text(path.read_text().replace("llama-3-8b", "qwen3-30b-a3b"))
    assert read_rows([path]) == []  # a step reads some experts only
    (decode, (tokens, seconds)), several = found
    assert tokens == 1 << 16 and several == [decode, (1 << 13, pytest.approx(seconds / 8))]


def test_memory_is_that_of_the_checkpoint(seed: int) -> None:
    folder = MODELS / "tiny-standard"
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  # it is no dict
    setup = setup_of(str(folder), gpu("h100"), None, 1, None)
    assert setup.weights == sum(2 * np.prod(shape) for shape in shapes if len(shape) == 2)
    config, tokens, fits = setup.config, random.randint(1, 1000), random.randint(0, 50)
    block = 16 * config.n_layers * 2 * config.n_kv_heads * config.head_dim * 2
    free = (fits + 0.5) * -(-tokens // 16) * block
    # the cache gets half of so little
    small = replace(setup, gpu=replace(setup.gpu, memory=setup.weights + RESERVE + 2 * free))
    assert largest_batch(small, tokens, 1000) == fits
    assert largest_batch(small, tokens, 7) == min(7, fits)
    assert setup_of("llama-3-8b", gpu("h200"), "standard", 1, "int4").weights < 6e9


@pytest.mark.parametrize("tp", [2, 4])
def test_a_cache_is_as_large_as_the_server_makes_it(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Llama-70B on two H100s, where graphs need much of what the weights leave, and on four."""
    setup = setup_of("llama-3-70b", gpu("h100"), "standard", tp, None)
    free = int(setup.gpu.memory - RESERVE - setup.weights)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, int(setup.gpu.memory)))
    tokens = cache_memory(EngineLimits(), torch.device("cuda")) / setup.kv_bytes
    assert largest_batch(setup, 1280, 1 << 20) == int(tokens // 1280)


def test_looser_goals_and_faster_steps_allow_more_load(tables: Tables, seed: int) -> None:
    steps, first, gap = steps_of(tables, 32), random.uniform(0.05, 0.5), random.uniform(0.006, 0.03)
    rates = [largest_rate(steps, 512, 32, Goals(first * f, gap * f, share), seed) for f, share in ((1, 1), (1, 0.8), (2, 0.8))]
    assert rates == sorted(rates)
    assert largest_rate(steps, 512, 32, Goals(first, 1e-6, 0.5), seed) == 0


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    monkeypatch.chdir(ROOT)
    return Here(monkeypatch, capfd, program.main, ())


def test_the_command_plans_and_prints(plan: Here) -> None:
    asked = (*LLAMA, "--widths", "bf16", "fp8", "--variants", "standard", "--max-num-seqs", 8, "--prompt", 256, "--answer", 16)
    done = plan(*asked, "--json")
    plans = done.record["plans"]
    assert done.code == 0 and [p["width"] for p in plans] == ["fp8", "bf16"]
    for one in plans:
        assert one["ttft_ms"]["p90"] <= 300 and one["itl_ms"]["p90"] <= 15 and one["times"] == "measured"
        assert one["tokens_per_second"] == pytest.approx(16 * one["requests_per_second"], rel=1e-3)
    text = plan(*asked, "--widths", "fp8").out
    assert f"{plans[0]['requests_per_second']:.2f}" in text
    assert "python -m server --tp 1 --model llama-3-8b" in text and "--quantize fp8" in text


def test_on_one_rank_the_first_variant_stands_for_all(plan: Here) -> None:
    asked = ("--model", "llama-3-8b", "--gpus", "2", "--ttft", "300", "--itl", "15", "--widths", "bf16", "--max-num-seqs", 8)
    found = plan(*asked, "--prompt", 64, "--answer", 8, "--variants", "ladder", "standard", "--json").record
    assert sorted((one["tp"], one["variant"]) for one in found["plans"]) == [(1, "ladder"), (2, "ladder"), (2, "standard")]


def test_a_variant_keeps_its_number(plan: Here) -> None:
    """In the table and the command, and the plans differ. Halves of 80 and of 16 layers are the same layers, 8 of each are not."""
    asked = (
        "--model",
        "llama-3-8b",
        "--gpus",
        2,
        "--tp",
        2,
        "--ttft",
        300,
        "--itl",
        15,
        "--widths",
        "bf16",
        "--max-num-seqs",
        8,
    )
    flags = (*asked, "--prompt", 64, "--answer", 8, "--variants", "hybrid:8", "hybrid:24", "hybrid", "hybrid:16")
    found = {one["variant"]: one["requests_per_second"] for one in plan(*flags, "--json").record["plans"]}
    assert found["hybrid:24"] > found["hybrid"] > found["hybrid:8"] and len(found) == 3
    assert re.search("^bf16 +hybrid:8 .*--variant hybrid:24$", plan(*flags).out, re.MULTILINE | re.DOTALL)

    def layer(model: str, variant: str) -> object:
        return setup_of(model, gpu("h200"), variant, 2, None).layer

    assert layer("llama-3-70b", "hybrid") == layer("llama-3-70b:16", "hybrid:8") != layer("llama-3-70b", "hybrid:8")
    assert layer("llama-3-70b", "desync-2x") == layer("llama-3-70b", "desync-2x:2") != layer("llama-3-70b", "desync-2x:4")


def test_the_variant_of_a_checkpoint_is_its_own(plan: Here, tmp_path: Path) -> None:
    """With its own layers, though those of a hybrid are not the upper half; only another one has to be asked for."""
    config = json.loads((MODELS / "tiny-hybrid" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"ladder_layers": [1]}))
    assert setup_of(str(tmp_path), gpu("h100"), "hybrid", 2, None).config.ladder_layers == (1,)
    asked = ("--model", tmp_path, "--gpus", 2, "--tp", 2, "--ttft", 300, "--itl", 15, "--prompt", 64, "--answer", 8)
    few = (*asked, "--widths", "bf16", "--max-num-seqs", 8)
    assert "--variant" not in plan(*few).out
    assert "--variant ladder" in plan(*few, "--variants", "ladder").out


def test_a_quantized_checkpoint_is_not_quantized_once_more(plan: Here) -> None:
    model = ("--model", MODELS / "tiny-hybrid-int4", "--gpus", 1, "--gpu", "h100", "--ttft", 500, "--itl", 20)
    flags = (*model, "--prompt", 64, "--answer", 8, "--max-num-seqs", 8)
    (found,) = plan(*flags, "--json").record["plans"]
    assert (found["width"], found["variant"], found["tp"]) == ("int4", "hybrid", 1)
    assert "is quantized already" in plan.refuses(*flags, "--widths", "bf16")


def test_docs_quote_what_the_command_prints_now(plan: Here) -> None:
    """docs/planner.md leaves lines out, but changes none and keeps their order."""
    page = (ROOT / "docs" / "planner.md").read_text()
    (flags,) = re.findall(r"^    python -m deploy\.plan (.*)", page, re.MULTILINE)
    (quoted,) = re.findall(r"```\n(weights .*?)```", page, re.DOTALL)
    printed = plan(*flags.split()).out.splitlines()
    assert quoted.splitlines() == [line for line in printed if line in quoted.splitlines()], "\n".join(printed)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--gpu", "a100"), "known: h100, h200"),
        (("--tp", "3"), "give a divisor of --gpus"),
        (("--prompt", "8000", "--answer", "400"), "exceed the context of llama-3-8b, 8192 tokens"),
        (("--share", "1.5"), "0.9 is nine of ten"),
        (("--ttft", "0"), "no number above 0"),
        (("--widths", "int2"), "known are bf16"),
        (("--variants", "ladders"), "unknown variant 'ladders'"),
        (("--itl", "0.5", "--widths", "bf16", "--variants", "standard"), "raise the goals above that"),
        (("--model", "llama-3.1-405b", "--widths", "bf16"), "GB"),
        (("--sweeps", "README.md"), "`make sweep` writes one"),
    ],
)
def test_bad_input_is_one_line(plan: Here, flags: tuple[str, ...], says: str) -> None:
    assert says in plan.refuses(*LLAMA, *flags)
