"""Turn text or conversations into a token file for training.

    python -m training.tokenize_data --model DIR --out tokens.bin corpus.jsonl more.jsonl
    python -m training.tokenize_data --model DIR --out tokens.bin books/
    python -m training.tokenize_data --model DIR --out chat.bin --chat --sequence-length 2048 conversations.jsonl

DIR is the checkpoint that will be trained. Its tokenizer and chat template are used. Inputs are files, or folders that are
searched for files:

    .jsonl    one JSON object per line: a document in "text"; with --chat, a conversation in "messages" with role and content
              (or in "conversations" with from and value), and optionally "tools"
    .txt      one document per file

Documents are stored one after the other, each with the tokens that begin and end a document. With --chat the loss counts only
the assistant's messages with their end-of-turn tokens, and whole conversations are packed into windows of --sequence-length
tokens. Attention crosses from one document or conversation of a window to the next.

The result is tokens.bin, its header tokens.json, with --chat also tokens.mask, and a copy of the tokenizer in
tokens.tokenizer/, which training copies to its result.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cli import Parser, run
from errors import UserError
from tokenizer import Tokenizer, load_tokenizer
from training.chat_data import encode_example, packed, read_messages
from training.export import copy_tokenizer
from training.token_file import TokenWriter, open_tokens, tokenizer_folder

PIECE_BYTES = 1 << 20  # of input in one work item
SUFFIXES = (".jsonl", ".txt")


# --- the work of one process ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """The settings of the encoding."""

    model: Path
    chat: bool
    window: int = 0  # with --chat: the most tokens that an example may have
    last_answer: bool = False
    truncate: bool = False  # truncate examples that are longer than a window; otherwise they are left out


@dataclass(frozen=True)
class Piece:
    """Bytes start … stop - 1 of a file. For JSON lines: the lines that begin there."""

    path: Path
    start: int
    stop: int


@dataclass
class Encoded:
    """The examples of a piece, one after the other."""

    ids: np.ndarray  # uint32
    mask: np.ndarray  # uint8
    lengths: np.ndarray  # int64, of the examples
    truncated: int = 0
    skipped: int = 0


class Encoder:
    """Encodes pieces; each process has one."""

    def __init__(self, task: Task) -> None:
        self.task, self.tokenizer = task, load_tokenizer(task.model)

    def encode(self, piece: Piece) -> Encoded:
        """Encode a piece. Raises UserError that names file and line."""
        ids: list[int] = []
        mask: list[int] = []
        lengths: list[int] = []
        truncated = skipped = 0
        for offset, text in _documents(piece):
            try:
                example_ids, example_mask = self._example(text, piece.path.suffix == ".txt")
            except UserError as e:
                raise UserError(f"{_where(piece.path, offset)}: {e}") from None
            if self.task.chat and len(example_ids) > self.task.window:
                example_ids, example_mask = example_ids[: self.task.window], example_mask[: self.task.window]
                if not self.task.truncate or not any(example_mask):
                    skipped += 1
                    continue
                truncated += 1
            ids += example_ids
            mask += example_mask
            lengths.append(len(example_ids))
        arrays = np.array(ids, np.uint32), np.array(mask, np.uint8), np.array(lengths, np.int64)
        return Encoded(*arrays, truncated, skipped)

    def _example(self, text: bytes, is_document: bool) -> tuple[list[int], list[int]]:
        decoded = _decode(text)
        if is_document:
            return self._document(decoded), []
        record = _record(decoded)
        if self.task.chat:
            example = encode_example(self.tokenizer, read_messages(record), _tools(record), self.task.last_answer)
            return example.ids, example.mask
        if not isinstance(record.get("text"), str):
            raise UserError('there is no "text"; for conversations ("messages") add --chat')
        return self._document(record["text"]), []

    def _document(self, text: str) -> list[int]:
        if not text.strip():
            raise UserError("the document is empty; leave it out")
        end = self.tokenizer.eos_ids[0]
        ids = self.tokenizer.encode(text, parse_special=False)
        return ids if ids[-1] == end else [*ids, end]


def _documents(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each document or line; blank lines are left out."""
    try:
        with piece.path.open("rb") as file:
            if piece.path.suffix == ".txt":
                yield 0, file.read()
                return
            file.seek(max(0, piece.start - 1))
            if piece.start:
                file.readline()  # the rest of a line that began in the previous piece, or only that line's end
            while (offset := file.tell()) < piece.stop and (line := file.readline()):
                if line.strip():
                    yield offset, line
    except OSError as e:
        raise UserError(f"{piece.path} cannot be read ({e.strerror}); check the path and its permissions") from None


