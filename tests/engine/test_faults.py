"""A rank that gives up waiting for another one hands out no token of the wrong sums that follow."""

import subprocess

import pytest

from ranks.processes import on_ranks
from tests import ROOT
from tests.engine.lone_rank import check, hand_out_on_cpu
from tests.support.gpus import most_ranks, ranks_errors
from tests.support.ranks import Ranks


def test_no_wrong_token_is_handed_out(interpreters: Ranks) -> None:
    check(*interpreters.run(2, hand_out_on_cpu)[0])


@pytest.mark.skipif(most_ranks() < 2, reason="needs 2 GPUs, or RUNG_SHARE_GPUS=1")
@pytest.mark.parametrize("communicator", ["one-shot", "two-shot"])
def test_no_wrong_token_is_handed_out_on_gpus(communicator: str) -> None:
    command = [*on_ranks(2), "-m", "tests.engine.lone_rank", communicator]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, ranks_errors(result.stderr)
