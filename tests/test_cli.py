"""Wrong flags and model names: every command of the project prints one line that names them and exits with code 2."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

from checkpoints.presets import PRESETS, preset
from cli import Parser, run
from errors import RankError, UserError
from tests import ROOT

GUARD = 'if __name__ == "__main__":'
STARTED_BY_OTHERS = {  # no flags
    *("scripts/sweep/worker.py", "scripts/sweep/vllm_worker.py")
}
COMMANDS = sorted(
    name
    for pattern in ("*.py", "scripts/**/*.py", "server/*.py", "training/*.py", "engine/*.py")
    for path in ROOT.glob(pattern)
    if GUARD in path.read_text() and (name := str(path.relative_to(ROOT))) not in STARTED_BY_OTHERS
)


def module_of(command: str) -> str | None:
    """The module to name after `python -m`, or None for a script of the root."""
    return command.removesuffix(".py").removesuffix("/__main__").replace("/", ".") if "/" in command else None


def start(command: str) -> None:
    if module := module_of(command):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(ROOT / command), run_name="__main__")


def leaves(
    command: str, *arguments: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line, run in this process."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [command, *arguments])
    monkeypatch.delitem(sys.modules, command.removesuffix(".py").replace("/", "."), raising=False)  # it would warn
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        start(command)
    return int(left.value.code or 0), *capfd.readouterr()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_an_unknown_flag(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = leaves(command, "--nonsense", monkeypatch=monkeypatch, capfd=capfd)
    assert (code, out) == (2, ""), err
    assert re.fullmatch(r"(error|[\w.]+): [^\n]*--nonsense[^\n]*\n", err), err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The usage begins with what to type."""
    code, out, err = leaves(command, "--help", monkeypatch=monkeypatch, capfd=capfd)
    assert (code, err) == (0, "")
    module = module_of(command)
    assert re.match(rf"usage: {f'python -m {module}' if module else command} ", out)


def test_an_error_during_a_progress_bar_has_a_line_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        bar = tqdm(total=3, desc="work")
        bar.update()
        raise UserError("bad input")

    with pytest.raises(SystemExit):
        run(main)
    assert re.fullmatch(r"\rwork:[^\n]*\nerror: bad input\n", capfd.readouterr().err)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_first_rank_prints_what_all_know_and_another_what_it_alone_knows(
    local_rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    def printed(error: UserError) -> str:
        def main() -> None:
            raise error

        with pytest.raises(SystemExit) as ended:
            run(main)
        assert ended.value.code == 2
        return capfd.readouterr().err

    assert printed(UserError("all")) == ("error: all\n" if local_rank == 0 else "")
    assert printed(RankError("rank 1")) == "error: rank 1\n"


def test_all_commands_are_found() -> None:
    known = {"generate.py", "launch.py", "server/__main__.py", "training/train.py", "engine/bench.py"}
    assert known | {"scripts/sweep/__main__.py", "scripts/bench/comm/all_reduce.py"} < set(COMMANDS)
    assert len(COMMANDS) > 35


# --- the parser ----------------------------------------------------------------------------------------------------------


def parser() -> Parser:
    made = Parser(prog="it")
    made.add_argument("-n", "--number", type=int)
    made.add_argument("--model", required=True)
    made.add_argument("--text")
    made.add_argument("rest", nargs="*")
    return made


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nonsense"], "unknown flag --nonsense; see it --help"),
        (["--nonsense", "--model", "x"], "unknown flag --nonsense; see it --help"),
        (["--modle=x"], "unknown flag --modle (did you mean --model?); see it --help"),
        (["--number", "3", "-q"], "unknown flag -q; see it --help"),
        (
            ["--modell", "x", "--txet", "y"],
            "unknown flags --modell (did you mean --model?), --txet (did you mean --text?); see it",
        ),
        (["--number", "3"], "--model"),
        (["--model", "x", "--number", "many"], "argument -n/--number: invalid int value: 'many'; see it --help"),
    ],
)
def test_what_is_refused_first(argv: list[str], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        parser().parse_args(argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["--model", "x", "--num", "-3", "--text", "- a list, --not a flag"],
        ["--model=x", "-n-3", "--text=--nonsense"],
        ["--model", "x", "--", "--nonsense", "-q"],
    ],
)
def test_what_looks_like_a_flag_and_is_none(argv: list[str]) -> None:
    assert parser().parse_args(argv).model == "x"


def test_the_usage_names_what_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["-n", "3", "-h"]):
        with pytest.raises(SystemExit):
            parser().parse_args(argv)
        assert "--model MODEL [--text TEXT]" in capsys.readouterr().out
    with pytest.raises(UserError, match="unknown flag --nonsense"):
        parser().parse_args(["--nonsense", "--help"])


# --- names of models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tiny-hybird", "did you mean models/tiny-hybrid"),
        ("tiny-hybrid", "did you mean models/tiny-hybrid"),
        ("models/tiny-hybird", "did you mean models/tiny-hybrid"),
        ("llama3-8b", "did you mean llama-3-8b"),
        ("llama-3-70:16", "did you mean llama-3-70b"),
    ],
)
def test_a_wrong_model_names_the_one_that_was_meant(name: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=re.escape(meant)):
        preset(name)


def test_a_wrong_model_names_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("nope", "no/such/nope"):
        code, out, err = leaves("generate.py", "--model", name, "--prompt", "a", monkeypatch=monkeypatch, capfd=capfd)
        assert (code, out) == (2, "")
        assert name in err
        assert "models/tiny-hybrid" in err
        assert all(one in err for one in PRESETS)
        assert "did you mean" not in err
    monkeypatch.chdir(tmp_path)  # no folder of checkpoints
    with pytest.raises(UserError, match=r"no such directory\); presets: "):
        preset("nope")
