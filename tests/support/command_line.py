"""Runs commands as a user does: in this process (`Here`), or `generate.py` in new processes (`launch`)."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import cli
import generate
from tests import MODELS, ROOT
from tests.support import quick_start

HYBRID = str(MODELS / "tiny-hybrid")
CPU = ("--device", "cpu")  # a --device that the test passes comes later and overrides it


@dataclass(frozen=True)
class Finished:
    """Exit code and output of a command that has ended."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """The JSON lines on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def record(self) -> dict[str, Any]:
        (only,) = self.records
        return only


class Here:
    """Runs a command, `generate.py` by default, in this process, where torch is already imported."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        main: Callable[[], None] = generate.main,
        flags: Sequence[str] = CPU,
    ) -> None:
        """flags: come before those of each call."""
        self.monkeypatch, self.capfd, self.main, self.flags = monkeypatch, capfd, main, flags
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)

    def __call__(self, *args: object) -> Finished:
        self.monkeypatch.setattr(sys, "argv", ["command", *self.flags, *map(str, args)])
        self.capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.run(self.main)
        out, err = self.capfd.readouterr()
        return Finished(left.value.code or 0, out, err)  # type: ignore[arg-type]

    def told(self, *args: object) -> tuple[int, str]:
        """The exit code and all output."""
        done = self(*args)
        return done.code, done.out + done.err

    def refuses(self, *args: object) -> str:
        """The one-line message of a command that ends with a user error."""
        done = self(*args)
        assert done.code == 2 and not done.out, done
        (line,) = done.err.splitlines()
        assert line.startswith("error: ")
        return line


def command(args: Sequence[object], ranks: int = 0) -> list[str]:
    """`python generate.py …`, with `--tp` if `ranks` is not 0."""
    return [sys.executable, "generate.py", *(("--tp", str(ranks)) if ranks else ()), *CPU, *map(str, args)]


def environment(**more: object) -> dict[str, str]:
    """The environment of this process without the variables that mark a rank, with one OpenMP thread and with `more`."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return inherited | {"OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in more.items()}


def launch(*args: object, ranks: int = 0, stdin: str = "", timeout: float = 400.0) -> Finished:
    """Run a command to its end in new processes. They are forked from a process that has imported what they need."""
    done = quick_start.run(
        command(args, ranks), cwd=ROOT, env=environment(), input=stdin, capture_output=True, text=True, timeout=timeout
    )
    return Finished(done.returncode, done.stdout, done.stderr)
