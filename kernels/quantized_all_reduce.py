"""The quantized all-reduce as one Triton kernel over memory that all GPUs address: stores over NVLink, no multicast.

It is the fused kernel of Flash Communication (Li et al., arXiv:2412.04964, section 3.2.3 and Algorithm 1) on the protocol of
`kernels/all_reduce.py`'s two-shot sums: epochs, two slots that take turns, a flag for each phase, rank and program.

The message is cut into tiles of whole groups of values, and the tiles into units of N, one tile for each of the N ranks to sum.
A program takes some units a round, and does a round's three phases one round after the other, so that while one round's bytes
travel another one is quantized and a third one read:

    scatter   quantize each tile of mine into its owner's buffer
    reduce    read all ranks' codes of the tiles that I own, add them in fp32 in rank order, quantize the sum into every buffer
    gather    read the sums of all tiles

Codes lie in one plane of a buffer and headers in another, so that both are stored in long vectors. A header is 4 bytes: the scale's
bits (bf16) and, above them, the zero point (int16). With two 4-bit codes a byte, value j of a group's first half has the low bits
and value j of its second half the high ones.

A group's bytes depend on its own values only, so the result is that of `comm.quantized.two_step_sum` bit for bit, wherever either
cuts the message. In particular, a last group that is not full has its last value repeated.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import all_reduce
from kernels.all_reduce import MAX_PROGRAMS, Exchange, Tiling, _announce, _at, _await, _count, _flag_bytes, _this_epoch
from kernels.dispatch import pdl_supported
from kernels.quantize import _codes, _extremes, _negative_zeros, _scale, _step, _values, _zero_point

MAX_REGISTERS = 128  # of a thread
WARPS_OF_SM = 16  # with so many registers a thread: how many programs fit must be known, since they wait for each other's twins
MAX_ROUNDS = 1 << 16
MAX_ROW = 16384  # values of a row that one program can hold

_MAX_ROUNDS = tl.constexpr(MAX_ROUNDS)
_FLAG_BYTES = tl.constexpr(_flag_bytes(1))


@dataclass(frozen=True)
class Wire:
    """What travels: groups of `group` values (a power of two from 16 to 4096), coded with so many bits (4 or 8) before the
    reduction and before the gather. symmetric, floating: as in `comm.quantize.Format`."""

    group: int
    reduce_bits: int
    gather_bits: int
    symmetric: bool = False
    floating: bool = False

    def bytes_of(self, bits: int, values: int) -> int:
        """Codes and headers of `values` values, whole groups of them."""
        return values * bits // 8 + values // self.group * 4

    def buffer_bytes(self, world_size: int, capacity: int) -> int:
        """Size of a workspace's buffer for launches of up to `capacity` values (a multiple of four groups): flags; two slots of what
        is to be summed and of sums."""
        assert capacity % (4 * self.group) == 0, f"{capacity} values are no multiple of 4 groups of {self.group}"
        slot = self.bytes_of(self.reduce_bits, capacity) + self.bytes_of(self.gather_bits, capacity)
        return _flag_bytes(world_size) + 2 * slot


@dataclass(frozen=True)
class Rounds(Tiling):
    """block: values of a tile; programs: at most; rounds: in which a program does its units of a long message. With three programs
    an SM one round was the fastest at 16 and at 64 MiB: other programs then fill the time in which one waits."""

    rounds: int = 1


SUM = Rounds(block=2048, warps=4, programs=396)
BESIDE = Rounds(block=2048, warps=4, programs=48)
NORM = Rounds(block=0, warps=16, programs=84)  # a tile is a row


# --- tiles ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def _rows(TILE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """(ROWS,) whether there is such a group in a tile."""
    return tl.arange(0, ROWS) < TILE // GROUP


@triton.jit
def _place(GROUP: tl.constexpr, ROWS: tl.constexpr):
    """(ROWS, GROUP / 2) offsets in a tile of the values in the groups' first halves."""
    return tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, GROUP // 2)[None, :]


