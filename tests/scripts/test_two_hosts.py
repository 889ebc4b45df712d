"""Ranks of two torchruns on one machine, as two hosts would start them."""

import os
import signal
import subprocess
import sys
import time

from scripts.lib.process_tree import process_tree
from tests import ROOT
from tests.support import quick_start
from tests.support.command_line import HYBRID
from tests.support.server_process import runs

GENERATE = ["generate.py", "--device", "cpu", "--model", HYBRID, "--prompt", "Once upon a time", "--temperature", "0"]


def two_hosts(*args: str, ranks: int = 2) -> quick_start.Popen:
    command = [sys.executable, "-m", "scripts.two_hosts", "--ranks", str(ranks), "--device", "cpu", *args]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return quick_start.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_hosts_write_what_one_rank_writes() -> None:
    together = two_hosts(*GENERATE, "--max-new-tokens", "12")
    alone = quick_start.run(
        [sys.executable, *GENERATE, "--max-new-tokens", "12"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    out, err = together.communicate(timeout=400)
    assert (together.returncode, alone.returncode) == (0, 0), err + alone.stderr
    assert out == alone.stdout and len(out.split()) > 5


def test_a_failure_on_the_hosts_ends_both_at_once() -> None:
    start = time.monotonic()
    process = two_hosts("-m", "generate", "--device", "cpu", "--model", "no-such-model", "--prompt", "x")
    _, err = process.communicate(timeout=400)
    assert process.returncode != 0 and "no-such-model" in err
    assert time.monotonic() - start < 300


def test_an_unknown_communicator_is_told_on_both_hosts() -> None:
    process = two_hosts(*GENERATE, "--comm", "bogus")
    _, err = process.communicate(timeout=400)
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert process.returncode != 0 and len(said) == 2, err
    assert all(line.startswith("error: unknown communicator 'bogus'") for line in said), err


def test_a_signal_ends_all_ranks() -> None:
    process = two_hosts(*GENERATE, "--max-new-tokens", "900", "--ignore-eos", "--num-samples", "10000")
    deadline = time.monotonic() + 300
    while (
        len(ranks := process_tree(process.pid)) < 5 and time.monotonic() < deadline
    ):  # the script, two torchruns and two ranks
        time.sleep(0.1)
    assert len(ranks) >= 5
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert not [pid for pid in ranks if runs(pid)]


def test_bad_use_is_told() -> None:
    for args, ranks, message in ((GENERATE, 3, "even number"), ([], 2, "name a script")):
        process = two_hosts(*args, ranks=ranks)
        _, err = process.communicate(timeout=300)
        assert process.returncode != 0 and message in err, err
