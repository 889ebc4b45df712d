"""Check that the figures in README.md and docs/ agree with the files that they come from.

python -m scripts.report.check_docs             # exits with 2 and prints a line for each figure without a source
python -m scripts.report.check_docs docs/x.md   # only that page

A section that states measured figures has an entry in docs/results/figures.txt:

    communication.md: The quantized all-reduce
    from h200-4-quantized.md h200-4/quantized.json
    stated 1.9: Li et al., table 3
    1.80 = 325.5 / 180.6

The first line names the page and the heading. `from` names tables or raw files in docs/results. Every number of the section
must meet one of three conditions: it is in one of these files, rounded as in the text; it is computed from such numbers (`=`);
or it is declared to come from elsewhere (`stated`). Numbers that describe a setting (batch sizes, bytes, tokens, ranks:
`SETTING`) need no source. A section with a measured unit (`MEASURED`) but no entry is an error, and so is an entry of which the
page says nothing.

Tables and plots in docs/results are compared with `made-from.json`, which the scripts that write them update
(`scripts/lib/results.py`). A table or plot that was changed by hand or is older than its raw files is an error. So is a table
to which docs/results.md has no link.
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
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
UNCHECKED = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|https?://\S+|^#[^\n]*$|arXiv:\S+", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"<!-- docs/results/\S+ -->.*?<!-- end -->", re.DOTALL)  # checked by scripts/report/quote_tables.py
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LONE_NUMBER = re.compile(rf"(?<![\w.:/-]){NUMBER}(?!\w|:\w|-\w)")
FIGURES = RESULTS / "figures.txt"
ARITHMETIC: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass
class Claims:
    """What an entry says of the numbers in its section."""

    values: list[float] = field(default_factory=list)  # all numbers in the files that `from` names
    derived: list[tuple[str, str]] = field(default_factory=list)  # number as written in the text, expression
    stated: set[str] = field(default_factory=set)


Entries = dict[tuple[str, str], Claims]  # by the names of page and section


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


def read_entries(path: Path) -> Entries:
    """The entries of a file like FIGURES, whose sources lie in the same folder. Raises UserError for a line that has no
    meaning."""
    entries: Entries = {}
    for block in path.read_text().split("\n\n"):
        head, *lines = block.strip().splitlines()
        page, _, section = head.partition(": ")
        if not page.endswith(".md") or not section or (page, section) in entries:
            raise UserError(f"{path.name}: an entry begins with {head!r}, which is no new PAGE.md: HEADING")
        entries[page, section] = parse(lines, path)
    return entries


def parse(lines: Sequence[str], path: Path) -> Claims:
    claims = Claims()
    for line in lines:
        if line.startswith("from "):
            for source in (path.parent / name for name in line.split()[1:]):
                if not source.is_file():
                    raise UserError(f"{path.name} names {source.relative_to(path.parent)}, which does not exist")
                claims.values += read_numbers(source)
        elif line.startswith("stated "):
            claims.stated |= set(re.findall(NUMBER, line.partition(":")[0]))
        elif match := re.fullmatch(rf"({NUMBER}) = (.+)", line):
            claims.derived.append((match[1], match[2]))
        else:
            raise UserError(f"{path.name} has the line {line!r}; say from FILE …, stated NUMBER: WHY or NUMBER = EXPRESSION")
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


def plain_text(text: str) -> str:
    """Markdown without code, links, comments and the numbers that describe a setting."""
    return SETTING.sub(" ", UNCHECKED.sub(" ", text))


def unbacked(text: str, claims: Claims) -> Iterator[str]:
    """The numbers of a section that have no source."""
    plain, derived = plain_text(text), {number for number, _ in claims.derived}
    for match in LONE_NUMBER.finditer(plain):
        percent = plain[match.end() :].lstrip()[:1] == "%"
        if match[0] not in derived and not is_known(match[0], claims, percent):
            yield match[0]


def is_known(number: str, claims: Claims, percent: bool = False) -> bool:
    """Whether a number is in the sources or stated. percent: the sources may have it as a share of 1."""
    return number in claims.stated or any(
        rounds_to(v, number) or (percent and rounds_to(100 * v, number)) for v in claims.values
    )


def wrong(text: str, claims: Claims) -> Iterator[str]:
    """What is wrong with the entry of a section: numbers that the section does not have, and expressions with another
    result."""
    percent = "%" in text
    written = {match[0] for match in LONE_NUMBER.finditer(plain_text(text))}
    used = written | {number for _, expression in claims.derived for number in re.findall(NUMBER, expression)}
    for number in sorted({number for number, _ in claims.derived} - written | claims.stated - used):
        yield f"{number}: {FIGURES.name} speaks of it, but the section has no such figure"
    for number, expression in claims.derived:
        try:
            value = evaluate(expression, lambda text: is_known(text, claims, percent))
        except UserError as e:
            yield f"{number}: {e}"
            continue
        if not rounds_to(value, number):
            yield f"{number}, but {expression} = {value:.6g}"


def sections(text: str) -> Iterator[tuple[int, str, str]]:
    """The first line's number, the heading and the text of each section. Quoted tables and code blocks are empty lines."""
    for hidden in (QUOTED, re.compile(r"```.*?```", re.DOTALL), re.compile(r"(?<=\n\n)(?: {4}.*\n|\n)+")):
        text = hidden.sub(lambda m: "\n" * m[0].count("\n"), text)
    places = [*HEADING.finditer(text)]
    for match, after in zip(places, [*(place.start() for place in places[1:]), len(text)], strict=True):
        yield text.count("\n", 0, match.start()) + 1, match[1], text[match.start() : after]


def check_page(page: Path, entries: Entries) -> list[str]:
    """An error line for each figure of one page that has no source, and for each claim that the page does not make."""
    found, text = list[str](), page.read_text()
    where = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
    parts = [*sections(text)]
    for line, heading, section in parts:
        claims = entries.get((page.name, heading))
        if claims is None:
            if figure := MEASURED.search(UNCHECKED.sub(" ", section)):
                found.append(f"{where}:{line}: {figure[0]!r} has no source: add an entry to {FIGURES.name}")
            continue
        found += [f"{where}:{line}: {problem}" for problem in (*unbacked(section, claims), *wrong(section, claims))]
    gone = {section for name, section in entries if name == page.name} - {heading for _, heading, _ in parts}
    return found + [f"{where}: has no section {section!r}, of which {FIGURES.name} speaks" for section in sorted(gone)]


def unlisted(page: Path, tables: Path) -> list[str]:
    """An error line for each table in the folder `tables` to which `page` has no link."""
    text = page.read_text()
    return [f"{page.name}: has no link to {path.name}" for path in sorted(tables.glob("*.md")) if f"/{path.name})" not in text]


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("pages", nargs="*", type=Path, help="default: README.md and docs/*.md, and all tables and plots")
    args = parser.parse_args()
    pages = args.pages or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    entries = read_entries(FIGURES)
    found = [problem for page in pages for problem in check_page(page, entries)]
    found += [] if args.pages else [*stale(RESULTS), *unlisted(ROOT / "docs" / "results.md", RESULTS)]
    if found:
        print("\n".join(found))
        raise UserError(f"{len(found)} lines above name what to mend in the documentation")


if __name__ == "__main__":
    run(main)
