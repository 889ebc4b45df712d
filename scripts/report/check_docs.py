"""Check that the figures in README.md and docs/ agree with the files that they come from.

python -m scripts.report.check_docs             # exits with 2 and prints a line for each figure without a source
python -m scripts.report.check_docs docs/x.md   # only that page

A paragraph, list or table that states measured figures has a comment below it, which is not visible on the rendered page:

    64 MiB take NCCL 326 µs and `int8` 181, 1.80 times as fast; the paper says 1.9.
    <!-- figures
    from results/h200-4-quantized.md
    1.80 = 325.5 / 180.6
    stated 1.9: Li et al., table 3
    -->

`from` names tables or raw files, relative to the page or to the root. Every number of the text must meet one of three conditions:
it is in one of these files, rounded as in the text; it is computed from such numbers (`=`); or it is declared to come from
elsewhere (`stated`). Numbers that describe a setting (batch sizes, bytes, tokens, ranks: `SETTING`) need no source. A paragraph
with a measured unit (`MEASURED`) but no such comment is an error.

Tables and plots in docs/results are compared with `made-from.json`, which the scripts that write them update
(`scripts/lib/results.py`). A table or plot that was changed by hand or is older than its raw files is an error. So is a table to
which docs/results.md has no link, and more words or bytes than MOST allows.
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cli import Parser, run
from errors import UserError
from scripts.lib.results import RESULTS, ROOT, stale

NUMBER = r"\d(?:[\d,]*\d)?(?:\.\d+)?"
MEASURED = re.compile(rf"{NUMBER}\s?(?:µs|ms|%|[KMGT]B/s|TFLOP/s|tokens/s|times as|tokens a (?:GPU|second))")
SETTING = re.compile(
    rf"(?:\b(?:batch(?: size)?|tp|tables?|figures?|sections?|seed|steps? of|version|torch|CUDA|Llama|port|buckets?)\s{NUMBER}"
    rf"(?:(?:,| to| and| or) {NUMBER})*"
    rf"|{NUMBER}(?:(?:,| to| and| or| [x+]) {NUMBER})*(?: x|-|\s)?(?:[KMG]i?B\b(?!/s)|[BMK]\b|bits?\b|bytes?\b|tokens?\b(?! a| per)|rows?\b|ranks?\b|GPUs?\b|H[12]00s?\b|A800s?\b"
    r"|layers?\b|prompts?\b|sequences?\b|heads?\b|hosts?\b|nodes?\b|cores?\b|windows?\b|streams?\b|values?\b|micro-batch(?:es)?\b|requests?\b"
    r"|arrivals?\b|replays?\b|features?\b|steps?\b|runs?\b|items?\b|launches\b|chunks?\b|programs?\b|graphs?\b|models?\b|seeds?\b))"
)
UNCHECKED = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|https?://\S+|^#.*$|arXiv:\S+", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"<!-- docs/results/\S+ -->.*?<!-- end -->", re.DOTALL)  # checked by scripts/report/quote_tables.py
COMMENT = re.compile(r"<!-- figures\n(.*?)-->", re.DOTALL)
LONE_NUMBER = re.compile(rf"(?<![\w.:/-]){NUMBER}(?!\w|:\w|-\w)")
MOST = {  # budgets, which only fall: say in a page what its reader decides by, and keep the raw files that pages quote
    "words of README.md and docs": 31_000,  # tables included, comments not
    "bytes of docs/results": 6_000_000,
    "bytes of README.md": 8_000,
    "lines of README.md": 110,
}
ARITHMETIC: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass
class Claims:
    """The contents of one comment, which describe the paragraph above it."""

    values: list[float] = field(default_factory=list)  # all numbers in the files that `from` names
    derived: dict[str, str] = field(default_factory=dict)  # number as written in the text: expression
    stated: set[str] = field(default_factory=set)


def numbers_in(value: Any) -> Iterator[float]:
    """All numbers of a JSON value, and the median of each list of numbers."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, dict):
        for one in value.values():
            yield from numbers_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from numbers_in(one)
        if value and all(isinstance(one, float) for one in value):
            yield median(value)


def read_numbers(path: Path) -> list[float]:
    text = path.read_text()
    if path.suffix == ".json":
        return list(numbers_in(json.loads(text)))
    if path.suffix == ".jsonl":
        return [number for line in text.splitlines() for number in numbers_in(json.loads(line))]
    return [_float(one) for one in re.findall(NUMBER, text)]


def _float(text: str) -> float:
    return float(text.replace(",", ""))


def rounds_to(value: float, text: str) -> bool:
    """Whether `text` equals `value` rounded to the number of decimals that `text` has."""
    decimals = len(text.partition(".")[2])
    return abs(value - _float(text)) <= 0.5 * 10**-decimals * (1 + 1e-9)


