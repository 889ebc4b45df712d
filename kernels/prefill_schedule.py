"""The order in which the programs of a persistent attention kernel compute the tiles of queries of a step: longest first.

A tile is up to `tokens` consecutive queries of a span. Its work is the number of keys up to its last query. Rows after the last
span are padding: their tiles have no keys and come last. The order depends only on tensors on the device, so a captured graph
follows them, and it is the same for all layers of a step.
"""

import torch
from torch import Tensor

from kernels.dispatch import on_gpu, pdl_options, tl, triton

FIELDS = 8  # int32 of an entry, of which 5 are used: a row, tokens, a position, a length, a span
RANKED = 4096  # pairs of a tile and a span that a program compares


def prefill_schedule(starts: Tensor, lengths: Tensor, rows: int, tokens: int) -> Tensor:
    """Tiles by decreasing work, those of equal work in the order of their rows.

    starts (S + 1,) and lengths (S,) int32 on one device: as of `kernels.paged_attention.paged_prefill`; rows: of all queries and
    padding; tokens: of a tile. Returns (rows // tokens + S + 1, FIELDS) int32, which has of each tile: its first row, its number
    of tokens, the position of its first token, the length of the span's sequence (0 for padding) and the number of its span (0 for
    padding). Entries after the last tile have 0 tokens. Other elements are undefined."""
    if not on_gpu(starts):
        return prefill_schedule_reference(starts, lengths, rows, tokens)
    spans, most = len(lengths), rows // tokens + len(lengths) + 1  # each span, and the padding, may end with a partial tile
    out = torch.empty(most, FIELDS, dtype=torch.int32, device=starts.device)
    padded = triton.next_power_of_2(spans + 1)
    ranked = max(RANKED // padded, 1)
    _prefill_schedule[(triton.cdiv(most, ranked),)](
        starts,
        lengths,
        out,
        rows,
        spans,
        most,
        tokens,
        SPANS=padded,
        RANKED=ranked,
        FIELDS=FIELDS,
        **pdl_options(starts.device),
    )
    return out


def prefill_schedule_reference(starts: Tensor, lengths: Tensor, rows: int, tokens: int) -> Tensor:
    bounds, spans = [*starts.tolist(), rows], lengths.tolist()
    tiles = []
    for span, length in enumerate([*spans, 0]):
        first, end = bounds[span : span + 2]
        for row in range(first, end, tokens):
            count, is_padding = min(tokens, end - row), span == len(spans)
            position = 0 if is_padding else length - (end - row)
            tiles.append([row, count, position, length, 0 if is_padding else span])
    tiles.sort(key=lambda tile: -(tile[2] + tile[1]) if tile[3] else 0)
    out = torch.zeros(rows // tokens + len(spans) + 1, FIELDS, dtype=torch.int32)
    out[: len(tiles), :5] = torch.tensor(tiles, dtype=torch.int32).view(-1, 5)
    return out.to(starts.device)


@triton.jit
def _ends_up_to(end, prefix, length, tiles, tokens):
    """The number of a span's tiles whose last query's position + 1 is at most `end`."""
    return tl.where(length <= end, tiles, tl.minimum(tl.maximum(end - prefix, 0) // tokens, tl.maximum(tiles - 1, 0)))


@triton.jit(do_not_specialize=["rows", "spans", "most"])
def _prefill_schedule(starts, lengths, out, rows, spans,
    most,  # tiles that fit `out`
    tokens,
    SPANS: tl.constexpr,  # a power of two above the number of spans
    RANKED: tl.constexpr,  # tiles of a program
    FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile's place is the number of tiles before it, which is counted span by span without a sort."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    span = tl.arange(0, SPANS)
    first = tl.load(starts + span, mask=span <= spans, other=rows)
    count = tl.load(starts + span + 1, mask=span < spans, other=rows) - first
    length = tl.load(lengths + span, mask=span < spans, other=0)
    tiles = (count + tokens - 1) // tokens
    real = tl.where(span < spans, tiles, 0)
    before = tl.cumsum(tiles, axis=0) - tiles
    total = tl.sum(tiles, axis=0)

    number = tl.program_id(0) * RANKED + tl.arange(0, RANKED)  # of a tile, in the order of rows
    mine = (before[None, :] <= number[:, None]) & (number[:, None] < (before + tiles)[None, :])
    of_span = tl.sum(tl.where(mine, span[None, :], 0), axis=1)
    of_first = tl.sum(tl.where(mine, first[None, :], 0), axis=1)
    of_count = tl.sum(tl.where(mine, count[None, :], 0), axis=1)
    of_length = tl.sum(tl.where(mine, length[None, :], 0), axis=1)
    token = (number - tl.sum(tl.where(mine, before[None, :], 0), axis=1)) * tokens
    own = tl.minimum(tokens, of_count - token)
    is_padding = of_span == spans
    position = tl.where(is_padding, 0, of_length - of_count + token)

    end = (position + own)[:, None]
    prefix = (length - count)[None, :]
    earlier = _ends_up_to(end, prefix, length[None, :], real[None, :], tokens)
    equal = earlier - _ends_up_to(end - 1, prefix, length[None, :], real[None, :], tokens)
    equal = tl.where(span[None, :] < of_span[:, None], equal, 0)
    place = tl.sum(real[None, :] - earlier + equal, axis=1)
    exists = number < total
    place = tl.where(is_padding | ~exists, number, place)

    entry = out + place * FIELDS
    tl.store(entry, of_first + token, mask=exists)
    tl.store(entry + 1, tl.where(exists, own, 0), mask=number < most)
    tl.store(entry + 2, position, mask=exists)
    tl.store(entry + 3, of_length, mask=exists)
    tl.store(entry + 4, tl.where(is_padding, 0, of_span), mask=exists)
