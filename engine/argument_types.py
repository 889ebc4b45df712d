"""Checks the types of arguments by their annotations, so that a wrong one is named where it is given."""

from collections.abc import Mapping
from functools import cache
from inspect import formatannotation
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from errors import UserError
from files import shown

TAKEN = {
    int: (int, Integral),
    float: (float, int, Real),
    list: (list, tuple),
}  # what is taken for one of these, the most common first, which is fast; NumPy's numbers, too


def check_types(annotated: Any, values: Mapping[str, Any]) -> None:
    """Raise UserError for the first value that is not of its type. annotated: the class or function with the annotations. values:
    by name. What lists and dicts contain is not checked."""
    for name, classes, text in _annotations(annotated):
        value = values[name]
        if not isinstance(value, classes) or (isinstance(value, bool) and bool not in classes):
            raise UserError(f"{name} must be {text}, not {shown(value)}")


@cache
def _annotations(annotated: Any) -> list[tuple[str, tuple[type, ...], str]]:
    """The name, classes and text of each annotation."""
    hints = {name: hint for name, hint in get_type_hints(annotated).items() if name != "return"}
    return [(name, _classes(hint), formatannotation(hint)) for name, hint in hints.items()]


def _classes(hint: Any) -> tuple[type, ...]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return tuple(one for part in get_args(hint) for one in _classes(part))
    if origin is Literal:
        return tuple(map(type, get_args(hint)))
    return TAKEN.get(origin or hint, (origin or hint,))
