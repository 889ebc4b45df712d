"""The bench of all-reduces between hosts: what it counts on the cable does not depend on how busy the machine is."""

import pytest

from scripts.bench.comm.between_hosts import RANKS, markdown, on_two_hosts
from scripts.lib.machine import machine
from tests.support.namespaces import TwoHosts


@pytest.mark.usefixtures("forked_commands")
def test_a_hierarchical_all_reduce_sends_a_third_less_over_the_cable() -> None:
    """2 (H - 1) / H of the message for H hosts instead of 2 (N - 1) / N for N ranks, and some percent for packets' headers."""
    with TwoHosts() as hosts:
        hosts.slow_down("tbf rate 400mbit burst 128kb latency 100ms")
        (row,) = on_two_hosts(hosts, [1 << 20])
    ranks = 2 * RANKS
    assert 1 <= row["ring"]["sent"] / (2 * (ranks - 1) / ranks) < 1.05 and 1 <= row["hierarchical"]["sent"] < 1.05
    assert min(row[way]["ms"] for way in ("ring", "hierarchical")) > 18  # at this rate, after the burst
    assert "| 400 Mbit/s | 1,024 KiB |" in markdown({"machine": machine(), "load_average": 1, "cables": {"400 Mbit/s": [row]}})
