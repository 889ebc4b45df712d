"""How the Gluon kernels of quantized linear layers push their tiles to all ranks, as `kernels/linear_push.py` describes."""

from typing import TYPE_CHECKING, Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.device import push_pairs, zero_words

if TYPE_CHECKING:
    from kernels.all_reduce import Exchange


def destination(exchange: "Exchange | None") -> dict[str, Any]:
    """Arguments of a kernel that pushes its result to this workspace; without one, it stores its result."""
    if exchange is None:
        return {"state": None, "rank": 0, "CAPACITY": 0}
    return {"state": exchange.state, "rank": exchange.rank, "CAPACITY": exchange.capacity // 4}


@gluon.jit
def begin_push(state, CAPACITY: gl.constexpr, PDL: gl.constexpr):
    """To be called after the wait for the previous kernel, and before this program stores a tile or a piece of one. Returns the
    epoch of this launch. CAPACITY: words of a message, at most."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # not earlier: the receiver relies on what the wait has completed
    N: gl.constexpr = len(state.peers)
    WARPS: gl.constexpr = gl.num_warps()
    block = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    epoch = gl.load(state.epochs, volatile=True) + 1
    zero_words(state, epoch, 0, N * CAPACITY, gl.program_id(0), gl.num_programs(0), block, N, N * CAPACITY)
    return epoch


@gluon.jit
def push_tile(sums, state, rank, epoch, row, column, rows, features, DTYPE: gl.constexpr, CAPACITY: gl.constexpr):
    """Push (BLOCK, ROWS) sums of a (rows, features) message, from this row and this even column on, rounded to DTYPE."""
    N: gl.constexpr = len(state.peers)
    BLOCK: gl.constexpr = sums.shape[0]
    ROWS: gl.constexpr = sums.shape[1]
    values = gl.convert_layout(sums.to(DTYPE), _pair_layout(BLOCK, ROWS, gl.num_warps()))
    first, second = gl.split(values.reshape((BLOCK // 2, 2, ROWS)).permute((0, 2, 1)))
    LAYOUT: gl.constexpr = first.type.layout
    pair = column // 2 + gl.arange(0, BLOCK // 2, gl.SliceLayout(1, LAYOUT))[:, None]
    m = row + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    push_pairs(first, second, m, pair, rows, features // 2, state.peers, epoch, rank, N, CAPACITY)


@gluon.constexpr_function
def _pair_layout(block, rows, warps):
    """Of (BLOCK, ROWS) sums: a thread has neighbouring features, and a warp stores 64 bytes of words of a row at a time. That is one
    exchange of neighbouring lanes' values away from an mma's result: they are shuffled, and need no shared memory."""
    spread = block >= 16 * warps  # else all warps have all sums
    first = 16 * warps if spread else 16
    registers = [[1, 0], *[[0, row] for row in (1, 8) if row < rows]]
    registers += [[first << i, 0] for i in range((block // first).bit_length() - 1)]
    lanes = [*[[0, row if row < rows else 0] for row in (2, 4)], [8, 0], [2, 0], [4, 0]]
    shares = [[16 << i if spread else 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, shares, [], [block, rows])
