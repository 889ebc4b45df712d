"""Snapshots of a training run. Every rank writes the states that it owns, in the background; any number of ranks can read them.

    step-00000500/                  complete, because the folder has its final name
        manifest.json               the run's settings, each parameter's shape, each file's size, checksums and pieces
        rank-0.safetensors, rank-1.safetensors, …
    step-00001000.RUN-2.partial/    the second save of run RUN: being written, or left by a run that was killed
        rank-0.safetensors, rank-0.json, …

A rank writes its tensors and then a small JSON file that describes them. Rank 0 waits for the JSON files of all ranks, writes
the manifest and renames the folder. Ranks may be killed at any time: the last complete snapshot remains. Each save has a folder
of its own, so files of a killed run cannot get into a snapshot. The folders must be on a file system that all ranks share.
"""

import json
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from errors import UserError
from training.snapshot_folder import (
    FORMAT,
    MANIFEST,
    TornFile,
    advice,
    check_coverage,
    check_size,
    checksum,
    complete_snapshots,
    put_in_place,
    read,
    read_manifest,
    remove,
    snapshot_path,
    write,
    write_json,
)

KEYS = ("master", "exp_avg", "exp_avg_sq")
POLL_SECONDS = 0.05

Range = tuple[str, int, int]  # elements [start, stop) of a flattened parameter


@dataclass(frozen=True)
class Piece:
    """The states of elements [start, stop) of a flattened parameter. tensors: a (stop - start,) fp32 tensor for each of
    KEYS, on any device."""

    name: str
    start: int
    stop: int
    tensors: dict[str, Tensor]


