"""Copy the tables of docs/results into README.md, between `<!-- docs/results/X.md -->` and `<!-- end -->`.

python scripts/readme.py            # rewrite the README
python scripts/readme.py --check    # exit with 2 if that would change it
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli import Parser, run
from errors import UserError
from scripts.results import ROOT


def filled(text: str) -> str:
    """`text` with every marked place replaced by its file's content. Raises UserError for a file that is not there."""

    def content(match: re.Match[str]) -> str:
        path = ROOT / match[1]
        if not path.exists():
            raise UserError(f"README.md quotes {match[1]}, which does not exist; run the make target that writes it")
        return f"<!-- {match[1]} -->\n{path.read_text().strip()}\n<!-- end -->"

    return re.sub(r"<!-- (docs/results/\S+\.md) -->.*?<!-- end -->", content, text, flags=re.DOTALL)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the README is out of date")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    if args.check and filled(text) != text:
        raise UserError("README.md quotes outdated results; run make readme")
    readme.write_text(filled(text))


if __name__ == "__main__":
    run(main)
