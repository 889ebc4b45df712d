"""The quantized all-reduce as one Triton kernel over symmetric memory: stores over NVLink, no multicast.

It is the fused kernel of Flash Communication (Li et al., arXiv:2412.04964, section 3.2.3 and Algorithm 1) with the protocol of
the two-shot all-reduces of `kernels/all_reduce.py`: epochs, two alternating slots, a flag for each phase, rank and program.

The message is cut into tiles of whole groups of values. A unit is N consecutive tiles, of which each of the N ranks reduces
one. A program handles some units in a round. The three phases of a round run in three consecutive rounds, so that while the
bytes of one round are in flight, another round is quantized and a third one read:

    scatter   quantize each tile of this rank into its owner's buffer
    reduce    read all ranks' codes of this rank's tiles, add them in fp32 in rank order, quantize the sums into every buffer
    gather    read the sums of all tiles

Codes and headers are in separate planes of a buffer, so that both are stored as long vectors. A header has 4 bytes: the scale's
bits (bf16) and, in the upper half, the zero point (int16). Two 4-bit codes share a byte: value j of a group's first half in the
low bits, value j of its second half in the high ones.

A group's bytes depend on its own values only. So the result is bitwise that of `comms.quantized.quantized_all_reduce`, wherever
the two cut the message. In particular, both pad the last group with its last value.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import all_reduce
from kernels.all_reduce import Exchange, Tiling, flag_bytes
from kernels.device import MAX_PROGRAMS, advance_epoch, launch_epoch, pointer_to, signal, wait_signals
from kernels.dispatch import pdl_options
from kernels.quantize import decode, encode, extremes, negative_zeros, scale_of, step_of, zero_point

MAX_REGISTERS = 128  # of a thread
WARPS_OF_SM = 16  # with MAX_REGISTERS; bounds the programs that fit on a GPU, which must all run at once to wait for other GPUs
MAX_ROUNDS = 1 << 16
MAX_ROW = 16384  # values of a row, at most: one program holds it

_MAX_ROUNDS = tl.constexpr(MAX_ROUNDS)
_FLAG_BYTES = tl.constexpr(flag_bytes(1))


@dataclass(frozen=True)
class WireFormat:
    """How messages are encoded: groups of `group` values (a power of two from 16 to 4096), with 4 or 8 bits a value in each
    of the two exchanges. symmetric, floating: as in `comms.quantize.Format`."""

    group: int
    reduce_bits: int
    gather_bits: int
    symmetric: bool = False
    floating: bool = False

    def bytes_of(self, bits: int, values: int) -> int:
        """Bytes of the codes and headers of `values` values, a multiple of `group`."""
        return values * bits // 8 + values // self.group * 4

    def buffer_bytes(self, world_size: int, capacity: int) -> int:
        """Bytes of a workspace's buffer for launches of up to `capacity` values (a multiple of four groups): flags, and two
        slots, each with the received slices and the sums."""
        assert capacity % (4 * self.group) == 0, f"{capacity} values are no multiple of 4 groups of {self.group}"
        slot = self.bytes_of(self.reduce_bits, capacity) + self.bytes_of(self.gather_bits, capacity)
        return flag_bytes(world_size) + 2 * slot


@dataclass(frozen=True)
class RoundTiling(Tiling):
    """block: values of a tile; programs: at most; rounds: in which a program handles its units of a long message. With three
    programs on each SM, one round was the fastest at 16 and at 64 MiB: other programs run while one waits."""

    rounds: int = 1


BLOCKING = RoundTiling(block=2048, warps=4, programs=396)
OVERLAPPED = RoundTiling(block=2048, warps=4, programs=48)
BLOCKING_NORM = RoundTiling(block=0, warps=16, programs=84)  # a tile is a row


class Coding(NamedTuple):
    """The compile-time constants of the kernel that describe the encoding."""

    tile: int  # values: whole groups
    group: int  # values
    rows: int  # groups of a tile, rounded up to a power of two
    bits: int  # of a code before the reduction
    sum_bits: int  # of a code of the sums
    symmetric: bool
    floating: bool
    e4m3: bool  # whether the GPU has an instruction for the conversion
    full: bool  # whether the message ends with a full group


# --- kernel -------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["units", "per_round", "rounds", "rank"])
def _quantized_sum(
    partial, x, weight, out, normed, state,
    count,  # values of the message
    units,
    per_round,  # units of a program in a round
    rounds, rank, eps,
    CODING: tl.constexpr, N: tl.constexpr, PADDED_N: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = sum. If x is not None: out = x + sum and normed = rms_norm(out) * weight. Tiles are then rows, and every rank
    adds and normalizes all rows."""
    epoch, last = _begin(partial, state, count, CODING, PDL)
    planes = _planes(epoch, CODING, N, CAPACITY)
    offsets = _first_half_offsets(CODING)
    HALF: tl.constexpr = CODING.group // 2
    TILE: tl.constexpr = CODING.tile
    r = 0
    while r < rounds + 2:
        _run_phases(r, partial, state, epoch, count, last, units, per_round, rounds, rank, planes, CODING, N, PADDED_N, PDL)
        k = 0
        while (r >= 2) & (k < per_round) & (_unit(r - 2, k, per_round) < units):
            unit = _unit(r - 2, k, per_round)
            sums = _load_unit(state.peers[N - 1], planes[2], planes[3], unit, CODING.sum_bits, CODING, N)
            for owner in tl.static_range(N):
                first, second = _dequantize_tile(sums[owner], CODING.sum_bits, CODING)
                start = (unit * N + owner) * TILE
                index = start + offsets
                if x is None:
                    tl.store(out + index, first.to(out.dtype.element_ty), mask=index < count)
                    tl.store(out + index + HALF, second.to(out.dtype.element_ty), mask=index + HALF < count)
                else:
                    inside = (offsets < TILE) & (start < count)
                    first = _add(x, first, out, index, inside)
                    second = _add(x, second, out, index + HALF, inside)
                    squares = tl.sum(tl.sum(first * first + second * second, axis=1), axis=0)
                    factor = tl.rsqrt(squares / TILE + eps) + squares * 0.0  # NaN if they overflow, see `norm.py`
                    scale = tl.load(weight + offsets, mask=offsets < TILE, other=0.0).to(tl.float32)
                    tl.store(normed + index, (first * factor * scale).to(normed.dtype.element_ty), mask=inside)
                    scale = tl.load(weight + offsets + HALF, mask=offsets < TILE, other=0.0).to(tl.float32)
                    tl.store(normed + index + HALF, (second * factor * scale).to(normed.dtype.element_ty), mask=inside)
            k += 1
        r += 1


