"""From the tensors of each file format to `weight.Quantized`, reading only one rank's slice of them, and back for compressed-tensors.

N output features and K input features of the full layer.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from errors import UserError
from kernels import determinism
from quantized.scheme import ON_LOAD, Scheme
from quantized.weight import FP4, FP8, Quantized, local_group, pack, quantize, unpack

WIDE = (torch.bfloat16, torch.float16, torch.float32)
INT32 = (torch.int32,)
ROUNDING = threading.Lock()  # of the threads that read weights: one at a time has one in 16 or 32 bits on the device
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble that holds each of 8 neighbouring features

Shapes = dict[str, tuple[tuple[int, ...] | None, ...]]  # which shapes a tensor may have; None: it may be absent
Read = Callable[[str, int, int, int], Tensor]  # of name, dim, start, stop: `checkpoint.Source.read`


@dataclass(frozen=True)
class Slice:
    """One rank's part of the quantized layer `name` (`model.layers.0.self_attn.q_proj`): the features of `rows` and `columns`."""

    name: str
    shape: tuple[int, int]  # (N, K)
    rows: range
    columns: range
    scheme: Scheme

    @property
    def groups(self) -> int:
        """How many scales a row of the full layer has."""
        return -(-self.shape[1] // (self.scheme.group or self.shape[1]))

    @property
    def cut(self) -> tuple[int, range]:
        """Along which dim of the weight (N, K) it is cut, and which features along this dim it has."""
        return (0, self.rows) if len(self.columns) == self.shape[1] else (1, self.columns)

    def shapes(self) -> Shapes:
        """The tensors that the file has of this layer, under their names behind `name` and a dot.

        Raises UserError if the layer's size does not fit the scheme.
        """
        (n, k), group, per_word = self.shape, self.scheme.group, 32 // self.scheme.bits
        packed = {"packed": (k,), "gptq": (k, n), "gptq-v2": (k, n), "awq": (n,)}.get(self.scheme.format, ())
        if any(size % per_word for size in packed):
            raise UserError(
                f"{self.name} ({n}, {k}) cannot be packed by {per_word} values; config.json describes another model"
            )
        if packed and group and k % group:
            raise UserError(f"{self.name} has {k} input features, which groups of {group} do not divide; quantize it anew")
        if self.scheme.bits == 4 and len(self.columns) % 2:
            raise UserError(
                f"{self.name}: a rank has {len(self.columns)} input features, which 4 bits need even; start fewer ranks"
            )
        local_group(self.scheme, self.columns, self.name)
        return FORMATS[self.scheme.format].shapes(self)


class Tensors:
    """The tensors of one slice in its file. Each method reads one, and raises UserError if it holds what it cannot hold."""

    def __init__(self, part: Slice, read: Read, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        self.part, self._read, self._shapes, self.device = part, read, shapes, device

    def has(self, suffix: str) -> bool:
        return self._name(suffix) in self._shapes

    def read(self, suffix: str, dtypes: tuple[torch.dtype, ...], dim: int = 0, rows: range | None = None) -> Tensor:
        """`rows` of a tensor along `dim`, on the device; all of it without them."""
        return self.on_host(suffix, dtypes, dim, rows).to(self.device)

    def on_host(self, suffix: str, dtypes: tuple[torch.dtype, ...], dim: int = 0, rows: range | None = None) -> Tensor:
        """`read`, before it is copied to the device."""
        name = self._name(suffix)
        shape = self._shapes[name]
        whole = range(shape[dim] if shape else 1)
        rows = whole if rows is None or not shape else rows
        tensor = self._read(name, dim, rows.start, rows.stop)
        if tensor.dtype not in dtypes:
            known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise UserError(
                f"{name} has data type {tensor.dtype}, and config.json asks for {known}; it describes another format"
            )
        return tensor

    def scales(self, suffix: str, dim: int = 0, rows: range | None = None) -> Tensor:
        found = self.read(suffix, WIDE, dim, rows)
        if not bool((found.isfinite() & (found > 0)).all()):
            raise UserError(f"{self._name(suffix)} has scales that are zero, negative or not finite; quantize the model anew")
        return found

    def codes(self, suffix: str, dtype: torch.dtype, dim: int, rows: range) -> Tensor:
        """One code of 8 bits an element."""
        found = self.read(suffix, (dtype,), dim, rows)
        # fp8's NaNs are 0x7F and 0xFF, the largest bytes with and without a sign: no copy is needed to find them
        if dtype == FP8 and found.numel() and (found.view(torch.int8).amax() == 0x7F or found.view(torch.uint8).amax() == 0xFF):
            raise UserError(f"{self._name(suffix)} has codes that are not numbers (NaN); quantize the model anew")
        return found

    def input_scale(self, suffixes: tuple[str, ...] = ("input_scale",)) -> Tensor | None:
        static = self.part.scheme.activations == "static"
        return self.scales(self.only(suffixes)).reshape(()).float() if static else None

    def only(self, suffixes: tuple[str, ...]) -> str:
        """The one of these names that the file has. Raises UserError for none or several."""
        found, names = [suffix for suffix in suffixes if self.has(suffix)], [self._name(suffix) for suffix in suffixes]
        if not found:
            raise UserError(f"the checkpoint lacks {' or '.join(names)}; is it complete, and does config.json belong to it?")
        if len(found) > 1:
            raise UserError(f"the checkpoint has both {' and '.join(names)}; quantize the model anew")
        return found[0]

    def groups(self, suffix: str) -> Tensor | None:
        """The group (K,) of each of this rank's input features; None if they are neighbours in order."""
        part = self.part
        if not self.has(suffix):
            return None
        found, size = self.read(suffix, INT32), part.scheme.group or part.shape[1]
        if not bool(((found >= 0) & (found < part.groups)).all()):
            raise UserError(f"{self._name(suffix)} names groups that the layer does not have; quantize the model anew")
        if bool((found.bincount(minlength=part.groups) != size).any()):
            raise UserError(
                f"{self._name(suffix)} has groups that are not of {size} input features each; quantize the model anew"
            )
        found = found[part.columns.start : part.columns.stop]
        columns = torch.arange(part.columns.start, part.columns.stop, device=found.device)
        return None if bool((found == columns // size).all()) else found

    def _name(self, suffix: str) -> str:
        return f"{self.part.name}.{suffix}"


def of_columns(grid: Tensor, part: Slice, group: int | None = None) -> Tensor:
    """The scales or zero points (…, G) of this rank's columns, from those of all columns (…, all G). group: columns of each; None:
    the scheme's."""
    step = local_group(part.scheme, part.columns, part.name)
    columns = torch.arange(part.columns.start, part.columns.stop, step, device=grid.device)
    return grid[:, columns // (group or part.scheme.group or part.shape[1])]


def blocks(part: Slice) -> range:
    """The rows of a grid of scales that belong to this rank's rows."""
    size = part.scheme.rows or part.shape[0]
    return range(part.rows.start // size, -(-part.rows.stop // size))


def of_rows(grid: Tensor, part: Slice) -> Tensor:
    """One row for each of this rank's rows, from the rows `blocks(part)` of a grid of scales."""
    size = part.scheme.rows or part.shape[0]
    return grid[torch.arange(part.rows.start, part.rows.stop, device=grid.device) // size - blocks(part).start]


def packed_codes(words: Tensor, bits: int) -> Tensor:
    """Unsigned integers in int32 words (N, K * bits / 32), the first in the lowest bits, as signed codes in the layout of
    `weight.pack`. Memory has a word's lowest byte first, so these are the bytes of the words."""
    # flat, because a transposed column counts as contiguous whatever its last stride, which `view` needs to be 1
    found = words.contiguous().flatten().view(torch.uint8).view(len(words), words.shape[1] * 4)
    return found if bits == 4 else (found ^ 128).view(torch.int8)


def integers(words: Tensor, bits: int) -> Tensor:
    """The same codes as (N, K) int8."""
    return unpack(packed_codes(words, bits))


def aligned(rows: range, bits: int) -> tuple[range, slice]:
    """The whole words that hold the values `rows`, and where these are in them."""
    size = 32 // bits
    first, last = rows.start // size, -(-rows.stop // size)
    return range(first, last), slice(rows.start - first * size, rows.stop - first * size)


def unless_symmetric(zeros: Tensor, part: Slice) -> Tensor | None:
    """The zero points of `qzeros`, which symmetric layers have, too. Raises UserError if those are not 0."""
    if not part.scheme.symmetric:
        return zeros
    if bool(zeros.any()):
        raise UserError(
            f"{part.name}.qzeros has zero points, and config.json says that there are none; correct its `sym`, `zero_point` or "
            "`checkpoint_format`"
        )
    return None


def in_bytes(values: slice, bits: int) -> slice:
    """Where the packed `values`, an even number, are in bytes."""
    return slice(values.start * bits // 8, values.stop * bits // 8)


# --- the formats --------------------------------------------------------------------------------------------------------------


class Plain:
    """One code an element in `weight` (compressed-tensors float-quantized and int-quantized, ModelOpt fp8, HF fp8).

    scales and input_scales: the names of which a file has one for these tensors. Only the first one may hold scales of blocks.
    """

    def __init__(self, scales: tuple[str, ...] = ("weight_scale",), input_scales: tuple[str, ...] = ("input_scale",)) -> None:
        self.scales, self.input_scales = scales, input_scales

    def _scales(self, part: Slice) -> tuple[str, ...]:
        return self.scales[:1] if part.scheme.group else self.scales

    def shapes(self, part: Slice) -> Shapes:
        (n, k), scheme = part.shape, part.scheme
        grid = (-(-n // (scheme.rows or n)), part.groups)
        also = [(n,)] if scheme.group is None and scheme.rows == 1 else [(), (1,)] if grid == (1, 1) else []
        found: Shapes = {"weight": ((n, k),)}
        names, inputs = self._scales(part), self.input_scales if scheme.activations == "static" else ()
        found |= dict.fromkeys(names, (grid, *also, None) if len(names) > 1 else (grid, *also))
        found |= dict.fromkeys(inputs, ((), (1,), None) if len(inputs) > 1 else ((), (1,)))
        if not scheme.symmetric:
            found["weight_zero_point"] = (grid, *also)
        return found

    def read(self, tensors: Tensors) -> Quantized:
        part = tensors.part
        dtype = FP8 if part.scheme.is_float else torch.int8
        codes = tensors.codes("weight", dtype, *part.cut)
        scales, zeros = tensors.scales(tensors.only(self._scales(part)), 0, blocks(part)).reshape(-1, part.groups), None
        if not part.scheme.symmetric:
            zeros = tensors.read("weight_zero_point", (torch.int8,), 0, blocks(part)).reshape(-1, part.groups)
            zeros = of_columns(of_rows(zeros, part), part)
        return Quantized(codes, of_columns(of_rows(scales, part), part), zeros, None, tensors.input_scale(self.input_scales))


class RowInt8(Plain):
    """bitsandbytes in 8 bits (LLM.int8): `SCB` is the largest value of each row, which is 127 times its scale."""

    def __init__(self) -> None:
        super().__init__(("SCB",))

    def shapes(self, part: Slice) -> Shapes:
        return super().shapes(part) | {"weight_format": ((), (1,), None)}

    def read(self, tensors: Tensors) -> Quantized:
        if tensors.has("weight_format") and tensors.read("weight_format", (torch.uint8,)).any():
            raise UserError(f"{tensors.part.name}.weight_format is of a GPU's tiles, not of rows; save the model anew")
        found = super().read(tensors)
        return found._replace(scales=found.scales.float() / 127)


class Packed:
    """compressed-tensors pack-quantized: `weight_packed` (N, K / words) int32 of code + 2^(bits - 1)."""

    def shapes(self, part: Slice) -> Shapes:
        (n, k), per_word = part.shape, 32 // part.scheme.bits
        grid = (1 if part.scheme.rows is None else n, part.groups)
        also = [(1,)] if grid == (1, 1) else []
        found: Shapes = {"weight_packed": ((n, k // per_word),), "weight_scale": (grid, *also)}
        found |= {"weight_shape": ((2,), None), "weight_g_idx": ((k,), None)}
        if not part.scheme.symmetric:
            found["weight_zero_point"] = ((-(-n // per_word), part.groups) if part.scheme.rows else (1,),)
        if part.scheme.activations == "static":
            found["input_scale"] = ((), (1,))
        return found

    def read(self, tensors: Tensors) -> Quantized:
        part, bits = tensors.part, tensors.part.scheme.bits
        if tensors.has("weight_shape"):
            shape = tuple(tensors.read("weight_shape", (torch.int32, torch.int64)).tolist())
            if shape != part.shape:
                raise UserError(f"{part.name}.weight_shape is {shape}, and config.json asks for {part.shape}; quantize it anew")
        outer, inner = aligned(part.columns, bits)
        dim, own = part.cut
        packed = tensors.read("weight_packed", INT32, dim, outer if dim else own)
        codes = packed_codes(packed, bits)[:, in_bytes(inner, bits)]
        scales = of_rows(tensors.scales("weight_scale", 0, blocks(part)).reshape(-1, part.groups), part)
        zeros = None
        if not part.scheme.symmetric and part.scheme.rows is None:  # the one of a whole tensor is not packed
            zeros = of_rows(tensors.read("weight_zero_point", (torch.int8,)).reshape(1, 1), part)
        elif not part.scheme.symmetric:
            outer, inner = aligned(blocks(part), bits)
            zeros = of_rows(integers(tensors.read("weight_zero_point", INT32, 0, outer).T, bits).T[inner], part)
        groups = tensors.groups("weight_g_idx")
        if groups is None:
            scales, zeros = of_columns(scales, part), None if zeros is None else of_columns(zeros, part)
        return Quantized(codes, scales, zeros, groups, tensors.input_scale())


class Gptq:
    """GPTQ: `qweight` (K / words, N), `qzeros` (G, N / words), `scales` (G, N), `g_idx` (K,). Version 1 stores zero point - 1."""

    def __init__(self, less: int) -> None:
        self.less = less

    def shapes(self, part: Slice) -> Shapes:
        (n, k), groups, per_word = part.shape, part.groups, 32 // part.scheme.bits
        return {
            "qweight": ((k // per_word, n),),
            "qzeros": ((groups, n // per_word),),
            "scales": ((groups, n),),
            "g_idx": ((k,), None),
        }

    def read(self, tensors: Tensors) -> Quantized:
        part, bits = tensors.part, tensors.part.scheme.bits
        outer, inner = aligned(part.columns, bits)
        dim, own = part.cut
        packed = tensors.read("qweight", INT32, 1 - dim, outer if dim else own)
        codes = packed_codes(packed.T, bits)[:, in_bytes(inner, bits)]
        outer, inner = aligned(part.rows, bits)
        stored = integers(tensors.read("qzeros", INT32, 1, outer), bits)[:, inner].T
        half = 2 ** (bits - 1)
        zeros = ((stored.short() + half + self.less) % (2 * half) - half).to(torch.int8)
        scales, groups = tensors.scales("scales", 1, part.rows).T, tensors.groups("g_idx")
        if groups is None:
            scales, zeros = of_columns(scales, part), of_columns(zeros, part)
        return Quantized(codes, scales, unless_symmetric(zeros, part), groups)


class Awq:
    """AWQ: `qweight` (K, N / 8), `qzeros` (G, N / 8), `scales` (G, N); 8 neighbouring output features in a word, interleaved."""

    def shapes(self, part: Slice) -> Shapes:
        n, k = part.shape
        return {"qweight": ((k, n // 8),), "qzeros": ((part.groups, n // 8),), "scales": ((part.groups, n),)}

    def read(self, tensors: Tensors) -> Quantized:
        part = tensors.part
        outer, inner = aligned(part.rows, 4)
        dim, own = part.cut
        packed = tensors.read("qweight", INT32, 1 - dim, own if dim else outer)
        codes = self._features(packed)[:, inner].T
        zeros = self._features(tensors.read("qzeros", INT32, 1, outer))[:, inner].T
        scales = tensors.scales("scales", 1, part.rows).T
        return Quantized(pack(codes, 4), of_columns(scales, part), unless_symmetric(of_columns(zeros, part), part))

    @staticmethod
    def _features(packed: Tensor) -> Tensor:
        return integers(packed, 4).unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1)


class Mxfp4:
    """OCP's MXFP4: `blocks` (N, K / 2), the first of two e2m1 codes in a byte's low half; `scales` (N, K / 32), exponents with the
    bias 127. A scale is half of its power of two, since codes are doubled."""

    def shapes(self, part: Slice) -> Shapes:
        n, k = part.shape
        if k % 32:
            raise UserError(
                f"{part.name} has {k} input features, which groups of 32 do not divide; config.json describes another model"
            )
        return {"blocks": ((n, k // 2),), "scales": ((n, k // 32),)}

    def read(self, tensors: Tensors) -> Quantized:
        part, (dim, own) = tensors.part, tensors.part.cut
        codes = tensors.read("blocks", (torch.uint8,), dim, range(own.start // 2, own.stop // 2) if dim else own)
        exponents = tensors.read("scales", (torch.uint8,), 0, part.rows)
        if bool((exponents == 255).any()):
            raise UserError(f"{part.name}.scales has codes that are not numbers (NaN); quantize the model anew")
        scales = torch.exp2(exponents.float() - 128).to(torch.bfloat16)  # exact, also as subnormals
        return Quantized(codes.view(FP4), of_columns(scales, part))


class OnLoad:
    """A weight in 16 or 32 bits, which each rank rounds for itself: its slice's scales depend on this slice only, but with
    --deterministic on whole rows, whatever the number of ranks."""

    def shapes(self, part: Slice) -> Shapes:
        return {"weight": (part.shape,)}

    def read(self, tensors: Tensors) -> Quantized:
        part = tensors.part
        if determinism.enabled():
            whole = self._rounded(tensors, 0, part.rows)
            first, last = (end * part.scheme.bits // 8 for end in (part.columns.start, part.columns.stop))
            group = part.shape[1] // whole.scales.shape[1]
            zeros = None if whole.zeros is None else of_columns(whole.zeros, part, group)
            return whole._replace(codes=whole.codes[:, first:last], scales=of_columns(whole.scales, part, group), zeros=zeros)
        return self._rounded(tensors, *part.cut)

    @staticmethod
    def _rounded(tensors: Tensors, dim: int, rows: range) -> Quantized:
        weight = tensors.on_host("weight", (*WIDE, torch.float64), dim, rows)
        with ROUNDING:
            return quantize(weight.to(tensors.device), tensors.part.scheme, tensors.part.name)


FORMATS: dict[str, Plain | Packed | Gptq | Awq | Mxfp4 | OnLoad] = {
    "plain": Plain(),
    "fp8": Plain(("weight_scale_inv", "weight_scale"), ("activation_scale", "input_scale")),  # of transformers, of AutoFP8
    "bitsandbytes": RowInt8(),
    "packed": Packed(),
    "gptq": Gptq(less=1),
    "gptq-v2": Gptq(less=0),
    "awq": Awq(),
    "mxfp4": Mxfp4(),
    ON_LOAD: OnLoad(),
}


def compressed_tensors(layer: Quantized, scheme: Scheme) -> dict[str, Tensor]:
    """The tensors of a layer (N, K) by the suffix of their names, as the config of `hf.scheme_to_hf` asks for them. See
    `packed_codes` about integers."""
    if scheme.is_float:
        return {"weight": layer.codes, "weight_scale": layer.scales}
    words = (layer.codes if scheme.bits == 4 else layer.codes.view(torch.uint8) ^ 128).contiguous().view(torch.int32)
    shape = len(words), words.shape[1] * 32 // scheme.bits
    return {"weight_packed": words, "weight_scale": layer.scales, "weight_shape": torch.tensor(shape)}
