"""The file of token ids that training reads: writing it, and mapping it into memory.

A token file NAME.bin holds token ids, uint16 or uint32, little endian. NAME.json is its header. NAME.mask is optional
(uint8, one per token) and marks the tokens that the loss counts. Documents are stored one after the other, each with its
end token. Conversations are packed into windows before they are written.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from errors import UserError
from files import TOKENIZER_BYTES, read_file, writing
from text.tokenizer_files import find_tokenizer

FORMAT = 1
END = 4096  # tokens at both ends of a file
HEADER_KEYS = {"format", "dtype", "tokens", "vocab_size", "tokenizer", "window", "digest"}


@dataclass(frozen=True)
class Header:
    """The content of NAME.json."""

    dtype: str  # uint16 or uint32
    tokens: int
    vocab_size: int  # all ids are below it
    tokenizer: str  # a fingerprint of the tokenizer's file
    window: int | None = None  # tokens; length of the packed windows, with which the file must be read
    format: int = FORMAT
    digest: str | None = None  # of NAME.bin and NAME.mask; None in files of earlier versions


@dataclass(frozen=True)
class TokenFile:
    """An open token file."""

    path: Path
    header: Header
    tokens: np.ndarray  # (tokens,) uint16 or uint32, memory-mapped
    mask: np.ndarray | None  # (tokens,) uint8, memory-mapped: 1 where the loss counts the token

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the header, all tokens and the mask. They are read only if the header has no digest of them, as in files of
        earlier versions, or is older than they are. A copied file may keep its time, so both ends are always read."""
        header = self.header
        if header.digest is None or self._is_newer_than_header():
            header = replace(header, digest=_joined(hashlib.sha256(a.data) for a in (self.tokens, self.mask) if a is not None))
        ends = hashlib.sha256(self.tokens[:END].tobytes() + self.tokens[-END:].tobytes()).hexdigest()
        known = asdict(header) | {"masked": self.mask is not None, "ends": ends}
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]

    def _is_newer_than_header(self) -> bool:
        names = (".bin", ".json") if self.mask is None else (".bin", ".mask", ".json")
        *data, header = (self.path.with_suffix(name).stat().st_mtime_ns for name in names)
        return max(data) > header


def _joined(digests: Iterable["hashlib._Hash"]) -> str:
    """The digest in a header, from those of NAME.bin and of NAME.mask if there is one."""
    return " ".join(digest.hexdigest() for digest in digests)


def _little_endian(dtype: str) -> np.dtype:
    return np.dtype(dtype).newbyteorder("<")


