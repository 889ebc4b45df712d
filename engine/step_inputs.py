"""A step's inputs at fixed addresses: tokens, positions, block tables, sampling parameters.

CUDA graphs are captured with these addresses, so each step first copies its inputs there, from pinned host memory and
without waiting for the device.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention import AttentionContext, Heads
from engine.paged_cache import PagedCache
from engine.scheduler import Chunk
from kernels.paged_attention import paged_decode, paged_prefill
from kernels.rope_cache import rope_store

ROUND = 64
PINNED = 3  # pinned buffers: for the running step, for the step queued after it, and for the one that the host writes


@dataclass(frozen=True)
class Capacity:
    """The largest step that a runner's buffers hold."""

    sequences: int
    tokens: int
    blocks: int  # of one sequence

    @property
    def rows(self) -> int:
        """Tokens and padding: a multiple of ROUND, because fused all-reduces need equally many rows for each rank."""
        return -(-self.tokens // ROUND) * ROUND


class Mirror:
    """A device tensor and a host array of the same shape, which is written with NumPy and then copied to the device."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._pinned = [torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda") for _ in range(PINNED)]
        self._turn = 0
        self.host: np.ndarray = np.zeros(shape, dtype=self._pinned[0].numpy().dtype)

    def send(self, rows: int | None = None) -> None:
        """Copy the host's first `rows` entries (None: all) to the device, in the order of the current stream."""
        self._turn = (self._turn + 1) % PINNED
        pinned = self._pinned[self._turn][:rows]
        pinned.numpy()[...] = self.host[:rows]
        self.device[:rows].copy_(pinned, non_blocking=True)


class Tables:
    """Block tables of a step's rows, (B, W) int32. Only changed rows are written; nothing is copied if none changed."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self.mirror = Mirror((capacity.sequences, capacity.blocks), torch.int32, device)
        self._written: list[list[int]] = [[] for _ in range(capacity.sequences)]

    def update(self, tables: List[List[int]]) -> None:
        changed = False
        for row, blocks in enumerate(tables):
            known = self._written[row]
            if known != blocks:
                self.mirror.host[row, : len(blocks)] = blocks
                self._written[row] = list(blocks)
                changed = True
        if changed:
            self.mirror.send(len(tables))


@dataclass
class Draws:
    """Sampling parameters of B rows, on the device."""

    temperature: Tensor  # (B,) fp32
    seed: Tensor  # (B,) int64


class DecodeInputs:
    """One token each of up to `capacity.sequences` sequences. Rows beyond the step's have position -1 and do nothing.

    A step writes its drawn tokens to `tokens` and increments `positions`. The next step of the same sequences then
    copies only new block-table entries.
    """

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        rows = capacity.sequences
        self._integers = Mirror((3, rows), torch.int64, device)
        self._temperature = Mirror((rows,), torch.float32, device)
        self.tables = Tables(capacity, device)
        self.tokens, self.positions, self.seed = self._integers.device
        self._integers.host[1] = -1
        self.positions.fill_(-1)
        self._rows: list[object] = []  # the sequences whose rows on the device are up to date

    def write(self, chunks: List[Chunk]) -> None:
        """Write a row for each of `chunks`. If the host does not know a token yet, the caller must write it to `tokens`."""
        integers = self._integers.host
        integers[1] = -1
        for i, chunk in enumerate(chunks):
            tokens, params = chunk.sequence.tokens, chunk.sequence.params
            integers[:, i] = tokens[chunk.start] if chunk.start < len(tokens) else 0, chunk.start, params.seed
            self._temperature.host[i] = params.temperature
        self._integers.send()
        self._temperature.send()
        self._rows = [c.sequence for c in chunks]

    def continues(self, chunks: List[Chunk]) -> bool:
        """Whether the last step left the rows of `chunks` on the device: the same sequences in the same order."""
        return len(self._rows) == len(chunks) and all(row is c.sequence for row, c in zip(self._rows, chunks, strict=True))

    def forget(self) -> None:
        """Mark the rows on the device as out of date."""
        self._rows = []

    def draws(self, rows: int) -> Draws:
        return Draws(self._temperature.device[:rows], self.seed[:rows])


class DecodeContext(AttentionContext):
    """Attention of one token each of B sequences. `lengths` and `places` are computed on the device."""

    def __init__(self, inputs: DecodeInputs, rows: int, cache: PagedCache, max_length: int) -> None:
        self.cache, self.max_length = cache, max_length
        self.positions, self.tables = inputs.positions[:rows], inputs.tables.mirror.device[:rows]
        self.lengths = (self.positions + 1).int()
        held = self.positions.clamp(min=0)
        blocks = self.tables.gather(1, (held // cache.block_size)[:, None])[:, 0]
        self.places = torch.where(self.positions < 0, -1, blocks.long() * cache.block_size + held % cache.block_size)

    def attend(self, heads: Heads, qkv: Tensor, frequencies: Tensor) -> Tensor:
        keys, values = self.cache.keys_values[heads.slot]
        q = stored(heads, qkv[0], self.positions, frequencies, self.places, keys, values)
        out = paged_decode(q, keys, values, self.tables, self.lengths, heads.window, self.max_length)
        return out.flatten(1)[None]


def stored(
    heads: Heads, qkv: Tensor, positions: Tensor, frequencies: Tensor, places: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Rotate qkv (T, (H + 2K) * D), write its keys and values to their places in the cache, return its queries (T, H, D)."""
    q_norm, k_norm, eps = None, None, 0.0
    if heads.q_norm is not None and heads.k_norm is not None:
        q_norm, k_norm, eps = heads.q_norm.weight, heads.k_norm.weight, heads.q_norm.eps
    rows = keys.flatten(0, 1), values.flatten(0, 1)
    q = rope_store(qkv.contiguous(), positions, frequencies, places, *rows, q_norm, k_norm, eps)
    return q if heads.rope_factor == 1 else q * heads.rope_factor**2  # instead of the factor on queries and on keys


class SpanInputs:
    """Chunks of any length of up to `capacity.sequences` sequences, one after the other in T rows."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self.capacity = capacity
        self._rows = Mirror((3 * capacity.rows,), torch.int64, device)
        self._spans = Mirror((3, capacity.sequences + 1), torch.int32, device)
        self._seeds = Mirror((2, capacity.sequences), torch.int64, device)
        self._temperature = Mirror((capacity.sequences,), torch.float32, device)
        self.tables = Tables(capacity, device)

    def write(self, chunks: List[Chunk], rows: int, block_size: int) -> None:
        """Write the inputs for `chunks`. rows: at least the chunks' number of tokens; the rest is padding."""
        tokens, positions, places = (self._rows.host[i * rows : (i + 1) * rows] for i in range(3))
        starts, lengths, ends = self._spans.host
        self._spans.host[...], tokens[...], positions[...], places[...] = 0, 0, 0, -1
        first = 0
        for i, chunk in enumerate(chunks):
            stop, last = chunk.start + chunk.count, first + chunk.count
            tokens[first:last] = chunk.sequence.tokens[chunk.start : stop]
            positions[first:last] = np.arange(chunk.start, stop)
            blocks = np.asarray(chunk.sequence.blocks, dtype=np.int64)
            places[first:last] = blocks[positions[first:last] // block_size] * block_size + positions[first:last] % block_size
            first = last
            starts[i + 1], lengths[i], ends[i] = last, stop, last - 1
            params = chunk.sequence.params
            self._seeds.host[:, i] = params.seed, stop
            self._temperature.host[i] = params.temperature
        starts[len(chunks) + 1 :] = first
        self._rows.send(3 * rows)
        for mirror in (self._spans, self._seeds, self._temperature):
            mirror.send()
        self.tables.update([c.sequence.blocks for c in chunks])

    def tokens(self, rows: int) -> Tensor:
        return self._rows.device[:rows]

    def ends(self, spans: int) -> Tensor:
        """The last row of each span, (S,) int64."""
        return self._spans.device[2, :spans].long()

    def draws(self, spans: int) -> tuple[Draws, Tensor]:
        """Sampling parameters, and the positions (S,) int64 of the tokens to draw."""
        seed, positions = self._seeds.device[:, :spans]
        return Draws(self._temperature.device[:spans], seed), positions


class SpanContext(AttentionContext):
    """Attention of T tokens of S chunks. A chunk may be a single new token."""

    def __init__(self, inputs: SpanInputs, rows: int, spans: int, cache: PagedCache, max_span: int) -> None:
        self.cache, self.max_span = cache, max_span
        self.positions, self.places = inputs._rows.device[rows : 2 * rows], inputs._rows.device[2 * rows : 3 * rows]
        self.starts, self.lengths = inputs._spans.device[0, : spans + 1], inputs._spans.device[1, :spans]
        self.tables = inputs.tables.mirror.device[:spans]

    def attend(self, heads: Heads, qkv: Tensor, frequencies: Tensor) -> Tensor:
        keys, values = self.cache.keys_values[heads.slot]
        q = stored(heads, qkv[0], self.positions, frequencies, self.places, keys, values)
        out = paged_prefill(q, keys, values, self.tables, self.starts, self.lengths, heads.window, self.max_span)
        return out.flatten(1)[None]
