"""Snapshots of a training run: every rank writes what it owns, in the background; any other set of ranks can read it.

    step-00000500/            complete, because the folder has its final name
        manifest.json         what the run is, each parameter's shape, each file's size, checksum and pieces
        rank-0-RUN.safetensors
    step-00001000.partial/    being written, or left by a run that was killed
        rank-0-RUN.safetensors, rank-0-RUN.json, …

A rank writes its tensors and then a small JSON file that speaks of them; rank 0 waits for all of these, writes the manifest and
renames the folder. Whenever the ranks are killed, the last complete snapshot stays. RUN tells the files of one run from those
that a killed one left. The folder must lie on a file system that all ranks share.
"""

import json
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from errors import UserError

FORMAT = 1
KEYS = ("master", "exp_avg", "exp_avg_sq")
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened parameter's states: `tensors` holds one (stop - start,) fp32 tensor for each key."""

    name: str
    start: int
    stop: int
    tensors: dict[str, Tensor]


class Snapshots:
    """The snapshots of one run in `directory`.

    run_id: the same on all ranks of a run, another in each run. keep: how many complete snapshots stay. timeout: seconds that
    rank 0 waits for the slowest rank's file.
    """

    def __init__(
        self, directory: Path, rank: int, world_size: int, keep: int = 2, run_id: str = "0", timeout: float = 600.0
    ) -> None:
        self.directory, self.rank, self.world_size = directory, rank, world_size
        self.keep, self.run_id, self.timeout = keep, run_id, timeout
        self._thread: threading.Thread | None = None
        self._error: UserError | None = None

    # --- writing ---------------------------------------------------------------------------------------------------------

    def save(self, step: int, pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]], meta: Mapping[str, Any]) -> None:
        """Copy `pieces` to host memory and write them in the background. Every rank must call, with the pieces that it alone
        writes, maybe none. Waits for the save before; raises its UserError if it failed."""
        self.wait()
        copies = [Piece(p.name, p.start, p.stop, {k: t.detach().cpu().clone() for k, t in p.tensors.items()}) for p in pieces]
        partial = self.directory / f"step-{step:08d}.partial"

        def work() -> None:
            try:
                self._write_part(partial, copies)
                if self.rank == 0:
                    self._complete(partial, {"format": FORMAT, "step": step, "meta": dict(meta), "shapes": dict(shapes)})
            except (OSError, SafetensorError) as e:
                reason = getattr(e, "strerror", None) or str(e).splitlines()[0]
                self._error = UserError(
                    f"the snapshot of step {step} could not be written to {self.directory} ({reason}); the one before is whole: "
                    "make room or name another --out, then --resume"
                )
                self._say_failed(partial, str(self._error))
            except UserError as e:
                self._error = e

        self._thread = threading.Thread(target=work, name=f"snapshot of step {step}")
        self._thread.start()

    def wait(self) -> None:
        """Until the save in flight is done. Raises UserError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _part(self, rank: int) -> str:
        return f"rank-{rank}-{self.run_id}"

    def _write_part(self, partial: Path, pieces: list[Piece]) -> None:
        partial.mkdir(parents=True, exist_ok=True)
        part: dict[str, Any] = {"file": None, "pieces": [[p.name, p.start, p.stop] for p in pieces]}
        if pieces:
            path = partial / f"{self._part(self.rank)}.safetensors"
            save_file({f"{i}.{key}": p.tensors[key] for i, p in enumerate(pieces) for key in KEYS}, path)
            _sync(path)
            part |= {"file": path.name, "bytes": path.stat().st_size, "crc32": _checksum(path)}
        _write_json(partial / f"{self._part(self.rank)}.json", part)

    def _complete(self, partial: Path, manifest: dict[str, Any]) -> None:
        """Rank 0: wait for all parts, then make them a snapshot."""
        parts = [self._wait_for_part(partial, rank) for rank in range(self.world_size)]
        manifest["files"] = [part for part in parts if part["file"]]
        _check_coverage(partial, manifest)
        for left in partial.iterdir():  # by a killed run at the same step, and the parts that the manifest now contains
            if left.name not in {part["file"] for part in manifest["files"]}:
                left.unlink()
        _write_json(partial / "manifest.json", manifest)
        final = partial.with_suffix("")
        if final.exists():  # torn, or its step would not have been trained again
            shutil.rmtree(final)
        partial.rename(final)
        _sync(self.directory)
        for old in self._complete_ones()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        for stale in self.directory.glob("step-*.partial"):
            if stale.name <= partial.name:  # not the next one, which other ranks may have begun
                shutil.rmtree(stale, ignore_errors=True)

    def _wait_for_part(self, partial: Path, rank: int) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout
        path, failed = partial / f"{self._part(rank)}.json", partial / f"{self._part(rank)}.failed"
        while not path.exists():
            if failed.exists():
                raise UserError(f"rank {rank}: {failed.read_text()}")
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank {rank} did not write its part of {partial} within {self.timeout:.0f} s; is the folder on a file "
                    "system that all hosts share?"
                )
            time.sleep(POLL_SECONDS)
        part: dict[str, Any] = json.loads(path.read_text())
        return part

    def _say_failed(self, partial: Path, message: str) -> None:
        with suppress(OSError):  # rank 0 then runs into its timeout
            (partial / f"{self._part(self.rank)}.failed").write_text(message)

    # --- reading ---------------------------------------------------------------------------------------------------------

    def _complete_ones(self) -> list[Path]:
        """Oldest first."""
        if not self.directory.is_dir():
            return []
        named = [p for p in self.directory.iterdir() if re.fullmatch(r"step-\d{8,}", p.name)]
        return sorted((p for p in named if (p / "manifest.json").exists()), key=lambda p: int(p.name.removeprefix("step-")))

    def latest(self) -> Path | None:
        """The newest complete snapshot."""
        return next(reversed(self._complete_ones()), None)

    def load(self, path: Path, wanted: Sequence[tuple[str, int, int]]) -> list[dict[str, Tensor]]:
        """For each (name, start, stop) a fp32 CPU tensor (stop - start,) of each key, read from whichever files hold them.

        Raises UserError for a file that is torn, naming an older snapshot if there is one, and for elements that are missing.
        """
        manifest = read_manifest(path)
        found = [{key: torch.empty(stop - start) for key in KEYS} for _, start, stop in wanted]
        missing = [stop - start for _, start, stop in wanted]
        by_name: dict[str, list[int]] = {}
        for i, (name, _, _) in enumerate(wanted):
            by_name.setdefault(name, []).append(i)
        for file in manifest["files"]:
            cuts = [
                (number, i, max(start, wanted[i][1]), min(stop, wanted[i][2]), start)
                for number, (name, start, stop) in enumerate(file["pieces"])
                for i in by_name.get(name, [])
            ]
            cuts = [cut for cut in cuts if cut[2] < cut[3]]
            if cuts:
                self._check_file(path, file)
                with safe_open(path / file["file"], framework="pt") as tensors:
                    for number, i, low, high, start in cuts:
                        missing[i] -= high - low
                        for key in KEYS:
                            part = tensors.get_slice(f"{number}.{key}")[low - start : high - start]
                            found[i][key][low - wanted[i][1] : high - wanted[i][1]] = part
        if any(missing):
            name = wanted[next(i for i, left in enumerate(missing) if left)][0]
            raise UserError(f"{path} does not hold all of {name}; it is of another model{self._instead(path)}")
        return found

    def _check_file(self, path: Path, file: dict[str, Any]) -> None:
        data = path / file["file"]
        try:
            whole = data.stat().st_size == file["bytes"] and _checksum(data) == file["crc32"]
        except OSError:
            whole = False
        if not whole:
            raise UserError(f"{data} is torn or missing{self._instead(path)}")

    def _instead(self, path: Path) -> str:
        older = [p for p in self._complete_ones() if p != path]
        if older:
            return f"; delete {path} to resume from {older[-1].name}"
        return "; there is no other snapshot: start again with another --out"


def read_manifest(path: Path) -> dict[str, Any]:
    """A snapshot's `step`, `meta`, `shapes` and `files`. Raises UserError for what is no snapshot of this format."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        known = manifest["format"] == FORMAT and {"step", "meta", "shapes", "files"} <= manifest.keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise UserError(f"{path} is no snapshot of format {FORMAT}, or its manifest is torn; name another, or delete it")
    return dict(manifest)


