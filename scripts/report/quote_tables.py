"""Copy the tables of docs/results into README.md and docs/, between `<!-- docs/results/X.md -->` and `<!-- end -->`.

python -m scripts.report.quote_tables            # rewrite the pages
python -m scripts.report.quote_tables --check    # exit with 2 if a page is out of date
"""

import re

from cli import Parser, run
from errors import UserError
from scripts.lib.results import ROOT


def filled(text: str, page: str) -> str:
    """`text` with every marked place replaced by the content of its file. Raises UserError for a missing file."""

    def content(match: re.Match[str]) -> str:
        path = ROOT / match[1]
        if not path.exists():
            raise UserError(f"{page} quotes {match[1]}, which does not exist; run the make target that writes it")
        return f"<!-- {match[1]} -->\n{path.read_text().strip()}\n<!-- end -->"

    return re.sub(r"<!-- (docs/results/\S+\.md) -->.*?<!-- end -->", content, text, flags=re.DOTALL)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    args = parser.parse_args()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text()
        new = filled(text, page.name)
        if args.check and new != text:
            raise UserError(f"{page.relative_to(ROOT)} quotes outdated results; run make quote-tables")
        if new != text:
            page.write_text(new)


if __name__ == "__main__":
    run(main)