@triton.jit
def _add(x, update, total, index, inside):
    """Store x + update in `total` and return the stored values in fp32. The update is rounded first, as by a separate sum."""
    DTYPE: tl.constexpr = total.dtype.element_ty
    before = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    after = (before + update.to(DTYPE).to(tl.float32)).to(DTYPE)
    tl.store(total + index, after, mask=inside)
    return tl.where(inside, after.to(tl.float32), 0.0)


@triton.jit
def _begin(partial, state, count, CODING: tl.constexpr, PDL: tl.constexpr):
    """This launch's epoch, and the last value of the message, which pads its last group."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    epoch = launch_epoch(state.epochs)
    last = tl.load(partial + count - 1) if not CODING.full else 0.0
    advance_epoch(state.epochs, epoch)
    return epoch, last


@triton.jit
def _planes(epoch, CODING: tl.constexpr, N: tl.constexpr, CAPACITY: tl.constexpr):
    """Byte offsets of this launch's planes: codes and headers of the partial sums, codes and headers of the sums."""
    HEADERS: tl.constexpr = CAPACITY // CODING.group * 4
    SLOT: tl.constexpr = CAPACITY * (CODING.bits + CODING.sum_bits) // 8 + 2 * HEADERS
    codes = _FLAG_BYTES * N + (epoch & 1) * SLOT
    headers = codes + CAPACITY * CODING.bits // 8
    sum_codes = headers + HEADERS
    return codes, headers, sum_codes, sum_codes + CAPACITY * CODING.sum_bits // 8


# --- phases -------------------------------------------------------------------------------------------------------------------


