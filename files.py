"""Reading files that someone else wrote. What is no regular file is refused and not waited for, and nothing is read without a bound."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from errors import UserError

CONFIG_BYTES = 16 << 20  # of config.json and other settings; those that are published have less than 2 MB
INDEX_BYTES = 64 << 20  # of an index of tensors
TOKENIZER_BYTES = 128 << 20  # of a vocabulary
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path) -> int:
    """The size of the file at `path`. Raises FileNotFoundError, and UserError for what is no regular file, such as a pipe."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read {path}: {getattr(e, 'strerror', e)}; check the path and its permissions") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(
            f"{path} is {KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}, not a file; put the checkpoint's file there"
        )
    return status.st_size


def read_file(path: Path, most: int) -> bytes:
    """All of a file of up to `most` bytes. Raises FileNotFoundError, and UserError for one that is larger, no file, or unreadable."""
    size = check_regular(path)
    try:
        with path.open("rb") as file:
            content = file.read(most + 1) if size <= most else b""
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}; check the path and its permissions") from None
    if size > most or len(content) > most:
        raise UserError(f"{path} has more than {most >> 20} MiB, far more than such a file needs; download it again")
    return content


def read_json(path: Path, most: int) -> dict[str, Any]:
    """The JSON object in a file. Raises FileNotFoundError, and UserError as `read_file` does and for what is no JSON object."""
    content = read_file(path, most)
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as e:  # no UTF-8, no JSON, a number of too many digits; nested too deeply
        raise UserError(f"{path} is not valid JSON ({str(e)[:200]}); download or export it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; download or export it again")
    return value
