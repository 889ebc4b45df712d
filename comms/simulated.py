"""A slow link for ranks of one CPU host, so that overlap can be studied without GPUs.

An all-reduce ends no earlier than `latency + bytes / bandwidth` after it began. `bytes` is what one rank sends: for a plain
all-reduce what a ring sends, 2 (N - 1) / N of the message in its own dtype; for a quantized one its records. All-reduces
share the link: the bytes of one wait until those of the previous one are sent. The waiting rank sleeps only for the
remaining time, so it does not wait for time that it spent computing.

The real all-reduce still runs, so one also takes at least as long as with gloo. Sleeping is exact to about 0.1 ms.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from comms.interface import Communicator, PendingAllReduce, Schedule
from comms.quantized import QuantizedCommunicator
from errors import UserError

TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@dataclass(frozen=True)
class Link:
    """latency in seconds; bandwidth of one rank in bytes per second, in each direction."""

    latency: float
    bandwidth: float
    text: str = ""  # as the user wrote it


def parse_link(text: str) -> Link:
    """A Link from a text such as `10us,100GB/s`. Raises UserError for any other form."""
    number = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    match = re.fullmatch(rf"{number}({'|'.join(TIMES)}),{number}({'|'.join(SIZES)})/s", text.replace(" ", ""))
    if not match or not float(match[3]):
        raise UserError(
            f"--simulate-link is {text!r}; give a latency and a bandwidth above 0, such as 10us,100GB/s "
            f"(units: {', '.join(TIMES)}; {', '.join(f'{size}/s' for size in SIZES)})"
        )
    return Link(float(match[1]) * TIMES[match[2]], float(match[3]) * SIZES[match[4]], match[0])


def sent_bytes(communicator: Communicator, partial: Tensor) -> float:
    """Bytes that one rank sends in an all-reduce of `partial`."""
    ranks = communicator.world_size
    if isinstance(communicator, QuantizedCommunicator):
        scheme = communicator.scheme
        return scheme.sent_bytes(partial.numel(), scheme.group_of(partial), ranks)
    return 2 * (ranks - 1) / ranks * partial.nbytes


class SimulatedLink(Communicator):
    """`inner`, whose all-reduces take at least as long as on `link`. All-gathers are not slowed down."""

    waited: float = 0.0

    def __init__(
        self,
        inner: Communicator,
        link: Link,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """clock and sleep: in seconds; tests replace them."""
        self.inner, self.link, self.clock, self.sleep = inner, link, clock, sleep
        self.rank, self.world_size = inner.rank, inner.world_size
        self.name = f"{inner.name} on a simulated link of {link.text}" if link.text else f"{inner.name} on a simulated link"
        self.busy_until = 0.0  # when the link has sent all bytes so far

    def use(self, schedule: Schedule) -> None:
        super().use(schedule)
        self.inner.use(schedule)

    def begin_all_reduce(self, partial: Tensor, overlap: bool = False) -> PendingAllReduce:
        sending = sent_bytes(self.inner, partial) / self.link.bandwidth
        self.busy_until = max(self.clock(), self.busy_until) + sending
        deadline = self.busy_until + self.link.latency
        return _SimulatedAllReduce(self, self.inner.begin_all_reduce(partial, overlap), deadline)

    def all_gather(self, shard: Tensor) -> Tensor:
        return self.inner.all_gather(shard)


class _SimulatedAllReduce(PendingAllReduce):
    def __init__(self, link: SimulatedLink, pending: PendingAllReduce, deadline: float) -> None:
        self.link, self.pending, self.deadline = link, pending, deadline

    def wait(self) -> Tensor:
        """The result, at the deadline or later. The whole time of this call counts as `waited`."""
        begin = self.link.clock()
        total = self.pending.wait()
        left = self.deadline - self.link.clock()
        if left > 0:
            self.link.sleep(left)
        self.link.waited += self.link.clock() - begin
        return total
