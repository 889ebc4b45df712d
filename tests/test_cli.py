"""Wrong flags and model names: every command of the project prints one line that names them and exits with code 2."""

import argparse
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
from tqdm import tqdm

import generate
from checkpoints.presets import PRESETS, preset
from cli import PEERS, Parser, run
from errors import RankError, UserError
from server.settings import build_parser, load_settings
from tests import ROOT
from tests.support import quick_start
from tests.support.command_line import HYBRID

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


BROKEN_RANK = """
import atexit, time
import torch.distributed as dist
from cli import run

def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(time.sleep, 600)  # as a destructor of the group that waits for another rank
    1 / 0

run(main)
"""


def test_a_rank_with_an_unexpected_error_ends() -> None:
    ended = quick_start.run([sys.executable, "-c", BROKEN_RANK], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and ended.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


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
            "unknown flags --modell (did you mean --model?); --txet (did you mean --text?); see it",
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


# --- habits from other programs ------------------------------------------------------------------------------------------


def answers_of(program: str) -> tuple[Parser, dict[str, str]]:
    """A program's parser, and what it says to each flag of PEERS."""
    made: list[Parser] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "parse_args", lambda self, *given: made.append(self) or sys.exit())
        with pytest.raises(SystemExit):
            generate.parse_args([]) if program == "generate.py" else build_parser().parse_args([])
    (own,), said = made, {}
    for flag in [flag for flags in tomllib.loads(PEERS.read_text()).values() for flag in flags]:
        if flag not in own._option_string_actions and own._unknown([flag, "1"]):  # neither its own nor the beginning of one
            with pytest.raises(UserError) as e:
                own.parse_args([flag, "1"])
            said[flag] = str(e.value)
    return own, said


def test_flags_of_other_programs_are_answered_with_flags_that_there_are() -> None:
    table = [flag for flags in tomllib.loads(PEERS.read_text()).values() for flag in flags]
    assert len(table) == len(set(table)) > 150 and not any("_" in flag for flag in table)
    answered = set()
    for program in ("server", "generate.py"):
        own, said = answers_of(program)
        for flag, text in said.items():
            answer = text.removeprefix(f"unknown flag {flag}: ").removesuffix(f"; see {own.prog} --help")
            if answer == text.removesuffix(f"; see {own.prog} --help") or "has it" in answer:
                continue  # nothing is known of it here
            named = re.findall(r"(?<![\w-])--[\w-]+", answer.partition("launch.py")[0])
            assert set(named) <= own._option_string_actions.keys(), (flag, answer)
            assert named or re.match(r"not needed, because |set |write |start |for ranks |common |requests ", answer), answer
            answered.add(flag)
    assert len(answered) > 150


def test_what_is_called_otherwise_here() -> None:
    _, server = answers_of("server")
    _, generates = answers_of("generate.py")
    for flag, ours in {
        "--tensor-parallel-size": "--tp",
        "-tp": "--tp",
        "-hf": "--model",
        "--model-draft": "--speculate",
    }.items():
        assert server[flag].startswith(f"unknown flag {flag}: it is {ours} here; see ")
        assert generates[flag].startswith(f"unknown flag {flag}: it is {ours} here; see ")
    assert "it is --max-num-seqs here" in server["-np"] and "it is --batch-size here" in generates["-np"]
    assert "not needed, because no code of a model is run" in server["--trust-remote-code"]
    assert "write it behind the model's name: --model ORG/NAME@REVISION" in generates["--revision"]
    for parse, argv, words in (
        (load_settings, ["--max_num_seqs", "3", "--tp_size=2"], "_seqs: it is --max-num-seqs here; --tp_size: it is --tp here"),
        (load_settings, ["--model_path", "x"], "unknown flag --model_path: it is --model here"),
        (generate.parse_args, ["--checkpoint_path", "x"], "unknown flag --checkpoint_path: it is --model here, the folder of"),
        (generate.parse_args, ["--num_samples=3", "--mdel", "x"], "--num_samples: it is --num-samples here; --mdel (did you"),
        (generate.parse_args, ["-hf", "a/b", "--help"], "unknown flag -hf: it is --model here"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            parse(argv)  # type: ignore[operator]
    other = Parser(prog="it")
    other.add_argument("--tp")
    other.add_argument("program", nargs=argparse.REMAINDER)
    with pytest.raises(UserError, match="unknown flag --tensor-parallel-size; see it"):
        other.parse_args(["--tensor-parallel-size", "2"])
    assert other.parse_args(["x", "-half"]).program == ["x", "-half"]


@pytest.mark.parametrize("before", [[], ["--deterministic"], ["--tp", "1"]])
def test_the_model_as_an_argument(before: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "c.toml"
    config.write_text("model = 'of the file'\ntp = 1\n")
    monkeypatch.chdir(ROOT)
    for argv in ([*before, HYBRID], [*before, HYBRID, "--dtype", "float32"], [*before, "--", HYBRID], [HYBRID, *before]):
        both = ["--model", HYBRID, *argv]
        for given in (argv, both):
            assert load_settings(given, {}).model == generate.parse_args(given).model == HYBRID
        assert load_settings(["--config", str(config), *argv], {"RUNG_MODEL": "of the environment"}).model == HYBRID
        with pytest.raises(UserError, match=f"two models are named, {HYBRID} and --model other; leave one out"):
            load_settings(["--model", "other", *argv], {})
        for parse in (load_settings, generate.parse_args):
            with pytest.raises(UserError, match="unrecognized arguments: more; see"):
                parse([*argv, "more"])
    for argv in (before, [*before, ""]):
        with pytest.raises(UserError, match="no model; "):
            load_settings(argv, {})
        with pytest.raises(UserError, match="no model; "):
            generate.parse_args(argv)
    config.write_text("model-word = 'x'\n")
    with pytest.raises(UserError, match="unknown key 'model-word'"):
        load_settings(["--config", str(config)], {})


# --- names of models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tiny-hybird", "did you mean models/tiny-hybrid"),
        ("tiny-hybrid", "did you mean models/tiny-hybrid"),
        ("models/tiny-hybird", "did you mean models/tiny-hybrid"),
        ("llama3-8b", "did you mean llama-3-8b"),
        ("llama-3-70:16", "did you mean llama-3-70b"),
        ("Qwen/Qwen3-8B-GGUF:Q4_K_M", "did you mean Qwen/Qwen3-8B-GGUF? "),
        ("models/tiny-hybrid:Q8_0", "did you mean models/tiny-hybrid"),
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
