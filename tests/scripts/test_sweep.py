"""scripts/sweep: its configurations and their order, finished and failed configurations, and one run on real ranks."""

import argparse
import json
import random
import re
import sys
import textwrap
import weakref
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from comms import Local, parse_link
from engine import LLM
from errors import UserError
from scripts.lib.process_tree import end, kill
from scripts.sweep import __main__ as sweep
from scripts.sweep import grids, launches, tables, vllm_worker, worker
from scripts.sweep.launches import reason
from scripts.sweep.rows import Row, Setting, finished, read_rows
from scripts.trace import benchmark_params
from tests import ROOT
from tests.support import quick_start
from tests.support.command_line import environment
from tp import World

CPU = torch.device("cpu")
TINY = Setting("tiny", "standard", 1, 1, 4, 3)


def arguments(*argv: object) -> argparse.Namespace:
    before, sys.argv = sys.argv, ["sweep.py", "--device", "cpu", *map(str, argv)]
    try:
        return sweep.parse_args()
    finally:
        sys.argv = before


# --- choice of configurations --------------------------------------------------------------------------------------------


def test_settings_are_the_product_with_variants_next_to_each_other() -> None:
    axes = "--models tiny llama-3-8b --variants standard ladder --tp 2 4 --batch-sizes 1 8 --interconnects default 1ms,1GB/s"
    settings = grids.settings_of(arguments(*axes.split(), "--prompt-lengths", 7, "--new-tokens", 5, "--runs", 4))
    assert len(settings) == len(set(settings)) == 32
    assert all((s.prompt_length, s.new_tokens, s.runs, s.device, s.dtype) == (7, 5, 4, "cpu", "float32") for s in settings)
    for first, second in zip(settings[::2], settings[1::2], strict=True):
        assert first.of_variant("ladder") == second and first.variant == "standard"


def test_one_launch_for_all_that_share_ranks_hosts_and_environment() -> None:
    axes = "--tp 4 2 --interconnects no-p2p default two-hosts 1ms,1GB/s NCCL_ALGO=Ring --batch-sizes 1 2"
    settings = grids.settings_of(arguments(*axes.split()))
    found = list(launches.by_launch(settings))
    between = [(1, ()), (2, ()), (1, (("NCCL_ALGO", "Ring"),)), (1, (("NCCL_P2P_DISABLE", "1"),))]
    expected = [launches.Start(tp, hosts, settings[0].device, environment) for tp in (2, 4) for hosts, environment in between]
    assert sorted((start for start, _ in found), key=str) == sorted(expected, key=str)
    assert sorted((s.key for _, part in found for s in part)) == sorted(s.key for s in settings)
    plain = {s.interconnect for start, part in found for s in part if start.hosts == 1 and not start.environment}
    assert plain == {"default", "1ms,1GB/s"}
    assert {s.interconnect for start, part in found for s in part if start.hosts == 2} == {"two-hosts"}


# --- the order of runs ---------------------------------------------------------------------------------------------------


def test_variants_take_turns_if_they_fit_together() -> None:
    group = [Setting("tiny", v, 1, 1, 4, 3, runs=2, profile=True) for v in ("standard", "ladder")]
    assert [(n, s.variant[0]) for n, s in worker.turns(group, True)] == [(n, v) for n in range(4) for v in "sl"]
    assert [(n, s.variant[0]) for n, s in worker.turns(group, False)] == [(n, v) for v in "sl" for n in range(4)]