def _where(path: Path, offset: int) -> str:
    """The file, and the number of the line that begins at `offset`, for an error message."""
    if path.suffix == ".txt":
        return str(path)
    line = 1
    with path.open("rb") as file:
        while offset and (block := file.read(min(offset, PIECE_BYTES))):
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


# --- many processes ------------------------------------------------------------------------------------------------------

_encoder: Encoder  # of this process


def _start_process(task: Task) -> None:
    global _encoder
    _encoder = Encoder(task)


def _encode_piece(piece: Piece) -> Encoded:
    return _encoder.encode(piece)


def find_pieces(inputs: Sequence[Path], chat: bool) -> list[Piece]:
    """The work items of the inputs, in the order of the output. Raises UserError if an input is missing or has an unknown
    suffix."""
    files: list[Path] = []
    for path in inputs:
        found = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
        if not found:
            raise UserError(f"{path} is no file and no folder with {' or '.join(SUFFIXES)} files; name the data to tokenize")
        files += found
    for file in files:
        if file.suffix not in SUFFIXES or (chat and file.suffix != ".jsonl"):
            wanted = ".jsonl" if chat else " or ".join(SUFFIXES)
            raise UserError(f"{file} is of no kind that is read here; give {wanted} files")
    return [piece for file in files for piece in _cut(file, file.stat().st_size)]


def _cut(file: Path, size: int) -> Iterator[Piece]:
    step = PIECE_BYTES if file.suffix == ".jsonl" else max(size, 1)
    for start in range(0, size, step):
        yield Piece(file, start, min(start + step, size))


def encode_all(task: Task, pieces: Sequence[Piece], processes: int) -> Iterator[Encoded]:
    """Encode the pieces. Yields each piece's examples in order, for any number of processes."""
    total = sum(piece.stop - piece.start for piece in pieces)
    with _results(task, pieces, processes) as results, tqdm(total=total, desc="tokenizing", unit="B", unit_scale=True) as bar:
        for piece, encoded in zip(pieces, results, strict=True):
            yield encoded
            bar.update(piece.stop - piece.start)


@contextmanager
def _results(task: Task, pieces: Sequence[Piece], processes: int) -> Iterator[Iterator[Encoded]]:
    if processes == 1 or len(pieces) == 1:
        yield map(Encoder(task).encode, pieces)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(processes, len(pieces)), _start_process, (task,)) as pool:
        yield pool.imap(_encode_piece, pieces)


# --- the token file ------------------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What was made of the inputs."""

    examples: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    skipped: int = 0
    windows: int = 0

    def add(self, encoded: Encoded) -> None:
        self.examples += len(encoded.lengths)
        self.tokens += len(encoded.ids)
        self.supervised += int(encoded.mask.sum())
        self.truncated += encoded.truncated
        self.skipped += encoded.skipped


def write_text(path: Path, task: Task, pieces: Sequence[Piece], processes: int) -> Counts:
    """Tokenize documents into the token file `path`."""
    tokenizer, counts = load_tokenizer(task.model), Counts()
    _require_end(tokenizer, task.model)
    with TokenWriter(path, tokenizer.vocab_size, fingerprint(task.model)) as writer:
        for encoded in encode_all(task, pieces, processes):
            writer.append(encoded.ids)
            counts.add(encoded)
        if not counts.examples:
            raise UserError("the inputs hold no document; name files with text")
    return counts


