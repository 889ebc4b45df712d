"""scripts/measure_gpus.py: commands are valid, finished steps are not repeated, and its time limits hold."""

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest

from errors import UserError
from scripts import measure_gpus
from scripts.bench.serving import load, startup
from scripts.bench.training import __main__ as bench_training
from scripts.lib.steps import Step, perform
from scripts.sweep import __main__ as sweep

PARSERS = {
    "scripts.sweep": sweep,
    "scripts.bench.serving.load": load,
    "scripts.bench.serving.startup": startup,
    "scripts.bench.training": bench_training,
}


def arguments(monkeypatch: pytest.MonkeyPatch, *argv: object) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["measure_gpus.py", *map(str, argv)])
    return measure_gpus.parse_args()


def test_every_command_is_one_that_its_script_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = measure_gpus.steps(arguments(monkeypatch, "--ranks", 4, "--raw", tmp_path, "--vllm-python", sys.executable))
    assert len({step.name for step in found}) == len(found) > 20
    parsed = launched = 0
    for step in found:
        flag, module = step.command[step.command.index("-m") :][:2]
        assert importlib.util.find_spec(module)
        if step.command[1] == flag:
            monkeypatch.setattr(sys, "argv", [module, *step.command[3:]])
            PARSERS[module].parse_args()
            parsed += 1
        launched += Path(step.command[1]).name == "launch.py"
    assert parsed + launched == len(found) and parsed > launched


def steps_that(tmp_path: Path, *codes: str) -> list[Step]:
    return [Step(f"step {i}", 1, (sys.executable, "-c", code), tmp_path / f"{i}.txt") for i, code in enumerate(codes)]


def run_main(monkeypatch: pytest.MonkeyPatch, found: list[Step], *argv: object) -> None:
    monkeypatch.setattr(measure_gpus, "steps", lambda _: found)
    monkeypatch.setattr(sys, "argv", ["measure_gpus.py", "--ranks", "2", *map(str, argv)])
    measure_gpus.main()


def test_steps_that_are_done_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = steps_that(tmp_path, "print('a')", "raise SystemExit(3)", "print('c')")
    for _ in range(2):
        with pytest.raises(UserError, match="did not end well"):
            run_main(monkeypatch, found, "--raw", tmp_path)
    assert [(tmp_path / f"{i}.txt").read_text() for i in (0, 2)] == ["a\n", "c\n"]
    assert "step 1: exit code 3" in (said := capsys.readouterr().err) and "step 0: done before" in said


def test_what_would_take_too_long_is_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(monkeypatch, steps_that(tmp_path, "print('a')"), "--raw", tmp_path, "--minutes", 0.1)
    assert not (tmp_path / "0.txt").exists() and "not started" in capsys.readouterr().err


def test_a_step_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (step,) = steps_that(tmp_path, "import time; print('began', flush=True); time.sleep(600)")
    args = arguments(monkeypatch, "--ranks", 2, "--raw", tmp_path)
    assert perform(step, args, 2.0) == "stopped after 2 s"
