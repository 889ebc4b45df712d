"""Reading untrusted files, and errors of writing. Only regular files are read, because a pipe could block, and only up to a
given size."""

import hashlib
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from errors import UserError, first_line

JSON_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}
FOLDERS = "", "checkpoints/", "comms/", "engine/", "engine/*/", "kernels/", "layers/", "quantized/", "ranks/", "text/"
ENGINE = (*(f"{folder}*.py" for folder in FOLDERS), "checkpoints/*.toml")  # the files that decide what a model computes
WEIGHTS = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json", "model.pth"
AUTOGPTQ = "gptq_model-*.safetensors"  # what AutoGPTQ calls its only file. Of those above the first counts, as in transformers
REQUIRED: Any = object()
SHOWN = 80  # most characters of a wrong value in a message


def shown(value: object) -> str:
    """A wrong value as text for a message, truncated if it is long."""
    try:
        text = repr(value[: SHOWN + 1] if isinstance(value, str) else value)
    except ValueError:  # an integer with more digits than Python converts to text
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def get(raw: dict[str, Any], key: str, kind: type, default: Any = REQUIRED) -> Any:
    """`raw[key]`, or `default` if it is absent. null counts as absent, as in transformers.

    Raises UserError if the value is not of JSON type `kind`, is a number that is not finite, or is absent and required.
    """
    value: Any = raw.get(key)
    if value is None and default is not REQUIRED:
        return default
    if value is None:
        raise UserError(f"key {key!r} is missing")
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 1 << 63 else math.inf
    finite = not isinstance(value, float) or math.isfinite(value)
    if type(value) is not kind or not finite:  # not isinstance: in Python, True is an int
        raise UserError(f"{key} must be {JSON_KINDS[kind]}, not {shown(raw[key])}")
    return value


def count(raw: dict[str, Any], key: str, default: Any = REQUIRED, most: int = 1 << 31) -> int:
    """`raw[key]`, a whole number from 1 to `most`. Raises UserError otherwise."""
    value = get(raw, key, int, default)
    if not 1 <= value <= most:
        raise UserError(f"{key} must be {'at least 1' if value < 1 else f'at most {most:,}'}, not {shown(value)}")
    return value


def positive(raw: dict[str, Any], key: str, default: Any = REQUIRED, least: float = 0.0) -> float:
    """`raw[key]`, a number above 0 and at least `least`. Raises UserError otherwise."""
    value = get(raw, key, float, default)
    if value is not None and not (value > 0 and value >= least):
        raise UserError(f"{key} must be {f'at least {least:g}' if least else 'a positive number'}, not {value!r}")
    return value


def one_or_list(raw: dict[str, Any], key: str) -> int | list[int]:
    """`raw[key]`, a whole number or a list of whole numbers; if absent, an empty list. Raises UserError otherwise."""
    value = raw.get(key)
    if value is None:
        return []
    if type(value) is not int and not (type(value) is list and all(type(v) is int for v in value)):
        raise UserError(f"{key} must be a whole number or a list of them, not {shown(value)}")
    return value


CONFIG_BYTES = 16 << 20  # most bytes of config.json and other settings; published ones have less than 2 MB
LFS, LFS_BYTES = b"version https://git-lfs", 1024  # how a pointer begins, and more bytes than one has
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


def model_name(model: str) -> str:
    """How a value of `--model` is shown: a folder in the cache of the hub by its name there, ORG/NAME."""
    match = re.fullmatch(r"models--(.+?)--(.+)/snapshots", "/".join(Path(model).parts[-3:-1]))
    return f"{match[1]}/{match[2]}" if match else model


def check_regular(path: Path) -> int:
    """The size of the file at `path`, in bytes.

    Raises FileNotFoundError, and UserError if it cannot be read or is not a regular file (a pipe, for example).
    """
    with _reading(path):
        size = _size(os.stat(path), path)
        if len(LFS) < size < LFS_BYTES and path.read_bytes().startswith(LFS):
            raise UserError(
                f"{path} is a pointer of git LFS to the file; run `git lfs pull`, or name the model by its name on the hub"
            )
    return size


def open_regular(path: Path, within: Path | None = None) -> BinaryIO:
    """The file at `path`, open. within: the folder in which it must lie. What was opened is checked, since a path may name another
    file a moment later. Raises FileNotFoundError, and UserError for anything but a regular file there."""
    check_regular(path)  # opening a device may have effects
    with _reading(path):
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
        try:
            _size(os.fstat(file.fileno()), path)
            if within is not None and not Path(os.readlink(descriptor_path(file))).is_relative_to(within.resolve()):
                raise UserError(f"{path} is not in {within}, with all symbolic links followed; put it there")
        except BaseException:
            file.close()
            raise
    return file


def descriptor_path(file: BinaryIO) -> str:
    """A path of the open file, whatever its name is now."""
    return f"/proc/self/fd/{file.fileno()}"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read {path}: {getattr(e, 'strerror', e)}; check the path and its permissions") from None


def _size(status: os.stat_result, path: Path) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is {KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}, not a file; put a regular file there")
    return status.st_size


def read_file(path: Path, most: int, within: Path | None = None) -> bytes:
    """The contents of a file of at most `most` bytes. within: see `open_regular`.

    Raises FileNotFoundError, and UserError if the file is larger, not a regular file, or unreadable.
    """
    with open_regular(path, within) as file, _reading(path):
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
    if size > most or len(content) > most:
        bound = f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
        raise UserError(f"{path} has more than {bound}, far more than such a file needs; shorten or replace it")
    return content


def read_json(path: Path, most: int, within: Path | None = None) -> dict[str, Any]:
    """The JSON object in a file. Raises as `read_file` does, and UserError if the file does not hold a JSON object."""
    content = read_file(path, most, within)
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


def source_digest(patterns: Sequence[str]) -> str:
    """A hash of the content of the files that match the patterns."""
    root = Path(__file__).resolve().parent
    paths = sorted(path for pattern in patterns for path in root.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]
