"""Weights in the 4 bits of bitsandbytes (Dettmers et al., QLoRA, arXiv:2305.14314), dequantized while they are read.

The elements of a weight (N, K), row after row, are in blocks. Each is one of 16 values, `quant_map`, times the `absmax` of its block.
Two are in a byte, the first in the high bits. With double quantization `absmax` has codes of 8 bits: one is
`nested_quant_map[code] * nested_absmax[its block] + nested_offset`.
"""

import json
from collections.abc import Callable

import torch
from torch import Tensor

from errors import UserError
from files import count, get

STATE = ".quant_state.bitsandbytes__"  # between the name of a weight and `nf4` or `fp4`: a JSON object in uint8
TENSORS = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")  # behind the name of a weight
PIECE = 1 << 19  # elements that are dequantized at once: about what a core's cache holds
MOST = 4096  # elements of a block


class FourBits:
    """One weight, `shape` being (N, K)."""

    def __init__(self, key: str, read: Callable[[str, int, int, int], Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
        """key: of the JSON object. read, shapes: of the file's tensors. Raises UserError if they contradict each other."""
        self.name, self._source = key.partition(STATE)[0], read
        self.tensors = [key, *(self.name + suffix for suffix in TENSORS if self.name + suffix in shapes)]
        self.nested = self.name + ".nested_absmax" in shapes
        try:
            state = json.loads(read(key, 0, 0, shapes[key][0]).numpy().tobytes())
            n, k = get(state, "shape", list)
            self.shape, self.block = (
                (count({"shape": n}, "shape"), count({"shape": k}, "shape")),
                count(state, "blocksize", most=MOST),
            )
            if self.nested:
                self.nested_block, self.offset = count(state, "nested_blocksize", most=MOST), get(state, "nested_offset", float)
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError, UserError) as e:
            raise UserError(f"{key} does not describe the weight ({str(e)[:200]}); download it again") from None
        self.blocks, (stored, *_) = -(-n * k // self.block), (*shapes.get(self.name, ()), 0)
        self.per_value = n * k // max(stored, 1)  # elements in one stored value, which may be wider than a byte
        sizes = {"": stored if self.per_value * stored == n * k else -1, ".absmax": self.blocks, ".quant_map": 16}
        if self.nested:
            sizes |= {".nested_absmax": -(-self.blocks // self.nested_block), ".nested_quant_map": 256}
        for suffix, size in sizes.items():
            if (found := shapes.get(self.name + suffix)) not in ((size,), (size, 1)):
                asked = f"{self.name} ({n}, {k}) in blocks of {self.block}"
                raise UserError(f"{self.name + suffix} has shape {found}, which is not that of {asked}; download it again")
        self.table = self._read(".quant_map", range(16), True)
        self.nested_table = self._read(".nested_quant_map", range(256), True) if self.nested else self.table
        self.pairs = torch.cartesian_prod(self.table, self.table).view(torch.int64).flatten()  # the bits of each byte's two

    def _read(self, suffix: str, rows: range, is_float: bool) -> Tensor:
        found = self._source(self.name + suffix, 0, rows.start, rows.stop).flatten()
        if found.dtype.is_floating_point != is_float or (not is_float and found.dtype != torch.uint8):
            raise UserError(f"{self.name + suffix} has data type {found.dtype}, not that of 4-bit weights; download it again")
        return found.float() if is_float else found

    def read(self, dim: int, start: int, stop: int) -> Tensor:
        """The slice [start, stop) along `dim`, in fp32. Columns are cut from whole rows, as the file has them."""
        n, k = self.shape
        rows, columns = (range(start, stop), slice(k)) if dim == 0 else (range(n), slice(start, stop))
        found, step = torch.empty(len(rows), len(range(k)[columns])), max(PIECE // k, 1)
        for first in rows[::step]:
            last = min(first + step, rows.stop)
            found[first - rows.start : last - rows.start] = self._elements(first * k, last * k).view(-1, k)[:, columns]
        return found

    def _elements(self, start: int, stop: int) -> Tensor:
        values, place = _around(start, stop, self.per_value)
        stored = self._source(self.name, 0, values.start, values.stop)
        if stored.element_size() * 2 != self.per_value:
            raise UserError(f"{self.name} has data type {stored.dtype}, which does not fit its shape; download it again")
        elements = self.pairs.index_select(0, stored.flatten().view(torch.uint8).int()).view(torch.float32)[place]
        blocks, place = _around(start, stop, self.block)
        return elements.mul_(self._scales(blocks).repeat_interleave(self.block)[place])

    def _scales(self, blocks: range) -> Tensor:
        """The absmax of these blocks."""
        found = self._read(".absmax", blocks, not self.nested)
        if not self.nested:
            return found
        outer, place = _around(blocks.start, blocks.stop, self.nested_block)
        scales = self._read(".nested_absmax", outer, True).repeat_interleave(self.nested_block)[place]
        return self.nested_table[found.int()] * scales + self.offset


def _around(start: int, stop: int, size: int) -> tuple[range, slice]:
    """The blocks of `size` that hold the elements [start, stop), and where these are in them."""
    blocks = range(start // size, -(-stop // size))
    return blocks, slice(start - blocks.start * size, stop - blocks.start * size)
