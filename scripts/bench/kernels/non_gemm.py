"""Measure a decoder layer's kernels on one GPU: errors, and median times in CUDA graphs compared with plain PyTorch.

    python -m scripts.bench.kernels.non_gemm --out out/kernels.json
    python -m scripts.bench.kernels.non_gemm --only long --ranks 1 4 8   # attention at 32k and 128k tokens

The shapes are those of Llama-3-70B on 4 and on 8 ranks; on 1 rank, all its 8 key-value heads. A graph holds at least 20 launches,
or 20 ms of them, which cycle through several inputs. The inputs together exceed the L2 cache, so that none is still cached when
it is used again. Prints a table; --out writes the rows as JSON. Decode is also compared with how fast the GPU reads its memory. The
launch configurations at the top of kernels/paged_attention.py were found with this script of commit 4a2e01f.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from cli import Parser, run
from engine import SamplingParams
from engine.sampler import SamplingBatch, sample
from errors import UserError
from kernels.activation import swiglu, swiglu_reference
from kernels.dispatch import replay_seconds, successive_seconds
from kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from kernels.paged_attention import paged_decode, paged_decode_reference, paged_prefill, paged_prefill_reference
from kernels.rope_cache import rope_store, rope_store_reference
from kernels.sampling import combine_best, local_best
from scripts.lib.machine import machine
from scripts.lib.results import write_text

LAUNCHES, REPLAYS = 20, 15
GRAPH_SECONDS, REPLAYED_SECONDS = 0.02, 0.5  # of the launches of a graph and of its replays: enough of them
COLD_BYTES = 200e6  # more than three times the L2 cache of an H200
SCORES_BYTES = 5e9  # most for the scores of a reference in fp32; of larger cases it computes SAMPLED rows
SAMPLED = 48
HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 8192, 28672, 128256, 64, 8, 128, 16
BATCHES, LENGTHS, EPS = (1, 4, 16, 64), (1024, 1536, 8192), 1e-5

WORDS, READS = 3 * 1024**3, 8  # int32
BLOCKS, PROGRAMS_AN_SM, STAGES = (1024, 2048, 4096, 8192), (2, 4, 8, 16), (1, 4)

Inputs = tuple[Any, ...]


@dataclass
class Case:
    """One kernel at one shape. `make` draws random inputs; the other callables take them."""

    kernel: str
    shape: dict[str, int]
    make: Callable[[], Inputs]
    ours: Callable[..., Any]
    peer: Callable[..., Any]
    exact: Callable[..., Tensor]  # the reference, in fp32 or equivalent
    for_peer: Callable[..., Inputs] = lambda *inputs: inputs  # converts the inputs of `make` to those of `peer`
    bytes: float = 0
    flops: float = 0
    sampled: Tensor | None = None  # the rows that `exact` returns; None: all

    def copies(self) -> int:
        """Of the inputs: one that is much larger than the cache is not there any more when it is read again."""
        return int(min(max(COLD_BYTES / max(self.bytes, 1), 1 if self.bytes > 4 * COLD_BYTES else 2), 256))

    def error(self, output: Tensor, exact: Tensor) -> float:
        return (output if self.sampled is None else output[self.sampled]).float().sub(exact).abs().max().item()


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, device="cuda")


# --- the cases ---------------------------------------------------------------------------------------------------------------


def gate_up(rows: int, size: int) -> Inputs:
    return (randn(rows, 2 * size),)


def elementwise_cases(ranks: int) -> Iterator[Case]:
    size, weight = INTERMEDIATE // ranks, randn(HIDDEN)
    for rows in (*BATCHES, 1024, 8192):

        def normed(count: int, rows: int = rows) -> Inputs:
            return *(randn(rows, HIDDEN) for _ in range(count)), weight, EPS

        if ranks == 4:  # the norms are not sharded
            shape = {"rows": rows, "size": HIDDEN}
            yield Case(
                "rms_norm",
                shape,
                partial(normed, 1),
                rms_norm,
                rms_norm_reference,
                lambda x, weight, eps: rms_norm_reference(x.float(), weight.float(), eps),
                bytes=rows * HIDDEN * 4,
            )
            yield Case(
                "add_rms_norm",
                shape,
                partial(normed, 2),
                lambda *x: add_rms_norm(*x)[1],
                lambda *x: add_rms_norm_reference(*x)[1],
                lambda x, update, weight, eps: rms_norm_reference((x + update).float(), weight.float(), eps),
                bytes=rows * HIDDEN * 8,
            )
        yield Case(
            "swiglu",
            {"rows": rows, "size": size},
            partial(gate_up, rows, size),
            swiglu,
            swiglu_reference,
            lambda x: swiglu_reference(x.float()),
            bytes=rows * size * 6,
        )


def rope_by_torch(
    qkv: Tensor, positions: Tensor, frequencies: Tensor, cache_rows: Tensor, keys: Tensor, values: Tensor, *_: Any
) -> Tensor:
    """Like the reference, but stores all tokens: boolean indexing cannot be captured in a CUDA graph."""
    heads, kv_heads = qkv.unflatten(-1, (-1, HEAD_DIM)), keys.shape[1]
    qk, v = heads[:, :-kv_heads], heads[:, -kv_heads:]
    angles = positions[:, None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = qk.float().chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(qkv)
    keys.index_copy_(0, cache_rows, turned[:, -kv_heads:])
    values.index_copy_(0, cache_rows, v)
    return turned[:, :-kv_heads]


def rope_cases(ranks: int) -> Iterator[Case]:
    heads, kv_heads = HEADS // ranks, KV_HEADS // ranks
    frequencies = 1 / 500000 ** (torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)
    for rows in (*BATCHES, 1024, 8192):

        def make(rows: int = rows) -> Inputs:
            cache = randn(2, 2 * rows, kv_heads, HEAD_DIM)
            cache_rows = torch.randperm(2 * rows, device="cuda")[:rows]
            qkv = randn(rows, (heads + 2 * kv_heads) * HEAD_DIM)
            return qkv, integers(8192, rows), frequencies, cache_rows, *cache, None, None, EPS

        yield Case(
            "rope_store",
            {"rows": rows, "heads": heads, "kv_heads": kv_heads},
            make,
            rope_store,
            rope_by_torch,
            lambda qkv, *rest: rope_store_reference(qkv.float(), *rest),
            bytes=rows * (heads + 2 * kv_heads) * HEAD_DIM * 4,
        )


def pages(sequences: int, length: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values (N, P, K, D), and tables (sequences, W) of shuffled blocks."""
    width = -(-length // BLOCK)
    keys, values = (randn(sequences * width, BLOCK, kv_heads, HEAD_DIM) for _ in range(2))
    return keys, values, torch.randperm(sequences * width, device="cuda").view(sequences, width).int()


def unpaged(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, *_: Any) -> Inputs:
    """Queries (B, T, H, D), and keys and values (B, L, K, D), for a peer without pages. All sequences have the same length."""
    k, v = (x[tables.long()].flatten(1, 2) for x in (keys, values))
    return q.view(len(tables), -1, *q.shape[1:]), k, v


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    last = causal and q.shape[2] < k.shape[2]  # the queries are the last positions: is_causal would make them the first
    mask: Any = causal_lower_right(q.shape[2], k.shape[2]) if last else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and not last, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def decode_case(ranks: int, batch: int, length: int, bound: int) -> Case:
    heads, kv_heads = HEADS // ranks, KV_HEADS // ranks

    def make() -> Inputs:
        lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        return randn(batch, heads, HEAD_DIM), *pages(batch, length, kv_heads), lengths, None, bound

    return Case(
        "paged_decode",
        {"batch": batch, "length": length, "bound": bound, "heads": heads, "kv_heads": kv_heads},
        make,
        paged_decode,
        partial(attend, causal=False),
        lambda q, *rest: paged_decode_reference(q.float(), *rest),
        for_peer=unpaged,
        bytes=batch * length * kv_heads * HEAD_DIM * 4,
    )


def decode_cases(ranks: int) -> Iterator[Case]:
    shapes = [(b, length, length) for b in BATCHES for length in LENGTHS] + [(1, 1024, 8192), (64, 1024, 8192)]
    return (decode_case(ranks, *shape) for shape in shapes)


def prefill_case(ranks: int, spans: int, length: int, keys: int | None = None) -> Case:
    """Spans of `length` queries, the last positions of sequences of `keys` tokens (default: the whole sequences)."""
    heads, kv_heads, keys = HEADS // ranks, KV_HEADS // ranks, keys or length
    large = 4 * heads * length * keys > SCORES_BYTES
    sampled = torch.randperm(spans * length, device="cuda")[:SAMPLED] if large else None

    def make() -> Inputs:
        starts = torch.arange(spans + 1, dtype=torch.int32, device="cuda") * length
        lengths = torch.full((spans,), keys, dtype=torch.int32, device="cuda")
        q = randn(spans * length, heads, HEAD_DIM)
        return q, *pages(spans, keys, kv_heads), starts, lengths, None, length

    return Case(
        "paged_prefill",
        {"spans": spans, "length": length, "keys": keys, "heads": heads, "kv_heads": kv_heads},
        make,
        paged_prefill,
        partial(attend, causal=length > 1),  # one query is the last position and needs no mask
        prefill_exact if sampled is None else partial(prefill_rows_exact, sampled, length),
        for_peer=unpaged,
        bytes=spans * (2 * heads * length + 2 * kv_heads * keys) * HEAD_DIM * 2,
        flops=4 * spans * length * (keys - (length - 1) / 2) * heads * HEAD_DIM,
        sampled=sampled,
    )


def prefill_exact(q: Tensor, *rest: Any) -> Tensor:
    return paged_prefill_reference(q.float(), *rest)


def prefill_rows_exact(
    rows: Tensor, span: int, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor, *_: Any
) -> Tensor:
    """These rows of q, in spans of `span` rows: each attends as one that is decoded at its position."""
    seen = lengths[rows // span] - span + rows % span + 1
    return paged_decode_reference(q[rows].float(), keys, values, tables[rows // span], seen, None, int(seen.max()))


def prefill_cases(ranks: int) -> Iterator[Case]:
    """Prompts, and last what decoding sequences have in a step with prompts: spans of one token."""
    yield from (prefill_case(ranks, spans, length) for spans, length in ((1, 1024), (8, 1024), (1, 8192)))
    yield prefill_case(ranks, 16, 1, 1024)


def long_cases(ranks: int) -> Iterator[Case]:
    """Attention at 32k and 128k tokens: decode, whole prompts, and their last chunks, of 2,048 and 8,192 tokens."""
    lengths = (32768, 131072)
    yield from (decode_case(ranks, batch, length, length) for batch in (1, 32) for length in lengths)
    if ranks > 1:  # a prompt of 128k tokens takes a second with all 64 heads
        yield from (prefill_case(ranks, 1, queries, keys) for keys in lengths for queries in (2048, 8192, keys))


def draw(logits: Tensor, batch: SamplingBatch, positions: Tensor) -> Tensor:
    per_row = batch.temperature[:, 0], batch.seed[:, 0], positions[:, 0]
    return combine_best(local_best(logits, *per_row, 0, logits.shape[1]))


def sampling_cases(ranks: int) -> Iterator[Case]:
    size = VOCAB // ranks
    for batch in BATCHES:
        for temperature in (0.0, 0.7):

            def make(batch: int = batch, temperature: float = temperature) -> Inputs:
                params = [SamplingParams(temperature=temperature, seed=i) for i in range(batch)]
                return randn(batch, size), SamplingBatch.of(params, torch.device("cuda")), integers(8192, batch, 1)

            yield Case(
                "sampling",
                {"batch": batch, "ids": size, "greedy": int(temperature == 0)},
                make,
                draw,
                lambda logits, *rest: sample(logits.float(), *rest),
                lambda logits, *rest: sample(logits.float(), *rest),
                bytes=batch * size * 2,
            )


FAMILIES: dict[str, Callable[[int], Iterator[Case]]] = {
    "elementwise": elementwise_cases,
    "rope": rope_cases,
    "decode": decode_cases,
    "prefill": prefill_cases,
    "long": long_cases,
    "sampling": sampling_cases,
}

# --- measuring -----------------------------------------------------------------------------------------------------------------


def microseconds(call: Callable[..., Any], inputs: list[Inputs]) -> float:
    """Median time of one call in µs, in a CUDA graph of many calls."""
    call(*inputs[0])
    once = median(successive_seconds(partial(call, *inputs[0]), 3))
    count = max(min(LAUNCHES, math.ceil(GRAPH_SECONDS / once)), len(inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(*inputs[i % len(inputs)])
    graph.replay()
    replays = min(REPLAYS, max(3, round(REPLAYED_SECONDS / (once * count))))
    return median(replay_seconds(graph, replays)) * 1e6 / count


def measure(case: Case, ceiling: float) -> dict[str, Any]:
    """ceiling: bytes/s that decode is compared with."""
    inputs = [case.make() for _ in range(case.copies())]
    peer_inputs = [case.for_peer(*x) for x in inputs]
    exact = case.exact(*inputs[0]).float()
    error = case.error(case.ours(*inputs[0]), exact)
    peer_error = case.error(case.peer(*peer_inputs[0]), exact)
    ours, peer = microseconds(case.ours, inputs), microseconds(case.peer, peer_inputs)
    share = {"share_of_ceiling": round(case.bytes / ours * 1e6 / ceiling, 3)} if case.kernel == "paged_decode" else {}
    return {
        "kernel": case.kernel,
        **case.shape,
        "us": round(ours, 2),
        "peer_us": round(peer, 2),
        "gb_per_second": round(case.bytes / ours / 1e3, 1),
        "tflop_per_second": round(case.flops / ours / 1e6, 1),
        **share,
        "error": error,
        "peer_error": peer_error,
        "right": error <= 2 * peer_error + 1e-6,
    }


# --- the read ceiling: how fast the GPU reads its memory, which a decode step does with all weights -------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(x, sums, count, steps, BLOCK: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int32)
    for step in tl.range(0, steps, num_stages=STAGES):
        at = (step * tl.num_programs(0) + program) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(x + at, mask=at < count, other=0)
    tl.store(sums + program, tl.sum(total))


def bytes_per_second(x: torch.Tensor, block: int, programs: int, stages: int) -> float:
    """x: int32. Raises AssertionError if the sum is wrong."""
    sums = torch.empty(programs, dtype=torch.int32, device=x.device)
    seconds = []
    for _ in range(1 + READS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        _add_up[(programs,)](x, sums, len(x), triton.cdiv(len(x), programs * block), BLOCK=block, STAGES=stages, num_warps=8)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    assert sums.sum(dtype=torch.int32) == x.sum(dtype=torch.int32), "a part was not read"
    return x.nbytes / median(seconds[1:])  # the first launch compiles


def read_ceiling() -> float:
    """Bytes/s of the fastest launch configuration."""
    x = torch.randint(-(2**31), 2**31, (WORDS,), dtype=torch.int32, device="cuda")
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    return max(
        bytes_per_second(x, block, sms * each, stages) for block, each, stages in product(BLOCKS, PROGRAMS_AN_SM, STAGES)
    )


# --- the command ------------------------------------------------------------------------------------------------------------------


def measured(ranks: list[int], families: list[str], ceiling: float) -> Iterator[dict[str, Any]]:
    for case in (case for name in families for n in ranks for case in FAMILIES[name](n)):
        row = measure(case, ceiling)
        show(row, case)
        yield row


def show(row: dict[str, Any], case: Case) -> None:
    shape = " ".join(f"{k}={v}" for k, v in case.shape.items())
    rate = f"{row['tflop_per_second']:7.1f} TFLOP/s" if row["tflop_per_second"] else f"{row['gb_per_second']:7.1f} GB/s"
    rate += f" {row['share_of_ceiling']:.0%} of the ceiling" if "share_of_ceiling" in row else ""
    verdict = "" if row["right"] else f"  WRONG: {row['error']:.3g}, PyTorch {row['peer_error']:.3g}"
    print(f"{row['kernel']:14} {shape:58} {row['us']:9.2f} us  PyTorch {row['peer_us']:9.2f} us {rate}{verdict}", flush=True)


def main() -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="kernels to measure")
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        choices=(1, 2, 4, 8),
        default=[4, 8],
        help="measure the shards of these numbers of ranks (default: 4 8)",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("measuring needs a GPU, and this machine shows none")
    torch.manual_seed(0)
    content: dict[str, Any] = {"machine": machine()}
    with torch.no_grad():
        content["read_bytes_per_second"] = read_ceiling()
        rows = list(measured(args.ranks, args.only, content["read_bytes_per_second"]))
    if args.out:
        write_text(args.out, json.dumps(content | {"rows": rows}, indent=1) + "\n")
    wrong = [row["kernel"] for row in rows if not row["right"]]
    if wrong:
        raise UserError(f"wrong results: {', '.join(sorted(set(wrong)))}")


if __name__ == "__main__":
    run(main)
