"""The plots of the synthetic corpus, as plots.toml has them and explains them."""

import tomllib
from pathlib import Path
from typing import Any

PARAGRAPH = None
Plot = tuple[Any, ...]  # of steps: (action, sentences), PARAGRAPH, or a list of plots, one of which is chosen

_DATA: dict[str, dict[str, list[Any]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _plot(steps: list[Any]) -> Plot:
    return tuple(expanded for step in steps for expanded in _expanded(step))


def _expanded(step: Any) -> Plot:
    """The steps that an entry of plots.toml stands for."""
    match step:
        case "paragraph":
            return (PARAGRAPH,)
        case str():
            return _plot(_DATA["parts"][step])
        case {"one_of": plots}:
            return ([_plot(plot) for plot in plots],)
        case {"moral": sentences}:
            return _plot(["paragraph", "ending", ["?say nobody", *sentences]])
        case [action, *sentences]:
            return ((action, tuple(sentences)),)
        case _:
            raise ValueError(f"plots.toml has the step {step!r}")


PLOTS = tuple(map(_plot, _DATA["plots"].values()))
ITEM_PLOTS = PLOTS[:-1]  # all but the harvest, which has no item
