"""The folder of a snapshot: its files, its manifest, its name, and how it becomes complete in one step.

A rank's file has flat fp32 tensors in the safetensors format. A checksum for every block is computed from the data in memory
while it is written, so all damage by the storage is found. To read a slice, only the blocks that contain it are checked, so many
ranks can share a large file without each reading all of it.

Only a folder with a manifest and its final name is a snapshot. So a run that is killed while it writes or removes one never
leaves a folder that could be mistaken for a complete snapshot.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
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


def complete_snapshots(directory: Path) -> list[Path]:
    """The folders of all complete snapshots, oldest first. Raises UserError if the directory cannot be read."""
    try:
        names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    except OSError as e:
        raise UserError(f"{directory} cannot be read ({e.strerror}); mend its permissions or name another folder") from None
    steps = [int(name[5:]) for name in names if re.fullmatch(r"step-\d{8,}", name) and (directory / name / MANIFEST).exists()]
    return [snapshot_path(directory, step) for step in sorted(steps)]


def snapshot_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def read_manifest(path: Path) -> dict[str, Any]:
    """A snapshot's `step`, `meta`, `shapes` and `files`. Raises UserError if it is damaged, or is not a snapshot of this
    format."""
    try:
        return _read_manifest(path)
    except TornFile as e:
        raise UserError(f"{e}; {advice(path)}") from None


def check_fits(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError unless the snapshot has exactly these parameters with these shapes. Reads only the manifest."""
    found = {name: tuple(shape) for name, shape in read_manifest(path)["shapes"].items()}
    for name in sorted(found.keys() | shapes.keys()):
        there, here = found.get(name), shapes.get(name)
        if there is None or here is None or there != tuple(here):
            raise UserError(
                f"{path} is of another model: {name} has {f'shape {there}' if there is not None else 'no place'} there and "
                f"{f'shape {tuple(here)}' if here is not None else 'no place'} in this model; resume with that run's own settings"
            )


def _read_manifest(path: Path) -> dict[str, Any]:
    """Like `read_manifest`, but raises TornFile for a snapshot that is damaged."""
    file = path / MANIFEST
    if not file.is_file():
        raise UserError(f"{path} is no complete snapshot, it has no {MANIFEST}; name a folder such as snapshots/step-00000500")
    try:
        with _torn_if_unreadable(file):
            manifest = json.loads(file.read_text())
    except ValueError:
        raise TornFile(f"{file} is torn: it is no JSON") from None
    if not isinstance(manifest, dict) or not {"format", "crc32"} <= manifest.keys():
        raise UserError(f"{file} is not that of a training snapshot; name a folder that training wrote")
    if manifest["format"] != FORMAT:
        raise UserError(f"{file} has format {manifest['format']}, this version reads {FORMAT}; use the version that wrote it")
    if manifest.pop("crc32") != checksum(manifest):
        raise TornFile(f"{file} is damaged: it does not match its checksum")
    return manifest


def check_coverage(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise UserError unless the pieces cover every parameter exactly once."""
    ends = dict.fromkeys(manifest["shapes"], 0)
    for name, start, stop in sorted(tuple(piece) for file in manifest["files"] for piece in file["pieces"]):
        if ends.get(name) != start:
            expected = f"{ends[name]} was next" if name in ends else "it is no parameter of the model"
            raise UserError(f"{path}: a rank has {name} from element {start} on, but {expected}; report this as a bug")
        ends[name] = stop
    for name, shape in manifest["shapes"].items():
        if ends[name] != torch.Size(shape).numel():
            raise UserError(
                f"{path}: the ranks have {name} up to element {ends[name]} of {torch.Size(shape).numel()}; report this as a bug"
            )


def advice(path: Path) -> str:
    """Advice for a damaged snapshot. A snapshot that it names has a valid manifest, and all files with their full sizes."""
    for other in reversed(complete_snapshots(path.parent)):
        with suppress(UserError, TornFile):
            if other != path:
                for file in _read_manifest(other)["files"]:
                    check_size(other / file["file"], file)
                return f"delete {path} to go on from {other.name}"
    return "there is no other whole snapshot beside it: start again with another --out"


def put_in_place(partial: Path, final: Path) -> None:
    """Give a complete folder its final name, instead of what has it."""
    remove(final)
    partial.rename(final)
    _sync(final.parent)
    _sync(final.parent.parent)


def remove(path: Path) -> None:
    """Remove a folder, its manifest first. Without a manifest it is not a snapshot, so a kill here cannot leave a
    snapshot that lacks files."""
    with suppress(OSError):
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest).encode())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file. It appears under its name only when all of it is on disk."""
    hidden = path.with_suffix(".tmp")
    with hidden.open("w") as file:
        file.write(json.dumps(value))
        file.flush()
        os.fsync(file.fileno())
    with _opened(path.parent) as folder:  # opened first: rank 0 may rename the folder once it sees the file
        hidden.rename(path)
        os.fsync(folder)


def _sync(directory: Path) -> None:
    """Write the names in a directory to disk."""
    with _opened(directory) as folder:
        os.fsync(folder)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
