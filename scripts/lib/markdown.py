"""Tables in Markdown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

BYTES = ("B", "KiB", "MiB", "GiB")

# by title: a format such as "{ms:.2f}" of a row's fields, or what makes the cell
Columns = Mapping[str, str | Callable[[Any], object]]


def table(columns: Columns, rows: Iterable[Mapping[str, Any]], caption: str = "") -> str:
    """The text of a table with a line for each row, and a caption below if there is one."""
    cells = ([how.format_map(row) if isinstance(how, str) else how(row) for how in columns.values()] for row in rows)
    return captioned(list(columns), cells, caption) if caption else "\n".join([*table_lines(list(columns), cells), ""])


def table_lines(head: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a table. head: the titles of its columns. rows: the cells of each further line."""
    lines = [_line(head), "|" + "---|" * len(head)]
    return lines + [_line(row) for row in rows]


def captioned(head: Sequence[str], rows: Iterable[Iterable[object]], caption: str) -> str:
    """The text of a table, as of `table_lines`, with a caption below."""
    return "\n".join([*table_lines(head, rows), "", caption, ""])


def cell(value: float | None, form: str) -> str:
    """A figure that may be missing."""
    return "" if value is None else format(value, form)


def size_text(count: float) -> str:
    """A number of bytes in the largest unit that makes it at least 1: `64 KiB`, `1.5 MiB`."""
    unit = 0
    while count >= 1024 and unit < len(BYTES) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.4g} {BYTES[unit]}"


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
