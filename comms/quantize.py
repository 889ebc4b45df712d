"""The quantizers of the quantized all-reduce, defined in PyTorch (Li et al., "Flash Communication", arXiv:2412.04964).

A message is cut into groups of consecutive values. Each group is sent as one record of bytes:

    scale bf16 (2 bytes) | zero point int16 (2 bytes, asymmetric formats only) | codes, one byte a value, or two values a byte

This implements the paper's appendix A.3 as follows, with n bits and L = 2^n - 1:

    asymmetric   s = (max - min) / L,           z = round(-min / s),   q = clamp(round(x / s) + z, 0, L),   x' = (q - z) * s
    symmetric    s = max|x| / (2^(n-1) - 1),    q = clamp(round(x / s), -2^(n-1), 2^(n-1) - 1),             x' = q * s

The paper prints ceilings. They are implemented as rounding to nearest (ties to even), because the text speaks of rounding
errors, and a ceiling would raise every value by half a step on average. Two choices are not the paper's. The scale is rounded
up to bf16 before it is used, so that the codes still cover the group, and |x - x'| <= s / 2 holds for the scale that is sent.
And s is at least max|x| / 32767, so that the zero point of a group far from zero fits in 16 bits; this step is finer than
bf16. A group with a NaN or an infinity gets the scale NaN, so all its values are NaN after dequantization.

(q - z) * s has at most 16 + 8 significant bits, so it is exact in fp32, whether or not a compiler fuses it with the addition.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from errors import UserError

E4M3_MAX = 448.0  # the largest value of torch.float8_e4m3fn
ZERO_POINT_MAX = 32767
PER_TOKEN = "token"  # one group for each token: the values of the last dim


@dataclass(frozen=True)
class Format:
    """The encoding of a group's values. A floating format is e4m3 with a scale and without a zero point."""

    bits: int  # of a code: 4 or 8
    symmetric: bool = False
    floating: bool = False

    @property
    def header(self) -> int:
        """Bytes of a record before its codes."""
        return 2 if self.symmetric or self.floating else 4

    def record_bytes(self, group: int) -> int:
        return self.header + group * self.bits // 8