def test_a_profile_shows_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that it profiles has computed the same before, so that it captures no graph meanwhile."""
    models, setting, engines = worker.Models(World(0, 1, CPU, Local())), replace(TINY, new_tokens=12), list[Any]()
    llm, _ = models.get(setting)

    def record(llm: LLM, prompts: list[list[int]], new_tokens: int, *_: Any) -> None:
        engines.append(llm.engine)
        llm.generate(prompts, benchmark_params(new_tokens))
        engines.append(llm.engine)

    monkeypatch.setattr(worker, "record", record)
    worker.profiled_split(llm, setting, replace(models.world, rank=1))  # rank 0 would read the trace
    assert engines[0] is engines[1] is not None


def messages(capsys: pytest.CaptureFixture[str], group: list[Setting], together: bool) -> list[Any]:
    """The messages that a group prints on one rank, which is this process."""
    models = worker.Models(World(0, 1, CPU, Local()))
    capsys.readouterr()
    worker.run_group(models, group, together)
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(worker.MARK) for line in lines)
    return [json.loads(line[len(worker.MARK) :]) for line in lines]


@pytest.mark.parametrize("together", [True, False])
def test_a_group_on_one_rank(capsys: pytest.CaptureFixture[str], together: bool) -> None:
    """An impossible variant fails alone; the others have all their samples."""
    group = [Setting("tiny", v, 1, 2, 4, 3, runs=2) for v in ("standard", "bogus", "ladder")]
    said = messages(capsys, group, together)
    (failed,) = [one for one in said if "failed" in one]
    assert failed["failed"]["variant"] == "bogus" and "unknown variant" in failed["error"]
    done = {one["done"]["variant"]: one for one in said if "done" in one}
    assert set(done) == {"standard", "ladder"}
    for one in done.values():
        assert len(one["samples"]) == 2
        for sample in one["samples"]:
            assert len(sample["step_ms"]) == 2 and sample["prefill_ms"] > 0 and sample["exposed_ms"] == 0
            middle = sum(sample["step_ms"]) / 2
            assert sample["decode_ms_per_token"] == pytest.approx(middle, abs=1e-3)
            assert sample["tokens_per_second"] == pytest.approx(2 / middle * 1e3, rel=1e-2)
            assert sample["weight_gb_per_second"] > 0 and sample["peak_memory_gb"] > 0
    begun = [one["begin"]["variant"] for one in said if "begin" in one]
    assert begun.count("standard") == begun.count("ladder") == 3 and begun.count("bogus") == 1


def test_memory_that_is_short_for_all_suffices_for_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Out of memory with several models loaded raises `Shortage`. With one model loaded it is that configuration's error."""
    real, group = worker.one_run, [Setting("tiny", v, 1, 1, 4, 3, runs=1) for v in ("standard", "ladder")]

    def one_run(model: Any, comm: Any, s: Setting, world: World) -> Any:
        if s.variant == "ladder":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
        return real(model, comm, s, world)

    monkeypatch.setattr(worker, "one_run", one_run)
    with pytest.raises(worker.Shortage):
        messages(capsys, group, together=True)
    said = messages(capsys, group, together=False)
    assert [one["error"] for one in said if "failed" in one] == ["out of memory: CUDA out of memory. Tried to allocate"]
    assert [one["done"]["variant"] for one in said if "done" in one] == ["standard"]


@pytest.mark.parametrize("short", [False, True])
def test_one_model_at_a_time_means_one(monkeypatch: pytest.MonkeyPatch, short: bool) -> None:
    """If models do not fit together, each one is freed before the next one is built; also after a shortage, whose exception must not
    keep them alive."""
    built, alive_before, shortages = list[weakref.ref[Any]](), list[int](), [True] * short
    real_load, real_run = worker.load_model, worker.one_run

    def load(*args: Any) -> Any:
        alive_before.append(sum(ref() is not None for ref in built))
        built.append(weakref.ref(model := real_load(*args)))
        return model

    def one_run(model: Any, comm: Any, s: Setting, world: World) -> Any:
        if s.variant == "ladder" and shortages:
            shortages.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real_run(model, comm, s, world)

    monkeypatch.setattr(worker, "load_model", load)
    monkeypatch.setattr(worker, "one_run", one_run)
    monkeypatch.setattr(worker.Models, "fit_together", lambda *_: short)
    group = [Setting("tiny:2", v, 1, 1, 4, 3, runs=1) for v in ("standard", "parallel", "ladder")]
    worker.run_together_or_in_turn(worker.Models(World(0, 1, CPU, Local())), group)
    assert alive_before == [*([0, 1, 2] if short else []), 0, 0, 0]


# --- the time of a simulated link ----------------------------------------------------------------------------------------


class TwoRanks(Local):
    """One of two ranks, whose all-reduces return at once without communication."""

    world_size = 2