@triton.jit
def _run_phases(
    r, partial, state, epoch, count, last, units, per_round, rounds, rank, planes,
    CODING: tl.constexpr, N: tl.constexpr, PADDED_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scatter round r, reduce round r - 1, and wait for the sums of round r - 2, where these rounds exist."""
    round_epoch = epoch * _MAX_ROUNDS + r
    if r < rounds:
        k = 0
        while (k < per_round) & (_unit(r, k, per_round) < units):
            _scatter(partial, state.peers, planes, _unit(r, k, per_round), count, last, rank, CODING, N)
            k += 1
        signal(state.peers, 0, rank, round_epoch, N, PADDED_N)
    if (r >= 1) & (r <= rounds):
        wait_signals(state, 0, round_epoch - 1, N, PADDED_N)
        k = 0
        while (k < per_round) & (_unit(r - 1, k, per_round) < units):
            _reduce(state.peers, planes, _unit(r - 1, k, per_round), rank, CODING, N)
            k += 1
        signal(state.peers, 1, rank, round_epoch - 1, N, PADDED_N)
        if PDL:
            _launch_dependents(r == rounds)
    if r >= 2:
        wait_signals(state, 1, round_epoch - 2, N, PADDED_N)


@triton.jit
def _unit(r, k, per_round):
    """The k-th unit of this program in round r."""
    return (r * per_round + k) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def _launch_dependents(condition):
    if condition:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _scatter(partial, peers, planes, unit, count, last, rank, CODING: tl.constexpr, N: tl.constexpr):
    """Quantize a unit's tiles into their owners' buffers, the next rank's first. All loads are issued before any is used."""
    offsets = _first_half_offsets(CODING)
    halves = ()
    for i in tl.static_range(N):
        start = (unit * N + (rank + 1 + i) % N) * CODING.tile
        first = _load_half(partial, start + offsets, count, last, CODING.full)
        halves += ((first, _load_half(partial, start + offsets + CODING.group // 2, count, last, CODING.full)),)  # type: ignore[assignment]
    for i in tl.static_range(N):
        first, second = halves[i][0].to(tl.float32), halves[i][1].to(tl.float32)  # type: ignore
        coded = _quantize_tile(first, second, CODING.bits, CODING)
        _store_tile(coded, peers[i] + planes[0], peers[i] + planes[1], unit * N + rank, CODING.bits, CODING)


@triton.jit
def _load_half(partial, index, count, last, FULL: tl.constexpr):
    """Values of the message. Beyond its end they are `last`, or 0 if the message ends with a full group."""
    values = tl.load(partial + index, mask=index < count, other=0.0)
    if not FULL:
        values = tl.where(index < count, values, last)
    return values


@triton.jit
def _reduce(peers, planes, unit, rank, CODING: tl.constexpr, N: tl.constexpr):
    """Add what all ranks sent of this rank's tile of a unit, and quantize the sum into all buffers."""
    received = _load_unit(peers[N - 1], planes[0], planes[1], unit, CODING.bits, CODING, N)
    first, second = negative_zeros(CODING.rows, CODING.group // 2), negative_zeros(CODING.rows, CODING.group // 2)
    for r in tl.static_range(N):
        a, b = _dequantize_tile(received[r], CODING.bits, CODING)
        first += a
        second += b
    coded = _quantize_tile(first, second, CODING.sum_bits, CODING)
    for i in tl.static_range(N):
        _store_tile(coded, peers[i] + planes[2], peers[i] + planes[3], unit * N + rank, CODING.sum_bits, CODING)


# --- tiles --------------------------------------------------------------------------------------------------------------------


@triton.jit
def _load_unit(buffer, codes, headers, unit, BITS: tl.constexpr, CODING: tl.constexpr, N: tl.constexpr):
    """The codes and headers of a unit's N tiles."""
    tiles = ()
    for i in tl.static_range(N):
        tiles += (_load_tile(buffer + codes, buffer + headers, unit * N + i, BITS, CODING),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _quantize_tile(first, second, BITS: tl.constexpr, CODING: tl.constexpr):
    """fp32 values of the groups' first and second halves to (codes of the first halves, codes of the second halves, headers)."""
    LEVELS: tl.constexpr = 2**BITS - 1
    low, high, nonfinite = extremes(first, second, True)
    scale = scale_of(low, high, nonfinite, LEVELS, CODING.symmetric, CODING.floating)
    step, zero = step_of(scale), tl.zeros_like(low)
    if not (CODING.symmetric or CODING.floating):
        zero = zero_point(low, step)
    first = encode(first, step, zero, LEVELS, CODING.symmetric, CODING.floating, CODING.e4m3)
    second = encode(second, step, zero, LEVELS, CODING.symmetric, CODING.floating, CODING.e4m3)
    return first, second, scale | (zero.to(tl.int32) << 16)


@triton.jit
def _dequantize_tile(coded, BITS: tl.constexpr, CODING: tl.constexpr):
    """The inverse of `_quantize_tile`: fp32 values of the groups' first and second halves."""
    step, zero = step_of(coded[2]), (coded[2] >> 16).to(tl.float32)
    if CODING.symmetric:
        zero = tl.full(zero.shape, 2 ** (BITS - 1), tl.float32)
    first, second = coded[0], coded[1]
    if BITS == 4:
        first, second = first & 15, first >> 4
    return decode(first, zero, step, CODING.floating, CODING.e4m3), decode(second, zero, step, CODING.floating, CODING.e4m3)


@triton.jit
def _store_tile(coded, codes_at, headers_at, tile, BITS: tl.constexpr, CODING: tl.constexpr):
    """Store a quantized tile as number `tile` of the planes that begin at these addresses."""
    rows = _rows(CODING)
    pointers, inside = _code_pointers(codes_at, tile, BITS, CODING), rows[:, None]
    if BITS == 4:
        tl.store(pointers, coded[0] | (coded[1] << 4), mask=inside)
    else:
        tl.store(pointers, coded[0], mask=inside)
        tl.store(pointers + CODING.group // 2, coded[1], mask=inside)
    tl.store(_header_pointers(headers_at, tile, CODING), coded[2], mask=rows)


@triton.jit
def _load_tile(codes_at, headers_at, tile, BITS: tl.constexpr, CODING: tl.constexpr):
    """What `_store_tile` stored: (bytes of the first halves, of the second halves, headers). With 4 bits both are the same."""
    rows = _rows(CODING)
    pointers, inside = _code_pointers(codes_at, tile, BITS, CODING), rows[:, None]
    first = tl.load(pointers, mask=inside)
    second = first
    if BITS == 8:
        second = tl.load(pointers + CODING.group // 2, mask=inside)
    return first, second, tl.load(_header_pointers(headers_at, tile, CODING), mask=rows)


@triton.jit
def _rows(CODING: tl.constexpr):
    """(rows,) whether a tile has this group: `rows` is rounded up."""
    return tl.arange(0, CODING.rows) < CODING.tile // CODING.group


@triton.jit
def _first_half_offsets(CODING: tl.constexpr):
    """(rows, group / 2) offsets, in a tile, of the values of the groups' first halves."""
    return tl.arange(0, CODING.rows)[:, None] * CODING.group + tl.arange(0, CODING.group // 2)[None, :]


@triton.jit
def _code_pointers(codes_at, tile, BITS: tl.constexpr, CODING: tl.constexpr):
    first = pointer_to(codes_at + tile.to(tl.int64) * (CODING.tile * BITS // 8), tl.uint8)
    return first + tl.arange(0, CODING.rows)[:, None] * (CODING.group * BITS // 8) + tl.arange(0, CODING.group // 2)[None, :]


@triton.jit
def _header_pointers(headers_at, tile, CODING: tl.constexpr):
    return pointer_to(headers_at, tl.int32) + tile * (CODING.tile // CODING.group) + tl.arange(0, CODING.rows)


# --- launches -----------------------------------------------------------------------------------------------------------------


def quantized_sum(
    partial: Tensor, wire: WireFormat, exchange: Exchange, tiling: RoundTiling = BLOCKING, pdl: bool = True
) -> Tensor:
    """The quantized sum over ranks of `partial`: contiguous, fp32, bf16 or fp16; same shape and dtype.

    exchange: of a workspace with `wire.buffer_bytes` bytes, whose capacity counts values; longer messages take several
    launches. All ranks must pass the same tiling, and all its programs must fit on the GPU at once. Asynchronous: complete in
    the current stream's order. Raises ValueError if the workspace does not hold a tile of every rank."""
    flat, out = partial.view(-1), torch.empty_like(partial)
    for begin, end in _pieces(flat.numel(), max(tiling.block, wire.group), exchange):
        piece = flat[begin:end]
        grid, cut = _cut(piece, max(tiling.block, wire.group), exchange, tiling)
        _quantized_sum[grid](
            piece, None, None, out.view(-1)[begin:end], None, exchange.state, *cut, exchange.rank, None,
            **_options(piece, max(tiling.block, wire.group), wire, exchange, tiling, pdl),
        )  # fmt: skip
    return out


def quantized_add_norm(
    partial: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    wire: WireFormat,
    exchange: Exchange,
    tiling: RoundTiling = BLOCKING_NORM,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """(x + sum of `partial`, its RMSNorm times weight), both in x's dtype; x (..., C) contiguous, weight (C,).

    The sum is that of `quantized_sum`, rounded before it is added to x. Raises ValueError unless `fits_norm`."""
    if not fits_norm(partial, x, weight, wire, exchange):
        raise ValueError(f"no kernel for partial {_shape(partial)}, x {_shape(x)}, weight {_shape(weight)} and {wire}")
    row, (total, normed) = x.shape[-1], (torch.empty_like(x) for _ in range(2))
    for begin, end in _pieces(x.numel(), row, exchange):
        piece, before, after, after_norm = (t.view(-1)[begin:end] for t in (partial, x, total, normed))
        grid, cut = _cut(piece, row, exchange, tiling)
        _quantized_sum[grid](
            piece, before, weight, after, after_norm, exchange.state, *cut, exchange.rank, eps,
            **_options(piece, row, wire, exchange, tiling, pdl),
        )  # fmt: skip
    return total, normed


def fits_norm(partial: Tensor, x: Tensor, weight: Tensor, wire: WireFormat, exchange: Exchange) -> bool:
    """Whether `quantized_add_norm` supports these: rows of whole groups, one row of each rank fits the workspace, and
    `all_reduce.fits_norm`."""
    row = x.shape[-1]
    whole = row % max(wire.group, 32) == 0 and row <= MAX_ROW and row * exchange.world_size <= exchange.capacity
    return whole and all_reduce.fits_norm(partial, x, weight)


def _pieces(count: int, tile: int, exchange: Exchange) -> list[tuple[int, int]]:
    """(first, end) of the pieces of a message of `count` values that fit the workspace: whole units, except the last."""
    unit = tile * exchange.world_size
    if unit > exchange.capacity:
        raise ValueError(f"{exchange.world_size} tiles of {tile} values, but the workspace takes {exchange.capacity}")
    longest = exchange.capacity // unit * unit
    return [(begin, min(begin + longest, count)) for begin in range(0, count, longest)]


def _cut(piece: Tensor, tile: int, exchange: Exchange, tiling: RoundTiling) -> tuple[tuple[int], tuple[int, int, int, int]]:
    """The grid, and (values, units, units of a program in a round, rounds). Raises ValueError for too many programs."""
    units = triton.cdiv(piece.numel(), tile * exchange.world_size)
    programs = min(units, tiling.programs)
    if programs > MAX_PROGRAMS:
        raise ValueError(f"{programs} programs, but at most {MAX_PROGRAMS} have flags")
    per_round = triton.cdiv(units, programs * tiling.rounds)
    return (programs,), (piece.numel(), units, per_round, triton.cdiv(units, programs * per_round))


def _options(piece: Tensor, tile: int, wire: WireFormat, exchange: Exchange, tiling: RoundTiling, pdl: bool) -> dict[str, Any]:
    coding = Coding(
        tile=tile,
        group=wire.group,
        rows=triton.next_power_of_2(tile // wire.group),
        bits=wire.reduce_bits,
        sum_bits=wire.gather_bits,
        symmetric=wire.symmetric,
        floating=wire.floating,
        e4m3=wire.floating and _converts_e4m3(piece.device),
        full=piece.numel() % wire.group == 0,
    )
    return {
        "CODING": coding,
        "N": exchange.world_size,
        "PADDED_N": max(2, triton.next_power_of_2(exchange.world_size)),
        "CAPACITY": exchange.capacity,
        "num_warps": tiling.warps,
        "maxnreg": MAX_REGISTERS,
        **pdl_options(piece.device, pdl),
    }


@lru_cache
def _converts_e4m3(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _shape(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
