"""Ranks on GPUs: how many a test may start, and a way to start them that shows their errors."""

import re
import subprocess
import sys
from collections.abc import Mapping

import torch

import shared_gpus
from tests import ROOT

MOST = 4
MOST_LINES = 200  # of an error
REPORT = "failed (exitcode: "  # in the first line of torchrun's report, which follows what the ranks wrote
CPP_FRAME = re.compile(r"(\[rank\d+\]: *)?frame #\d+")  # dozens of them would hide the message


def most_ranks() -> int:
    """One for each GPU, or MOST on any number of GPUs if ranks may share them."""
    gpus = torch.cuda.device_count()
    return max(gpus, MOST) if gpus and shared_gpus.allowed() else gpus


def torchrun(ranks: int, *program: str, timeout: float, env: Mapping[str, str] | None = None) -> str:
    """What `ranks` ranks of a program print: a script, or `-m` and a module, with its arguments. timeout: in seconds. Raises
    AssertionError with the ranks' errors if one fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *program]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, ranks_errors(result.stderr)
    return result.stdout


def ranks_errors(stderr: str) -> str:
    """The end of what ranks wrote to stderr, without torchrun's report and C++ frames."""
    lines = [line for line in stderr.splitlines() if not CPP_FRAME.match(line)]
    end = next((i for i, line in enumerate(lines) if REPORT in line), len(lines))
    return "\n".join(lines[:end][-MOST_LINES:])
