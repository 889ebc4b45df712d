"""Wait for flags that copy engines set in host memory."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.device import MAX_POLLS


@triton.jit
def _wait(flags, epoch, fault, max_polls, N: tl.constexpr, BLOCK: tl.constexpr):
    source = tl.arange(0, BLOCK)
    address = tl.zeros([BLOCK], tl.int64)
    for rank in tl.static_range(N):
        address = tl.where(source == rank, flags[rank], address)
    target = tl.load(epoch)
    missing = 1
    polls = tl.where(tl.load(fault) != 0, max_polls, 0)  # after one timeout, no launch waits again
    while (missing != 0) & (polls < max_polls):
        seen = tl.load(address.to(tl.pointer_type(tl.int64)), mask=source < N, other=target, volatile=True)
        missing = tl.max((seen < target).to(tl.int32), axis=0)
        polls += 1
    if missing != 0:
        tl.store(fault, 1)


def wait_flags(flags: tuple[int, ...], epoch: Tensor, fault: Tensor, max_polls: int | None = None) -> None:
    """Make the current stream wait until the int64 at each of these addresses is at least `epoch` (1,) int64. Set fault (1,)
    int32 to 1 if it is not after `max_polls` (None: MAX_POLLS) polls of about a microsecond each."""
    block = max(2, triton.next_power_of_2(len(flags)))
    _wait[(1,)](flags, epoch, fault, MAX_POLLS if max_polls is None else max_polls, N=len(flags), BLOCK=block, num_warps=1)
