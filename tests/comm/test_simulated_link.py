"""The simulated link: with the test's own clock, and around real all-reduces of two ranks."""

import time

import pytest
import torch
from torch import Tensor

from comms import (
    Communicator,
    GlooCommunicator,
    Link,
    PendingAllReduce,
    QuantizedGlooCommunicator,
    SimulatedLink,
    parse_link,
    parse_scheme,
)
from comms.registry import choose
from comms.simulated import sent_bytes
from errors import UserError
from tests.support.command_line import HYBRID, Here
from tests.support.ranks import Ranks
from tp import World, init_world

LINK = Link(latency=2.0, bandwidth=100.0)  # seconds, bytes a second


class Clock:
    """A clock that advances only when the test or `sleep` advances it."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class Slow(Communicator):
    """Communicator of four ranks whose all-reduces end `seconds` after the call of `wait`."""

    name, rank, world_size = "slow", 0, 4

    def __init__(self, clock: Clock, seconds: float = 0.0) -> None:
        self.clock, self.seconds = clock, seconds

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> "SlowAllReduce":
        return SlowAllReduce(self, partial)

    def all_gather(self, shard: Tensor) -> Tensor:
        return shard.repeat(4)


class SlowAllReduce(PendingAllReduce):
    def __init__(self, owner: Slow, total: Tensor) -> None:
        self.owner, self.total = owner, total

    def wait(self) -> Tensor:
        self.owner.clock.now += self.owner.seconds
        return self.total


def simulated(seconds: float = 0.0) -> tuple[SimulatedLink, Clock]:
    clock = Clock()
    return SimulatedLink(Slow(clock, seconds), LINK, clock, clock.sleep), clock


# 100 fp32 values on 4 ranks: a ring sends 2 * 3/4 * 400 = 600 bytes in 6 s, and the last byte arrives 2 s later
PARTIAL, SECONDS = torch.ones(100), 8.0


def test_a_sum_takes_latency_and_bytes() -> None:
    link, clock = simulated()
    assert torch.equal(link.all_reduce(PARTIAL), PARTIAL)
    assert clock.now == 50 + SECONDS
    assert link.waited == SECONDS


@pytest.mark.parametrize("computed", [0.0, 3.0, 7.9, 8.0, 20.0])
def test_what_computation_hides_is_not_waited_for_again(computed: float) -> None:
    link, clock = simulated()
    pending = link.begin_all_reduce(PARTIAL)
    clock.now += computed
    pending.wait()
    assert clock.now == pytest.approx(50 + max(SECONDS, computed))
    assert link.waited == pytest.approx(max(0.0, SECONDS - computed))


def test_a_sum_that_takes_longer_underneath_is_waited_for_but_not_slept_for() -> None:
    link, clock = simulated(seconds=30.0)
    link.all_reduce(PARTIAL)
    assert clock.now == 80
    assert link.waited == 30


def test_two_sums_share_the_link() -> None:
    link, clock = simulated()
    first, second = link.begin_all_reduce(PARTIAL), link.begin_all_reduce(PARTIAL)
    first.wait()
    assert clock.now == 50 + 8  # 6 s to send, 2 s of latency
    second.wait()
    assert clock.now == 50 + 14  # its bytes are sent from 56 to 62 s; nothing hides its latency
    link.all_reduce(PARTIAL)  # the link is idle again
    assert clock.now == 64 + 8
    assert link.waited == 8 + 6 + 8


def test_gathers_are_not_slowed_down() -> None:
    link, clock = simulated()
    assert link.all_gather(torch.ones(2)).shape == (8,)
    assert clock.now == 50
    assert (link.rank, link.world_size) == (0, 4)


# --- bytes -------------------------------------------------------------------------------------------------------------------


def counted(world: World, name: str) -> list[float]:
    communicator = GlooCommunicator() if name == "gloo" else QuantizedGlooCommunicator(parse_scheme(name))
    return [sent_bytes(communicator, torch.zeros(2, 512, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gloo", [4 * 1024, 2 * 1024]),  # 2 ranks: the ring's factor is 1
        ("int8", [2 * 4 * 132] * 2),  # in both phases, 4 of 8 groups go to the other rank
        ("int6", [4 * 68 + 4 * 132] * 2),
        ("int4", [2 * 4 * 68] * 2),
        ("fp8", [2 * 4 * 130] * 2),
    ],
)
def test_bytes_of_each_communicator(name: str, expected: list[float], ranks: Ranks) -> None:
    assert ranks.run(2, counted, name) == [expected] * 2


# --- the command-line option --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "latency", "bandwidth", "shown"),
    [
        ("10us,100GB/s", 10e-6, 100e9, "10us,100GB/s"),
        ("1.5ms, 25 MB/s", 1.5e-3, 25e6, "1.5ms,25MB/s"),
        ("0s,1TB/s", 0, 1e12, "0s,1TB/s"),
        ("3µs,.5KB/s", 3e-6, 500, "3µs,.5KB/s"),
    ],
)
def test_links_as_users_write_them(text: str, latency: float, bandwidth: float, shown: str) -> None:
    link = parse_link(text)
    assert (link.latency, link.bandwidth, link.text) == (pytest.approx(latency), pytest.approx(bandwidth), shown)


@pytest.mark.parametrize(
    "text", ["", "10us", "10,100", "10us,100GB", "-1us,1GB/s", "1us,0GB/s", "1us,1Gb/s", "nan us,1GB/s", "1e3us,1GB/s"]
)
def test_what_is_no_link(text: str) -> None:
    with pytest.raises(UserError, match=r"--simulate-link.*such as 10us,100GB/s"):
        parse_link(text)


def test_only_gloo_ranks_have_a_simulated_link(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--device cpu"):
        choose("cuda", None, "10us,100GB/s")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert init_world("cpu", "int4", "10us,100GB/s").comm.name == "local"


def test_a_bad_link_is_refused(here_run: Here) -> None:
    finished = here_run("--model", HYBRID, "--prompt", "a", "--simulate-link", "fast")
    assert finished.code == 2
    assert "'fast'" in finished.err
    assert finished.out == ""


@pytest.fixture
def here_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capfd)


# --- on real ranks -----------------------------------------------------------------------------------------------------------


def on_a_slow_link(world: World, name: str) -> tuple[float, float, float, Tensor, str]:
    """Seconds of a blocking all-reduce; `waited`; CPU seconds used meanwhile; the total; the communicator's name."""
    link = choose("cpu", name, "400ms,1GB/s").build()
    wall, cpu = time.perf_counter(), time.thread_time()
    total = link.all_reduce(torch.ones(300))
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    assert link.waited is not None
    return wall, link.waited, cpu, total, link.name


@pytest.mark.parametrize("name", ["gloo", "int8"])
def test_real_sums_are_slowed_down_without_burning_cpu(name: str, ranks: Ranks) -> None:
    for wall, waited, cpu, total, label in ranks.run(2, on_a_slow_link, name):
        assert wall >= 0.39 and wall >= waited > 0, (
            "the sum itself takes a part of the link's time, the more the busier the machine is"
        )
        assert cpu < 0.2
        assert (total - 2).abs().max() < 1e-3
        assert label == f"{name} on a simulated link of 400ms,1GB/s"
