"""Ranks on GPUs: how many a test may start, and a way to start them that shows their errors."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from comms.process_group import may_share_gpus
from tests import ROOT

MOST = 4
MOST_LINES = 200  # of an error
MOST_PRINTED = 4000  # characters of what ranks printed before it
REPORT = "failed (exitcode: "  # in the first line of torchrun's report, which follows what the ranks wrote
CPP_FRAME = re.compile(r"(\[rank\d+\]: *)?frame #\d+")  # dozens of them would hide the message
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def most_ranks() -> int:
    """One for each GPU, or MOST on any number of GPUs if ranks may share them."""
    gpus = torch.cuda.device_count()
    return max(gpus, MOST) if gpus and may_share_gpus() else gpus


needs_two = pytest.mark.skipif(most_ranks() < 2, reason="needs two GPUs")


def torchrun(ranks: int, *program: str, timeout: float, env: Mapping[str, str] | None = None) -> str:
    """What `ranks` ranks of a program print: a script, or `-m` and a module, with its arguments. timeout: in seconds. Raises
    AssertionError with the ranks' errors if one fails or they take longer."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr, tempfile.TemporaryDirectory() as logs:
        # Each rank's stderr has its own file: in a shared one, lines of tracebacks that ranks write at once can mix.
        launch = ["-m", "torch.distributed.run", "--standalone", "--redirects", "2", "--log-dir", logs]
        command = [sys.executable, *launch, "--nproc-per-node", str(ranks), *program]
        started = subprocess.Popen(command, cwd=ROOT, env=env, stdout=stdout, stderr=stderr)
        ended: int | str
        try:
            ended = started.wait(timeout)
        except subprocess.TimeoutExpired:
            ended = f"not ended after {timeout:g} s"
            started.terminate()  # torchrun ends the ranks
            started.wait(timeout=60)
        printed = _text(stdout)
        errors = [path.read_text() for path in sorted(Path(logs).rglob("stderr.log"))] + [_text(stderr)]
    assert ended == 0, "\n".join([str(ended), printed[-MOST_PRINTED:], *map(ranks_errors, errors)])
    return printed


def gpu_report(
    module: str, folder: Path, *arguments: str, most: int = MOST, timeout: float, env: Mapping[str, str] | None = None
) -> Any:
    """The JSON file that rank 0 of a module of checks writes, on up to `most` ranks. Its first argument is the file. env: more variables
    of their environment. Raises AssertionError as `torchrun`, and for errors in the report."""
    out = folder / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"NCCL_NVLS_ENABLE": "0", **(env or {})}
    torchrun(min(most, most_ranks()), "-m", module, str(out), *arguments, timeout=timeout, env=environment)
    report = json.loads(out.read_text())
    assert report["errors"] == {}
    return report


def _text(file: TextIO) -> str:
    file.seek(0)
    return file.read()


def ranks_errors(stderr: str) -> str:
    """The end of what ranks wrote to stderr, without torchrun's report and C++ frames."""
    lines = [line for line in stderr.splitlines() if not CPP_FRAME.match(line)]
    end = next((i for i, line in enumerate(lines) if REPORT in line), len(lines))
    return "\n".join(lines[:end][-MOST_LINES:])
