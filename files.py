"""Reading untrusted files, and errors of writing. Only regular files are read, because a pipe could block, and only up to a
given size."""

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from errors import UserError, first_line

CONFIG_BYTES = 16 << 20  # most bytes of config.json and other settings; published ones have less than 2 MB
PROBE_BYTES = 1 << 16  # free space that an output folder must have at least
INDEX_BYTES = 64 << 20  # most bytes of an index of tensors
TOKENIZER_BYTES = 128 << 20  # most bytes of a vocabulary
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def model_folder(model: str | Path) -> Path:
    """The checkpoint's folder of a value of `--model`, which names the folder or a weights file in it."""
    path = Path(model)
    return path.parent if path.is_file() else path


def check_regular(path: Path) -> int:
    """The size of the file at `path`, in bytes.

    Raises FileNotFoundError, and UserError if it cannot be read or is not a regular file (a pipe, for example).
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read {path}: {getattr(e, 'strerror', e)}; check the path and its permissions") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is {KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}, not a file; put a regular file there")
    return status.st_size


def read_file(path: Path, most: int) -> bytes:
    """The contents of a file of at most `most` bytes.

    Raises FileNotFoundError, and UserError if the file is larger, not a regular file, or unreadable.
    """
    size = check_regular(path)
    try:
        with path.open("rb") as file:
            content = file.read(most + 1) if size <= most else b""
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}; check the path and its permissions") from None
    if size > most or len(content) > most:
        bound = f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
        raise UserError(f"{path} has more than {bound}, far more than such a file needs; shorten or replace it")
    return content


def read_json(path: Path, most: int) -> dict[str, Any]:
    """The JSON object in a file. Raises as `read_file` does, and UserError if the file does not hold a JSON object."""
    content = read_file(path, most)
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as e:  # not UTF-8, not JSON, a number with too many digits; nested too deeply
        raise UserError(f"{path} is not valid JSON ({str(e)[:200]}); download or export it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; download or export it again")
    return value


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises UserError for an error of writing `path` inside."""
    try:
        yield
    except (OSError, SafetensorError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else first_line(e)
        raise UserError(f"{path} cannot be written ({why}); name another output, or make room") from None


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all. Raises OSError; a stopped process leaves a file `.part` at most."""
    half = path.with_suffix(".part")
    half.write_text(text)
    half.replace(path)


def check_folder(folder: Path) -> Path:
    """Create `folder` if it is missing and return it. Raises UserError if files cannot be written there."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
    return folder
