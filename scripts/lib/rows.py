"""Rows of a measurement, each kept in a file as soon as it is measured, so that a stopped command goes on with the others."""

import fcntl
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from errors import UserError
from files import ENGINE, source_digest, write_whole

FOLDERS = "training", "training/planner", "scripts/corpus", "scripts/quality"
CODE = (*ENGINE, *(f"{folder}/*.py" for folder in FOLDERS), "scripts/quantize.py")


def row_file(folder: Path, name: str, settings: Mapping[str, Any]) -> Path:
    """The file of the row `name`. Its name depends on the JSON-serializable settings, so a row of other settings is not taken for
    it."""
    digest = zlib.crc32(json.dumps(settings, sort_keys=True).encode())
    return folder / f"{name.replace(' ', '-').replace(':', '-')}-{digest:08x}.json"


@cache
def code_digest() -> str:
    """A digest of what decides the quality that a model is found to have: a setting of its rows."""
    return source_digest(CODE)


def by_versions(codes: Collection[str]) -> str:
    """What a table says of rows by so many `code_digest`s; nothing if they are one."""
    return f", by {len(codes)} versions of the code" if len(codes) > 1 else ""


def read_row(path: Path) -> dict[str, Any] | None:
    """The row in `path`, None if there is none."""
    return dict(json.loads(path.read_text())) if path.exists() else None


def whole_lines(path: Path) -> list[str]:
    """The lines of a file of rows, none if there is no file. An incomplete last line, left by a killed run, is removed from it."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return whole.splitlines()


def write_row(path: Path, row: Mapping[str, Any]) -> None:
    """Write a row whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(row))


def kept(path: Path, measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The row in `path`. If there is none, that of `measure()`, which is then kept there."""
    if not path.exists():
        write_row(path, measure())
    return dict(json.loads(path.read_text()))


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Whether no other process holds the lock file `path`, which this one then does. The kernel releases a lock when its owner ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def only_command(folder: Path) -> Iterator[None]:
    """Raise UserError if another command works in this folder."""
    with locked(folder / "command.lock") as mine:
        if not mine:
            raise UserError(f"another command works in {folder}; wait for its end, or name another --out")
        yield


def weights_checksum(model: Path) -> str:
    """A checksum of a checkpoint's weights and config, eight hexadecimal digits."""
    value = 0
    for file in [*sorted(model.glob("*.safetensors")), model / "config.json"]:
        value = zlib.crc32(file.read_bytes(), value)
    return f"{value:08x}"
