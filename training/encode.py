"""Encodes text and conversations as token ids, in as many processes as there are cores.

Inputs are cut into work items of about equal size. Each is encoded in a process of its own with limits of time and memory, because
the tokenizer and the chat template of a checkpoint are not trusted. The result does not depend on the number of processes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from checkpoints.hub import is_hub_name
from errors import UserError, first_line
from ranks.bounded import bounded
from text.tokenizer import Tokenizer
from text.tokenizer_files import load_tokenizer
from training.chat_data import Example, encode_example, read_messages

ITEM_BYTES = 1 << 20  # of input in one work item
SUFFIXES = (".jsonl", ".txt", ".parquet")
KEYS = ("text", "messages", "conversations", "tools")  # columns of a table that are read


@dataclass(frozen=True)
class Task:
    """The settings of the encoding."""

    model: Path
    chat: bool
    window: int = 0  # with --chat: the most tokens that an example may have
    last_answer: bool = False
    truncate: bool = False  # truncate examples that are longer than a window; otherwise they are left out


@dataclass(frozen=True)
class WorkItem:
    """Bytes start … stop - 1 of a file. For JSON lines: the lines that begin there."""

    path: Path
    start: int
    stop: int


@dataclass
class Encoded:
    """The examples of a work item, one after the other."""

    ids: np.ndarray  # uint32
    mask: np.ndarray  # uint8
    lengths: np.ndarray  # int64, of the examples
    truncated: int = 0
    skipped: int = 0


def encode_item(task: Task, tokenizer: Tokenizer, item: WorkItem) -> Encoded:
    """Encode a work item, within limits of time and memory. Raises UserError, which names file and line if an example is wrong."""
    documents = list(_documents(item))
    if not documents:
        return _encode(task, tokenizer, item.path, documents)
    times = 1
    if task.chat:  # a conversation is rendered twice for each of its answers
        times = max(1, *(2 * (line.count(b"assistant") + line.count(b"gpt")) for _, line in documents))
    size = sum(len(text) for _, text in documents)
    return bounded(f"the text of {item.path}", _encode, task, tokenizer, item.path, documents, characters=size, times=times)


def _encode(task: Task, tokenizer: Tokenizer, path: Path, documents: Sequence[tuple[int, bytes]]) -> Encoded:
    ids: list[int] = []
    mask: list[int] = []
    lengths: list[int] = []
    truncated = skipped = 0
    for offset, text in documents:
        try:
            example = _example(task, tokenizer, text, path.suffix == ".txt")
        except UserError as e:
            raise UserError(f"{_where(path, offset)}: {e}") from None
        if task.chat and len(example.ids) > task.window:
            example = Example(example.ids[: task.window], example.mask[: task.window])
            if not task.truncate or not any(example.mask):
                skipped += 1
                continue
            truncated += 1
        ids += example.ids
        mask += example.mask
        lengths.append(len(example.ids))
    arrays = np.array(ids, np.uint32), np.array(mask, np.uint8), np.array(lengths, np.int64)
    return Encoded(*arrays, truncated, skipped)


def _example(task: Task, tokenizer: Tokenizer, text: bytes, is_document: bool) -> Example:
    decoded = _decode(text)
    if is_document:
        return document(tokenizer, decoded)
    record = _record(decoded)
    if task.chat:
        return encode_example(tokenizer, read_messages(record), _tools(record), task.last_answer)
    if not isinstance(record.get("text"), str):
        raise UserError('there is no "text"; for conversations ("messages") add --chat')
    return document(tokenizer, record["text"])


def document(tokenizer: Tokenizer, text: str) -> Example:
    """The tokens of a document with one end token, and no mask. Raises UserError if it is empty."""
    if not text.strip():
        raise UserError("the document is empty; leave it out")
    end = tokenizer.eos_ids[0]
    ids = tokenizer.encode(text, parse_special=False)
    return Example(ids if ids[-1] == end else [*ids, end], [])


def _documents(item: WorkItem) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each document or line; blank lines are left out."""
    try:
        with item.path.open("rb") as file:
            if item.path.suffix == ".txt":
                yield 0, file.read()
                return
            file.seek(max(0, item.start - 1))
            if item.start:
                file.readline()  # the rest of a line that began in the previous item, or only that line's end
            while (offset := file.tell()) < item.stop and (line := file.readline()):
                if line.strip():
                    yield offset, line
    except OSError as e:
        raise UserError(f"{item.path} cannot be read ({e.strerror}); check the path and its permissions") from None