def test_a_metered_link_adds_up_what_its_sums_take() -> None:
    """Three all-reduces, two of them overlapped with a millisecond of compute, on the test's own clock."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    link = worker.MeteredLink(TwoRanks(), parse_link("1ms,1MB/s"), clock=lambda: now, sleep=sleep)
    each = 1e-3 + 2 * (1 / 2) * 500 * 4 / 1e6
    for busy in (0.0, 1e-3, 1e-3):
        pending = link.begin_all_reduce(torch.ones(500))
        now += busy
        pending.wait()
    assert link.link_seconds == pytest.approx(3 * each)
    assert link.waited == pytest.approx(3 * each - 2e-3)


# --- the results file ----------------------------------------------------------------------------------------------------


def test_what_is_in_the_file_is_done(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = launches.RowsFile(path)
    failed = TINY.of_variant("ladder")
    file.add(TINY, samples=[{"prefill_ms": 1.0, "step_ms": []}])
    file.add(failed, error="out of memory")
    with path.open("a") as torn:
        torn.write('{"setting": {"mod')
    again = launches.RowsFile(path)
    assert path.read_text().endswith("}\n")
    assert [again.is_done(s, False) for s in (TINY, failed, TINY.of_variant("parallel"))] == [True, True, False]
    assert not again.is_done(failed, retry=True) and again.is_done(TINY, retry=True)
    for name, value in asdict(TINY).items():  # a configuration with any other value is a different one
        other = "x" if value is None else value + "x" if isinstance(value, str) else value + 1
        assert not again.is_done(Setting(**{**asdict(TINY), name: other}), False), name


# --- crashes -------------------------------------------------------------------------------------------------------------

FAKE = """
    import json, os, sys, time
    def say(**what): print("@sweep " + json.dumps(what), flush=True)
    for s in json.load(open(sys.argv[-1])):
        print("NCCL version 2.x"); say(begin=s)
        if s["variant"] == "crash": print("[rank0]: RuntimeError: boom\\nW1 ended", file=sys.stderr); os._exit(3)
        if s["variant"] == "hang": time.sleep(60)
        if s["variant"] == "oom": say(failed=s, error="out of memory")
        else: say(done=s, samples=[{"prefill_ms": 1.0}], split=None, variant="v", communicator="c")