class Snapshots:
    """The snapshots of one run in `directory`.

    run_id: letters and digits, the same on all ranks of a run, different for each run. keep: the number of complete
    snapshots to keep. timeout: seconds that rank 0 waits for the files of other ranks while none of them grows.
    """

    def __init__(
        self, directory: Path, rank: int, world_size: int, *, run_id: str, keep: int = 2, timeout: float = 600.0
    ) -> None:
        assert keep >= 1 and run_id.isalnum(), f"keep {keep}, run_id {run_id!r}"
        self.directory, self.rank, self.world_size = directory, rank, world_size
        self.run_id, self.keep, self.timeout = run_id, keep, timeout
        self._saves = 0
        self._host: _HostCopy | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    # --- writing ---------------------------------------------------------------------------------------------------------

    def save(self, step: int, pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]], meta: Mapping[str, Any]) -> None:
        """Copy `pieces` to host memory, and write them in the background. Collective.

        pieces: those that only this rank writes, possibly none. The pieces of all ranks together must cover `shapes` (all
        parameters of the model) exactly once. meta: JSON-serializable. Waits for the previous save. Raises UserError if that
        failed, or if the host has too little memory for the copy.
        """
        self.wait()
        pieces = [piece for piece in pieces if piece.start < piece.stop]
        manifest = {"format": FORMAT, "step": step, "meta": meta, "shapes": {n: list(shape) for n, shape in shapes.items()}}
        frozen = json.loads(json.dumps(manifest))  # the caller may change its dicts while the thread writes
        values = self._copy(pieces)
        ranges = [(p.name, p.start, p.stop) for p in pieces]
        self._saves += 1
        number = self._saves
        partial = snapshot_path(self.directory, step).with_suffix(f".{self.run_id}-{number}.partial")

        def work() -> None:
            try:
                if self.rank == 0:
                    self._clear(before=number)
                self._write_part(partial, ranges, values)
                if self.rank == 0:
                    self._complete(partial, frozen)
            except Exception as e:
                self._error = self._failed(partial, step, e)

        # A daemon thread: a process that exits because of another error must not wait for ranks that have exited.
        self._thread = threading.Thread(target=work, name=f"snapshot of step {step}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save in flight is done. On rank 0, the snapshot is then complete. Raises UserError if the save
        failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _copy(self, pieces: Sequence[Piece]) -> Tensor:
        tensors = [piece.tensors[key] for piece in pieces for key in KEYS]
        size = sum(tensor.numel() for tensor in tensors)
        if self._host is None or self._host.flat.numel() != size:
            self._host = None  # free the old buffer before the new one is allocated
            self._host = _HostCopy(size, pinned=any(tensor.is_cuda for tensor in tensors))
        return self._host.fill(tensors)

    def _write_part(self, partial: Path, ranges: list[Range], values: Tensor) -> None:
        partial.mkdir(parents=True, exist_ok=True)
        part: dict[str, Any] = {"file": None, "pieces": ranges}
        if ranges:
            part["file"] = f"rank-{self.rank}.safetensors"
            sizes = {f"{name}[{start}:{stop}].{key}": stop - start for name, start, stop in ranges for key in KEYS}
            part |= write(partial / part["file"], sizes, values)
        write_json(partial / f"rank-{self.rank}.json", part)

    def _complete(self, partial: Path, manifest: dict[str, Any]) -> None:
        """On rank 0: wait for all parts, make them a snapshot, and only then remove snapshots that are no longer kept."""
        parts = self._wait_for_parts(partial)
        manifest["files"] = [part for part in parts if part["file"]]
        check_coverage(partial, manifest)
        for file in manifest["files"]:
            check_size(partial / file["file"], file)
        write_json(partial / MANIFEST, {"crc32": checksum(manifest)} | manifest)
        for rank in range(self.world_size):
            (partial / f"rank-{rank}.json").unlink()
        final = snapshot_path(self.directory, manifest["step"])
        put_in_place(partial, final)
        others = [path for path in complete_snapshots(self.directory) if path != final]
        for old in others[: max(0, len(others) - (self.keep - 1))]:
            remove(old)

    def _clear(self, before: int) -> None:
        """Remove folders that are half written or half removed: those of other runs, and of this run's saves before that number."""
        for path in self.directory.glob("step-*"):
            if path.suffix == ".partial":
                run_id, _, number = path.name.split(".")[1].partition("-")
                stale = run_id != self.run_id or int(number) < before
            else:
                stale = not (path / MANIFEST).exists()
            if stale:
                remove(path)

    def _wait_for_parts(self, partial: Path) -> list[dict[str, Any]]:
        """The JSON of each rank about its file, once all are written. Raises UserError if a rank failed, or if no file
        grew for `timeout` seconds."""
        parts: dict[int, dict[str, Any]] = {}
        written, deadline = -1, 0.0
        while True:
            for rank in range(self.world_size):
                if rank not in parts and (said := partial / f"rank-{rank}.json").exists():
                    parts[rank] = json.loads(said.read_text())
                    if "failed" in parts[rank]:
                        raise UserError(f"rank {rank}: {parts[rank]['failed']}")
            missing = [str(rank) for rank in range(self.world_size) if rank not in parts]
            if not missing:
                return [parts[rank] for rank in range(self.world_size)]
            if (size := _size(partial)) != written:
                written, deadline = size, time.monotonic() + self.timeout
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} wrote nothing more to {partial} for "
                    f"{self.timeout:g} s; see whether the processes run, and whether all hosts share that file system; {self._kept()}"
                )
            time.sleep(POLL_SECONDS)

    def _failed(self, partial: Path, step: int, error: Exception) -> Exception:
        """Delete this rank's file, report the failure to rank 0, and return the error with advice for the user."""
        if isinstance(error, (OSError, TornFile)):
            reason = error.strerror if isinstance(error, OSError) else None
            where = (error.filename if isinstance(error, OSError) else None) or partial
            error = UserError(
                f"the snapshot of step {step} could not be written: {where}: {reason or error}; free space or mend the folder's "
                f"permissions, then go on with --resume; {self._kept()}"
            )
        with suppress(OSError):
            (partial / f"rank-{self.rank}.safetensors").unlink(missing_ok=True)
        with suppress(OSError):  # otherwise rank 0 waits until its timeout
            write_json(partial / f"rank-{self.rank}.json", {"failed": str(error)})
        return error

    def _kept(self) -> str:
        with suppress(UserError):
            if (path := self.latest()) is not None:
                return f"{path} is still complete"
        return "there is no earlier snapshot"

    # --- reading ---------------------------------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """The newest complete snapshot. Raises UserError if the directory cannot be read."""
        return next(reversed(complete_snapshots(self.directory)), None)

    def load(self, path: Path, wanted: Sequence[Range]) -> list[dict[str, Tensor]]:
        """For each (name, start, stop), a (stop - start,) fp32 CPU tensor for each of KEYS. Any number of ranks may have
        written the snapshot.

        Only the slices are read. Raises UserError for a damaged file, naming the newest other snapshot that is complete,
        and for elements that the snapshot does not have.
        """
        manifest = read_manifest(path)
        for name, start, stop in wanted:
            size = torch.Size(manifest["shapes"].get(name, [0])).numel()
            if not 0 <= start <= stop <= size:
                raise UserError(
                    f"{path} has {size} elements of {name}, not those from {start} to {stop}: it is of another model"
                )
        found = [{key: torch.empty(stop - start) for key in KEYS} for _, start, stop in wanted]
        targets: dict[str, list[tuple[int, dict[str, Tensor]]]] = defaultdict(list)
        for (name, start, _), tensors in zip(wanted, found, strict=True):
            targets[name].append((start, tensors))
        total, done = sum(stop - start for _, start, stop in wanted), 0
        show: Any = dict(desc="reading snapshot", unit="param", unit_scale=True, disable=self.rank != 0, delay=1, leave=False)
        with tqdm(total=total, **show) as bar:
            for file in manifest["files"]:
                slices = list(_slices(file["pieces"], targets))
                try:
                    if slices:
                        read(path / file["file"], file, slices)
                except TornFile as e:
                    raise UserError(f"{e}; {advice(path)}") from None
                count = sum(len(tensor) for _, tensor in slices) // len(KEYS)
                done += count
                bar.update(count)
        assert done == total, f"{path}: read {done} of {total} elements"
        return found


