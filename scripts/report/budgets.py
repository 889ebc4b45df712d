"""How large the parts of the repository may be, so that it can be read in an afternoon. `make lint` refuses more.

A budget only falls: whoever makes a part smaller lowers it to the new size, rounded up. Where a change needs more, take what
the part no longer needs out of it.
"""

from collections.abc import Iterable
from pathlib import Path

INFERENCE = ("checkpoints", "comms", "engine", "kernels", "layers", "quantized", "ranks", "server", "text")  # and the root
LINES = {  # of Python, by package
    "server": 12_415,
    "engine": 10_066,
    "kernels": 10_059,
    "comms": 3_732,
    "training": 5_868,
    "scripts": 10_125,
    "tests": 57_388,
}
INFERENCE_LINES = 46_470
ROOT_FILES = 9
ENTERED_FILES = 52  # by a streamed chat request; tests/server/test_files_entered.py counts them
PAGES_WORDS = 27_000  # README.md and docs, tables included: say in a page what its reader decides by
RESULTS_BYTES = 4_000_000  # the raw files that pages quote; older ones stay in the history
README_BYTES, README_LINES = 8_000, 110


def over_budget(root: Path) -> list[str]:
    """An error line for each part of the repository in `root` that is larger than its budget."""
    readme, results = root / "README.md", (root / "docs" / "results").rglob("*")
    package = {name: lines_of((root / name).rglob("*.py")) for name in {*INFERENCE, *LINES}}
    own = sorted(root.glob("*.py"))
    sizes = {f"lines of {name}/": (package[name], most) for name, most in LINES.items()}
    sizes |= {
        "lines of inference": (lines_of(own) + sum(package[name] for name in INFERENCE), INFERENCE_LINES),
        "Python files in the root": (len(own), ROOT_FILES),
        "words of README.md and docs": (sum(map(words_of, [readme, *(root / "docs").glob("*.md")])), PAGES_WORDS),
        "bytes of docs/results": (sum(path.stat().st_size for path in results if path.is_file()), RESULTS_BYTES),
        "bytes of README.md": (readme.stat().st_size, README_BYTES),
        "lines of README.md": (lines_of([readme]), README_LINES),
    }
    return [f"{size:,} {what}, but at most {most:,} are allowed" for what, (size, most) in sizes.items() if size > most]


def lines_of(paths: Iterable[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def words_of(page: Path) -> int:
    return len(page.read_text().split())