@triton.jit
def _codes_place(codes_at, tile, TILE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr):
    here = _at(codes_at + tile.to(tl.int64) * (TILE * BITS // 8), tl.uint8)
    return here + tl.arange(0, ROWS)[:, None] * (GROUP * BITS // 8) + tl.arange(0, GROUP // 2)[None, :]


@triton.jit
def _store_tile(
    coded, codes_at, headers_at, tile, TILE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Store a quantized tile as the `tile`-th of the planes that begin at these addresses."""
    rows = _rows(TILE, GROUP, ROWS)
    place, inside = _codes_place(codes_at, tile, TILE, GROUP, ROWS, BITS), rows[:, None]
    if BITS == 4:
        tl.store(place, coded[0] | (coded[1] << 4), mask=inside)
    else:
        tl.store(place, coded[0], mask=inside)
        tl.store(place + GROUP // 2, coded[1], mask=inside)
    tl.store(_at(headers_at, tl.int32) + tile * (TILE // GROUP) + tl.arange(0, ROWS), coded[2], mask=rows)


@triton.jit
def _load_tile(codes_at, headers_at, tile, TILE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr):
    """What `_store_tile` stored: bytes of codes, with 8 bits those of the second halves again by themselves, and headers."""
    rows = _rows(TILE, GROUP, ROWS)
    place, inside = _codes_place(codes_at, tile, TILE, GROUP, ROWS, BITS), rows[:, None]
    first = tl.load(place, mask=inside)
    second = first
    if BITS == 8:
        second = tl.load(place + GROUP // 2, mask=inside)
    return first, second, tl.load(_at(headers_at, tl.int32) + tile * (TILE // GROUP) + tl.arange(0, ROWS), mask=rows)


@triton.jit
def _quantize_tile(first, second, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, FLOATING: tl.constexpr, E4M3: tl.constexpr):
    """fp32 values of the groups' halves to (codes of the first halves, of the second, headers)."""
    LEVELS: tl.constexpr = 2**BITS - 1
    low, high, unknown = _extremes(first, second, True)
    scale = _scale(low, high, unknown, LEVELS, SYMMETRIC, FLOATING)
    step, zero = _step(scale), tl.zeros_like(low)
    if not (SYMMETRIC or FLOATING):
        zero = _zero_point(low, step)
    first = _codes(first, step, zero, LEVELS, SYMMETRIC, FLOATING, E4M3)
    second = _codes(second, step, zero, LEVELS, SYMMETRIC, FLOATING, E4M3)
    return first, second, scale | (zero.to(tl.int32) << 16)


@triton.jit
def _dequantize_tile(coded, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, FLOATING: tl.constexpr, E4M3: tl.constexpr):
    """fp32 values of the groups' first halves and of their second ones."""
    step, zero = _step(coded[2]), (coded[2] >> 16).to(tl.float32)
    if SYMMETRIC:
        zero = tl.full(zero.shape, 2 ** (BITS - 1), tl.float32)
    first, second = coded[0], coded[1]
    if BITS == 4:
        first, second = first & 15, first >> 4
    return _values(first, zero, step, FLOATING, E4M3), _values(second, zero, step, FLOATING, E4M3)


# --- phases ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _load_half(partial, place, count, last, FULL: tl.constexpr):
    """Values of the message; behind its end the last one, unless it ends with a group."""
    values = tl.load(partial + place, mask=place < count, other=0.0)
    if not FULL:
        values = tl.where(place < count, values, last)
    return values


@triton.jit
def _scatter(
    partial, peers, codes, headers, unit, count, last, rank,
    N: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr, FLOATING: tl.constexpr, E4M3: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Quantize a unit's tiles into their owners' buffers, the next rank's first. All loads are in flight together."""
    place = _place(GROUP, ROWS)
    halves = ()
    for i in tl.static_range(N):
        start = (unit * N + (rank + 1 + i) % N) * TILE
        first = _load_half(partial, start + place, count, last, FULL)
        halves += ((first, _load_half(partial, start + place + GROUP // 2, count, last, FULL)),)  # type: ignore[assignment]
    for i in tl.static_range(N):
        first, second = halves[i][0].to(tl.float32), halves[i][1].to(tl.float32)  # type: ignore
        coded = _quantize_tile(first, second, BITS, SYMMETRIC, FLOATING, E4M3)
        _store_tile(coded, peers[i] + codes, peers[i] + headers, unit * N + rank, TILE, GROUP, ROWS, BITS)


@triton.jit
def _reduce(
    peers, codes, headers, sum_codes, sum_headers, unit, rank,
    N: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, SUM_BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr, FLOATING: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Sum what all ranks sent of my tile of a unit, and quantize the sum into all buffers."""
    received = ()
    for r in tl.static_range(N):
        received += (_load_tile(peers[N - 1] + codes, peers[N - 1] + headers, unit * N + r, TILE, GROUP, ROWS, BITS),)  # type: ignore[assignment]
    first, second = _negative_zeros(ROWS, GROUP // 2), _negative_zeros(ROWS, GROUP // 2)
    for r in tl.static_range(N):
        a, b = _dequantize_tile(received[r], BITS, SYMMETRIC, FLOATING, E4M3)
        first += a
        second += b
    coded = _quantize_tile(first, second, SUM_BITS, SYMMETRIC, FLOATING, E4M3)
    for i in tl.static_range(N):
        _store_tile(coded, peers[i] + sum_codes, peers[i] + sum_headers, unit * N + rank, TILE, GROUP, ROWS, SUM_BITS)


@triton.jit
def _load_unit(
    mine, sum_codes, sum_headers, unit,
    N: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SUM_BITS: tl.constexpr,
):  # fmt: skip
    """The coded sums of a unit's tiles."""
    sums = ()
    for owner in tl.static_range(N):
        sums += (_load_tile(mine + sum_codes, mine + sum_headers, unit * N + owner, TILE, GROUP, ROWS, SUM_BITS),)  # type: ignore[assignment]
    return sums


@triton.jit
def _unit(r, k, per_round):
    """The k-th of the units that this program does in round r."""
    return (r * per_round + k) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def _launch_dependents(now):
    if now:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _advance(
    r, partial, peers, epoch, fault, count, last, units, per_round, rounds, rank, patience, planes,
    N: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BITS: tl.constexpr, SUM_BITS: tl.constexpr, SYMMETRIC: tl.constexpr, FLOATING: tl.constexpr, E4M3: tl.constexpr,
    FULL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scatter round r, reduce round r - 1, and wait for the sums of round r - 2, as far as there are such rounds."""
    mine, mark = peers[N - 1], epoch * _MAX_ROUNDS + r
    if r < rounds:
        k = 0
        while (k < per_round) & (_unit(r, k, per_round) < units):
            _scatter(
                partial, peers, planes[0], planes[1], _unit(r, k, per_round), count, last, rank,
                N, TILE, GROUP, ROWS, BITS, SYMMETRIC, FLOATING, E4M3, FULL,
            )  # fmt: skip
            k += 1
        _announce(peers, 0, rank, mark, N, LANES)
    if (r >= 1) & (r <= rounds):
        _await(mine, 0, mark - 1, patience, fault, N, LANES)
        k = 0
        while (k < per_round) & (_unit(r - 1, k, per_round) < units):
            _reduce(
                peers, planes[0], planes[1], planes[2], planes[3], _unit(r - 1, k, per_round), rank,
                N, TILE, GROUP, ROWS, BITS, SUM_BITS, SYMMETRIC, FLOATING, E4M3,
            )  # fmt: skip
            k += 1
        _announce(peers, 1, rank, mark - 1, N, LANES)
        if PDL:
            _launch_dependents(r == rounds)
    if r >= 2:
        _await(mine, 1, mark - 2, patience, fault, N, LANES)


@triton.jit
def _planes(epoch, N: tl.constexpr, CAPACITY: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, SUM_BITS: tl.constexpr):
    """Where in a buffer this launch's planes begin: codes and headers to be summed, codes and headers of sums."""
    HEADERS: tl.constexpr = CAPACITY // GROUP * 4
    SLOT: tl.constexpr = CAPACITY * (BITS + SUM_BITS) // 8 + 2 * HEADERS
    codes = _FLAG_BYTES * N + (epoch & 1) * SLOT
    headers = codes + CAPACITY * BITS // 8
    sum_codes = headers + HEADERS
    return codes, headers, sum_codes, sum_codes + CAPACITY * SUM_BITS // 8


@triton.jit
def _begin(partial, epochs, count, FULL: tl.constexpr, PDL: tl.constexpr):
    """This launch's epoch, and the last value of the message, with which its last group is filled up."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    epoch = _this_epoch(epochs)
    last = tl.load(partial + count - 1) if not FULL else 0.0
    _count(epochs, epoch)
    return epoch, last


# --- kernels --------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["units", "per_round", "rounds", "rank", "patience"])
def _quantized_sum(
    partial, out, peers, epochs, fault, count, units, per_round, rounds, rank, patience,
    N: tl.constexpr, LANES: tl.constexpr, CAPACITY: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BITS: tl.constexpr, SUM_BITS: tl.constexpr, SYMMETRIC: tl.constexpr, FLOATING: tl.constexpr, E4M3: tl.constexpr,
    FULL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    epoch, last = _begin(partial, epochs, count, FULL, PDL)
    planes = _planes(epoch, N, CAPACITY, GROUP, BITS, SUM_BITS)
    place = _place(GROUP, ROWS)
    r = 0
    while r < rounds + 2:
        _advance(
            r, partial, peers, epoch, fault, count, last, units, per_round, rounds, rank, patience, planes,
            N, LANES, TILE, GROUP, ROWS, BITS, SUM_BITS, SYMMETRIC, FLOATING, E4M3, FULL, PDL,
        )  # fmt: skip
        k = 0
        while (r >= 2) & (k < per_round) & (_unit(r - 2, k, per_round) < units):
            unit = _unit(r - 2, k, per_round)
            sums = _load_unit(peers[N - 1], planes[2], planes[3], unit, N, TILE, GROUP, ROWS, SUM_BITS)
            for owner in tl.static_range(N):
                first, second = _dequantize_tile(sums[owner], SUM_BITS, SYMMETRIC, FLOATING, E4M3)
                where = (unit * N + owner) * TILE + place
                tl.store(out + where, first.to(out.dtype.element_ty), mask=where < count)
                tl.store(out + where + GROUP // 2, second.to(out.dtype.element_ty), mask=where + GROUP // 2 < count)
            k += 1
        r += 1


@triton.jit
def _add(x, update, total, where, inside):
    """x + update, stored, and what was stored in fp32. The update is rounded first, as when it is summed and added one after the
    other."""
    DTYPE: tl.constexpr = total.dtype.element_ty
    before = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    after = (before + update.to(DTYPE).to(tl.float32)).to(DTYPE)
    tl.store(total + where, after, mask=inside)
    return tl.where(inside, after.to(tl.float32), 0.0)


@triton.jit(do_not_specialize=["units", "per_round", "rounds", "rank", "patience"])
def _quantized_add_norm(
    partial, x, weight, total, normed, peers, epochs, fault, count, units, per_round, rounds, rank, patience, eps,
    N: tl.constexpr, LANES: tl.constexpr, CAPACITY: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BITS: tl.constexpr, SUM_BITS: tl.constexpr, SYMMETRIC: tl.constexpr, FLOATING: tl.constexpr, E4M3: tl.constexpr,
    FULL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile is a row: every rank adds and normalizes all rows itself."""
    epoch, last = _begin(partial, epochs, count, FULL, PDL)
    planes = _planes(epoch, N, CAPACITY, GROUP, BITS, SUM_BITS)
    place = _place(GROUP, ROWS)
    HALF: tl.constexpr = GROUP // 2
    r = 0
    while r < rounds + 2:
        _advance(
            r, partial, peers, epoch, fault, count, last, units, per_round, rounds, rank, patience, planes,
            N, LANES, TILE, GROUP, ROWS, BITS, SUM_BITS, SYMMETRIC, FLOATING, E4M3, FULL, PDL,
        )  # fmt: skip
        k = 0
        while (r >= 2) & (k < per_round) & (_unit(r - 2, k, per_round) < units):
            unit = _unit(r - 2, k, per_round)
            sums = _load_unit(peers[N - 1], planes[2], planes[3], unit, N, TILE, GROUP, ROWS, SUM_BITS)
            for owner in tl.static_range(N):
                first, second = _dequantize_tile(sums[owner], SUM_BITS, SYMMETRIC, FLOATING, E4M3)
                start = (unit * N + owner) * TILE
                where, inside = start + place, (place < TILE) & (start < count)
                first = _add(x, first, total, where, inside)
                second = _add(x, second, total, where + HALF, inside)
                squares = tl.sum(tl.sum(first * first + second * second, axis=1), axis=0)
                factor = tl.rsqrt(squares / TILE + eps)
                scale = tl.load(weight + place, mask=place < TILE, other=0.0).to(tl.float32)
                tl.store(normed + where, (first * factor * scale).to(normed.dtype.element_ty), mask=inside)
                scale = tl.load(weight + place + HALF, mask=place < TILE, other=0.0).to(tl.float32)
                tl.store(normed + where + HALF, (second * factor * scale).to(normed.dtype.element_ty), mask=inside)
            k += 1
        r += 1


# --- launches -------------------------------------------------------------------------------------------------------------------


def quantized_sum(partial: Tensor, wire: Wire, exchange: Exchange, tiling: Rounds = SUM, pdl: bool = True) -> Tensor:
    """The quantized sum over ranks of `partial`: contiguous, fp32, bf16 or fp16; same shape and dtype.

    exchange: of a workspace with `wire.buffer_bytes`, whose capacity counts values; a longer message takes several launches, one
    after the other. All ranks must give the same tiling, and all its programs must fit the GPU at once. Returns at once; the sum is
    there when the current stream gets there. Raises ValueError if the workspace does not hold a tile of every rank."""
    flat, out = partial.view(-1), torch.empty_like(partial)
    for begin, end in _pieces(flat.numel(), max(tiling.block, wire.group), exchange):
        piece = flat[begin:end]
        grid, cut = _cut(piece, max(tiling.block, wire.group), exchange, tiling)
        _quantized_sum[grid](
            piece, out.view(-1)[begin:end], exchange.peers, exchange.epochs, exchange.fault, *cut, exchange.rank,
            exchange.patience, **_constants(piece, max(tiling.block, wire.group), wire, exchange, pdl),
            num_warps=tiling.warps, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    return out


def quantized_add_norm(
    partial: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    wire: Wire,
    exchange: Exchange,
    tiling: Rounds = NORM,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """(x + sum of `partial`, its RMSNorm times weight), both in x's dtype; x (..., C) contiguous, weight (C,).

    The sum is that of `quantized_sum`, rounded before it is added. Raises ValueError unless `fits_norm`."""
    if not fits_norm(partial, x, weight, wire, exchange):
        raise ValueError(f"no kernel for partial {_shape(partial)}, x {_shape(x)}, weight {_shape(weight)} and {wire}")
    row, (total, normed) = x.shape[-1], (torch.empty_like(x) for _ in range(2))
    for begin, end in _pieces(x.numel(), row, exchange):
        piece, *others = (t.view(-1)[begin:end] for t in (partial, x, total, normed))
        grid, cut = _cut(piece, row, exchange, tiling)
        _quantized_add_norm[grid](
            piece, others[0], weight, others[1], others[2], exchange.peers, exchange.epochs, exchange.fault, *cut, exchange.rank,
            exchange.patience, eps, **_constants(piece, row, wire, exchange, pdl),
            num_warps=tiling.warps, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    return total, normed


def fits_norm(partial: Tensor, x: Tensor, weight: Tensor, wire: Wire, exchange: Exchange) -> bool:
    """Whether `quantized_add_norm` serves these: rows of whole groups, one of which each rank can hold; and `all_reduce.fits_norm`."""
    row = x.shape[-1]
    whole = row % max(wire.group, 32) == 0 and row <= MAX_ROW and row * exchange.world_size <= exchange.capacity
    return whole and all_reduce.fits_norm(partial, x, weight)


def _pieces(count: int, tile: int, exchange: Exchange) -> list[tuple[int, int]]:
    """Parts of a message of `count` values that the workspace takes: whole units, but for the last."""
    unit = tile * exchange.world_size
    if unit > exchange.capacity:
        raise ValueError(f"{exchange.world_size} tiles of {tile} values, but the workspace takes {exchange.capacity}")
    most = exchange.capacity // unit * unit
    return [(begin, min(begin + most, count)) for begin in range(0, count, most)]


def _cut(piece: Tensor, tile: int, exchange: Exchange, tiling: Rounds) -> tuple[tuple[int], tuple[int, int, int, int]]:
    """The grid, and (values, units, units of a program in a round, rounds)."""
    units = triton.cdiv(piece.numel(), tile * exchange.world_size)
    programs = min(units, tiling.programs)
    if programs > MAX_PROGRAMS:
        raise ValueError(f"{programs} programs, but at most {MAX_PROGRAMS} have flags")
    per_round = triton.cdiv(units, programs * tiling.rounds)
    return (programs,), (piece.numel(), units, per_round, triton.cdiv(units, programs * per_round))


def _constants(piece: Tensor, tile: int, wire: Wire, exchange: Exchange, pdl: bool) -> dict[str, Any]:
    pdl = pdl and pdl_supported(piece.device)
    return {
        "N": exchange.world_size,
        "LANES": max(2, triton.next_power_of_2(exchange.world_size)),
        "CAPACITY": exchange.capacity,
        "TILE": tile,
        "GROUP": wire.group,
        "ROWS": triton.next_power_of_2(tile // wire.group),
        "BITS": wire.reduce_bits,
        "SUM_BITS": wire.gather_bits,
        "SYMMETRIC": wire.symmetric,
        "FLOATING": wire.floating,
        "E4M3": wire.floating and _converts_e4m3(piece.device),
        "FULL": piece.numel() % wire.group == 0,
        "PDL": pdl,
        "launch_pdl": pdl,
    }


@lru_cache
def _converts_e4m3(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _shape(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
