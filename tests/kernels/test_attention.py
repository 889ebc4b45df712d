"""Attention over a paged KV cache: the PyTorch reference against fp64, the kernels against both."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import paged_attention
from kernels.paged_attention import paged_decode_reference, paged_prefill_reference
from tests.support.gpus import needs_gpu
from tests.support.kernels import kernels_always, worse
from tests.support.ranks import Ranks
from tests.support.replays import wrong_replays


@dataclass(frozen=True)
class Shape:
    n_heads: int
    n_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None


SHAPES = [
    Shape(8, 2, 32, 16, None),
    Shape(3, 3, 24, 8, 37),
    Shape(14, 2, 16, 32, None),
    Shape(4, 1, 64, 16, 1),
    Shape(20, 1, 48, 64, 100),
    Shape(2, 1, 256, 16, None),
]
LARGE = [Shape(16, 2, 128, 16, None), Shape(8, 1, 128, 16, None), Shape(8, 8, 128, 16, None), Shape(32, 8, 64, 16, 700)]


# --- the definition, in fp64 -------------------------------------------------------------------------------------------------


def seen(rows: int, length: int, window: int | None, device: torch.device) -> Tensor:
    ages = torch.arange(length - rows, length, device=device)[:, None] - torch.arange(length, device=device)
    return (ages >= 0) & (ages < (window or length))


def attend64(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None) -> Tensor:
    """Attention in fp64: q (n, H, D) at the last n of L positions, k and v (L, K, D). sinks (H,): logits without values."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) / q.shape[2] ** 0.5
    weights = scores.masked_fill(~seen(len(q), len(k), window, q.device), -torch.inf).exp()
    total = weights.sum(-1) + (0 if sinks is None else sinks.double().exp()[:, None])
    return torch.einsum("hnl,lhd->nhd", weights / total[..., None], v)