class _HostCopy:
    """Host memory for a rank's pieces, one after the other as in its file. It is reused by all saves."""

    def __init__(self, size: int, pinned: bool) -> None:
        """size: elements. pinned: page-locked, so that a GPU copies at full speed. Raises UserError if there is too
        little memory."""
        try:
            self.flat = torch.empty(size)
            if pinned:  # pin_memory would round the size up to a power of two
                cudart, address = torch.cuda.cudart(), self.flat.data_ptr()
                if code := int(cudart.cudaHostRegister(address, self.flat.nbytes, 0)):
                    raise RuntimeError(f"cudaHostRegister: error {code}")
                weakref.finalize(self, cudart.cudaHostUnregister, address).atexit = False
        except RuntimeError as e:
            raise UserError(
                f"a snapshot needs {4 * size / 1e9:.1f} GB of host memory on this rank ({str(e).splitlines()[0]}); "
                "free some, or shard the optimizer states over more ranks"
            ) from None

    def fill(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy `tensors` to the host, after the work queued on their device. Waits for the copy and returns all of it,
        (size,) fp32."""
        for tensor, part in zip(tensors, self.flat.split([t.numel() for t in tensors]), strict=True):
            assert tensor.dtype == torch.float32, tensor.dtype
            part.copy_(tensor.detach().view(-1), non_blocking=True)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return self.flat


def _slices(
    pieces: Iterable[Range], targets: Mapping[str, list[tuple[int, dict[str, Tensor]]]]
) -> Iterator[tuple[int, Tensor]]:
    """What a file with these pieces has of the wanted elements: the first one's index in the file, and the tensor that they fill.

    targets: by parameter, the first wanted element and the tensors by key.
    """
    begin = 0
    for name, start, stop in pieces:
        for key in KEYS:
            for first, tensors in targets.get(name, ()):
                low, high = max(start, first), min(stop, first + len(tensors[key]))
                if low < high:
                    yield begin + low - start, tensors[key][low - first : high - first]
            begin += stop - start


def _size(folder: Path) -> int:
    """Bytes of all files in a folder, which other ranks may remove at any time."""
    size = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
