"""A grid of settings, each of which is measured once. Rows are kept as lines of JSON as soon as they are measured, so that the same
command goes on where it stopped."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cli import note
from files import writing
from scripts.lib.results import check_output

Row = dict[str, Any]


class Experiment:
    """The rows of a file. A row has its `setting` and what was found, and `about`: what all figures depend on, such as the machine and
    the code. Rows with another `about` stay in the file and do not count."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Raises UserError if the file cannot be written."""
        self.path, self.about = check_output(path), about
        self._rows = {_key(row["setting"], row["about"]): row for row in map(json.loads, whole_lines(path))}

    def row(self, setting: Mapping[str, Any]) -> Row | None:
        """The last row of a setting, None if it has not been measured."""
        return self._rows.get(_key(setting, self.about))

    def add(self, setting: Mapping[str, Any], found: Mapping[str, Any]) -> Row:
        """Keep what was found. Raises UserError."""
        row = {"setting": dict(setting), "about": dict(self.about), **found}
        with writing(self.path), self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._rows[_key(setting, self.about)] = row
        return row

    def measure(
        self, settings: Sequence[Mapping[str, Any]], measure: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    ) -> Iterable[Row]:
        """The rows of all settings in their order. Those that the file does not have are measured."""
        missing = [setting for setting in settings if self.row(setting) is None]
        if len(missing) < len(settings):
            note(f"{len(settings) - len(missing)} of {len(settings)} rows are in {self.path}")
        for setting in settings:
            yield self.row(setting) or self.add(setting, measure(setting))


def whole_lines(path: Path) -> list[str]:
    """The lines of a file of rows, none if there is no file. An incomplete last line, left by a killed run, is removed from it."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return whole.splitlines()


def _key(setting: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    return json.dumps([setting, about], sort_keys=True)
