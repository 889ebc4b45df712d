"""Options that are fields of a dataclass and flags at the same time, and the model's options, which several programs share."""

import argparse
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields

import pytest

from cli import Parser
from comms.interface import SCHEDULES
from errors import UserError
from generate import parse_args
from options import OVERLAPS, ModelOptions, above_zero, add_options, count, option, zero_or_more
from server.settings import Settings, load_settings


@dataclass(frozen=True, kw_only=True)
class Base:
    inherited: int = option(1, "of another group")


@dataclass(frozen=True, kw_only=True)
class Example(Base):
    name: str = option(MISSING, "required")
    number: int = count(3, "a number", low=2, high=5)
    fast_one: bool = option(False, "a switch")
    word: tuple[str, ...] = option((), "may be repeated")
    plain: int = 0  # no flag


def parser(**options: object) -> argparse.ArgumentParser:
    made = Parser(allow_abbrev=False, **options)  # type: ignore[arg-type]
    add_options(made, Example, "the example", without=("word",) if "argument_default" not in options else ())
    return made


def test_fields_become_flags() -> None:
    assert vars(parser().parse_args(["--name", "x"])) == {"name": "x", "number": 3, "fast_one": False}
    assert vars(parser().parse_args(["--name=x", "--fast-one", "--number", "5"])) == {
        "name": "x",
        "number": 5,
        "fast_one": True,
    }
    given = parser(argument_default=argparse.SUPPRESS)
    assert vars(given.parse_args([])) == {}
    assert vars(given.parse_args(["--no-fast-one", "--word", "a", "--word", "b"])) == {"fast_one": False, "word": ["a", "b"]}


def test_help_ends_with_the_default_unless_it_says_it() -> None:
    texts = {one.name: one.metadata["help"] for one in fields(Example) if one.metadata}
    assert texts == {
        "inherited": "of another group (default: 1)", "name": "required", "number": "a number (default: 3)",
        "fast_one": "a switch", "word": "may be repeated",
    }  # fmt: skip
    for default, text in ((2.5, "s (default: 2.5)"), (30.0, "s (default: 30)"), ("auto", "s (default: auto)"), (None, "s")):
        assert option(default, "s").metadata["help"] == text
    assert option(0.0, "s (default: 0, exact)").metadata["help"] == "s (default: 0, exact)"


def test_the_schedules_have_the_names_of_the_flag() -> None:
    assert ("auto", *SCHEDULES) == OVERLAPS


def test_a_required_flag_can_be_made_optional() -> None:
    made = Parser()
    add_options(made, Example, "the example", optional=("name",))
    assert made.parse_args([]).name is None
    assert made.parse_args(["--name", "x"]).name == "x"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--name"),
        (["--name", "x", "--plain", "1"], "--plain"),
        (["--name", "x", "--inherited", "1"], "--inherited"),
        (["--name", "x", "--word", "1"], "--word"),
        (["--name", "x", "--number", "1"], "1 is not from 2 to 5"),
        (["--name", "x", "--number", "many"], "invalid int value: 'many'"),
    ],
)
def test_wrong_flags(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parser().parse_args(argv)


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "words"),
    [
        (above_zero, ["1e-9", "2.5", "7", "9e8"], ["0", "-1", "nan", "inf", "1e9", "soon", ""], "above 0 and below 1e"),
        (zero_or_more, ["0", "2.5", "7", "9e8"], ["-1e-9", "nan", "inf", "1e9", "soon", ""], "of at least 0 and below 1e"),
    ],
)
def test_numbers_have_bounds(kind: Callable[[str], float], right: list[str], wrong: list[str], words: str) -> None:
    made = Parser()
    made.add_argument("--seconds", type=kind)
    for text in right:
        assert made.parse_args(["--seconds", text]).seconds == float(text)
    for text in wrong:
        with pytest.raises(UserError, match=f"--seconds: '{text}' is no number {words}"):
            made.parse_args([f"--seconds={text}"])


def test_programs_have_the_same_options_of_the_model() -> None:
    argv = ["--model", "m", "--variant", "ladder", "--comm", "gloo", "--comm-error-budget", "0.5", "--no-compile", "--tp", "1"]
    for given in (argv[:2], argv):
        server = load_settings(given, {})
        command = parse_args([*given, "--prompt", "x"])
        for one in fields(ModelOptions):
            assert getattr(server, one.name) == getattr(command, one.name), one.name
    assert Settings(model="m") == load_settings(["--model", "m"], {})


def test_off_takes_back_an_earlier_speculate(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--model", "tiny", "--speculate", "auto"]
    assert load_settings(argv).speculate == "auto"
    assert load_settings([*argv, "--speculate", "off"]).speculate is None
    monkeypatch.setenv("RUNG_SPECULATE", "off")
    assert load_settings(argv[:2]).speculate is None
