"""Sparse MLPs: the router's choice of experts, and on a GPU the products of the chosen ones.

A slot is a token with one of its experts. Up to FEW tokens seldom share an expert, so each slot reads its expert's weights. More slots
are sorted by expert and cut into tiles of one expert each, which read a weight once. All is computed on the device, so that a graph can
hold it: there are as many programs as the worst choice needs, and those without a tile end at once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import pdl_options, tl, triton

FEW = 4  # tokens whose slots are not sorted
MOST = 128  # tokens whose experts one kernel chooses


def route(logits: Tensor, chosen: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """The `chosen` experts (T, chosen) int64 of the largest logits (T, E), and their softmax over all E (T, chosen), divided by its
    sum if `normalized`. Of equal logits, the first."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices[
        :, :chosen
    ]  # topk leaves open which of equal ones it takes
    weights = logits.softmax(-1).gather(-1, order)
    return order, weights / weights.sum(-1, keepdim=True) if normalized else weights


class Routes(NamedTuple):
    """What the router chose. experts (T, chosen) int32, weights (T, chosen) fp32. If tiles were wanted: slots (T * chosen,) int32 sorted
    by expert, their experts as `owners`, and for each of the M tiles the first of its slots; T * chosen for a tile that is not needed."""

    experts: Tensor
    weights: Tensor
    slots: Tensor
    owners: Tensor
    starts: Tensor