def check_fits(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError unless the snapshot holds these parameters in these shapes, and no others."""
    found = {name: tuple(shape) for name, shape in read_manifest(path)["shapes"].items()}
    for name in sorted(found.keys() | shapes.keys()):
        if found.get(name) != shapes.get(name):
            raise UserError(
                f"{path} is of another model: {name} has shape {found.get(name, 'nothing')} there, "
                f"{shapes.get(name, 'nothing')} here; give that model's --model and --variant"
            )


def _check_coverage(path: Path, manifest: dict[str, Any]) -> None:
    """Raise UserError unless the pieces cover every parameter exactly once."""
    ends: dict[str, int] = dict.fromkeys(manifest["shapes"], 0)
    pieces = [tuple(piece) for file in manifest["files"] for piece in file["pieces"]]
    for name, start, stop in sorted(pieces):
        if ends.get(name) != start:
            raise UserError(f"{path}: the ranks' pieces of {name} overlap or leave a gap at element {start}; this is a bug")
        ends[name] = stop
    for name, shape in manifest["shapes"].items():
        if ends[name] != torch.Size(shape).numel():
            raise UserError(f"{path}: no rank wrote {name} from element {ends[name]} on; this is a bug")


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Appears under its name only when all of it is on disk."""
    hidden = path.with_suffix(".tmp")
    hidden.write_text(json.dumps(value))
    _sync(hidden)
    hidden.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
