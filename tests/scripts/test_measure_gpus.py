"""scripts/measure_gpus.py: commands are valid, finished steps are not repeated, and its time limits hold."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine import bench
from errors import UserError
from scripts import measure_gpus
from scripts.bench.comm import all_reduce
from scripts.bench.serving import load, startup
from scripts.lib.steps import Step, perform
from scripts.sweep import __main__ as sweep
from scripts.sweep import grids
from scripts.sweep.rows import VLLM

PARSERS: dict[str, Any] = {"scripts.sweep": sweep, "scripts.bench.serving.load": load, "scripts.bench.serving.startup": startup}
LAUNCHED: dict[str, tuple[Any, str]] = {  # modules of ranks, and what a rank calls after it has read its flags
    "scripts.bench.comm.all_reduce": (all_reduce, "join_ranks"),
    "engine.bench": (bench, "init_world"),
}


def arguments(monkeypatch: pytest.MonkeyPatch, *argv: object) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["measure_gpus.py", *map(str, argv)])
    return measure_gpus.parse_args()


class Parsed(Exception):
    """A rank has read its flags and would now join the others."""


def stop(*_: object, **__: object) -> None:
    raise Parsed


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_command_is_one_that_its_script_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int) -> None:
    found = measure_gpus.steps(arguments(monkeypatch, "--ranks", ranks, "--raw", tmp_path, "--vllm-python", sys.executable))
    assert len({step.name for step in found}) == len(found) > 20
    for module, join in LAUNCHED.values():
        monkeypatch.setattr(module, join, stop)
    modules = set()
    for step in found:
        flag, module, *flags = step.command[step.command.index("-m") :]
        monkeypatch.setattr(sys, "argv", [module, *flags])
        before = step.command[: step.command.index(flag)]
        if len(before) == 1:
            parsed = PARSERS[module].parse_args()
            if module == "scripts.sweep":
                assert grids.settings_of(with_gpus(parsed))
        else:
            assert Path(before[-3]).name == "launch.py" and before[-2:] == ("--ranks", str(ranks))
            with pytest.raises(Parsed):
                LAUNCHED[module][0].main()
        modules.add(module)
    assert modules == PARSERS.keys() | LAUNCHED.keys()


def with_gpus(parsed: argparse.Namespace) -> argparse.Namespace:
    """The flags of a sweep on GPUs that have vLLM."""
    found = [name for name in parsed.variants if name != VLLM] or ["standard"]
    return argparse.Namespace(**vars(parsed) | {"device": "cuda", "variants": found})


def steps_that(tmp_path: Path, *codes: str) -> list[Step]:
    return [Step(f"step {i}", 30, (sys.executable, "-c", code), tmp_path / f"{i}.txt") for i, code in enumerate(codes)]


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
    assert "step 1: exit code 3" in (said := capsys.readouterr().err) and "step 0: done before with these flags" in said


def test_a_step_with_other_flags_is_neither_left_out_nor_mixed_with_what_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder and the Python may have another name. A folder whose steps have no digests is refused, too."""
    raw, moved = tmp_path / "raw", tmp_path / "moved"
    out = "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"

    def step(folder: Path, ranks: str) -> Step:
        return Step("load", 30, (sys.executable, "-c", out, str(folder / "load.txt"), ranks, str(folder)))

    run_main(monkeypatch, [step(raw, "4")], "--raw", raw)
    raw.rename(moved)
    (python := tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    run_main(monkeypatch, [step(moved, "4")], "--raw", moved)
    for _ in range(2):
        with pytest.raises(UserError, match=r"other flags \(load\).* --raw"):
            run_main(monkeypatch, [step(moved, "2")], "--raw", moved, "--only", "another")
        assert (moved / "load.txt").read_text() == "4"
        (moved / "done.txt").write_text("load\n")
    run_main(monkeypatch, [step(raw, "2")], "--raw", raw)
    assert (raw / "load.txt").read_text() == "2"


def test_what_a_step_has_left_without_a_parent_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    step = Step("left", 1, ("bash", "-c", f"(sleep 600 & echo $! > {pid}.new && mv {pid}.new {pid}); exec sleep 600"))
    assert perform(step, arguments(monkeypatch, "--ranks", 2, "--raw", tmp_path), 2.0) == "stopped after 2 s"
    stat = Path("/proc", pid.read_text().strip(), "stat")  # killed: gone, or a zombie until init has read its exit code
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
