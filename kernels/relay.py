"""Waiting for flags that copy engines set in host memory."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.device import PATIENCE


@triton.jit
def _await_flags(flags, epoch, fault, patience, N: tl.constexpr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    address = tl.zeros([LANES], tl.int64)
    for rank in tl.static_range(N):
        address = tl.where(lane == rank, flags[rank], address)
    target = tl.load(epoch)
    missing = 1
    polls = tl.where(tl.load(fault) != 0, patience, 0)  # after one timeout, no launch waits again
    while (missing != 0) & (polls < patience):
        seen = tl.load(address.to(tl.pointer_type(tl.int64)), mask=lane < N, other=target, volatile=True)
        missing = tl.max((seen < target).to(tl.int32), axis=0)
        polls += 1
    if missing != 0:
        tl.store(fault, 1)


def await_flags(flags: tuple[int, ...], epoch: Tensor, fault: Tensor, patience: int | None = None) -> None:
    """Let the current stream wait until the int64 at each of these addresses is at least `epoch` (1,) int64; fault (1,) int32
    is 1 if that has not happened after `patience` (None: PATIENCE) polls of about a microsecond."""
    lanes = max(2, triton.next_power_of_2(len(flags)))
    _await_flags[(1,)](flags, epoch, fault, PATIENCE if patience is None else patience, N=len(flags), LANES=lanes, num_warps=1)