"""


def test_a_crash_takes_its_own_configuration_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "fake.py"
    program.write_text(textwrap.dedent(FAKE))
    started: list[int] = []
    real = launches.launch

    def launch(command: Any, *more: Any) -> str | None:
        started.append(len(json.loads(Path(command[-1]).read_text())))
        return real([sys.executable, "-I", "-S", str(program), command[-1]], *more)

    monkeypatch.setattr(launches, "launch", launch)
    file = launches.RowsFile(tmp_path / "rows.jsonl")
    todo = [TINY.of_variant(v) for v in ("a", "oom", "crash", "b", "hang", "c")]
    with tqdm(disable=True) as bar:
        launches.run_all(file, launches.Start(1, 1, "cpu", ()), list(todo), 5.0, bar)
    found = {row.setting.variant: row.error for row in read_rows(file.path)}
    assert found == {
        "a": None,
        "oom": "out of memory",
        "crash": "exit code 3: RuntimeError: boom",
        "b": None,
        "hang": "nothing happened for 5 s",
        "c": None,
    }
    assert started == [6, 3, 1]


def test_the_reason_is_a_ranks_own_line(seed: int) -> None:
    rank, kind = random.randrange(8), random.choice(("ValueError", "torch.distributed.DistBackendError", "my.OwnException"))
    said = f"W1 warning\n[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]:     raise it\n[rank{rank}]: {kind}: gone\n"
    launcher = "E1 failed\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: x\n ====\nroot cause\n"
    assert reason(said + launcher) == f"{kind}: gone"
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried"
    assert reason(f"{said}[rank{rank + 1}]: {memory}\n{launcher}") == memory  # after which other ranks miss this one
    told = "error: --device cuda, but this machine shows no GPU"
    assert reason(f"W1 warning\n{told}\n{launcher}") == told


@pytest.mark.parametrize("parent", ["child.wait()", "pass"], ids=["hangs", "has ended"])
def test_a_process_that_keeps_the_output_open_delays_nothing(parent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's child ignores SIGTERM. Its second line would come after the time limit."""
    child = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print('@sweep {"pid": %d}' % os.getpid(), flush=True)
        time.sleep(60)
        print('@sweep {"pid": 0}', flush=True)
    """
    code = f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-ISc', {textwrap.dedent(child)!r}])\n{parent}"
    monkeypatch.setattr(launches, "end", partial(end, seconds=0.5))
    heard: list[dict[str, int]] = []
    try:
        assert launches.launch([sys.executable, "-ISc", code], {}, 5.0, heard.append) == "nothing happened for 5 s"
        assert len(heard) == 1
    finally:
        kill(event["pid"] for event in heard if event["pid"])


def test_a_sweep_that_measured_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []
    monkeypatch.setattr(launches, "launch", lambda *_: tries.append("") or "exit code 2: error: no GPU")
    flags = ["--models", "tiny", "--tp", "1", "--batch-sizes", "1", "--device", "cpu", "--out", str(tmp_path / "sweep.jsonl")]
    for more, expected in ([], 1), ([], 1), (["--retry"], 2):
        monkeypatch.setattr(sys, "argv", ["sweep", *flags, *more])
        with pytest.raises(UserError, match="no configuration was measured"):
            sweep.main()
        assert len(tries) == expected


# --- real ranks ----------------------------------------------------------------------------------------------------------


def test_a_sweep_on_two_ranks_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "deeper" / "rows.jsonl"
    flags = "--device cpu --models tiny:2 --tp 2 --batch-sizes 1 --prompt-lengths 4 --new-tokens 3 --interconnects 2ms,100MB/s"
    command = [sys.executable, "-m", "scripts.sweep", *flags.split(), "--out", str(out)]

    def run(*variants: str) -> str:
        done = quick_start.run(
            [*command, "--variants", *variants], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    run("standard", "ladder", "upper-bound")
    before = out.read_text()
    rows = {row.setting.variant: row for row in read_rows(out)}
    assert all(len(row.samples) == 3 and not row.error for row in rows.values()) and len(rows) == 3
    # an all-reduce after the embedding and two a layer, each of 1 x 192 floats, which a rank sends once
    link_ms = (1 + 2 * 2) * (2 + 192 * 4 / 100e6 * 1e3)
    for sample in rows["standard"].samples + rows["ladder"].samples:
        assert sample["link_ms"] == pytest.approx(link_ms, rel=1e-3)
        assert sample["exposed_ms"] > 0 and len(sample["step_ms"]) == 2
    assert all(s["link_ms"] == s["exposed_ms"] == 0 for s in rows["upper-bound"].samples)
    said = run("standard", "upper-bound")
    assert out.read_text() == before
    assert "2 of 2 configurations are in" in said and "| standard |" in said and "| ladder |" not in said


# --- comparison with vLLM -----------------------------------------------------------------------------------------------

VLLM_STUB = """
import json, os, time
from types import SimpleNamespace as Some

__version__ = "0.0.stub"

class SamplingParams:
    def __init__(self, **given):
        self.given = given

class LLM:
    def __init__(self, **given):
        print("a word of its own")
        assert given["gpu_memory_utilization"] == 0.92 and given["max_model_len"] == 9 and given["tensor_parallel_size"] == 2
        assert given["compilation_config"] == {"cudagraph_capture_sizes": [1, 2, 3]}
        config = json.load(open(given["model"] + "/config.json"))
        assert [given["quantization"], "quantization_config" in config] == json.loads(os.environ["WIDTH"])

    def generate(self, prompts, params, use_tqdm):
        assert len({tuple(p["prompt_token_ids"]) for p in prompts}) == len(prompts)
        time.sleep(0.001)  # rows round times to whole microseconds, which must not be 0
        return [Some(outputs=[Some(token_ids=[1] * params.given["max_tokens"])]) for _ in prompts]