def plain(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None) -> Tensor:
    """The same with PyTorch's attention, in the dtype of the inputs. A sink is the mask's value for a key and a value of zeros."""
    mask = seen(len(q), len(k), window, q.device)
    if sinks is not None:
        mask = torch.where(mask, 0.0, -torch.inf).to(q.dtype).expand(len(sinks), -1, -1)
        mask = torch.cat((mask, sinks[:, None, None].expand(-1, len(q), 1)), -1)
        k, v = (F.pad(x.to(q.dtype), (0, 0, 0, 0, 0, 1)) for x in (k, v))
    q, k, v = (x.to(q.dtype).transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def factor(codes: bool) -> float:
    """Of codes, products of weights and scales are rounded to 16 bits, which plain PyTorch does not do where a weight is 1."""
    return 4 if codes else 2


@dataclass
class Pages:
    """Sequences of given lengths in a cache. The order of its blocks is random, and unused slots contain NaN. Codes are random, and
    their scales are of very different sizes; the sequences are then what they stand for, in fp32."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    scales: Tensor | None
    sequences: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, shape: Shape, lengths: list[int], device: str, dtype: torch.dtype, codes: bool = False) -> "Pages":
        size = shape.block_size
        width = -(-max(lengths) // size) + 1
        blocks = len(lengths) * width + 3
        order = torch.randperm(blocks)[: len(lengths) * width].view(len(lengths), width).int().to(device)
        held = torch.float8_e4m3fn if codes else dtype
        cache = torch.full((2, blocks, size, shape.n_kv_heads, shape.head_dim), torch.nan, device=device).to(held)
        scales = torch.full((2, blocks, shape.n_kv_heads, size), torch.nan, device=device) if codes else None
        sequences = []
        for table, length in zip(order.long(), lengths, strict=True):
            both = torch.randn(2, length, shape.n_kv_heads, shape.head_dim, device=device) * (100 if codes else 1)
            both = both.clamp(-448, 448).to(held)  # e4m3 has no larger values, and PyTorch would make them NaN
            at = torch.arange(length, device=device)
            cache[:, table[at // size], at % size] = both
            if scales is not None:
                own = torch.rand(2, length, shape.n_kv_heads, device=device) / 50
                own[1] *= 10 ** (3 * torch.randn(length, shape.n_kv_heads, device=device)).clamp(-6, 3)
                scales[:, table[at // size], :, at % size] = own.transpose(0, 1)
                both = both.float() * own[..., None]
            sequences.append((both[0], both[1]))
        return cls(cache[0], cache[1], order, scales, sequences)


def redraw(pages: Pages) -> None:
    """Other keys and values; unused slots keep their NaN."""
    for cache in (pages.keys, pages.values):
        cache.copy_(torch.randn_like(cache) + 0 * cache)


def sinks_of(shape: Shape, device: str, dtype: torch.dtype) -> Tensor:
    """From such that nothing sees to such that take almost all."""
    return (torch.randn(shape.n_heads, device=device) * 3 + 2).to(dtype)


def decode_faults(
    decode: Callable, shape: Shape, longest: int, device: str, dtype: torch.dtype, codes: bool = False, sunk: bool = False
) -> list[str]:
    lengths = [random.randint(1, longest), 0, 1, min(shape.block_size, longest), longest]
    pages = Pages.of(shape, lengths, device, dtype, codes)
    q = torch.randn(len(lengths), shape.n_heads, shape.head_dim, device=device).to(dtype)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
    bound, sinks = longest + random.randrange(500), sinks_of(shape, device, dtype) if sunk else None
    got = decode(q, pages.keys, pages.values, pages.tables, on_device, shape.window, bound, scales=pages.scales, sinks=sinks)
    rows = [(q[i : i + 1], *pages.sequences[i], shape.window, sinks) for i, length in enumerate(lengths) if length]
    name = f"decode {shape} {dtype} {codes=} {sunk=} {lengths}"
    found = [] if not got[1].any() else [f"{name}: padding is not zero"]
    exact, usual = [attend64(*row) for row in rows], [plain(*row) for row in rows]
    return found + worse(name, got[on_device > 0], torch.cat(usual), torch.cat(exact), factor(codes))


def prefill_faults(
    prefill: Callable, shape: Shape, longest: int, device: str, dtype: torch.dtype, codes: bool = False, sunk: bool = False
) -> list[str]:
    counts = [random.randint(1, longest // 2), 0, 1, random.randint(1, longest), 1, 0]
    if random.random() < 0.3:
        counts = [min(n, 2) for n in counts]
    lengths = [n + random.randrange(longest) if n else random.randrange(2) for n in counts]
    lengths[0] = counts[0]  # this sequence has no earlier tokens
    pages, padding = Pages.of(shape, lengths, device, dtype, codes), random.choice([0, 5, 150])
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    q = torch.randn(sum(counts) + padding, shape.n_heads, shape.head_dim, device=device).to(dtype)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
    bound, sinks = max(counts) + random.randrange(3), sinks_of(shape, device, dtype) if sunk else None
    got = prefill(
        q, pages.keys, pages.values, pages.tables, starts, on_device, shape.window, bound, scales=pages.scales, sinks=sinks
    )
    spans = [
        (part, *pages.sequences[s], shape.window, sinks) for s, part in enumerate(q[: sum(counts)].split(counts)) if len(part)
    ]
    name = f"prefill {shape} {dtype} {codes=} {sunk=} {counts} of {lengths}, {padding} rows of padding"
    found = [] if not got[sum(counts) :].any() else [f"{name}: padding is not zero"]
    exact, usual = [attend64(*span) for span in spans], [plain(*span) for span in spans]
    return found + worse(name, got[: sum(counts)], torch.cat(usual), torch.cat(exact), factor(codes))


@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_references(shape: Shape, dtype: torch.dtype, codes: bool, seed: int) -> None:
    for sunk in (False, True):
        assert decode_faults(paged_decode_reference, shape, 200, "cpu", dtype, codes, sunk) == []
        assert prefill_faults(paged_prefill_reference, shape, 60, "cpu", dtype, codes, sunk) == []


def faults(seed: int, device: str, cases: list[tuple[torch.dtype, Shape]], longest: int, codes: bool = False) -> list[str]:
    """The cases in which the error of the Triton kernels is too large."""
    table = "CODE_CONFIGS" if codes else "DECODE_CONFIGS"
    torch.manual_seed(seed)
    random.seed(seed)
    found, usual, usual_values = [], getattr(paged_attention, table), paged_attention.COMBINED_VALUES
    with kernels_always(paged_attention):
        for dtype, shape in cases:
            chosen = random.choice([usual, ((math.inf, some_config(paged_attention.DecodeConfig)),)])
            setattr(paged_attention, table, chosen)
            paged_attention.COMBINED_VALUES = random.choice([usual_values, 16])  # or few features of a head in a program
            faults = decode_faults(paged_attention.paged_decode, shape, longest, device, dtype, codes)
            found += [f"{fault}, {chosen}" for fault in faults]
            found += prefill_faults(paged_attention.paged_prefill, shape, longest // 2, device, dtype, codes)
    setattr(paged_attention, table, usual)
    paged_attention.COMBINED_VALUES = usual_values
    return found


def sink_faults(seed: int, device: str, cases: list[tuple[torch.dtype, Shape]], longest: int, codes: bool) -> list[str]:
    """The same with sinks, in one split and in several."""
    table, found = "CODE_CONFIGS" if codes else "DECODE_CONFIGS", []
    torch.manual_seed(seed)
    random.seed(seed)
    with kernels_always(paged_attention), pytest.MonkeyPatch.context() as patch:
        for dtype, shape in cases:
            for splits in (1, 7):
                patch.setattr(paged_attention, table, ((math.inf, paged_attention.DecodeConfig(32, 4, 2, 3, splits)),))
                found += decode_faults(paged_attention.paged_decode, shape, longest, device, dtype, codes, True)
            found += prefill_faults(paged_attention.paged_prefill, shape, longest // 2, device, dtype, codes, True)
    return found


def some_config(of: Callable[..., Any]) -> Any:
    """A random config: decode must be right with every config, not only with the default ones."""
    warps, stages, programs = random.choice([4, 8]), random.choice([2, 3]), random.choice([1, 3])
    return of(random.choice([16, 32, 64, 128]), warps, stages, programs, max_splits=random.choice([1, 2, 7, 64, 300]))


@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
def test_kernels_in_the_interpreter(codes: bool, interpreters: Ranks, seed: int) -> None:
    """Shapes chosen at random, in fp32 or fp16: the interpreter cannot multiply bf16 matrices. Few in a run, to save time."""
    dtypes = [torch.float32, torch.float16] * (len(SHAPES) // 2)
    random.shuffle(dtypes)
    cases = list(zip(dtypes, SHAPES, strict=True))
    assert interpreters.call(faults, seed, "cpu", random.sample(cases, 2 if codes else 4), 280, codes) == []


@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
def test_sinks_in_the_interpreter(codes: bool, interpreters: Ranks, seed: int) -> None:
    cases = [(torch.float16, Shape(6, 2, 64, 16, 50)), (torch.float32, Shape(6, 2, 16, 8, None))]
    assert interpreters.call(sink_faults, seed, "cpu", cases, 150, codes) == []


def test_splits_fill_the_gpu_but_never_fall_below_a_tile() -> None:
    pytest.importorskip("triton", reason="Triton is not installed; pip install triton")
    from kernels.paged_attention import decode_config, decode_splits

    for pairs in (1, 2, 7, 8, 16, 100, 192):
        config = decode_config(pairs)
        held = config.programs * 132
        for longest in (1, 64, 65, 1000, 8192, 10**6):
            splits, tiles = decode_splits(config, pairs, longest, 64, 132), -(-longest // 64)
            assert splits == 1 or (splits * pairs <= held and splits <= min(tiles, config.max_splits))
            assert (splits + 1) * pairs > held or splits == min(tiles, config.max_splits)


@needs_gpu
@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
def test_kernels_on_a_gpu(codes: bool, seed: int) -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    assert faults(seed, "cuda", list(product(dtypes, SHAPES)), 280, codes) == []
    assert faults(seed, "cuda", list(product([torch.bfloat16], LARGE)), 3000, codes) == []


@needs_gpu
@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
def test_sinks_and_wide_heads_on_a_gpu(codes: bool, seed: int) -> None:
    """Of gpt-oss's shape, and of Gemma's, with and without a window."""
    oss, gemma = (
        (Shape(64, 8, 64, 16, 128), Shape(64, 8, 64, 16, None)),
        (Shape(8, 4, 256, 16, 700), Shape(8, 4, 256, 16, None)),
    )
    assert sink_faults(seed, "cuda", list(product([torch.float32, torch.bfloat16], oss)), 1500, codes) == []
    assert faults(seed, "cuda", list(product([torch.float32, torch.bfloat16], gemma)), 1500, codes) == []


@needs_gpu
@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize("batch", [1, 4, 100])
def test_replays_of_decode_repeat_their_bits(batch: int, codes: bool, seed: int) -> None:
    from kernels.paged_attention import paged_decode

    shape, longest = LARGE[0], 2048
    pages = Pages.of(shape, [longest] * batch, "cuda", torch.bfloat16, codes)
    q = torch.randn(batch, shape.n_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((batch,), longest, dtype=torch.int32, device="cuda")

    def refresh() -> None:
        q.normal_()
        lengths.copy_(torch.randint(0, longest + 1, (batch,)))
        if not codes:
            redraw(pages)

    with torch.no_grad():
        arguments = q, pages.keys, pages.values, pages.tables, lengths, None, longest, pages.scales
        assert wrong_replays(lambda: paged_decode(*arguments), refresh) == 0, seed
