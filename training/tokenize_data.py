"""Turn text or conversations into a token file for training.

    python -m training.tokenize_data --model DIR --out tokens.bin corpus.jsonl more.jsonl
    python -m training.tokenize_data --model DIR --out tokens.bin books/
    python -m training.tokenize_data --model DIR --out chat.bin --chat --sequence-length 2048 conversations.jsonl

DIR is the checkpoint that will be trained. Its tokenizer and chat template are used. Inputs are files, folders that are
searched for files, or a data set's name on the hub, ORG/NAME[@REVISION][:CONFIG], of which the split train is read:

    .jsonl    one JSON object per line: a document in "text"; with --chat, a conversation in "messages" with role and content
              (or in "conversations" with from and value), and optionally "tools"
    .txt      one document per file
    .parquet  such objects as rows; read with pyarrow, data sets of the hub with datasets, into a temporary file beside tokens.bin

Documents are stored one after the other, each with the tokens that begin and end a document. With --chat the loss counts only
the assistant's messages with their end-of-turn tokens, and whole conversations are packed into windows of --sequence-length
tokens. Attention crosses from one document or conversation of a window to the next.

The result is tokens.bin, its header tokens.json, with --chat also tokens.mask, and a copy of the tokenizer in
tokens.tokenizer/, which training copies to its result.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tqdm import tqdm

from checkpoints.export import copy_tokenizer
from checkpoints.hub import fetch_checkpoint
from cli import Parser, run
from errors import UserError
from files import writing
from text.tokenizer import Tokenizer
from text.tokenizer_files import load_tokenizer
from training.chat_data import packed
from training.encode import Encoded, Task, WorkItem, encode_all, work_items
from training.token_file import TokenWriter, open_tokens, tokenizer_fingerprint, tokenizer_folder


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


def write(path: Path, task: Task, items: Sequence[WorkItem], processes: int) -> Counts:
    """Tokenize documents, or conversations and pack them, into the token file `path`. Raises UserError."""
    tokenizer, counts = load_tokenizer(task.model), Counts()
    if not tokenizer.eos_ids:
        raise UserError(f"the tokenizer of {task.model} names no end token; add eos_token_id to its generation_config.json")
    window = task.window if task.chat else None
    with TokenWriter(path, tokenizer.vocab_size, tokenizer_fingerprint(task.model), task.chat, window) as writer:
        if task.chat:
            pack(writer, task, tokenizer, items, processes, counts)
        else:
            for encoded in encode_all(task, items, processes):
                writer.append(encoded.ids)
                counts.add(encoded)
            if not counts.examples:
                raise UserError("the inputs hold no document; name files with text")
        keep_tokenizer(task.model, path)  # before the token file has its header
    return counts


def pack(
    writer: TokenWriter, task: Task, tokenizer: Tokenizer, items: Sequence[WorkItem], processes: int, counts: Counts
) -> None:
    """Write conversations in windows. Unpacked, they are stored in a temporary file next to the token file."""
    lengths = []
    with writing(writer.path), TemporaryDirectory(dir=writer.path.parent) as folder:
        spool = Path(folder, "unpacked.bin")
        with TokenWriter(spool, tokenizer.vocab_size, writer.header.tokenizer, masked=True) as unpacked:
            for encoded in encode_all(task, items, processes):
                unpacked.append(encoded.ids, encoded.mask)
                lengths.append(encoded.lengths)
                counts.add(encoded)
        if not counts.examples:
            why = f"all {counts.skipped} are longer than --sequence-length" if counts.skipped else "the inputs are empty"
            raise UserError(f"there is no conversation to pack: {why}; see --too-long and --sequence-length in --help")
        examples = open_tokens(spool, tokenizer.vocab_size)
        windows = packed(examples, np.concatenate(lengths), task.window, tokenizer.eos_ids[0])
        for ids, mask in tqdm(windows, desc="packing", unit="window"):
            writer.append(ids, mask)
            counts.windows += 1


def keep_tokenizer(model: Path, path: Path) -> None:
    """Copy the tokenizer beside the token file `path`. Raises UserError."""
    folder = tokenizer_folder(path)
    with writing(folder):
        folder.mkdir(exist_ok=True)
        copy_tokenizer(model, folder)


# --- command line --------------------------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("inputs", nargs="+", type=Path, metavar="FILE|FOLDER|ORG/NAME", help="texts or conversations")
    parser.add_argument("--model", type=Path, required=True, metavar="ORG/NAME|DIR", help="checkpoint whose tokenizer is used")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.bin", help="token file to write")
    parser.add_argument("--force", action="store_true", help="overwrite FILE.bin")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="number of processes (default: one per core)"
    )
    chat = parser.add_argument_group("conversations")
    chat.add_argument(
        "--chat", action="store_true", help="inputs are conversations; the loss counts only the assistant's messages"
    )
    chat.add_argument(
        "--sequence-length",
        type=int,
        metavar="TOKENS",
        help="--sequence-length of the training that follows; required by --chat",
    )
    chat.add_argument("--last-answer", action="store_true", help="the loss counts only the last answer of each conversation")
    chat.add_argument(
        "--too-long", choices=("skip", "truncate"), default="skip", help="what to do with longer conversations (default: skip)"
    )
    args = parser.parse_args(argv)
    if args.chat != (args.sequence_length is not None):
        raise UserError("--chat and --sequence-length go together: conversations are packed for one length, text is for any")
    for name in ("sequence_length", "processes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    fetch_checkpoint(args)
    if args.out.exists() and not args.force:
        raise UserError(f"--out {args.out} exists; name another file, or overwrite it with --force")
    if not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {args.out.parent}; create it or name another")
    return args


def main() -> None:
    args = parse_args()
    # a window is one token longer than the model's input: its last token is only a target
    task = Task(args.model, args.chat, (args.sequence_length or 0) + 1, args.last_answer, args.too_long == "truncate")
    with TemporaryDirectory(dir=args.out.parent) as spool:
        counts = write(args.out, task, work_items(args.inputs, args.chat, Path(spool)), args.processes)
    print(f"{args.out}: {counts.tokens:,} tokens of {counts.examples:,} {'conversations' if args.chat else 'documents'}")
    if args.chat:
        room = counts.windows * task.window
        print(f"{counts.supervised:,} of them count; {counts.windows:,} windows, {1 - counts.tokens / room:.1%} padding")
    if args.chat and counts.skipped + counts.truncated:
        print(f"longer than {task.window} tokens: {counts.skipped:,} left out, {counts.truncated:,} truncated")


if __name__ == "__main__":
    run(main)
