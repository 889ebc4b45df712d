"""Prefill attention over a paged KV cache for Hopper, with warp specialization, in Gluon.

A program is persistent and computes tiles of 128 rows: tokens times the PACK query heads that share a key-value head. Two
consumers, of 4 warps and 64 rows each, multiply (wgmma) and compute the online softmax; the tensor cores multiply the next
scores, and the last weights by their values, during the softmax. The consumers take turns to multiply, so that the softmax of one
overlaps the other's products (FlashAttention-3, Shah et al., arXiv:2407.08608, sections 3.1 and 3.2). One warp loads queries and
keys, another one values, by TMA: block by block of the cache, into rings of shared memory that run ahead of the consumers, also
into the next tile. Rows that lie beyond a sequence's blocks are filled with zeros by TMA. Those of its last block may hold
anything; the loading warp clears those of the values, so that a weight of 0 gives 0.

Shared memory holds matrices as panels of 64 features, which is a row of TMA's and wgmma's 128-byte pattern. So a panel's rows
are consecutive, and the rows of a block of the cache are a part of them wherever it lies.
"""

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.prefill_schedule import FIELDS

ROWS = 128  # of a tile
CONSUMERS = 2
PANEL = 64  # features
REGISTERS = 168  # of a thread at launch, when 12 warps share an SM's equally; then they are redistributed
# head_dim: (keys of a step, stages of the rings, buffers of queries), which fit shared memory
CONFIGS = {64: (128, 4, 2), 128: (128, 2, 2), 256: (64, 2, 1)}
_PANEL = gl.constexpr(PANEL)
_FIELDS = gl.constexpr(FIELDS)
_HALF = gl.constexpr(ROWS // CONSUMERS)


# --- tiles --------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _tile(schedule, nth, most, GROUPS: gl.constexpr):
    """This program's tile of round `nth`: (first row, tokens, position, length, span, group of heads). Tokens is 0 for none, and in
    all later rounds. most: of the tiles in the schedule, times GROUPS.

    Every other round the programs take tiles in the reverse order, so that the work of each is about the same."""
    programs = gl.num_programs(0)
    place = gl.program_id(0) if nth % 2 == 0 else programs - 1 - gl.program_id(0)
    tile = nth * programs + place
    entry = schedule + tile // GROUPS * _FIELDS
    row = gl.load(entry, mask=tile < most, other=0)
    tokens = gl.load(entry + 1, mask=tile < most, other=0)
    position = gl.load(entry + 2, mask=tile < most, other=0)
    length = gl.load(entry + 3, mask=tile < most, other=0)
    span = gl.load(entry + 4, mask=tile < most, other=0)
    return row, tokens, position, length, span, tile % GROUPS


@gluon.jit
def _steps(tokens, position, length, BLOCK_N: gl.constexpr):
    """Steps of a tile: blocks of BLOCK_N keys up to its last token. 0 for padding, and for entries without tokens, whose position
    is undefined."""
    return gl.where(tokens > 0, gl.cdiv(gl.minimum(position + tokens, length), BLOCK_N), 0)


# --- loading ------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _load_queries(q, buffers, full, free, step, row, first_head, BUFFERS: gl.constexpr):
    """Start to load a tile's queries: for each consumer its rows, panel by panel."""
    PANELS: gl.constexpr = buffers.type.shape[0] // (BUFFERS * 2)
    TOKENS: gl.constexpr = q.block_type.shape[0]
    slot = step % BUFFERS
    mbarrier.wait(free.index(slot), (step // BUFFERS & 1) ^ 1)
    mbarrier.expect(full.index(slot), 2 * PANELS * q.block_type.nbytes)
    for part in gl.static_range(2 * PANELS):
        at = [row + part // PANELS * TOKENS, first_head, part % PANELS * _PANEL]
        tma.async_copy_global_to_shared(q, at, full.index(slot), buffers.index(slot * 2 * PANELS + part))


@gluon.jit
def _cache_rows(table, key, length, BLOCK_N: gl.constexpr, LOADED: gl.constexpr, P: gl.constexpr):
    """The first cache rows of the BLOCK_N // LOADED parts of a step that begins at position `key`. Beyond the sequence, a row
    beyond the cache, so that TMA fills in zeros."""
    rows = ()
    for part in gl.static_range(BLOCK_N // LOADED):
        token = key + part * LOADED
        block = gl.load(table + token // P, mask=token < length, other=0)
        row = gl.where(token < length, block * P + token % P, 1 << 30)
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _load_step(cache, ring, arrived, slot, rows, column, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """Start to load the keys or values of a step into a slot of the ring. The barrier `arrived` counts their bytes."""
    PARTS: gl.constexpr = BLOCK_N // cache.block_type.shape[0]
    PANELS: gl.constexpr = D // _PANEL
    mbarrier.expect(arrived, PARTS * PANELS * cache.block_type.nbytes)
    for part in gl.static_range(PARTS):
        for panel in gl.static_range(PANELS):
            to = ring.index((slot * PANELS + panel) * PARTS + part)
            tma.async_copy_global_to_shared(cache, [rows[part], column + panel * _PANEL], arrived, to)


@gluon.jit
def _clear(ring, slot, begin, end, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """Write zeros to the rows begin … end - 1 of a slot; `end` is a multiple of 8."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    pieces = ring._reinterpret(ring.dtype, [ring.type.shape[0] * ring.type.shape[1] // 8, 8, _PANEL], ring.layout)
    row = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))[:, None]
    for number in range(begin // 8, end // 8):
        for panel in gl.static_range(D // _PANEL):
            piece = pieces.index((slot * (D // _PANEL) + panel) * (BLOCK_N // 8) + number)
            old = piece.load(LAYOUT)
            piece.store(gl.where(number * 8 + row < begin, old, gl.zeros_like(old)))


@gluon.jit
def _load_keys(q, keys, tables, schedule, most, queries, ring, barriers, table_stride,
    G: gl.constexpr, PACK: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, P: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Queries and keys of all tiles of this program."""
    q_full, q_free, full, free = barriers
    step = 0
    loaded = 0  # tiles
    nth = 0
    row, tokens, position, length, span, group = _tile(schedule, nth, most, GROUPS)
    while tokens > 0:
        steps = _steps(tokens, position, length, BLOCK_N)
        if steps > 0:
            _load_queries(q, queries, q_full, q_free, loaded, row, group * PACK, BUFFERS)
            loaded += 1
        table = tables + span.to(gl.int64) * table_stride
        column = group * PACK // G * D
        for i in range(steps):
            slot = step % STAGES
            rows = _cache_rows(table, i * BLOCK_N, length, BLOCK_N, keys.block_type.shape[0], P)
            mbarrier.wait(free.index(slot), (step // STAGES & 1) ^ 1)
            _load_step(keys, ring, full.index(slot), slot, rows, column, BLOCK_N, D)
            step += 1
        nth += 1
        row, tokens, position, length, span, group = _tile(schedule, nth, most, GROUPS)


@gluon.jit
def _load_values(values, tables, schedule, most, ring, barriers, table_stride,
    G: gl.constexpr, PACK: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, P: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Values of all tiles of this program. A step in whose last block the sequence ends is full when it has been cleared."""
    full, free, landed = barriers
    LOADED: gl.constexpr = values.block_type.shape[0]
    step = 0
    cleared = 0  # steps
    nth = 0
    _row, tokens, position, length, span, group = _tile(schedule, nth, most, GROUPS)
    while tokens > 0:
        table = tables + span.to(gl.int64) * table_stride
        column = group * PACK // G * D
        for i in range(_steps(tokens, position, length, BLOCK_N)):
            slot = step % STAGES
            rows = _cache_rows(table, i * BLOCK_N, length, BLOCK_N, LOADED, P)
            mbarrier.wait(free.index(slot), (step // STAGES & 1) ^ 1)
            used = length - i * BLOCK_N
            if (used < BLOCK_N) & (used % LOADED != 0):
                _load_step(values, ring, landed, slot, rows, column, BLOCK_N, D)
                mbarrier.wait(landed, cleared & 1)
                _clear(ring, slot, used, gl.cdiv(used, LOADED) * LOADED, BLOCK_N, D)
                fence_async_shared()
                mbarrier.arrive(full.index(slot))
                cleared += 1
            else:
                _load_step(values, ring, full.index(slot), slot, rows, column, BLOCK_N, D)
            step += 1
        nth += 1
        _row, tokens, position, length, span, group = _tile(schedule, nth, most, GROUPS)


# --- computing ----------------------------------------------------------------------------------------------------------------


@gluon.jit
def _weights(scores, row_max, scale):
    """(exponentials of scores (M, BLOCK_N), their sums (M, 4) by the 4 threads of a row, maximum, factor of earlier results). Scores
    times `scale` are base-2 logarithms. The threads' sums are only added up at the end of a tile: no step waits for shuffles."""
    BLOCK_N: gl.constexpr = scores.shape[1]
    left, right = scores.reshape((scores.shape[0], 2, BLOCK_N // 2)).permute((0, 2, 1)).split()
    largest = gl.max(gl.maximum(left, right), axis=1)  # half as many maxima that wait for one another
    new_max = gl.maximum(row_max, gl.convert_layout(largest, row_max.type.layout))
    weights = gl.exp2(scores * scale - (new_max * scale)[:, None])
    sums = gl.sum(gl.sum(weights.reshape((scores.shape[0], BLOCK_N // 8, 4, 2)), axis=3), axis=1)
    return weights, sums, new_max, gl.exp2((row_max - new_max) * scale)


@gluon.jit
def _masked(scores, key, position):
    """Scores (M, BLOCK_N) of the keys from `key` on; a row attends to keys up to its position (M,). Every row attends to key 0,
    which is in the first step, so its maximum is finite."""
    keys = key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
    return gl.where(keys[None, :] <= position[:, None], scores, float("-inf"))


@gluon.jit
def _multiply_keys(query, k_ring, slot):
    """Start to multiply one consumer's queries by the keys of a slot: scores (M, BLOCK_N)."""
    BLOCK_N: gl.constexpr = k_ring.type.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    scores = gl.zeros((_HALF, BLOCK_N), gl.float32, SCORES)
    return warpgroup_mma(query, k_ring.index(slot).permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _attend_step(query, k_ring, v_ring, barriers, turn, step, acc, row_max, row_sum, weights, scale, key, position, masked,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Scores of step `step`, and meanwhile the values of the step before, times `weights` (M, BLOCK_N).

    The consumers take turns, so that one multiplies while the other computes its softmax. turn: how many this one had."""
    k_full, k_free, v_full, v_free, turns = barriers
    STAGES: gl.constexpr = k_ring.type.shape[0]
    slot = step % STAGES
    last = (step + STAGES - 1) % STAGES
    mbarrier.wait(turns.index(CONSUMER), (turn & 1) ^ (1 - CONSUMER))  # consumer 0 begins
    mbarrier.wait(k_full.index(slot), step // STAGES & 1)
    scores = _multiply_keys(query, k_ring, slot)
    mbarrier.wait(v_full.index(last), (step - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, v_ring.index(last), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - CONSUMER))
    scores = warpgroup_mma_wait(1, (scores,))
    mbarrier.arrive(k_free.index(slot))
    if masked:
        scores = _masked(scores, key, position)
    new_weights, sums, row_max, factor = _weights(scores, row_max, scale)
    row_sum = row_sum * gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    new_weights = new_weights.to(k_ring.dtype)
    # This barrier's phase is over. But ptxas does not move the softmax past the loop that tests it, and so not past the next line.
    mbarrier.wait(v_full.index(last), (step - 1) // STAGES & 1)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(v_free.index(last))
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, row_max, row_sum, gl.convert_layout(new_weights, weights.type.layout)


@gluon.jit
def _attend_tile(query, k_ring, v_ring, barriers, tile, step, steps, first_position, position, scale, CONSUMER: gl.constexpr):
    """(attention of one consumer's rows (M, D) in fp32, next step). position (M,): the last key that a row attends to;
    first_position: of the tile's first row; tile: how many this consumer had."""
    k_full, k_free, v_full, v_free, _turns = barriers
    STAGES: gl.constexpr = k_ring.type.shape[0]
    BLOCK_N: gl.constexpr = k_ring.type.shape[1]
    D: gl.constexpr = k_ring.type.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    unmasked = (first_position + 1) // BLOCK_N  # steps

    mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1)
    scores = warpgroup_mma_wait(0, (_multiply_keys(query, k_ring, step % STAGES),))
    mbarrier.arrive(k_free.index(step % STAGES))
    if unmasked == 0:
        scores = _masked(scores, 0, position)
    row_max = gl.full((_HALF,), float("-inf"), gl.float32, gl.SliceLayout(1, scores.type.layout))
    weights, row_sum, row_max, _factor = _weights(scores, row_max, scale)
    weights = gl.convert_layout(weights.to(k_ring.dtype), gl.DotOperandLayout(0, ACC, 2))
    acc = gl.zeros((_HALF, D), gl.float32, ACC)
    for i in range(1, steps):
        step += 1  # each but a tile's first is a turn
        acc, row_max, row_sum, weights = _attend_step(
            query, k_ring, v_ring, barriers, step - tile - 1, step, acc, row_max, row_sum, weights, scale, i * BLOCK_N, position,
            i >= unmasked, CONSUMER,
        )  # fmt: skip
    mbarrier.wait(v_full.index(step % STAGES), step // STAGES & 1)
    acc = warpgroup_mma(weights, v_ring.index(step % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(v_free.index(step % STAGES))
    return acc * gl.convert_layout(1.0 / gl.sum(row_sum, axis=1), gl.SliceLayout(1, ACC))[:, None], step + 1


@gluon.jit
def _skip_tile(barriers, tile, step, steps, CONSUMER: gl.constexpr):
    """Pass over a tile in which a consumer has no rows, and give its turns to the other one. Returns the next step."""
    k_full, k_free, v_full, v_free, turns = barriers
    STAGES: gl.constexpr = k_full.type.shape[0]
    for i in range(steps):
        slot = step % STAGES
        if i > 0:
            mbarrier.wait(turns.index(CONSUMER), (step - tile - 1 & 1) ^ (1 - CONSUMER))
            mbarrier.arrive(turns.index(1 - CONSUMER))
        mbarrier.wait(k_full.index(slot), step // STAGES & 1)
        mbarrier.arrive(k_free.index(slot))
        mbarrier.wait(v_full.index(slot), step // STAGES & 1)
        mbarrier.arrive(v_free.index(slot))
        step += 1
    return step


@gluon.jit
def _store(out, result, row, tokens, group, FIRST: gl.constexpr, H: gl.constexpr, PACK: gl.constexpr):
    """Store one consumer's rows (M, D), except those beyond the tile's tokens."""
    m = gl.arange(0, _HALF, gl.SliceLayout(1, result.type.layout))
    token = FIRST + m // PACK
    offsets = ((row + token).to(gl.int64) * H + group * PACK + m % PACK) * result.shape[1]
    n = gl.arange(0, result.shape[1], gl.SliceLayout(0, result.type.layout))
    gl.store(out + offsets[:, None] + n[None, :], result, mask=(token < tokens)[:, None])


@gluon.jit
def _consume(out, schedule, most, queries, k_ring, v_ring, q_full, q_free, barriers, scale,
    CONSUMER: gl.constexpr, H: gl.constexpr, PACK: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """This consumer's rows of all tiles of this program, of which those without keys come last, as `prefill_schedule` orders them. It
    also computes rows that a partial tile does not have, if it has any."""
    BLOCK_N: gl.constexpr = k_ring.type.shape[1]
    D: gl.constexpr = k_ring.type.shape[2]
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    STORED: gl.constexpr = gl.BlockedLayout([D // 16, 8], [256 // D, D // 8], [4, 1], [1, 0])  # a thread has 16 bytes of a row
    FIRST: gl.constexpr = CONSUMER * (_HALF // PACK)  # token
    step = 0
    nth = 0
    row, tokens, first_position, length, _span, group = _tile(schedule, nth, most, H // PACK)
    while _steps(tokens, first_position, length, BLOCK_N) > 0:
        next_tile = _tile(schedule, nth + 1, most, H // PACK)  # loaded during this tile
        buffer = nth % BUFFERS
        query = queries.index(buffer * 2 + CONSUMER)
        position = first_position + FIRST + gl.arange(0, _HALF, ROW) // PACK
        steps = _steps(tokens, first_position, length, BLOCK_N)
        mbarrier.wait(q_full.index(buffer), nth // BUFFERS & 1)
        if tokens > FIRST:
            acc, step = _attend_tile(
                query, k_ring, v_ring, barriers, nth, step, steps, first_position, position, scale, CONSUMER
            )
            query.store(acc.to(query.dtype))  # in the place of the queries, so that each thread can store 16 bytes of a row
            result = query.load(STORED)
            fence_async_shared()
            mbarrier.arrive(q_free.index(buffer))
            _store(out, result, row, tokens, group, FIRST, H, PACK)
        else:
            mbarrier.arrive(q_free.index(buffer))
            step = _skip_tile(barriers, nth, step, steps, CONSUMER)
        nth += 1
        row, tokens, first_position, length, _span, group = next_tile
    while tokens > 0:  # padding
        _store(out, gl.zeros((_HALF, D), k_ring.dtype, STORED), row, tokens, group, FIRST, H, PACK)
        nth += 1
        row, tokens, first_position, length, _span, group = _tile(schedule, nth, most, H // PACK)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit(do_not_specialize=["most", "table_stride"])
def _prefill(
    q,  # descriptor of (T, H, D)
    keys, values,  # descriptors of (N * P, K * D)
    tables, schedule, out,
    most,  # tiles in the schedule, times GROUPS
    table_stride,
    scale,  # log2(e) / sqrt(D): the exponentials are powers of two
    H: gl.constexpr,
    G: gl.constexpr,  # query heads of a key-value head
    PACK: gl.constexpr,  # of them, in a tile
    D: gl.constexpr, P: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    PANELS: gl.constexpr = D // _PANEL
    PARTS: gl.constexpr = PANELS * (BLOCK_N // keys.block_type.shape[0])
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = keys.dtype
    # Triton knows no unpacking, hence RUF005
    query_parts = gl.allocate_shared_memory(dtype, [BUFFERS * 2 * PANELS] + q.block_type.shape, q.layout)  # noqa: RUF005
    key_parts = gl.allocate_shared_memory(dtype, [STAGES * PARTS] + keys.block_type.shape, keys.layout)  # noqa: RUF005
    value_parts = gl.allocate_shared_memory(dtype, [STAGES * PARTS] + values.block_type.shape, values.layout)  # noqa: RUF005
    queries = query_parts._reinterpret(dtype, [BUFFERS * 2, _HALF, D], MATRIX)
    k_ring = key_parts._reinterpret(dtype, [STAGES, BLOCK_N, D], MATRIX)
    v_ring = value_parts._reinterpret(dtype, [STAGES, BLOCK_N, D], MATRIX)
    q_full, q_free = _barriers(BUFFERS, 1), _barriers(BUFFERS, 2)
    k_full, k_free = _barriers(STAGES, 1), _barriers(STAGES, 2)
    v_full, v_free = _barriers(STAGES, 1), _barriers(STAGES, 2)
    landed = _barriers(1, 1).index(0)
    turns = _barriers(2, 1)
    tl.extra.cuda.gdc_wait()
    GROUPS: gl.constexpr = H // PACK
    consumed = (k_full, k_free, v_full, v_free, turns)
    key_barriers = (q_full, q_free, k_full, k_free)
    value_barriers = (v_full, v_free, landed)
    gl.warp_specialize(
        [
            (_consume, (out, schedule, most, queries, k_ring, v_ring, q_full, q_free, consumed, scale, 0, H, PACK, BUFFERS)),
            (_consume, (out, schedule, most, queries, k_ring, v_ring, q_full, q_free, consumed, scale, 1, H, PACK, BUFFERS)),
            (
                _load_keys,
                (q, keys, tables, schedule, most, query_parts, key_parts, key_barriers, table_stride, G, PACK, GROUPS, D, P, BLOCK_N,
                 STAGES, BUFFERS),
            ),
            (
                _load_values,
                (values, tables, schedule, most, value_parts, value_barriers, table_stride, G, PACK, GROUPS, D, P, BLOCK_N, STAGES),
            ),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip
    tl.extra.cuda.gdc_launch_dependents()


# --- the launch ---------------------------------------------------------------------------------------------------------------


def packed_heads(group: int) -> int:
    """The heads of a tile, a power of two, of `group` query heads that share a key-value head."""
    return min(group & -group, ROWS // CONSUMERS)


def tokens_of_tile(group: int) -> int:
    return ROWS // packed_heads(group)


def prefill(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, schedule: Tensor, out: Tensor, scale: float, sms: int
) -> None:
    """`kernels.paged_attention.paged_prefill` without a window into out (T, H, D), for operands that it has checked.

    schedule: of tiles of `tokens_of_tile` tokens. scale: of the scores, as base-2 logarithms."""
    (rows, n_heads, head_dim), (n_blocks, size, n_kv_heads, _) = q.shape, keys.shape
    block_n, stages, buffers = CONFIGS[head_dim]
    group = n_heads // n_kv_heads
    pack = packed_heads(group)
    caches = [_descriptor(x, (n_blocks * size, n_kv_heads * head_dim), (min(size, block_n), PANEL)) for x in (keys, values)]
    most = len(schedule) * (n_heads // pack)
    _prefill[(min(sms, most),)](
        _descriptor(q, (rows, n_heads, head_dim), (ROWS // CONSUMERS // pack, pack, PANEL)), *caches, tables, schedule, out, most,
        tables.stride(0), scale, H=n_heads, G=group, PACK=pack, D=head_dim, P=size, BLOCK_N=block_n, STAGES=stages, BUFFERS=buffers,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=True,
    )  # fmt: skip


def _descriptor(base: Tensor, shape: tuple[int, ...], block: tuple[int, ...]) -> TensorDescriptor:
    """Of contiguous `base`, viewed as `shape`; blocks lie in shared memory as rows of 128 bytes."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return TensorDescriptor(base, list(shape), strides, list(block), gl.NVMMASharedLayout(2 * PANEL, 16, len(block)))
