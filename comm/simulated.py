"""A slow link for ranks of one CPU host, so that overlap can be studied without GPUs.

An all-reduce is over no earlier than `latency + bytes / bandwidth` after it started, `bytes` being what one rank sends: for
a plain sum what a ring sends, 2 (N - 1) / N of the message in its own dtype; for a quantized one its records. Transfers share
the link: one that starts while another is under way has its bytes queue behind the other's. The caller sleeps only for what
is left when it waits, so time that it spent computing is not waited for again.

The real sum runs underneath, so a transfer also takes at least as long as gloo does, and sleeping is exact to about 0.1 ms.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from comm.interface import Communicator, Handle
from comm.quantized import QuantizedCommunicator
from errors import UserError

TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@dataclass(frozen=True)
class Link:
    """latency in seconds, bandwidth in bytes a second and direction, of one rank."""

    latency: float
    bandwidth: float
    text: str = ""  # as the user wrote it


def parse_link(text: str) -> Link:
    """`10us,100GB/s` to a Link. Raises UserError."""
    number = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    match = re.fullmatch(rf"{number}({'|'.join(TIMES)}),{number}({'|'.join(SIZES)})/s", text.replace(" ", ""))
    if not match or not float(match[3]):
        raise UserError(
            f"--simulate-link is {text!r}; give a latency and a bandwidth above 0, such as 10us,100GB/s "
            f"(units: {', '.join(TIMES)}; {', '.join(f'{size}/s' for size in SIZES)})"
        )
    return Link(float(match[1]) * TIMES[match[2]], float(match[3]) * SIZES[match[4]], match[0])


def sent_bytes(communicator: Communicator, partial: Tensor) -> float:
    """Bytes that one rank sends to sum `partial`."""
    ranks = communicator.world_size
    if isinstance(communicator, QuantizedCommunicator):
        scheme = communicator.scheme
        return scheme.sent_bytes(partial.numel(), scheme.group_of(partial), ranks)
    return 2 * (ranks - 1) / ranks * partial.nbytes


class SimulatedLink(Communicator):
    """`inner`, with sums that take as long as `link` would need. Gathers are not slowed down."""

    waited: float = 0.0

    def __init__(
        self,
        inner: Communicator,
        link: Link,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """clock and sleep: seconds; tests bring their own."""
        self.inner, self.link, self.clock, self.sleep = inner, link, clock, sleep
        self.rank, self.world_size = inner.rank, inner.world_size
        self.name = f"{inner.name} on a simulated link of {link.text}" if link.text else f"{inner.name} on a simulated link"
        self.busy_until = 0.0  # when the link has sent all bytes that it was given

    def start(self, partial: Tensor) -> Handle:
        sending = sent_bytes(self.inner, partial) / self.link.bandwidth
        self.busy_until = max(self.clock(), self.busy_until) + sending
        deadline = self.busy_until + self.link.latency
        return _Transfer(self, self.inner.start(partial), deadline)

    def all_gather(self, shard: Tensor) -> Tensor:
        return self.inner.all_gather(shard)


class _Transfer(Handle):
    def __init__(self, link: SimulatedLink, pending: Handle, deadline: float) -> None:
        self.link, self.pending, self.deadline = link, pending, deadline

    def wait(self) -> Tensor:
        """The sum, and not before its deadline; the whole wait is counted as `waited`."""
        begin = self.link.clock()
        total = self.pending.wait()
        left = self.deadline - self.link.clock()
        if left > 0:
            self.link.sleep(left)
        self.link.waited += self.link.clock() - begin
        return total
