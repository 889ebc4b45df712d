"""Style of all figures: a colour for each communicator, axes that are legible at 500 pixels, sizes in KiB and MiB.

The colours are Okabe and Ito's (Color Universal Design, 2008) and Tol's wine, which colour-blind readers can tell apart.
The yellow is darkened, so that its lines are visible on white. The grey is light, because some readers confuse a darker
grey with the purple.
"""

from typing import Any

from errors import UserError

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#e69f00", "#56b4e9", "#009e73", "#d9cb00", "#0072b2", "#d55e00", "#cc79a7"
)  # fmt: skip
WINE, GREY = "#882255", "#bbbbbb"

COMMUNICATORS = {
    "nccl": BLACK,
    "gloo": BLACK,
    "auto": BLUE,
    "one-shot": SKY,
    "two-shot": PURPLE,
    "torch one-shot": GREY,
    "torch two-shot": ORANGE,
    "int8": GREEN,
    "int6": WINE,
    "int4": VERMILION,
    "fp8": YELLOW,
}
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)  # for lines of anything else
UNITS = ("B", "KiB", "MiB", "GiB")


def communicator_colour(name: str) -> str:
    """The colour of a communicator: `NCCL`, `int8`, `int4:64`, `int8, over NCCL`. A width has the same colour over any link."""
    return COMMUNICATORS.get(name.lower().partition(",")[0].partition(":")[0], VERMILION)


def size_text(count: float) -> str:
    """A number of bytes in the largest unit that makes it at least 1: `64 KiB`, `1.5 MiB`."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.4g} {UNITS[unit]}"


def new_figure(width: float, height: float) -> Any:
    """A matplotlib Figure of so many inches. Raises UserError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing needs matplotlib; run `make setup-dev`, or pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def byte_axis(axes: Any) -> None:
    """Make the x axis a logarithmic axis of bytes with a tick at every factor of 16."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=16))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))


def plain_log_axis(axis: Any) -> None:
    """Make `axes.xaxis` or `.yaxis` logarithmic, with few ticks and plain numbers, so that labels do not overlap."""
    from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    steps = (1.0, 2.0, 5.0) if high / low < 200 else (1.0, 3.0)
    few = high / low < 6  # with the steps there might be a single tick
    axis.set_major_locator(AutoLocator() if few else LogLocator(subs=steps, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axis.set_minor_formatter(NullFormatter())
