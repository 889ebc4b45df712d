"""A rank's file in a snapshot: flat fp32 tensors in the safetensors format, with a checksum for every block.

The checksums are computed from the data in memory while it is written, so they detect all damage by the storage. To read
a slice, only the blocks that contain it are checked, so many ranks can share a large file without each reading all of it.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

BLOCK_BYTES = 16 * 2**20  # of data per checksum; the header has its own checksum
SYNC_BLOCKS = 64  # written between two fsyncs, so that the last fsync is short and unwritten pages do not fill the memory


class TornFile(Exception):
    """A file differs from what was written: missing, truncated, altered or unreadable. The message names the file and the
    problem."""


def write(path: Path, sizes: Mapping[str, int], values: Tensor) -> dict[str, Any]:
    """Write the tensors of `sizes` elements that are stored one after the other in `values`, a (sum of sizes,) fp32 CPU
    tensor.

    Returns what `read` needs: `bytes`, `header_bytes`, and `crc32` of the header and of each block. When it returns, all
    data is on the disk. Raises OSError.
    """
    assert values.dtype == torch.float32 and values.numel() == sum(sizes.values()), f"{values.dtype}, {values.numel()} elements"
    header, end = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "F32", "shape": [size], "data_offsets": [end, end + 4 * size]}
        end += 4 * size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format requires aligned data
    head = len(text).to_bytes(8, "little") + text
    data = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
    checksums = [zlib.crc32(head)]
    with path.open("wb") as file:
        file.write(head)
        for start in range(0, end, BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            checksums.append(zlib.crc32(block))
            file.write(block)
            if len(checksums) % SYNC_BLOCKS == 0:
                os.fsync(file.fileno())
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(head) + end, "header_bytes": len(head), "crc32": checksums}


def read(path: Path, written: Mapping[str, Any], slices: Iterable[tuple[int, Tensor]]) -> None:
    """Fill each fp32 CPU tensor with elements of `values`, from the given index on.

    written: what `write` returned. Raises TornFile if the file is missing or has another size, or if the header or a
    block that contains a slice does not match its checksum.
    """
    check_size(path, written)
    header, number, block = written["header_bytes"], -1, b""
    with _torn_if_unreadable(path), path.open("rb") as file:
        _checked(path, file, 0, header, written["crc32"][0])
        for first, target in slices:
            data = memoryview(target.view(torch.uint8).numpy())  # type: ignore[arg-type]
            start, stop = 4 * first, 4 * first + len(data)
            for wanted in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
                origin = wanted * BLOCK_BYTES
                if wanted != number:
                    end = min(header + origin + BLOCK_BYTES, written["bytes"])
                    number, block = wanted, _checked(path, file, header + origin, end, written["crc32"][1 + wanted])
                low, high = max(start, origin), min(stop, origin + BLOCK_BYTES)
                data[low - start : high - start] = block[low - origin : high - origin]


def check_size(path: Path, written: Mapping[str, Any]) -> None:
    """Raise TornFile unless the file exists and has its full size."""
    with _torn_if_unreadable(path), path.open("rb") as file:  # opening makes a network file system refresh the size
        size = os.fstat(file.fileno()).st_size
    if size != written["bytes"]:
        raise TornFile(f"{path} is torn: it has {size:,} bytes instead of {written['bytes']:,}")


def _checked(path: Path, file: BinaryIO, begin: int, end: int, checksum: int) -> bytes:
    """Bytes [begin, end) of the file. Raises TornFile if they do not match the checksum."""
    file.seek(begin)
    found = file.read(end - begin)
    if zlib.crc32(found) != checksum:
        raise TornFile(f"{path} is damaged: bytes {begin:,} to {end:,} do not match their checksum")
    return found


@contextmanager
def _torn_if_unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise TornFile(f"{path} cannot be read ({e.strerror})") from None
