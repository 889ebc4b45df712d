"""What all-reduces by copy engines leave to the SMs: to wait for flags that copies have set, and to add what they brought."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.device import MAX_POLLS

ADDING_PROGRAMS, ADDED = 16, 4096  # programs that add, and the values that each adds at a time


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


@triton.jit
def _add(own, received, stride, total, out, size, RANK: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    for begin in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < size
        sums = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(N):
            part = own if rank == RANK else received + rank * stride
            sums += tl.load(part + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + at, sums.to(total.dtype.element_ty), mask=inside)
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


def add_parts(own: Tensor, received: Tensor, rank: int, total: Tensor, out: Tensor) -> None:
    """The sum of own (n,) and of the first n values of all rows of received (N, m) but this rank's, in rank order in fp32, into
    total (n,) and out (n,), all contiguous and of one dtype. Few programs, so that another kernel keeps most SMs."""
    if len(own):
        _add[(ADDING_PROGRAMS,)](
            own, received, received.stride(0), total, out, len(own), RANK=rank, N=len(received), BLOCK=ADDED, num_warps=16
        )