class TokenWriter:
    """Writes a token file piece by piece: `with TokenWriter(path, ...) as writer: writer.append(ids)`.

    The files get their names at the end, the header last, and only if no exception was raised. So a header always belongs to a
    complete file, and processes that have mapped an earlier file of this name keep it. After an error, the partial files are
    removed. Raises UserError if the files cannot be written.
    """

    def __init__(self, path: Path, vocab_size: int, tokenizer: str, masked: bool = False, window: int | None = None) -> None:
        """masked: the loss counts only some tokens. window: tokens; the data consists of windows of this length. The
        others as in `Header`."""
        if path.suffix != ".bin":
            raise UserError(f"{path}: the name of a token file must end in .bin")
        self.path, self.masked = path, masked
        self.header = Header("uint16" if vocab_size <= 2**16 else "uint32", 0, vocab_size, tokenizer, window)

    def __enter__(self) -> "TokenWriter":
        with writing(self.path):
            self._files = [self._part(suffix).open("wb") for suffix in self._data]
        self._digests = [hashlib.sha256() for _ in self._files]
        return self

    @property
    def _data(self) -> tuple[str, ...]:
        return (".bin", ".mask") if self.masked else (".bin",)

    def _part(self, suffix: str) -> Path:
        return self.path.with_suffix(suffix + ".part")

    def append(self, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        """ids: (n,) of any integer type. mask: (n,) of 0 and 1, for a masked file. Raises UserError for ids outside the
        vocabulary."""
        outside = ids[(ids < 0) | (ids >= self.header.vocab_size)]
        if len(outside):
            raise UserError(f"token id {outside[0]} is outside the vocabulary of {self.header.vocab_size}; check the tokenizer")
        parts = [ids.astype(_little_endian(self.header.dtype)).tobytes()]
        if self.masked:
            assert mask is not None and len(mask) == len(ids), "a masked file needs one mask entry a token"
            parts.append(mask.astype(np.uint8).tobytes())
        with writing(self.path):
            for file, digest, part in zip(self._files, self._digests, parts, strict=True):
                file.write(part)
                digest.update(part)
        self.header = replace(self.header, tokens=self.header.tokens + len(ids))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with writing(self.path):
                for file in self._files:
                    file.close()
                if kind is None:
                    header = replace(self.header, digest=_joined(self._digests))
                    self._part(".json").write_text(json.dumps(asdict(header), indent=1) + "\n")
                    for suffix in (".json", ".mask"):
                        self.path.with_suffix(suffix).unlink(missing_ok=True)
                    for suffix in (*self._data, ".json"):
                        self._part(suffix).replace(self.path.with_suffix(suffix))
        finally:
            for suffix in (".bin", ".mask", ".json"):
                self._part(suffix).unlink(missing_ok=True)


def write_tokens(
    path: Path, tokens: np.ndarray, vocab_size: int, tokenizer: str, mask: np.ndarray | None = None, window: int | None = None
) -> TokenFile:
    """Write a token file in one call and open it. The arguments are those of `TokenWriter`."""
    with TokenWriter(path, vocab_size, tokenizer, masked=mask is not None, window=window) as writer:
        writer.append(tokens, mask)
    return open_tokens(path, vocab_size)


def tokenizer_folder(path: Path) -> Path:
    """The folder with the tokenizer of a token file: NAME.tokenizer/ next to NAME.bin."""
    return path.with_suffix(".tokenizer")


def tokenizer_fingerprint(folder: Path) -> str:
    """A hash of the tokenizer's file in a checkpoint's folder; "none" without one. Raises UserError if it cannot be read."""
    file = find_tokenizer(folder)
    return "none" if file is None else hashlib.sha256(read_file(file, TOKENIZER_BYTES)).hexdigest()[:16]


def check_tokenizer(tokens: TokenFile, folder: Path) -> None:
    """Raise UserError if a checkpoint's folder has another tokenizer than that with which the tokens were made."""
    if tokenizer_fingerprint(folder) not in ("none", tokens.header.tokenizer):
        raise UserError(
            f"{tokens.path} was made with another tokenizer than that of {folder}, so its ids mean other text; "
            f"write it with python -m training.tokenize_data --model {folder}"
        )


def open_tokens(path: Path, vocab_size: int) -> TokenFile:
    """Map a token file. Raises UserError if it is missing or damaged, or if its vocabulary is larger than the model's
    `vocab_size`."""
    how = "write it with python -m training.tokenize_data"
    if path.suffix != ".bin":
        raise UserError(f"{path} is no token file, whose name ends in .bin; {how}")
    header = _read_header(path.with_suffix(".json"), how)
    if header.vocab_size > vocab_size:
        raise UserError(
            f"{path} holds token ids below {header.vocab_size}, but the model knows {vocab_size}; "
            "tokenize with the model's own tokenizer"
        )
    tokens = _map(path, _little_endian(header.dtype), header.tokens, how)
    mask_path = path.with_suffix(".mask")
    mask = _map(mask_path, np.dtype(np.uint8), header.tokens, how) if mask_path.exists() else None
    return TokenFile(path, header, tokens, mask)


def _read_header(path: Path, how: str) -> Header:
    try:
        raw: Any = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing, the header of a token file; {how}") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path} is no header of a token file ({e}); {how}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or raw.keys() | {"digest"} != HEADER_KEYS:
        raise UserError(f"{path} is no header of a token file of format {FORMAT}; {how}")
    header = Header(**raw)
    counts = (header.tokens, header.vocab_size, 0 if header.window is None else header.window)
    if header.dtype not in ("uint16", "uint32") or not all(type(count) is int and count >= 0 for count in counts):
        raise UserError(f"{path} has no valid dtype and token count; {how}")
    if not isinstance(header.digest, str | None):
        raise UserError(f"{path} has no valid digest; {how}")
    return header


def _map(path: Path, dtype: np.dtype, count: int, how: str) -> np.ndarray:
    try:
        size = path.stat().st_size
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror}); {how}") from None
    if size != count * dtype.itemsize:
        raise UserError(f"{path} has {size} bytes where its header says {count * dtype.itemsize}: it is torn; {how}")
    return np.memmap(path, dtype=dtype, mode="r") if count else np.zeros(0, dtype)
