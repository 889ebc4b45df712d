"""A step's inputs at fixed addresses: tokens, positions, block tables, adapters, sampling parameters.

CUDA graphs are captured with these addresses, so each step first copies its inputs there, from pinned host memory and
without waiting for the device. `to_device` and `to_host` copy other values in the same way.

A step can also be measured with invented inputs, the same on all ranks: random tokens of sequences that attend to random blocks of
the cache. They store nothing in it. Padding would be a bad example: it attends to nothing, and equal rows take less power, so that
a GPU that lowers its clock to limit its power multiplies them faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.paged_cache import PagedCache, PagedContext
from engine.sequence import Chunk, drawn_by
from kernels.lora import DECODE_TILE, PREFILL_TILE, Groups, group_rows, most_tiles

ROUND = 64
INVENTED = 1024  # tokens of an invented sequence
PINNED = 3  # pinned buffers: for the running step, for the step queued after it, and for the one that the host writes


# PyTorch's own copies, from and to memory that is not pinned, wait until the device has finished all steps in flight. These do not.


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of the (nested) `values`. The copy is queued on the current stream."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """A copy of x in host memory. It is valid when the device has reached this point of the current stream."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=True)


@dataclass(frozen=True)
class Capacity:
    """The largest step that a runner's buffers hold."""

    sequences: int
    tokens: int
    blocks: int  # of one sequence
    drafted: int = 0  # tokens that are a guess; each of them adds a token to draw

    @property
    def draws(self) -> int:
        """The most tokens that a step draws."""
        return self.sequences + self.drafted

    @property
    def rows(self) -> int:
        """Tokens and padding: a multiple of ROUND, because fused all-reduces need equally many rows for each rank."""
        return -(-self.tokens // ROUND) * ROUND


class Mirror:
    """A device tensor and a host array of the same shape, which is written with NumPy and then copied to the device. On a CPU the
    two share their memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self.host: np.ndarray = torch.zeros(shape, dtype=dtype).numpy() if device.type == "cuda" else self.device.numpy()
        turns = PINNED if device.type == "cuda" else 0
        self._pinned = [torch.zeros(shape, dtype=dtype, pin_memory=True) for _ in range(turns)]
        self._turn = 0

    def send(self, rows: int | None = None) -> None:
        """Copy the host's first `rows` entries (None: all) to the device, in the order of the current stream."""
        if self._pinned:
            self._turn = (self._turn + 1) % PINNED
            pinned = self._pinned[self._turn][:rows]
            pinned.numpy()[...] = self.host[:rows]
            self.device[:rows].copy_(pinned, non_blocking=True)


class Tables:
    """Block tables of a step's rows, (B, W) int32. Only changed rows are written; nothing is copied if none changed. Behind a row's
    last block is that block again: a CPU reads it too, with weight 0, and NaN in a block of another sequence would still count."""

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        self.mirror = Mirror((rows, blocks), torch.int32, device)
        self._written: list[list[int]] = [[] for _ in range(rows)]

    def update(self, tables: list[list[int]]) -> None:
        changed = False
        for row, blocks in enumerate(tables):
            known = self._written[row]
            if known != blocks:
                self.mirror.host[row, : len(blocks)], self.mirror.host[row, len(blocks) :] = blocks, blocks[-1]
                self._written[row] = list(blocks)
                changed = True
        if changed:
            self.mirror.send(len(tables))

    def invent(self, generator: np.random.Generator, blocks: int) -> None:
        """Name random ones of a cache's first `blocks` blocks, which the next steps may only read."""
        self.mirror.host[...] = generator.integers(blocks, size=self.mirror.host.shape)
        self.mirror.send()
        self._written = [[] for _ in self._written]


class AdapterRows:
    """The rows of a step by adapter."""

    def __init__(self, rows: int, slots: int, tile: int, device: torch.device) -> None:
        """slots: of adapters. tile: rows of a tile on a GPU; a CPU has one tile for each adapter."""
        self.slots, self.tile = slots, tile if device.type == "cuda" else rows
        self._order = Mirror((rows,), torch.int32, device)
        self._tiles = Mirror((most_tiles(rows, slots, self.tile), 3), torch.int32, device)

    def write(self, chunks: list[Chunk]) -> None:
        """Write the rows of `chunks`, one after the other; those after them are padding."""
        slots = np.repeat([c.sequence.slot for c in chunks], [c.count for c in chunks]) if chunks else np.empty(0, np.int64)
        order, tiles = group_rows(slots, self.tile)
        self._order.host[: len(order)] = order
        self._tiles.host[: len(tiles)], self._tiles.host[len(tiles) :] = tiles, 0
        self._order.send()
        self._tiles.send()

    def groups(self, rows: int) -> Groups:
        """Those of the first `rows` rows, to which a step is padded."""
        return Groups(self._order.device[:rows], self._tiles.device[: most_tiles(rows, self.slots, self.tile)], self.tile)


class DecodeInputs:
    """One token each of up to `capacity.draws` rows: sequences, or tokens of their drafts. Rows beyond the step's have position -1
    and do nothing.

    A step writes its drawn tokens to `tokens` and increments `positions`. The next step of the same sequences then
    copies only new block-table entries.
    """

    def __init__(self, capacity: Capacity, device: torch.device, slots: int = 0) -> None:
        """slots: of adapters."""
        rows = capacity.draws
        self.adapters = AdapterRows(rows, slots, DECODE_TILE, device) if slots else None
        self._integers = Mirror((3, rows), torch.int64, device)
        self._temperature = Mirror((rows,), torch.float32, device)
        self.tables = Tables(rows, capacity.blocks, device)
        self.tokens, self.positions, self.seed = self._integers.device
        self._integers.host[1] = -1
        self.positions.fill_(-1)
        self.first_kept = torch.zeros((), dtype=torch.int64, device=device)  # a smaller position is not stored, and stays
        self._rows: list[object] = []  # the sequences whose rows on the device are up to date

    def write(self, chunks: list[Chunk]) -> None:
        """Write the rows of `chunks`. The caller must write tokens that the host does not know to `tokens`."""
        integers = self._integers.host
        integers[1] = -1
        row = 0
        for chunk in chunks:
            params = chunk.sequence.params
            for position, token in enumerate(chunk.tokens if chunk.is_known else (0,), chunk.start):
                integers[:, row] = token, position, params.seed
                self._temperature.host[row] = params.temperature
                row += 1
        self._integers.send()
        self._temperature.send()
        if self.adapters:
            self.adapters.write(chunks)
        self._rows = [] if any(c.draft for c in chunks) else [c.sequence for c in chunks]

    def continues(self, chunks: list[Chunk]) -> bool:
        """Whether the last step left the rows of `chunks`, which have no drafts, on the device: the same sequences in the same
        order. A step with drafts leaves none."""
        return len(self._rows) == len(chunks) and all(row is c.sequence for row, c in zip(self._rows, chunks, strict=True))

    def keep(self, rows: int) -> None:
        """Make the rows behind the first `rows`, whose sequences do not go on, padding. The host writes nothing, so that it need not
        wait for steps in flight."""
        if rows < len(self._rows):
            self.positions[rows:].fill_(-1)
            del self._rows[rows:]

    def forget(self) -> None:
        """Mark the rows on the device as out of date."""
        self._rows = []

    def clear(self) -> None:
        """Make all rows padding. The next step must write its rows."""
        self.forget()
        self.positions.fill_(-1)
        self.first_kept.zero_()
        if self.adapters:
            self.adapters.write([])

    def invent(self, rows: int, ids: int, cache: PagedCache) -> None:
        """Fill `rows` rows with random tokens below `ids`, until `clear`: a step stores nothing, and leaves the positions."""
        generator, length = np.random.default_rng(rows), min(INVENTED, self.tables.mirror.host.shape[1] * cache.block_size)
        tokens, positions, seeds = self._integers.host
        tokens[:], seeds[:] = generator.integers(ids, size=(2, len(tokens)))
        positions[:rows], positions[rows:] = length - 1, -1
        self._temperature.host[:] = 1.0
        self._integers.send()
        self._temperature.send()
        self.tables.invent(generator, cache.keys_values.shape[2])
        self.first_kept.fill_(length)
        if self.adapters:
            self.adapters.write([])
        self.forget()

    def temperature(self, rows: int) -> Tensor:
        """(rows,) fp32"""
        return self._temperature.device[:rows]

    def context(self, rows: int, cache: PagedCache, longest: int) -> PagedContext:
        """Attention of the first `rows` rows. Lengths and cache_rows are computed on the device, from what the last step left
        there.

        longest: at least the tokens of the longest sequence."""
        positions, tables = self.positions[:rows], self.tables.mirror.device[:rows]
        held = positions.clamp(min=0)
        blocks = tables.gather(1, (held // cache.block_size)[:, None])[:, 0]
        cache_rows = torch.where(positions < self.first_kept, -1, blocks.long() * cache.block_size + held % cache.block_size)
        context = PagedContext(cache, positions, cache_rows, tables, (positions + 1).int(), None, longest)
        context.adapters = self.adapters.groups(rows) if self.adapters else None
        return context


class SpanInputs:
    """Chunks of any length of up to `capacity.sequences` sequences, one after the other in T rows."""

    def __init__(self, capacity: Capacity, device: torch.device, slots: int = 0) -> None:
        """slots: of adapters."""
        self.capacity = capacity
        self.adapters = AdapterRows(capacity.rows, slots, PREFILL_TILE, device) if slots else None
        self._rows = Mirror((3 * capacity.rows,), torch.int64, device)
        self._spans = Mirror((2, capacity.sequences + 1), torch.int32, device)
        self._starts, self._lengths = self._spans.device
        self._drawing = Mirror((capacity.draws,), torch.int64, device)
        self._seeds = Mirror((2, capacity.draws), torch.int64, device)
        self._temperature = Mirror((capacity.draws,), torch.float32, device)
        self.tables = Tables(capacity.sequences, capacity.blocks, device)

    def write(self, chunks: list[Chunk], rows: int, block_size: int) -> None:
        """Write the inputs for `chunks`. rows: at least the chunks' number of tokens; the rest is padding. The caller must write
        tokens that the host does not know to `tokens`."""
        tokens, positions, cache_rows = self._rows.host[: 3 * rows].reshape(3, rows)
        # row, id, position and cache row of each chunk of one token: set at once, because setting single entries is slow
        single: list[tuple[int, int, int, int]] = []
        ends: list[int] = []  # of the chunks in the step, and in their sequences
        stops: list[int] = []
        drawing: list[int] = []
        used = 0
        for chunk in chunks:
            start, stop, sequence = chunk.start, chunk.start + chunk.count, chunk.sequence
            first, used = used, used + chunk.count
            if chunk.count == 1:
                known = sequence.tokens[start] if chunk.is_known else 0
                single.append((first, known, start, sequence.blocks[start // block_size] * block_size + start % block_size))
            else:
                own, block = np.arange(start, stop), start // block_size
                held = np.asarray(sequence.blocks[block : (stop - 1) // block_size + 1])
                tokens[first:used], positions[first:used] = chunk.tokens, own
                cache_rows[first:used] = held[own // block_size - block] * block_size + own % block_size
            ends.append(used)
            stops.append(stop)
            if chunk.draft:
                drawing += range(used - 1 - len(chunk.draft), used)
            elif chunk.samples:
                drawing.append(used - 1)
        if single:
            row, *values = map(list, zip(*single, strict=True))
            tokens[row], positions[row], cache_rows[row] = values
        tokens[used:], positions[used:], cache_rows[used:] = 0, 0, -1
        self._rows.send(3 * rows)
        if self.adapters:
            self.adapters.write(chunks)

        spans, draws = len(chunks), len(drawing)
        starts, lengths = self._spans.host
        starts[1 : spans + 1], lengths[:spans], self._drawing.host[:draws] = ends, stops, drawing
        starts[spans + 1 :], lengths[spans:], self._drawing.host[draws:] = used, 0, 0
        self._spans.send()
        self._drawing.send()
        self.tables.update([c.sequence.blocks for c in chunks])

    def invent(self, rows: int, ids: int, cache: PagedCache) -> None:
        """Fill `rows` rows with prompts of random tokens below `ids`, which a step does not store. The next step must write its
        inputs."""
        generator, sequences = np.random.default_rng(rows), self.capacity.sequences
        length = min(max(INVENTED, -(-rows // sequences)), self.capacity.blocks * cache.block_size)
        ends = np.minimum(np.arange(length, length * sequences + 1, length), rows)
        spans = -(-int(ends[-1]) // length)  # after them, ends repeats: spans without rows
        own = np.arange(rows) % length
        tokens, positions, cache_rows = self._rows.host[: 3 * rows].reshape(3, rows)
        tokens[:], positions[:], cache_rows[:] = generator.integers(ids, size=rows), own, -1
        self._rows.send(3 * rows)
        if self.adapters:
            self.adapters.write([])
        starts, lengths = self._spans.host
        starts[1:], lengths[:-1] = ends, np.diff(ends, prepend=0)
        self._drawing.host[:spans], self._drawing.host[spans:] = ends[:spans] - 1, 0
        self._spans.send()
        self._drawing.send()
        self._seeds.host[...], self._temperature.host[:] = generator.integers(ids, size=self._seeds.host.shape), 1.0
        self._seeds.send()
        self._temperature.send()
        self.tables.invent(generator, cache.keys_values.shape[2])

    def write_draws(self, chunks: list[Chunk], shift: int = 0) -> None:
        """Write what `draws` returns, which a CPU's steps do not need. shift: see `drawn_by`."""
        sequences, positions = drawn_by([c for c in chunks if c.samples], shift)
        params = [s.params for s in sequences]
        self._seeds.host[:, : len(params)] = [p.seed for p in params], positions
        self._temperature.host[: len(params)] = [p.temperature for p in params]
        self._seeds.send()
        self._temperature.send()

    def tokens(self, rows: int) -> Tensor:
        return self._rows.device[:rows]

    def drawing(self, draws: int) -> Tensor:
        """The rows from which the first `draws` tokens are drawn, (draws,) int64."""
        return self._drawing.device[:draws]

    def draws(self, draws: int) -> tuple[Tensor, Tensor, Tensor]:
        """Temperatures (draws,) fp32, seeds (draws,) int64, and the positions (draws,) int64 of the tokens to draw."""
        seed, positions = self._seeds.device[:, :draws]
        return self._temperature.device[:draws], seed, positions

    def context(self, rows: int, spans: int, cache: PagedCache, max_span: int) -> PagedContext:
        """Attention of the first `rows` rows. max_span: at least the rows of the longest span."""
        positions, cache_rows = self._rows.device[rows : 2 * rows], self._rows.device[2 * rows : 3 * rows]
        starts, lengths, tables = self._starts[: spans + 1], self._lengths[:spans], self.tables.mirror.device[:spans]
        context = PagedContext(cache, positions, cache_rows, tables, lengths, starts, max_span)
        context.adapters = self.adapters.groups(rows) if self.adapters else None
        return context