def parse(comment: str, page: Path) -> Claims:
    claims = Claims()
    for line in filter(None, map(str.strip, comment.splitlines())):
        if line.startswith("from "):
            for name in line.split()[1:]:
                path = next((p for p in (page.parent / name, ROOT / name) if p.is_file()), None)
                if path is None:
                    raise UserError(f"{page.name}: a comment names {name}, which does not exist")
                claims.values += read_numbers(path)
        elif line.startswith("stated "):
            claims.stated |= set(re.findall(NUMBER, line.partition(":")[0]))
        elif match := re.fullmatch(rf"({NUMBER}) = (.+)", line):
            claims.derived[match[1]] = match[2]
        else:
            raise UserError(
                f"{page.name}: a comment has the line {line!r}; say from FILE …, NUMBER = EXPRESSION or stated NUMBER: WHY"
            )
    return claims


def evaluate(expression: str, known: Callable[[str], bool]) -> float:
    """The value of an expression of + - * / and known numbers. Raises UserError for an unknown number or another operation."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            return ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            text = ast.get_source_segment(expression, node) or ""
            if node.value in (1, 100, 1000) or known(text):
                return float(node.value)
            raise UserError(f"{text} in {expression!r} stands in none of the named files")
        raise UserError(f"{expression!r} is more than sums and products of numbers")

    return value(ast.parse(expression, mode="eval").body)


def unbacked(text: str, claims: Claims) -> Iterator[str]:
    """The numbers of a paragraph that have no source, and other errors in its comment."""
    plain = SETTING.sub(" ", UNCHECKED.sub(" ", text))
    written = {match[0] for match in LONE_NUMBER.finditer(plain)} | set(re.findall(NUMBER, " ".join(claims.derived.values())))
    for number in (claims.derived.keys() | claims.stated) - written:
        yield f"{number}: the comment speaks of it, but the text has no such figure"
    for match in LONE_NUMBER.finditer(plain):
        number = match[0]
        percent = plain[match.end() :].lstrip()[:1] == "%"

        def known(text: str, percent: bool = percent) -> bool:
            return text in claims.stated or any(
                rounds_to(v, text) or (percent and rounds_to(100 * v, text)) for v in claims.values
            )

        if number in claims.derived:
            try:
                value = evaluate(claims.derived[number], known)
            except UserError as e:
                yield f"{number}: {e}"
                continue
            if not rounds_to(value, number):
                yield f"{number}, but {claims.derived[number]} = {value:.6g}"
        elif not known(number):
            yield number


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The first line's number and the text of each paragraph, including the comment that follows it."""
    masked = QUOTED.sub(lambda m: "\n" * m[0].count("\n"), text)
    masked = re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), masked, flags=re.DOTALL)
    for match in re.finditer(r"(?:^(?!\s*$).*\n?)+", masked, re.MULTILINE):
        yield masked.count("\n", 0, match.start()) + 1, match[0]


def check_page(page: Path) -> list[str]:
    """An error line for each figure of one page that has no source."""
    found = []
    for line, block in blocks(page.read_text()):
        where = f"{page.relative_to(ROOT) if page.is_relative_to(ROOT) else page}:{line}"
        if match := COMMENT.search(block):
            found += [f"{where}: {problem}" for problem in unbacked(block, parse(match[1], page))]
        elif not block.startswith("    ") and (figure := MEASURED.search(UNCHECKED.sub(" ", block))):
            found.append(f"{where}: {figure[0]!r} has no source: add a comment `<!-- figures`")
    return found


def unlisted(page: Path, tables: Path) -> list[str]:
    """An error line for each table in the folder `tables` to which `page` has no link."""
    text = page.read_text()
    return [f"{page.name}: has no link to {path.name}" for path in sorted(tables.glob("*.md")) if f"/{path.name})" not in text]


def over_budget(root: Path) -> list[str]:
    """An error line for each figure of MOST that the repository in `root` exceeds."""
    readme, results = root / "README.md", root / "docs" / "results"
    pages = [re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL) for page in (readme, *(root / "docs").glob("*.md"))]
    found = {
        "words of README.md and docs": sum(len(page.split()) for page in pages),
        "bytes of docs/results": sum(path.stat().st_size for path in results.rglob("*") if path.is_file()),
        "bytes of README.md": readme.stat().st_size,
        "lines of README.md": len(readme.read_text().splitlines()),
    }
    return [f"{found[what]:,} {what}, but at most {most:,} are allowed" for what, most in MOST.items() if found[what] > most]


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("pages", nargs="*", type=Path, help="default: README.md and docs/*.md, and all tables and plots")
    args = parser.parse_args()
    pages = args.pages or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [problem for page in pages for problem in check_page(page)]
    found += [] if args.pages else [*stale(RESULTS), *unlisted(ROOT / "docs" / "results.md", RESULTS), *over_budget(ROOT)]
    if found:
        print("\n".join(found))
        raise UserError(f"{len(found)} figures of the documentation are not what their files say")


if __name__ == "__main__":
    run(main)