def wire_bytes(elements: int, width: Format, group: int) -> int:
    """Bytes sent for `elements` values: whole records with scales and zero points, the last group padded."""
    return -(-elements // group) * width.record_bytes(group)


# --- groups to records and back ----------------------------------------------------------------------------------------


def quantize(x: Tensor, width: Format) -> Tensor:
    """(G, group) floating point to (G, record_bytes) uint8 records. On CUDA the Triton kernel gives the same bytes.

    `group` must be divisible by 4, see `check_width`. Two 4-bit codes share a byte: value j of the first half in its low bits, value j of the
    second half in its high bits.
    """
    assert x.shape[-1] % 4 == 0, f"groups of {x.shape[-1]} values, not a multiple of 4"
    if x.is_cuda:
        from kernels import quantize as kernel  # needs Triton, which a CPU machine may lack

        return kernel.quantize(x, width.bits, width.symmetric, width.floating)
    return quantize_reference(x, width)


def quantize_reference(x: Tensor, width: Format) -> Tensor:
    """The PyTorch definition of `quantize`."""
    x = x.float()
    low, high = x.aminmax(dim=-1, keepdim=True)  # (G, 1); NaN propagates
    largest = torch.maximum(high, -low)
    levels = 2**width.bits - 1
    if width.floating:
        step = largest / E4M3_MAX
    elif width.symmetric:
        step = largest / (levels // 2)
    else:  # divided before the subtraction, because high - low may overflow
        step = torch.maximum(high / levels - low / levels, largest / ZERO_POINT_MAX)
    step = _round_up_to_bf16(step).where(step.isfinite(), torch.nan)
    ratio = torch.where(step > 0, x / step, 0.0)  # the codes of a group of zeros or with a NaN do not matter
    header = [(step.view(torch.int32) >> 16).to(torch.int16)]  # the bits of a bf16
    if width.floating:
        codes = ratio.to(torch.float8_e4m3fn).view(torch.uint8)
    elif width.symmetric:
        half = levels // 2 + 1
        codes = (ratio.round().clamp(-half, half - 1) + half).to(torch.uint8)
    else:
        zero = torch.where(step > 0, -(low / step).round(), 0.0)
        codes = (ratio.round() + zero).clamp(0, levels).to(torch.uint8)
        header.append(zero.to(torch.int16))
    if width.bits == 4:
        first, second = codes.chunk(2, dim=-1)
        codes = first | second << 4
    return torch.cat([*(part.view(torch.uint8) for part in header), codes], dim=-1)


def dequantize_sum(records: Tensor, width: Format) -> Tensor:
    """Dequantize the (N, G, record_bytes) records of N ranks and add them in rank order: (G, group) fp32."""
    if records.is_cuda:
        from kernels import quantize as kernel

        return kernel.dequantize_sum(records, width.bits, width.symmetric, width.floating)
    return dequantize_sum_reference(records, width)


def dequantize_sum_reference(records: Tensor, width: Format) -> Tensor:
    """The PyTorch definition of `dequantize_sum`."""
    total = _dequantize(records[0], width)
    for rank in records[1:]:
        total += _dequantize(rank, width)
    return total


def _dequantize(records: Tensor, width: Format) -> Tensor:
    """(G, record_bytes) to (G, group) fp32."""
    header, codes = records[:, : width.header].contiguous(), records[:, width.header :]
    step = header[:, :2].contiguous().view(torch.bfloat16).float()  # (G, 1)
    if width.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    if width.floating:
        return codes.contiguous().view(torch.float8_e4m3fn).float() * step
    zero = 2.0 ** (width.bits - 1) if width.symmetric else header[:, 2:].contiguous().view(torch.int16).float()
    return (codes.float() - zero) * step


def _round_up_to_bf16(x: Tensor) -> Tensor:
    """Round nonnegative finite fp32 values up to bf16 values, as fp32: carry the low 16 bits into the high ones, then clear
    them. -0 becomes 0."""
    return ((x.abs().view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


# --- Hadamard transform ------------------------------------------------------------------------------------------------


def hadamard_transform(x: Tensor) -> Tensor:
    """(G, group) fp32 times an orthonormal Hadamard matrix, which is its own inverse (the paper's table 5, after QuaRot).

    The size of the matrix is the largest power of two that divides `group`; larger groups are transformed in blocks of this
    size. The transform is linear, so it may be applied before the first quantization and inverted after the last one.
    """
    size = x.shape[-1] & -x.shape[-1]
    blocks = x.unflatten(-1, (-1, size))
    span = 1
    while span < size:  # additions in a fixed order, so the bits are the same on every machine
        a, b = blocks.unflatten(-1, (-1, 2, span)).unbind(-2)
        blocks = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        span *= 2
    return blocks.flatten(-2) * size**-0.5


# --- quantization schemes of all-reduces ---------------------------------------------------------------------------------

WIDTHS = {  # the formats before the reduction and before the gather (int6: the paper's section 3.2.3)
    "int8": (Format(8), Format(8)),
    "int6": (Format(4), Format(8)),
    "int4": (Format(4), Format(4)),
    "fp8": (Format(8, floating=True), Format(8, floating=True)),
}
DEFAULT_GROUP = 128
ERROR_SAMPLE = 1 << 16  # values of a rank in `relative_error`


@dataclass(frozen=True)
class Scheme:
    """The formats of a quantized all-reduce's two exchanges, and how values are grouped."""

    name: str
    reduce: Format
    gather: Format
    group: int | None = DEFAULT_GROUP  # None: one group for each token
    hadamard: bool = False

    def group_of(self, tensor: Tensor) -> int:
        """Values in each group of this message."""
        return self.group or tensor.shape[-1]

    def sent_bytes(self, elements: int, group: int, world_size: int) -> int:
        """Bytes that one rank sends in an all-reduce of `elements` values: a slice to each other rank, twice."""
        slice_elements = -(-elements // (group * world_size)) * group
        both = wire_bytes(slice_elements, self.reduce, group) + wire_bytes(slice_elements, self.gather, group)
        return (world_size - 1) * both


def parse_scheme(text: str) -> Scheme:
    """`WIDTH[:GROUP][:symmetric][:hadamard]`, such as `int8`, `int4:64` or `int4:token:hadamard`, to a Scheme.

    GROUP is a power of two from 16 to 4096, or `token`. Raises UserError, KeyError for an unknown width.
    """
    width, *options = text.split(":")
    reduce, gather = WIDTHS[width]
    group: int | None = DEFAULT_GROUP
    if options and options[0] not in ("symmetric", "hadamard"):
        group = _parse_group(options.pop(0), text)
    if len(set(options)) < len(options) or not set(options) <= {"symmetric", "hadamard"}:
        raise UserError(f"--comm {text}: after the group come symmetric, hadamard or both, as in {width}:128:hadamard")
    if "symmetric" in options:
        reduce, gather = (Format(f.bits, symmetric=True, floating=f.floating) for f in (reduce, gather))
    shown = [] if group == DEFAULT_GROUP else [str(group or PER_TOKEN)]
    return Scheme(":".join([width, *shown, *sorted(options)]), reduce, gather, group, "hadamard" in options)


def _parse_group(text: str, scheme: str) -> int | None:
    if text == PER_TOKEN:
        return None
    if not text.isascii() or not text.isdigit() or (group := int(text)) & (group - 1) or not 16 <= group <= 4096:
        raise UserError(f"--comm {scheme}: the group is {text!r}; use a power of two from 16 to 4096, or {PER_TOKEN}")
    return group


def relative_error(scheme: Scheme, world_size: int) -> float:
    """Root mean square of an all-reduce's error, divided by that of its result, for normally distributed partial sums of
    `world_size` ranks."""
    generator, group = torch.Generator().manual_seed(0), scheme.group or 4096
    partials = torch.randn(world_size, ERROR_SAMPLE // group, group, generator=generator)
    transformed = torch.stack([hadamard_transform(partial) for partial in partials]) if scheme.hadamard else partials
    records = torch.stack([quantize_reference(partial, scheme.reduce) for partial in transformed])
    total = quantize_reference(dequantize_sum_reference(records, scheme.reduce), scheme.gather)
    result = dequantize_sum_reference(total[None], scheme.gather)
    exact = partials.sum(0)
    error = (hadamard_transform(result) if scheme.hadamard else result) - exact
    return float((error.square().mean() / exact.square().mean()).sqrt())