def sparse_mlp(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, chosen: int, normalized: bool, counter: Tensor,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None), limit: float = 0.0,
) -> Tensor:  # fmt: skip
    """The sum over each token's experts of weight · down · (silu(gate · x) * (up · x)), on a GPU.

    x: (T, C). router: (E, C). gate_up: (E * 2 * I, C), each expert's gate and then its up. down: (E * C, I). counter: (1,) int32, of
    the router's programs that have ended; 0 between launches. biases: of the router (E,), of gate_up and of down, with an entry for each
    of their rows. limit: of `clamped_swiglu`, which then is the activation; 0 for none. Returns (T, C) of x's data type. Sums and the router are in fp32."""
    tokens, count = len(x), len(router)
    if tokens <= FEW:
        return _of_slots(x, gate_up, down, _choose(x, router, chosen, normalized, 0, counter, biases[0]), biases[1:], limit)
    tile = min(128, max(16, triton.next_power_of_2(tokens * chosen // count)))
    choose = _choose if tokens <= MOST else _choose_many
    routes = choose(x, router, chosen, normalized, tile, counter, biases[0])
    return _of_tiles(x, gate_up, down, routes, tile, biases[1:], limit)


def _choose_many(
    x: Tensor, router: Tensor, chosen: int, normalized: bool, tile: int, _: Tensor, bias: Tensor | None = None
) -> Routes:
    """Any number of tokens, with PyTorch."""
    wide = torch.mm(x, router.t(), out_dtype=torch.float32) if x.is_cuda else x.float() @ router.float().t()
    experts, weights = route(wide if bias is None else wide + bias.float(), chosen, normalized)
    owners, slots = experts.flatten().sort(stable=True)
    place, total = torch.arange(len(slots), device=x.device), len(slots)
    first = torch.searchsorted(owners, owners)  # of the slots of the same expert
    begins = (place - first) % tile == 0
    starts = torch.full((total + 1,), total, device=x.device)
    starts.scatter_(0, torch.where(begins, begins.cumsum(0) - 1, total), torch.where(begins, place, total))
    most = most_tiles(total, len(router), tile)
    return Routes(*(t.int() if t is not weights else t for t in (experts, weights, slots, owners, starts[:most])))


def most_tiles(slots: int, experts: int, tile: int) -> int:
    return min(slots, experts + slots // tile)


def _choose(
    x: Tensor, router: Tensor, chosen: int, normalized: bool, tile: int, counter: Tensor, bias: Tensor | None = None
) -> Routes:
    """Up to MOST tokens. tile: of the tiles, 0 for none."""
    (tokens, size), count = x.shape, len(router)
    total, power = tokens * chosen, triton.next_power_of_2
    new = x.new_empty
    slots, owners, starts = (new(total, dtype=torch.int32) for _ in range(3))
    routes = Routes(new(tokens, chosen, dtype=torch.int32), new(tokens, chosen, dtype=torch.float32), slots, owners, starts)
    # a product of tensor cores has 16 rows and columns or more
    rows, own = (max(16, power(tokens)), 16) if tile else (power(tokens), 4)
    block, stages = (power(size), 1) if not tile else (512, 3) if rows == 16 else (128, 2)
    _router[(triton.cdiv(count, own),)](
        x, router, bias, new(tokens, count, dtype=torch.float32), counter, *routes, tokens,
        E=count, C=size, CHOSEN=chosen, NORMALIZED=normalized, TILE=tile, ROWS=rows, BLOCK_E=own, BLOCK_K=min(block, max(16, power(size))),
        EXPERTS=power(count), COLUMNS=power(chosen), SLOTS=power(total), num_warps=max(4, min(16, rows // 8 * 2)), num_stages=stages, **pdl_options(x.device),
    )  # fmt: skip
    return routes._replace(starts=routes.starts[: most_tiles(total, count, tile)] if tile else routes.starts)


def _of_slots(
    x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes, biases: tuple[Tensor | None, ...], limit: float
) -> Tensor:
    (tokens, size), chosen, inner = x.shape, routes.experts.shape[1], down.shape[1]
    hidden, out = x.new_empty(tokens * chosen, inner), torch.empty_like(x)
    shapes: dict[str, Any] = dict(CHOSEN=chosen, C=size, INNER=inner, **pdl_options(x.device))
    # few steps, each of many bytes, because a step takes as long as the memory's latency
    blocks = [min(1024, triton.next_power_of_2(width)) for width in (size, inner)]
    _slot_gate_up[(tokens * chosen, triton.cdiv(inner, 2))](
        x, gate_up, biases[0], routes.experts, hidden, **shapes, BLOCK_N=2, BLOCK_K=blocks[0], LIMIT=limit
    )
    _slot_down[(tokens, triton.cdiv(size, 4))](
        hidden, down, biases[1], routes.experts, routes.weights, out, **shapes, BLOCK_N=4, BLOCK_K=blocks[1]
    )
    return out


def _of_tiles(
    x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes, tile: int, biases: tuple[Tensor | None, ...], limit: float
) -> Tensor:
    (tokens, size), chosen, inner = x.shape, routes.experts.shape[1], down.shape[1]
    total = tokens * chosen
    hidden, parts, out = x.new_empty(total, inner), x.new_empty(total, size), torch.empty_like(x)
    small = tile <= 32
    shapes: dict[str, Any] = dict(CHOSEN=chosen, C=size, INNER=inner, TILE=tile, **pdl_options(x.device))
    options: dict[str, Any] = (
        dict(BLOCK_K=128, num_warps=4, num_stages=4) if small else dict(BLOCK_K=64, num_warps=8, num_stages=3)
    )
    listed = routes.slots, routes.owners, routes.starts, total
    columns = 32 if small else 64
    _tile_gate_up[(len(routes.starts), triton.cdiv(inner, columns))](
        x, gate_up, biases[0], hidden, *listed, **shapes, BLOCK_N=columns, LIMIT=limit, **options
    )
    columns = 32 if small else 128
    _tile_down[(len(routes.starts), triton.cdiv(size, columns))](
        hidden, down, biases[1], routes.weights, parts, *listed, **shapes, BLOCK_N=columns, **options
    )
    _sum[(tokens, triton.cdiv(size, 1024))](parts, out, CHOSEN=chosen, C=size, BLOCK=1024, **pdl_options(x.device))
    return out


@triton.jit
def _router(
    x, weight, bias, logits, counter, experts, weights, slots, owners, starts, tokens,
    E: tl.constexpr, C: tl.constexpr, CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program computes the logits of BLOCK_E experts. The last one to end chooses the experts, and sorts the slots into tiles."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, k = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    own = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    if TILE == 0:  # few tokens: the whole weight is on its way before they are there
        w = tl.load(weight + own[:, None] * C + k[None, :], mask=(own < E)[:, None] & (k < C)[None, :], other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        for i in tl.static_range(ROWS):
            a = tl.load(x + i * C + k, mask=(k < C) & (i < tokens), other=0.0)
            sums = tl.sum(w.to(tl.float32) * a.to(tl.float32)[None, :], 1)
            if bias is not None:
                sums += tl.load(bias + own, mask=own < E, other=0.0).to(tl.float32)
            tl.store(logits + i * E + own, sums, mask=(own < E) & (i < tokens))
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        total = tl.zeros((ROWS, BLOCK_E), tl.float32)
        for first in range(0, C, BLOCK_K):
            there = first + k < C
            a = tl.load(x + row[:, None] * C + first + k[None, :], mask=(row < tokens)[:, None] & there[None, :], other=0.0)
            w = tl.load(weight + own[None, :] * C + first + k[:, None], mask=(own < E)[None, :] & there[:, None], other=0.0)
            total = tl.dot(a, w, total, input_precision="ieee")
        if bias is not None:
            total += tl.load(bias + own, mask=own < E, other=0.0).to(tl.float32)[None, :]
        tl.store(logits + row[:, None] * E + own[None, :], total, mask=(row < tokens)[:, None] & (own < E)[None, :])
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.debug_barrier()
        tl.store(counter, 0)
        e, column = tl.arange(0, EXPERTS), tl.arange(0, COLUMNS)
        inside = (row < tokens)[:, None] & (e < E)[None, :]
        left = tl.load(logits + row[:, None] * E + e[None, :], mask=inside, other=float("-inf"), cache_modifier=".cg")
        left = tl.where((row < tokens)[:, None], left, tl.where((e < E)[None, :], 0.0, float("-inf")))
        largest = tl.max(left, 1)
        every = tl.sum(tl.exp(left - largest[:, None]), 1)
        numbers = tl.zeros((ROWS, COLUMNS), tl.int32)
        shares = tl.zeros((ROWS, COLUMNS), tl.float32)
        for j in tl.static_range(CHOSEN):
            best = tl.max(left, 1)
            number = tl.min(tl.where(left == best[:, None], e[None, :], E - 1), 1)  # of NaN, an expert that exists
            numbers = tl.where(column[None, :] == j, number[:, None], numbers)
            shares = tl.where(column[None, :] == j, (tl.exp(best - largest) / every)[:, None], shares)
            left = tl.where(e[None, :] == number[:, None], float("-inf"), left)
        if NORMALIZED:
            shares = shares / tl.sum(shares, 1)[:, None]
        place = row[:, None] * CHOSEN + column[None, :]
        wanted = (row < tokens)[:, None] & (column < CHOSEN)[None, :]
        tl.store(experts + place, numbers, mask=wanted)
        tl.store(weights + place, shares, mask=wanted)
        if TILE > 0:
            tl.debug_barrier()
            p, count = tl.arange(0, SLOTS), tokens * CHOSEN
            key = tl.sort(tl.load(experts + p, mask=p < count, other=EXPERTS) * SLOTS + p)
            owner = key // SLOTS
            tl.store(slots + p, key % SLOTS, mask=p < count)
            tl.store(owners + p, owner, mask=p < count)
            tl.debug_barrier()
            before = tl.load(owners + p - 1, mask=(p > 0) & (p < count), other=-1)
            begin = tl.associative_scan(tl.where(owner != before, p, 0), 0, _larger)  # of the slots of the same expert
            begins = (((p - begin) % TILE) == 0) & (p < count)
            tile = tl.cumsum(begins.to(tl.int32), 0)
            tl.store(starts + tile - 1, p, mask=begins)
            tl.store(starts + p, count + p * 0, mask=(p >= tl.sum(begins.to(tl.int32), 0)) & (p < count))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _activated(gate, up, DTYPE: tl.constexpr, LIMIT: tl.constexpr):
    """silu(gate) * up of two products, which PyTorch rounds before; with a limit, `clamped_swiglu`."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    if LIMIT > 0:
        gate, up = tl.where(gate > LIMIT, LIMIT, gate), tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return (gate / (1 + tl.exp(-1.702 * gate)) * (up + 1)).to(DTYPE)
    return (gate / (1 + tl.exp(-gate)) * up).to(DTYPE)


@triton.jit
def _slot_gate_up(
    x, weight, bias, experts, out,
    CHOSEN: tl.constexpr, C: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """hidden = silu(gate · x) * (up · x) of a slot and BLOCK_N of INNER features."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0)
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    gate = weight + tl.load(experts + slot).to(tl.int64) * (2 * INNER * C) + n[:, None] * C + k[None, :]
    left = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    right = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in range(0, C, BLOCK_K):
        there = first + k < C
        inside = (n < INNER)[:, None] & there[None, :]
        a = tl.load(x + slot // CHOSEN * C + first + k, mask=there, other=0.0).to(tl.float32)[None, :]
        left += tl.load(gate + first, mask=inside, other=0.0).to(tl.float32) * a
        right += tl.load(gate + INNER * C + first, mask=inside, other=0.0).to(tl.float32) * a
    one, other = tl.sum(left, 1), tl.sum(right, 1)
    if bias is not None:
        own = bias + tl.load(experts + slot) * (2 * INNER) + n
        one += tl.load(own, mask=n < INNER, other=0.0).to(tl.float32)
        other += tl.load(own + INNER, mask=n < INNER, other=0.0).to(tl.float32)
    hidden = _activated(one, other, out.dtype.element_ty, LIMIT)
    tl.store(out + slot * INNER + n, hidden, mask=n < INNER)


@triton.jit
def _slot_down(
    x, weight, bias, experts, weights, out,
    CHOSEN: tl.constexpr, C: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sum over a token's slots of weight · down · hidden, of BLOCK_N of C features."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for i in tl.static_range(CHOSEN):
        slot = token * CHOSEN + i
        matrix = weight + tl.load(experts + slot).to(tl.int64) * (C * INNER) + n[:, None] * INNER + k[None, :]
        share = tl.load(weights + slot)
        for first in range(0, INNER, BLOCK_K):
            there = first + k < INNER
            a = tl.load(x + slot * INNER + first + k, mask=there, other=0.0).to(tl.float32)[None, :] * share
            total += tl.load(matrix + first, mask=(n < C)[:, None] & there[None, :], other=0.0).to(tl.float32) * a
    place, sums = out + token * C + n, tl.sum(total, 1)
    if bias is not None:
        for i in tl.static_range(CHOSEN):
            own = bias + tl.load(experts + token * CHOSEN + i) * C + n
            sums += tl.load(weights + token * CHOSEN + i) * tl.load(own, mask=n < C, other=0.0).to(tl.float32)
    tl.store(place, sums.to(out.dtype.element_ty), mask=n < C)


@triton.jit
def _tile_gate_up(
    x, weight, bias, out, slots, owners, starts, total,
    CHOSEN: tl.constexpr, C: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden = silu(gate · x) * (up · x) of a tile's slots and BLOCK_N of INNER features."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start = tl.load(starts + tl.program_id(0))
    if start >= total:
        return
    expert = tl.load(owners + start)
    place = start + tl.arange(0, TILE)
    mine = (place < total) & (tl.load(owners + place, mask=place < total, other=-1) == expert)
    slot = tl.load(slots + place, mask=mine, other=0).to(tl.int64)
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    rows = x + (slot // CHOSEN)[:, None] * C + k[None, :]
    gate = weight + expert.to(tl.int64) * (2 * INNER * C) + n[None, :] * C + k[:, None]
    inside = (n < INNER)[None, :]
    left = tl.zeros((TILE, BLOCK_N), tl.float32)
    right = tl.zeros((TILE, BLOCK_N), tl.float32)
    for first in range(0, C, BLOCK_K):
        there = first + k < C
        a = tl.load(rows + first, mask=mine[:, None] & there[None, :], other=0.0)
        w = tl.load(gate + first, mask=inside & there[:, None], other=0.0)
        v = tl.load(gate + INNER * C + first, mask=inside & there[:, None], other=0.0)
        left = tl.dot(a, w, left, input_precision="ieee")
        right = tl.dot(a, v, right, input_precision="ieee")
    if bias is not None:
        own = bias + expert * (2 * INNER) + n
        left += tl.load(own, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
        right += tl.load(own + INNER, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
    hidden = _activated(left, right, out.dtype.element_ty, LIMIT)
    tl.store(out + slot[:, None] * INNER + n[None, :], hidden, mask=mine[:, None] & inside)


@triton.jit
def _tile_down(
    x, weight, bias, weights, out, slots, owners, starts, total,
    CHOSEN: tl.constexpr, C: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """weight · down · hidden of a tile's slots and BLOCK_N of C features."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start = tl.load(starts + tl.program_id(0))
    if start >= total:
        return
    expert = tl.load(owners + start)
    place = start + tl.arange(0, TILE)
    mine = (place < total) & (tl.load(owners + place, mask=place < total, other=-1) == expert)
    slot = tl.load(slots + place, mask=mine, other=0).to(tl.int64)
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    matrix = weight + expert.to(tl.int64) * (C * INNER) + n[None, :] * INNER + k[:, None]
    sums = tl.zeros((TILE, BLOCK_N), tl.float32)
    for first in range(0, INNER, BLOCK_K):
        there = first + k < INNER
        a = tl.load(x + slot[:, None] * INNER + first + k[None, :], mask=mine[:, None] & there[None, :], other=0.0)
        w = tl.load(matrix + first, mask=(n < C)[None, :] & there[:, None], other=0.0)
        sums = tl.dot(a, w, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + expert * C + n, mask=n < C, other=0.0).to(tl.float32)[None, :]
    sums *= tl.load(weights + slot, mask=mine, other=0.0)[:, None]
    tl.store(out + slot[:, None] * C + n[None, :], sums.to(out.dtype.element_ty), mask=mine[:, None] & (n < C)[None, :])


@triton.jit
def _sum(parts, out, CHOSEN: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The sum of a token's slots."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(CHOSEN):
        total += tl.load(parts + (token * CHOSEN + slot) * C + n, mask=n < C, other=0.0).to(tl.float32)
    tl.store(out + token * C + n, total.to(out.dtype.element_ty), mask=n < C)
