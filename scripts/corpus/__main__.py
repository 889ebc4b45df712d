"""Print the synthetic corpus, or train its tokenizer."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cli import Parser, note, run
from errors import UserError
from scripts.corpus.documents import MIXTURE, Document, documents, render
from scripts.corpus.tokenizer import train_tokenizer


def parse_args() -> argparse.Namespace:
    parser = Parser(
        description=(
            "Write a synthetic English corpus: stories from a simulated world, questions about them, and exact tasks.\n"
            "The same flags always give the same text. The splits train and heldout never share a task.\n"
            "Their stories and questions never share a cast, but a requested story may have one of the other split."
        ),
        epilog=(
            "examples:\n"
            "  python -m scripts.corpus --documents 5                      five documents, as a model sees them\n"
            "  python -m scripts.corpus --kind arithmetic --split heldout --json\n"
            "  python -m scripts.corpus --tokenizer out/tokenizer          train the tokenizer and stop\n\n"
            "kinds and their shares:\n  " + ", ".join(f"{kind} {share:.0%}" for kind, share in MIXTURE.items())
        ),
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed of the whole corpus (default 1)")
    parser.add_argument("--documents", type=int, default=10, metavar="N", help="how many documents (default 10)")
    parser.add_argument("--start", type=int, default=0, metavar="I", help="number of the first document (default 0)")
    parser.add_argument("--split", default="train", help="train or heldout (default train)")
    parser.add_argument("--kind", help="write only this kind (default: all kinds, mixed)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: standard output)")
    parser.add_argument("--json", action="store_true", help="write one JSON object per line instead of the rendered text")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="train the tokenizer into this folder and stop")
    parser.add_argument("--vocab-size", type=int, default=1024, metavar="N", help="size of the vocabulary (default 1024)")
    parser.add_argument("--sample", type=int, default=20000, metavar="N",
                        help="documents to train the tokenizer on (default 20000)")  # fmt: skip
    return parser.parse_args()


def as_json(document: Document) -> str:
    fields: dict[str, Any] = {"kind": document.kind, "key": document.key}
    fields |= {"text": document.text} if document.text is not None else {"messages": document.messages}
    return json.dumps(fields, ensure_ascii=False)


def write(lines: Iterator[str], out: Path | None) -> None:
    """Write lines to a file or to standard output. Raises UserError if the file cannot be written."""
    if out is None:
        sys.stdout.writelines(line + "\n" for line in lines)
        return
    try:
        with out.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error


def main() -> None:
    args = parse_args()
    stream = documents(args.seed, args.documents, args.split, args.kind, args.start)
    if args.tokenizer:
        try:
            train_tokenizer(args.tokenizer, args.vocab_size, args.seed, args.sample)
        except OSError as error:
            raise UserError(f"cannot write {args.tokenizer}: {error.strerror}") from error
        note(f"wrote {args.tokenizer}: {args.vocab_size} tokens")
    else:
        write(map(as_json if args.json else render, stream), args.out)


if __name__ == "__main__":
    run(main)
