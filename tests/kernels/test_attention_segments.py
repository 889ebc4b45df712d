"""Attention in fixed segments: a query's bits are the same alone, in any chunk, in any batch, and without a cache."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.test_attention import LARGE, SHAPES, Pages, Shape, attend64, factor, plain
from tests.support.gpus import needs_gpu
from tests.support.kernels import ordered_dots, worse
from tests.support.ranks import Ranks


def stated(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The definition of a query (H, D) at the last of L positions, k and v (L, K, D), operation by operation in fp32. Each segment of
    256 keys has an online softmax over tiles of 64, whose weights are rounded to the inputs' dtype; then segments are merged in order.
    """
    dtype, heads = q.numpy().dtype, q.shape[0] // k.shape[1]
    queries, keys, values = (x.float().numpy() for x in (q, *(x.repeat_interleave(heads, 1) for x in (k, v))))
    length, scale = len(keys), np.float32(math.log2(math.e) / math.sqrt(q.shape[1]))
    first = 0 if window is None else max(length - window, 0)
    total = nothing(queries)
    for segment in range(0, length, 256):
        own = nothing(queries)
        for start in range(segment, min(segment + 256, length), 64):
            tile = slice(start, min(start + 64, length))
            scores = np.zeros((len(queries), tile.stop - start), np.float32)
            for d in range(queries.shape[1]):
                scores += queries[:, d, None] * keys[tile, :, d].T
            scores[:, np.arange(start, tile.stop) < first] = -np.inf
            largest = np.maximum(own[1], scores.max(1) * scale)
            weights = np.exp2(scores * scale - largest[:, None]).astype(dtype).astype(np.float32)
            factor = np.exp2(own[1] - largest)
            acc, sums = own[0] * factor[:, None], own[2] * factor
            for j in range(tile.stop - start):
                acc, sums = acc + weights[:, j, None] * values[start + j], sums + weights[:, j]
            own = acc, largest, sums
        largest = np.maximum(total[1], own[1])
        before, after = np.exp2(total[1] - largest), np.exp2(own[1] - largest)
        merged = total[0] * before[:, None] + own[0] * after[:, None]
        total = merged, largest, total[2] * before + own[2] * after
    return torch.from_numpy((total[0] / total[2][:, None]).astype(dtype))


def nothing(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weighted values, largest score and sum of weights of queries (H, D) that have seen no key."""
    return np.zeros_like(queries), np.full(len(queries), -1e30, np.float32), np.zeros(len(queries), np.float32)


def faults(seed: int, device: str, cases: list[tuple[torch.dtype, Shape]], longest: int, codes: bool) -> list[str]:
    """Cases in which queries have other bits in another chunk or batch than in whole prompts, or those are far from fp64."""
    from kernels import paged_attention_segments as segments

    torch.manual_seed(seed)
    random.seed(seed)
    found = []
    for dtype, shape in cases:
        lengths = [random.randint(1, longest), longest, random.randint(1, 70)] if device == "cuda" else [9, longest, 70]
        pages = Pages.of(shape, lengths, device, dtype, codes)
        queries = [torch.randn(n, shape.n_heads, shape.head_dim, device=device).to(dtype) for n in lengths]
        name = f"{shape} {dtype} {codes=} {lengths}"

        def spans(
            which: list[int],
            ends: list[int],
            counts: list[int],
            shape: Shape = shape,
            pages: Pages = pages,
            queries: list[Tensor] = queries,
        ) -> Tensor:
            """Attention of the last queries up to `ends` of some sequences."""
            q = torch.cat([queries[s][end - n : end] for s, end, n in zip(which, ends, counts, strict=True)])
            starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
            on_device = torch.tensor(ends, dtype=torch.int32, device=device)
            q = torch.cat([q, q[: random.randrange(3)]])  # padding
            out = segments.prefill(
                q, pages.keys, pages.values, pages.tables[which], starts, on_device, shape.window, pages.scales
            )  # fmt: skip
            return out[: sum(counts)]

        whole = spans([0, 1, 2], lengths, lengths).split(lengths)
        exact = [attend64(q, *pages.sequences[s], shape.window) for s, q in enumerate(queries)]
        usual = [plain(q, *pages.sequences[s], shape.window) for s, q in enumerate(queries)]
        found += worse(name, torch.cat(whole), torch.cat(usual), torch.cat(exact), 2 * factor(codes))

        if device == "cpu" and not codes:  # the interpreter rounds as NumPy does
            for s in range(3):
                for end in {lengths[s], random.randint(1, lengths[s]), min(257, lengths[s])}:
                    keys, values = (x[:end] for x in pages.sequences[s])
                    if not torch.equal(stated(queries[s][end - 1], keys, values, shape.window), whole[s][end - 1]):
                        found.append(f"{name}: not the definition at {end} of sequence {s}")

        for _ in range(2 if device == "cpu" else 20):  # a chunk, with the start of another prompt
            end, other = random.randint(1, lengths[1]), random.randint(1, min(lengths[0], 40))
            count = random.randint(1, min(end, 100))
            got = spans([1, 0], [end, other], [count, other])
            if not torch.equal(got, torch.cat([whole[1][end - count : end], whole[0][:other]])):
                found.append(f"{name}: a chunk of {count} up to {end}")
        ends = [random.randint(1, n) for n in lengths]
        q = torch.stack([queries[s][end - 1] for s, end in enumerate(ends)])
        expected = torch.stack([whole[s][end - 1] for s, end in enumerate(ends)])
        on_device = torch.tensor([*ends, 0], dtype=torch.int32, device=device)
        tables, q = pages.tables[[0, 1, 2, 0]], torch.cat([q, q[:1]])
        for splits in (1, random.randint(2, 9)):
            bound = longest + random.randrange(600)
            got = segments.decode_with(
                q, pages.keys, pages.values, tables, on_device, shape.window, bound, pages.scales, splits
            )  # fmt: skip
            if not torch.equal(got[:3], expected) or got[3].any():
                found.append(f"{name}: decode at {ends} in {splits} splits of {bound}")
        if not codes:
            k, v = (x[None].transpose(1, 2) for x in pages.sequences[1])
            got = segments.attend(queries[1][None].transpose(1, 2), k, v, shape.window)
            if not torch.equal(got[0].transpose(0, 1), whole[1]):
                found.append(f"{name}: without a cache")
    return found


def interpreted(seed: int, cases: list[tuple[torch.dtype, Shape]], longest: int, codes: bool) -> list[str]:
    with torch.no_grad(), ordered_dots():
        return faults(seed, "cpu", cases, longest, codes)


def test_bits_of_a_query_in_the_interpreter(in_turn: Any, interpreters: Ranks, seed: int) -> None:
    """One random shape in each run, of values or of codes."""
    codes, shape = in_turn((False, True), 0), random.choice([shape for shape in SHAPES if shape.head_dim < 256])
    dtype = random.choice([torch.float32, torch.float16])
    assert interpreters.call(interpreted, seed, [(dtype, shape)], 300 if codes else 530, codes) == [], seed


@needs_gpu
@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
def test_bits_of_a_query_on_a_gpu(codes: bool, seed: int) -> None:
    """A few random shapes in each run, because each is compiled."""
    dtypes = [torch.float16, torch.bfloat16]
    with torch.no_grad():
        assert faults(seed, "cuda", list(zip(dtypes, random.sample(SHAPES, 2), strict=True)), 600, codes) == []
        assert faults(seed, "cuda", [(torch.bfloat16, random.choice(LARGE))], 3000, codes) == []