"""


@pytest.mark.parametrize(("quantize", "width"), [(None, [None, False]), ("fp8", ["fp8", False]), ("int4", [None, True])])
def test_vllm_is_measured_on_the_same_settings(tmp_path: Path, quantize: str | None, width: list[Any]) -> None:
    """The worker runs in a separate process with a stub of vLLM. It rounds to fp8 itself; int4 is in its config."""
    (tmp_path / "vllm.py").write_text(VLLM_STUB)
    settings = [
        replace(TINY, variant="vllm", tp=2, batch=b, prompt_length=6, new_tokens=n, runs=2, quantize=quantize)
        for b, n in ((3, 3), (1, 1))
    ]
    ((start, found),) = launches.by_launch(settings, sys.executable, 0.92)
    file = launches.RowsFile(tmp_path / "rows.jsonl")
    with pytest.MonkeyPatch.context() as patch, tqdm(disable=True) as bar:
        patch.setenv("PYTHONPATH", str(tmp_path))
        patch.setenv("WIDTH", json.dumps(width))
        launches.run_all(file, start, found, 60.0, bar)
    three, one = read_rows(file.path)
    assert (three.error, one.error) == (None, None) and three.variant == "vLLM 0.0.stub"
    assert len(three.samples) == len(one.samples) == 2 and one.median("decode_ms_per_token") is None
    assert "vLLM 0.0.stub" in tables.table([three, one])


def test_vllms_steps_are_what_its_prefill_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    # seconds of a prefill and of a whole run, in turn; the first pair is the warm-up
    calls = iter([9.0, 9.0, 0.10, 0.50, 0.14, 0.54, 0.12, 0.52])
    monkeypatch.setattr(vllm_worker, "seconds", lambda *_: next(calls))
    samples = vllm_worker.measure(None, asdict(replace(TINY, variant="vllm", batch=2, new_tokens=5)), 100)
    row = Row(TINY, {}, {}, samples=samples)
    assert row.values("prefill_ms") == [100, 140, 120]
    assert row.values("decode_ms_per_token") == pytest.approx([95, 105, 100])  # (500, 540, 520 - 120) / 4
    assert row.values("tokens_per_second") == pytest.approx([2e3 / 95, 2e3 / 105, 2e3 / 100], rel=1e-3)
    assert row.median("completion_ms") == pytest.approx(520)


# --- refused before anything starts --------------------------------------------------------------------------------------

ON_GPUS = "--device cuda --comms nccl --tp 2 --variants vllm"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--models tiny nope", "no preset 'nope'"),
        ("--models tiny:99", "1 to 8"),
        ("--models models/nope", "is missing"),
        ("--models tiny --variants standard ladder:3", "unknown variant"),
        ("--models tiny --variants hybrid:9", "only 8 layers"),
        ("--tp 0", "must be at least 1"),
        ("--tp 4 3 --interconnects two-hosts", "even"),
        ("--batch-sizes 1 -1", "must be at least 1"),
        ("--interconnects soon", "unknown interconnect"),
        ("--comms bogus", "bogus"),
        ("--also 4 0 1", "must be at least 1"),
        ("--vllm-memory nan", "above 0, at most 1"),
        ("--variants vllm", "needs GPUs"),
        (f"{ON_GPUS} --interconnects two-hosts", "needs GPUs of one host"),
        (f"{ON_GPUS} --models {ROOT}/models/tiny-standard", "random weights"),
        (f"{ON_GPUS} --vllm-python /nowhere/python", "No such file"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_ranks_start(
    flags: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launches, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--device", "cpu", *flags.split(), "--out", str(tmp_path / "rows.jsonl")])
    with pytest.raises(UserError, match=re.escape(said)):
        sweep.main()
    assert not (tmp_path / "rows.jsonl").exists()


# --- seeds ---------------------------------------------------------------------------------------------------------------


def test_a_sweep_over_seeds_pools_their_runs() -> None:
    settings = grids.settings_of(arguments("--models", "tiny", "--variants", "standard", "ladder", "--seeds", 3, 5, 5))
    assert len(settings) == len(set(settings)) == 8 and {s.seed for s in settings} == {3, 5}  # 2 batch sizes
    rows = [
        Row(
            replace(TINY, seed=seed),
            {},
            {},
            samples=[{"prefill_ms": float(seed), "step_ms": [], "decode_ms_per_token": None}] * 2,
        )
        for seed in (3, 5, 9)
    ]
    (row,) = finished([*rows, Row(replace(TINY, seed=11), {}, {}, error="x")])
    assert sorted(row.values("prefill_ms")) == [3, 3, 5, 5, 9, 9]
    assert finished([row]) == [row]
    assert rows[0].setting.label.endswith(" seed 3")
