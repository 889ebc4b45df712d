"""Tables in Markdown."""

import math
from collections.abc import Iterable, Sequence


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


def pair(value: float, error: float, form: str = "{:.1f}") -> str:
    """A value and its standard error, which one seed does not have."""
    return form.format(value) + ("" if math.isnan(error) else f" ± {form.replace('+', '').format(error)}")


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