def _where(path: Path, offset: int) -> str:
    """The file, and the number of the line that begins at `offset`, for an error message."""
    if path.suffix == ".txt":
        return str(path)
    line = 1
    with path.open("rb") as file:
        while offset and (block := file.read(min(offset, ITEM_BYTES))):
            line += block.count(b"\n")
            offset -= len(block)
    return f"{path}, line {line}"


def _decode(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"this is no UTF-8 text ({e.reason}); convert the file") from None


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f"this is no JSON ({e}); every line must be one JSON object") from None
    if not isinstance(record, dict):
        raise UserError("this is no JSON object; every line must be one")
    return record


def _tools(record: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = record.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError("tools must be a list of objects")
    return tools


def work_items(inputs: Sequence[Path], chat: bool, spool: Path) -> list[WorkItem]:
    """The work items of the inputs, in the order of the output. spool: a folder for tables as JSON lines. Raises UserError if an
    input is missing or has an unknown suffix."""
    files: list[Path] = []
    for path in inputs:
        found = (
            [path]
            if path.is_file() or _is_data_set(path)
            else sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
        )
        if not found:
            raise UserError(f"{path} is no file and no folder with {', '.join(SUFFIXES)} files; name the data to tokenize")
        files += found
    for i, file in enumerate(files):
        if file.suffix == ".parquet" or _is_data_set(file):
            files[i] = as_lines(file, spool / f"{i}.{file.name}.jsonl")
        elif file.suffix not in SUFFIXES or (chat and file.suffix == ".txt"):
            wanted = " or ".join(suffix for suffix in SUFFIXES if not (chat and suffix == ".txt"))
            raise UserError(f"{file} is of no kind that is read here; give {wanted} files")
    return [item for file in files for item in _cut(file, file.stat().st_size)]


def _is_data_set(path: Path) -> bool:
    """Whether it names one on the hub."""
    return is_hub_name(str(path).partition(":")[0]) and path.suffix not in SUFFIXES


def as_lines(source: Path, lines: Path) -> Path:
    """Write a table to `lines`, row by row. Raises UserError if it cannot be read, or if a library is missing."""
    try:
        with lines.open("x") as file:
            for row in tqdm(_rows(source), desc=str(source), unit="row"):
                text = json.dumps({key: row[key] for key in KEYS if key in row})
                row = json.loads(text, object_hook=_without_nulls)
                file.write(json.dumps(row) + "\n")
    except ImportError as e:
        raise UserError(f"{source} needs {str(e.name).partition('.')[0]}; pip install it, or give .jsonl") from None
    except Exception as e:  # of the table's library, the network or the disk
        raise UserError(f"{source} cannot be read as a table with text or messages ({first_line(e)})") from None
    return lines


def _rows(source: Path) -> Iterator[Mapping[str, Any]]:
    """Those of a .parquet file, or of the training split of ORG/NAME[@REVISION][:CONFIG] on the hub."""
    if source.suffix == ".parquet":
        for batch in import_module("pyarrow.parquet").ParquetFile(source).iter_batches(1024):
            yield from batch.to_pylist()
        return
    name, _, config = str(source).partition(":")
    repo, _, revision = name.partition("@")
    load = import_module("datasets").load_dataset
    yield from load(repo, config or None, split="train", revision=revision or None, streaming=True)


def _without_nulls(found: dict[str, Any]) -> dict[str, Any]:
    """A table has null where a row has no such key."""
    return {key: value for key, value in found.items() if value is not None}


def _cut(file: Path, size: int) -> Iterator[WorkItem]:
    step = ITEM_BYTES if file.suffix == ".jsonl" else max(size, 1)
    for start in range(0, size, step):
        yield WorkItem(file, start, min(start + step, size))


def encode_all(task: Task, items: Sequence[WorkItem], processes: int) -> Iterator[Encoded]:
    """Encode the work items. Yields each item's examples in order, for any number of processes."""
    encode = partial(encode_item, task, load_tokenizer(task.model))
    pool = ThreadPoolExecutor(processes)  # each thread waits for a process
    try:
        with tqdm(total=sum(item.stop - item.start for item in items), desc="tokenizing", unit="B", unit_scale=True) as bar:
            for item, encoded in zip(items, pool.map(encode, items), strict=True):
                yield encoded
                bar.update(item.stop - item.start)
    finally:
        pool.shutdown(cancel_futures=True)
