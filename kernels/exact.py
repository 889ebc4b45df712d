"""Arithmetic on CPUs whose bits depend on nothing but the values: not on the batch, the place in a tensor, threads or BLAS.

`--deterministic` computes with it (docs/determinism.md). Only two kinds of operations are used, which have this property:

- elementwise +, -, *, /, square root and rounding. IEEE 754 defines each result, so vector and scalar code agree. PyTorch's exp, log
  and sigmoid do not: the last elements of a tensor, which fill no vector, get other code;
- sums of whole numbers in fp64 that stay within 2^53. They are exact in every order. So values are first rounded to multiples of a
  power of two that depends on their row only (as the slices of Ozaki et al., "Error-free transformations of matrix multiplication",
  Numerical Algorithms 59, 2012).

Results are about as accurate as with fp32, less where a row has values far larger than its others, and rounded to the inputs' data
type at the end.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import determinism

FACTOR_BITS, CHUNK = 22, 1 << 9  # of a product's factors; terms that are added at once: 2^(22 + 22) * 2^9 = 2^53
SUM_BITS = 33  # of the terms of a plain sum, which may have 2^20 of them
BLOCK = 1 << 17  # values that are converted at once, so that they stay in a core's cache
SCORES = 1 << 18  # of attention that are computed at once
EXPONENT = 0x7FF << 52  # the bits of an fp64's exponent
LN2 = math.log(2)
LEAST, MOST = -300.0, 300.0  # of an exponent; e^300 is far beyond fp32


def used(x: Tensor) -> bool:
    """Whether this file's functions compute what depends on x."""
    return determinism.enabled() and not x.is_cuda


