"""The one representation of a quantized linear layer, which all formats become at load, and what it computes.

N output features and K input features of this rank's slice, G scales in a row of it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from errors import UserError
from kernels import linear_host, linear_quantized
from kernels.linear import linear
from quantized.scheme import FP4_VALUES, LEAST_GROUP, Scheme

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP4 = torch.float4_e2m1fn_x2  # two codes in a byte
PIECE = 1 << 24  # elements of a weight that are rounded at once
PIECE_BYTES = 20  # of each of them meanwhile: values of fp32, in units of the scale, rounded, between bounds; codes


class Quantized(NamedTuple):
    """w[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g], with g = groups[k], or k // (K / G) where `groups` is None.

    codes: (N, K) float8_e4m3fn or int8; of 4 bits (N, K / 2) uint8 or FP4, see `pack`. scales: (N, G), in the file's data type, above 0.
    zeros: (N, G) int8, None for 0. groups: (K,) int32, only where the groups are not neighbours (GPTQ's act-order).
    input_scale: () fp32, only for static activations.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    groups: Tensor | None = None
    input_scale: Tensor | None = None


def joined(pieces: Sequence[Quantized], dim: int = 0) -> Quantized:
    """A layer from pieces of its rows (dim 0) or columns (dim 1), with the first piece's `groups` and `input_scale`."""
    zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
    return pieces[0]._replace(
        codes=torch.cat([piece.codes for piece in pieces], dim),
        scales=torch.cat([piece.scales for piece in pieces], dim),
        zeros=torch.cat(zeros, dim) if zeros else None,
    )


class PlainWeight(nn.Module):
    """A part of a fused layer that is not quantized although other parts are. `weight` (N, K)."""

    def __init__(self, n: int, k: int, device: torch.device | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, k, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def tree(self, x: Tensor, bias: Tensor | None, parts: int) -> Tensor:
        """`forward` plus the bias, with --deterministic. parts: of the sum over K."""
        return linear(x, self.weight, bias, parts)


class QuantizedWeight(nn.Module):
    """One rank's slice (n, k) of a quantized linear layer without its bias. `fill` allocates its tensors, the fields of
    `Quantized`, as parameters without gradients. `pack` replaces them by `packed` for the kernels of a GPU, or by `host` for the
    operators of a CPU."""

    def __init__(self, scheme: Scheme, n: int, k: int, device: torch.device | None) -> None:
        super().__init__()
        self.scheme, self.n, self.k = scheme, n, k
        self.device = device or torch.device("cpu")
        self.packed: linear_quantized.Packed | None = None
        self.host: linear_host.HostPacked | None = None
        for name in Quantized._fields:
            self.register_parameter(name, None)

    def fill(self, tensors: Quantized) -> None:
        for name, tensor in tensors._asdict().items():
            stored = None if tensor is None else nn.Parameter(tensor.contiguous().to(self.device), requires_grad=False)
            self.register_parameter(name, stored)

    def pack(self, on_gpu: bool | None = None) -> None:
        """Keep the tensors as the GPU's kernels (on_gpu) or the CPU's operators read them, if they can. None: by the device."""
        codes, scales, zeros, groups, _ = self.tensors
        if codes.is_cuda if on_gpu is None else on_gpu:
            self.packed = linear_quantized.pack(codes, scales, zeros, groups, self.scheme.activations in ("token", "static"))
        elif groups is None and self.scheme.activations == "none":
            self.host = linear_host.pack(codes, unpack(codes), scales, zeros)
        found = self.packed or self.host
        for name in Quantized._fields if found else ():
            stored = getattr(found, name, None)
            self.register_parameter(name, None if stored is None else nn.Parameter(stored, requires_grad=False))

    @property
    def tensors(self) -> Quantized:
        return Quantized(*(getattr(self, name) for name in Quantized._fields))

    def tree(self, x: Tensor, bias: Tensor | None, parts: int) -> Tensor:
        """`forward` plus the bias, with --deterministic. parts: of the sum over K, for each of which activations are quantized."""
        tensors = self.tensors
        return linear(quantized_input(x, self.scheme, tensors, parts), dequantize(tensors, x.dtype), bias, parts)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N), of x's data type. It may be captured in a CUDA graph."""
        if self.packed is not None:
            return linear_quantized.linear(x, self.packed)
        if self.host is not None:
            return linear_host.linear(x, self.host)
        tensors = self.tensors
        x = quantized_input(x, self.scheme, tensors)
        # a scale for each row multiplies the result: fewer values, and no rounding of the weight. fp16 could overflow before.
        if tensors.scales.shape[1] == 1 and tensors.zeros is None and x.dtype != torch.float16:
            return F.linear(x, unpack(tensors.codes).to(x.dtype)).mul_(tensors.scales[:, 0])
        return F.linear(x, dequantize(tensors, x.dtype))


def merged(parts: list[QuantizedWeight]) -> QuantizedWeight | None:
    """One weight of the parts' rows, one after another; None unless all parts are quantized alike."""
    first, every = parts[0], [part.tensors for part in parts]
    if any(not _alike(tensors, every[0]) for tensors in every) or any(part.scheme != first.scheme for part in parts):
        return None
    whole = QuantizedWeight(first.scheme, sum(part.n for part in parts), first.k, first.device)
    inputs = [tensors.input_scale for tensors in every if tensors.input_scale is not None]
    whole.fill(joined(every)._replace(input_scale=torch.stack(inputs).amax(0) if inputs else None))
    return whole


def _alike(a: Quantized, b: Quantized) -> bool:
    """Whether the same groups of input features have scales and zero points."""
    same = torch.equal(a.groups, b.groups) if a.groups is not None and b.groups is not None else a.groups is b.groups
    return same and a.scales.shape[1:] == b.scales.shape[1:] and (a.zeros is None) == (b.zeros is None)


def dequantize(tensors: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight (N, K). Products are computed in fp32 and rounded to `dtype` by the same kernel."""
    codes, scales, zeros, groups = unpack(tensors.codes), tensors.scales.float(), tensors.zeros, tensors.groups
    if codes.dtype == FP8:
        codes = codes.to(dtype)  # exact in every data type of a model; PyTorch does not multiply fp8
    if groups is None:
        codes = codes.unflatten(1, (scales.shape[1], -1))
        scales, zeros = scales[:, :, None], None if zeros is None else zeros[:, :, None]
    else:
        scales, zeros = scales.index_select(1, groups), None if zeros is None else zeros.index_select(1, groups)
    if zeros is not None:
        codes = codes.to(torch.int16) - zeros
    return torch.mul(codes, scales, out=torch.empty_like(codes, dtype=dtype)).flatten(1)


def quantized_input(x: Tensor, scheme: Scheme, tensors: Quantized, parts: int = 1) -> Tensor:
    """x (..., K) rounded as the scheme's activations are, and multiplied by its scale again: what an exact product of the codes
    would see. A rank that has some of the input features quantizes those by their own largest value, and so each of `parts`."""
    if scheme.activations == "none":
        return x
    size = x.shape[-1] // parts
    wide = x.unflatten(
        -1, (-1, math.gcd(size, x.shape[-1] // tensors.scales.shape[1]) if scheme.activations == "group" else size)
    )
    if scheme.activations == "static":
        assert tensors.input_scale is not None
        scale = tensors.input_scale.expand_as(wide)  # not a scalar, whose product with 16 bits would be computed in 16 bits
    else:
        scale = _scale(torch.linalg.vector_norm(wide, torch.inf, -1, keepdim=True, dtype=torch.float32), scheme)
    return _codes(wide / scale, scheme).to(x.dtype).mul_(scale).reshape(x.shape)


def _scale(largest: Tensor, scheme: Scheme) -> Tensor:
    """The scale of values up to `largest`, 1 for 0. A symmetric integer range has half a step more than its largest code, which
    uses the lowest code, too (compressed-tensors' definition)."""
    if scheme.is_fp4:  # a power of two (OCP Microscaling Formats 1.0, section 6.3), halved
        return torch.where(largest == 0, 1.0, torch.exp2(largest.clamp(min=2.0**-124).log2().floor() - 3))
    scale = _divided(largest, FP8_MAX if scheme.is_float else 2 ** (scheme.bits - 1) - 0.5)
    return scale + (scale == 0)


def _divided(x: Tensor, by: float) -> Tensor:
    """x / by with the same bits on CPUs and GPUs, which multiply by the reciprocal of a Python number. A group's largest value
    lies in the middle of two codes, so the last bit decides."""
    return x / torch.full_like(x, by)


def _codes(x: Tensor, scheme: Scheme) -> Tensor:
    """x, in units of its scale, as float8 or int8, of fp4 the code. Where two are equally near, the even one."""
    if scheme.is_fp4:
        values = torch.tensor(FP4_VALUES, dtype=torch.float32, device=x.device)
        middle = (values[1:] + values[:-1]) / 2
        middle[1::2] = middle[1::2].nextafter(middle.new_zeros(()))  # below them an odd code
        return (torch.bucketize(x.abs(), middle, out_int32=True) + 8 * x.signbit()).to(torch.int8)
    if scheme.is_float:
        return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    half = 2 ** (scheme.bits - 1)
    return x.round().clamp(-half, half - 1).to(torch.int8)


# --- rounding to nearest ------------------------------------------------------------------------------------------------------


def quantize(weight: Tensor, scheme: Scheme, name: str) -> Quantized:
    """Round a weight (N, K) to nearest. Each row has scales of its own, also where the scheme has one for several rows.

    It takes a few rows at a time, and so little memory beside the result. Raises UserError, with the layer's `name`, if no group
    fits or a weight is not finite.
    """
    group, dtype = local_group(scheme, range(weight.shape[1]), name), scale_dtype(weight, scheme)
    found, first = None, 0
    for piece in weight.split(max(1, PIECE // weight.shape[1])):
        made = _quantize(piece.float().unflatten(1, (-1, group)), scheme, dtype)
        found = found or Quantized(*(t if t is None else t.new_empty(len(weight), *t.shape[1:]) for t in made))  # type: ignore[arg-type]
        for whole, part in zip(found, made, strict=True):
            if whole is not None and part is not None:
                whole[first : first + len(piece)] = part
        first += len(piece)
    assert found is not None
    check_finite(found.scales, name)
    static = torch.ones((), device=weight.device) if scheme.activations == "static" else None
    return found._replace(input_scale=static)


def rounding_bytes(n: int, k: int) -> int:
    """Bytes at most of a weight (n, k) in 32 bits and of what `quantize` needs beside its result."""
    return n * k * 4 + min(n * k, PIECE) * PIECE_BYTES


def _quantize(groups: Tensor, scheme: Scheme, dtype: torch.dtype) -> Quantized:
    scales, zeros = group_scales(groups, scheme, dtype)
    codes = round_to(groups, scales.float()[:, :, None], None if zeros is None else zeros[:, :, None], scheme)
    if scheme.is_fp4:
        return Quantized(pack(codes.flatten(1) - 8, 4).view(FP4), scales)
    return Quantized(pack(codes.flatten(1), scheme.bits), scales, zeros)


def check_finite(scales: Tensor, name: str) -> None:
    """Raises UserError unless the weights from which `scales` were made are finite."""
    if not bool(scales.isfinite().all()):
        raise UserError(f"{name} has weights that are not finite, which cannot be quantized; name another checkpoint")


def scale_dtype(weight: Tensor, scheme: Scheme) -> torch.dtype:
    """In which data type a weight's scales are made and stored: as the writers of compressed-tensors do, at most 32 bits."""
    if scheme.is_fp4:
        return torch.bfloat16
    return torch.float32 if scheme.is_float or weight.dtype == torch.float64 else weight.dtype


def group_scales(groups: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scales (N, G) of `dtype` and, unless symmetric, zero points (N, G) int8 of the groups (N, G, group) fp32."""
    if scheme.symmetric:
        scales = _scale(groups.abs().amax(-1), scheme).to(dtype)
        return torch.where(scales == 0, torch.finfo(dtype).tiny, scales), None
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = _divided(high - low, 2**scheme.bits - 1).to(dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return scales, _codes(-(2 ** (scheme.bits - 1)) - low / scales.float(), scheme)


def round_to(x: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme) -> Tensor:
    """The codes (int8 or float8) nearest to x. scales and zeros: of shapes that broadcast with x."""
    return _codes(x / scales if zeros is None else (x / scales).round() + zeros, scheme)


def local_group(scheme: Scheme, columns: range, name: str) -> int:
    """How many neighbouring input features of this rank's `columns` share a scale.

    A boundary of the shard may cut a group: smaller groups, which repeat its scale, then describe the slice exactly. Raises
    UserError if they would be smaller than any kernel's.
    """
    if scheme.group is None:
        return len(columns)
    size = math.gcd(scheme.group, columns.start, len(columns))
    if size < LEAST_GROUP:
        raise UserError(
            f"{name}: a rank's input features {columns.start} to {columns.stop} cut its groups of {scheme.group} into pieces of "
            f"{size}, and at least {LEAST_GROUP} are needed; start fewer ranks"
        )
    return size


# --- packing ------------------------------------------------------------------------------------------------------------------


def pack(codes: Tensor, bits: int) -> Tensor:
    """(N, K) int8 codes of 4 bits, -8 to 7, as (N, K / 2) uint8: code + 8 of an even feature in the low half of a byte, that of
    the next one in the high half. Codes of 8 bits stay as they are."""
    if bits == 8:
        return codes
    unsigned = (codes + 8).view(torch.uint8)
    return unsigned[:, ::2] | unsigned[:, 1::2] << 4


def unpack(codes: Tensor) -> Tensor:
    """The inverse of `pack`: (N, K) int8 or float8. Of FP4, in which the first code is in the low half of a byte, too, twice its
    values."""
    if codes.dtype == FP4:
        values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], dtype=torch.int8, device=codes.device)
        pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)  # by byte
        return pairs[codes.view(torch.uint8).int()].flatten(1)
    if codes.dtype != torch.uint8:
        return codes
    halves = codes.new_empty(*codes.shape, 2)
    torch.bitwise_and(codes, 15, out=halves[..., 0])
    torch.bitwise_right_shift(codes, 4, out=halves[..., 1])
    return halves.flatten(1).view(torch.int8).sub_(8)