def write_chat(path: Path, task: Task, pieces: Sequence[Piece], processes: int) -> Counts:
    """Tokenize conversations and pack them into the token file `path`. Unpacked, they are stored in a temporary file next
    to it."""
    tokenizer, counts = load_tokenizer(task.model), Counts()
    _require_end(tokenizer, task.model)
    spool, lengths = path.with_suffix(".unpacked.bin"), []
    try:
        with TokenWriter(spool, tokenizer.vocab_size, fingerprint(task.model), masked=True) as writer:
            for encoded in encode_all(task, pieces, processes):
                writer.append(encoded.ids, encoded.mask)
                lengths.append(encoded.lengths)
                counts.add(encoded)
        if not counts.examples:
            why = f"all {counts.skipped} are longer than --sequence-length" if counts.skipped else "the inputs are empty"
            raise UserError(f"there is no conversation to pack: {why}; see --too-long and --sequence-length in --help")
        examples = open_tokens(spool, tokenizer.vocab_size)
        windows = packed(examples, np.concatenate(lengths), task.window, tokenizer.eos_ids[0])
        arguments = (path, tokenizer.vocab_size, fingerprint(task.model))
        with TokenWriter(*arguments, masked=True, window=task.window) as writer:
            for ids, mask in tqdm(windows, desc="packing", unit="window"):
                writer.append(ids, mask)
                counts.windows += 1
    finally:
        for suffix in (".bin", ".mask", ".json"):
            spool.with_suffix(suffix).unlink(missing_ok=True)
    return counts


def _require_end(tokenizer: Tokenizer, model: Path) -> None:
    if not tokenizer.eos_ids:
        raise UserError(f"the tokenizer of {model} names no end token; add eos_token_id to its generation_config.json")


def fingerprint(model: Path) -> str:
    """A hash of the tokenizer's file in a checkpoint directory."""
    name = "tokenizer.json" if (model / "tokenizer.json").is_file() else "tokenizer.model"
    return hashlib.sha256((model / name).read_bytes()).hexdigest()[:16]


# --- command line --------------------------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m training.tokenize_data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="+", type=Path, metavar="FILE|FOLDER", help="the data")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="checkpoint whose tokenizer is used")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.bin", help="token file to write")
    parser.add_argument("--force", action="store_true", help="overwrite FILE.bin")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="default: one a core")
    chat = parser.add_argument_group("conversations")
    chat.add_argument("--chat", action="store_true", help="inputs are conversations; count only what the assistant says")
    chat.add_argument("--sequence-length", type=int, metavar="TOKENS", help="of the training that follows; required by --chat")
    chat.add_argument("--last-answer", action="store_true", help="count only the last answer of each conversation")
    chat.add_argument(
        "--too-long", choices=("skip", "truncate"), default="skip", help="what to do with longer conversations (default: skip)"
    )
    args = parser.parse_args(argv)
    if args.chat != (args.sequence_length is not None):
        raise UserError("--chat and --sequence-length go together: conversations are packed for one length, text is for any")
    for name in ("sequence_length", "processes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if not args.model.is_dir():
        raise UserError(f"--model {args.model} is no directory; name the checkpoint that will be trained")
    if args.out.exists() and not args.force:
        raise UserError(f"--out {args.out} exists; name another file, or overwrite it with --force")
    if not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {args.out.parent}; create it or name another")
    return args


def main() -> None:
    args = parse_args()
    # a window is one token longer than the model's input: its last token is only a target
    task = Task(args.model, args.chat, (args.sequence_length or 0) + 1, args.last_answer, args.too_long == "truncate")
    pieces = find_pieces(args.inputs, args.chat)
    counts = (write_chat if args.chat else write_text)(args.out, task, pieces, args.processes)
    tokenizer_folder(args.out).mkdir(exist_ok=True)
    copy_tokenizer(args.model, tokenizer_folder(args.out))
    print(f"{args.out}: {counts.tokens:,} tokens of {counts.examples:,} {'conversations' if args.chat else 'documents'}")
    if args.chat:
        room = counts.windows * task.window
        print(f"{counts.supervised:,} of them count; {counts.windows:,} windows, {1 - counts.tokens / room:.1%} padding")
    if args.chat and counts.skipped + counts.truncated:
        print(f"longer than {task.window} tokens: {counts.skipped:,} left out, {counts.truncated:,} truncated")


if __name__ == "__main__":
    run(main)