def differentiable(exact: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """exact(*inputs), with the gradient of `plain`, which computes the same with PyTorch's operations."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _Exact.apply(exact, plain, *inputs)
    with torch.no_grad():  # or a GPU's kernels would not be used
        return exact(*inputs)


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        inputs = [None if x is None else x.detach().requires_grad_(w) for x, w in zip(ctx.saved_tensors, wanted, strict=True)]
        with torch.enable_grad():
            out = ctx.plain(*inputs)
        leaves = [x for x, w in zip(inputs, wanted, strict=True) if x is not None and w]
        found = iter(torch.autograd.grad(out, leaves, gradient))
        return None, None, *(next(found) if w else None for w in wanted)


# --- exact sums ---------------------------------------------------------------------------------------------------------------


def whole(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x (..., K) as whole numbers of at most 2^bits (fp64, rounded to nearest) and the unit of each row, a power of two (..., 1)."""
    top = x.abs().amax(-1, keepdim=True).double().clamp_(min=2.0**-300)  # the unit of zeros must not be 0
    unit = (top.view(torch.int64) & EXPONENT).view(torch.float64).mul_(2.0 ** (1 - bits))
    return (x.double() * (1 / unit)).round_(), unit


def total(x: Tensor) -> Tensor:
    """The sum over the last dim, (..., 1) fp64, of values that are rounded to 2^-33 of a row's largest one."""
    numbers, unit = whole(x, SUM_BITS)
    return numbers.sum(-1, keepdim=True) * unit


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, parts: int = 1) -> Tensor:
    """x @ weight.T + bias: (..., K), (N, K) and (N,) to (..., N), as a `determinism.tree_sum` over `parts` equal parts of K, each with
    1 / parts of the bias."""
    inputs, units = _chunks(x.reshape(-1, x.shape[-1]), parts)
    out = x.new_empty(inputs.shape[1], len(weight))
    rows = max(1, BLOCK // weight.shape[1])
    for block in (slice(first, first + rows) for first in range(0, len(weight), rows)):
        weights, other = _chunks(weight[block], parts)
        products = (inputs @ weights.mT).mul_(units).mul_(other.mT).unflatten(0, (parts, -1))  # (parts, chunks, R, N)
        sums = reduce(torch.add, products.unbind(1))
        if bias is not None:
            sums = sums + bias[block].double() / parts
        out[:, block] = determinism.tree_sum(sums.float().to(x.dtype).unbind())
    return out.view(*x.shape[:-1], len(weight))


def _chunks(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """`whole` of each chunk of each part of x (R, K): numbers (parts * chunks, R, k) and units (parts * chunks, R, 1)."""
    size = x.shape[1] // parts
    count = -(-size // CHUNK)
    wide = F.pad(x.unflatten(1, (parts, size)), (0, -size % count)) if size % count else x
    numbers, unit = whole(wide.reshape(len(x), parts * count, -(-size // count)), FACTOR_BITS)
    return numbers.transpose(0, 1), unit.transpose(0, 1)


# --- elementwise functions of fp64, with a relative error below 1e-9 ----------------------------------------------------------


def exp(x: Tensor) -> Tensor:
    """e^x, where x is clamped to LEAST and MOST."""
    x = x.clamp(LEAST, MOST)
    n = (x / LN2).round_()
    x -= n * LN2
    y = torch.full_like(x, 1 / math.factorial(8))
    for k in range(7, -1, -1):  # Taylor's series for |x| <= ln(2) / 2
        y.mul_(x).add_(1 / math.factorial(k))
    return y.mul_((n.long() + 1023 << 52).view(torch.float64))  # 2^n


def log(x: Tensor) -> Tensor:
    """ln(x) of normal numbers above 0: with x = m * 2^e and s = (m - 1) / (m + 1), it is e * ln(2) + 2 * atanh(s)."""
    m, e = torch.frexp(x)
    low = m < math.sqrt(0.5)
    m, e = torch.where(low, 2 * m, m), e.double() - low.double()
    s = (m - 1) / (m + 1)
    square, y = s * s, torch.zeros_like(s)
    for k in range(17, 0, -2):
        y = y * square + 1 / k
    return e * LN2 + 2 * s * y


# --- what a model consists of -------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim, rounded once: x (..., C) and weight (C,) to (..., C)."""
    wide = x.double()
    root = (total(wide * wide) / x.shape[-1] + eps).sqrt()
    return (wide / root * weight.double()).float().to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (..., I) of gate_up (..., 2I), rounded once."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (gate / (exp(-gate) + 1) * up).float().to(gate_up.dtype)


def softmax(x: Tensor) -> Tensor:
    """Over the last dim, fp32."""
    weights = _weights(x)
    return (weights / total(weights)).float()


def log_softmax(x: Tensor) -> Tensor:
    """Over the last dim, fp32."""
    wide = x.double()
    return (wide - wide.amax(-1, keepdim=True) - log(total(_weights(wide)))).float()


def _weights(x: Tensor) -> Tensor:
    """e^(x - the row's largest value), 0 for -inf."""
    wide = x.double()
    return exp(wide - wide.amax(-1, keepdim=True)).masked_fill_(wide == -torch.inf, 0.0)


def attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """What F.scaled_dot_product_attention(enable_gqa=True) computes: q (B, H, n, D), keys and values (B, K, L, D), mask bool, True where
    a query attends: (n, L), or (B, 1, n, L) if H = K. Returns (B, H, n, D). Keys begin at position 0, because weighted values are added
    in chunks of CHUNK positions. Keys and values that a mask hides change no bit; who sees one that is not finite gets NaN."""
    (batch, _, tokens, size), (_, heads, length, _) = q.shape, keys.shape
    keys, key_units = whole(keys, FACTOR_BITS)
    values, value_units = whole(values, FACTOR_BITS)
    if (broken := value_units.isinf()).any():  # a value is inf or NaN: its weight of 0, too, would make a sum NaN
        key_units, value_units = key_units.masked_fill(broken, torch.nan), value_units.masked_fill(broken, 0.0)
        values.masked_fill_(broken, 0.0)
    out = torch.empty_like(q)
    shares = q.shape[1] // heads  # query heads of a KV head, which become more rows
    step = max(1, SCORES // (batch * q.shape[1] * length))
    for first in range(0, tokens, step):
        block = slice(first, first + step)
        numbers, unit = whole(q[:, :, block].reshape(batch, heads, -1, size), FACTOR_BITS)
        scores = (numbers @ keys.mT).mul_(unit / math.sqrt(size)).mul_(key_units.mT)
        visible = mask[:, :, block] if mask.dim() == 4 else mask[block].repeat(shares, 1)
        weights = _weights(scores.masked_fill_(~visible, -torch.inf))
        sums = torch.zeros_like(numbers)
        for start in range(0, length, CHUNK):
            chunk = slice(start, start + CHUNK)
            numbers, unit = whole(weights[..., chunk] * value_units[:, :, chunk].mT, FACTOR_BITS)
            sums += (numbers @ values[:, :, chunk]).mul_(unit)
        out[:, :, block] = (sums / total(weights)).float().to(q.dtype).view(batch, heads * shares, -1, size)
    return out
