"""The files of results: where they are written, whether they can be, and what tables and plots were made from."""

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cli import note
from files import check_folder, writing

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
MADE_FROM = "made-from.json"  # in RESULTS: for each table and plot, its digest and those of the raw files it was made from
OUT = ROOT / "out"


def write_table(name: str, content: Any, table: str, folder: Path) -> Path:
    """Write NAME.json, and NAME.md, which was made from it, into `folder`, and say so. Returns the path of the JSON. Raises UserError."""
    raw = folder / f"{name}.json"
    write_text(raw, json.dumps(content, indent=1) + "\n")
    write_text(raw.with_suffix(".md"), table, raw)
    note(f"wrote {raw} and .md")
    return raw


def made(path: Path, *raw: Path) -> None:
    """Record in MADE_FROM that the table or plot at `path` was made from the files `raw`. Does nothing outside docs/results."""
    if not path.is_relative_to(RESULTS):
        return
    notes = RESULTS / MADE_FROM
    known = json.loads(notes.read_text()) if notes.exists() else {}
    sources = {str(one.relative_to(RESULTS)): _digest(one) for one in raw}
    known[str(path.relative_to(RESULTS))] = {"digest": _digest(path), "from": sources}
    notes.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def stale(folder: Path) -> Iterable[str]:
    """An error line for each table and plot of `folder` that does not match its raw files.

    It does not match if it or a raw file changed after `made` was called, or if `made` was never called for it.
    """
    known = json.loads((folder / MADE_FROM).read_text())
    shown = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix in (".md", ".png", ".svg")}
    for name in sorted(shown | known.keys()):
        if name not in known:
            yield f"{name}: nothing says what it was made from"
        elif not (folder / name).exists():
            yield f"{name}: {MADE_FROM} names it, but it is gone"
        elif _digest(folder / name) != known[name]["digest"]:
            yield f"{name}: was changed by hand, or its writer did not note it"
        else:
            for raw, digest in known[name]["from"].items():
                if not (folder / raw).exists() or _digest(folder / raw) != digest:
                    yield f"{name}: older than {raw}; run the make target that writes it"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# --- outputs: checked at the start, because a measurement may take hours --------------------------------------------------


def add_write_option(parser: argparse.ArgumentParser) -> None:
    """Add --write. Without it no script changes the tracked files of docs/results."""
    parser.add_argument("--write", action="store_true", help="write into docs/results, whose files are tracked (default: out)")


def results_folder(args: argparse.Namespace) -> Path:
    """The output folder of a command with `add_write_option`. Raises UserError if it cannot be written to."""
    return check_folder(RESULTS if args.write else OUT)


def check_output(path: Path) -> Path:
    """Create the folder of `path` if it is missing and return `path`. Raises UserError if `path` cannot be written."""
    with writing(path):
        if path.exists() and not path.is_file() and not path.is_dir():  # a device or a pipe
            path.write_text("\n")
            return path
        check_folder(path.parent)
        new = not path.exists()
        with path.open("a"):
            pass
        if new:
            path.unlink()
    return path


def write_text(path: Path, text: str, *raw: Path) -> None:
    """Write a result, and record the files `raw` that it was made from. Raises UserError if it cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if raw:
        made(path, *raw)
