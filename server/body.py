"""What all request bodies share. Every field is used, accepted without effect, or refused. Unknown fields are removed and reported.

A field of a body's class is used, unless it is made by `without_effect`. refusals.py lists what is refused, each with what to use
instead; its neutral values, which change nothing, are accepted. In every field `null` means "not given".
"""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from server.errors import field_error
from server.refusals import REFUSED, Refusals

MAX_NAMED = 8  # most unknown names in the response header and in the log
MAX_NAME = 64  # characters of each
STRICT = (
    "true refuses a schema that cannot be enforced as a whole; false, the default, enforces the rest and names what was left out "
    "in the header X-Rung-Not-Enforced."
)

StopText = Annotated[str, Field(min_length=1, max_length=1000)]


def without_effect(why: str) -> Any:
    """A field that cannot change the answer: any value is accepted, and none is passed to a template."""
    return Field(None, exclude=True, description=f"Accepted, without effect: {why}.")


def _only_false(value: bool) -> bool:
    if value:
        raise PydanticCustomError("unsupported", "Input should be false")
    return value


# Literal[False] would accept 0, which equals it
Off = Annotated[bool, AfterValidator(_only_false), WithJsonSchema({"const": False, "type": "boolean"})]


def kind_of(value: Any, default: str | None = None) -> Any:
    """The `type` of an object of the body, or of one that is already checked; `default` if it is missing or null."""
    return (value.get("type") if isinstance(value, dict) else getattr(value, "type", None)) or default


def of_type(kind: Any) -> Any:
    """The validator of a `type` that has one value, and that some clients leave null. kind: a Literal of both."""
    return BeforeValidator(lambda given: get_args(kind)[0] if given is None else given, json_schema_input_type=kind)


class Checked(BaseModel):
    """An object whose fields are all checked. `Body` removes and reports fields that the class lacks."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())
    passes_on: ClassVar[bool] = False  # whether unknown fields are passed to the chat template


class Cacheable(Checked):
    """A part of a prompt up to which clients may ask for it to be cached."""

    cache_control: Any = without_effect("the prefix cache finds common prefixes by itself")


class Said(Cacheable):
    """A message with a role and a content, which a model's answer and a tool's result may lack."""

    @model_validator(mode="after")
    def _needs_content(self) -> Self:
        if getattr(self, "content", None) is None and getattr(self, "role", None) not in ("assistant", "tool"):
            raise PydanticCustomError("no_content", "has no content; give it a text")
        return self


def take_unknown(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the unknown fields in `value` and in its children. The iterator removes the fields as it advances."""
    if isinstance(value, list) and value and isinstance(value[0], Checked):
        for one in value:
            yield from take_unknown(one, path)
    elif isinstance(value, Checked):
        for name in sorted(value.model_fields_set & value.__dict__.keys()):  # only the few fields that were given
            yield from take_unknown(getattr(value, name), f"{path}{name}.")
        if value.model_extra and not value.passes_on:
            yield from (path + name for name in value.model_extra)
            value.model_extra.clear()


def shown_names(names: Iterable[str]) -> list[str]:
    """At most MAX_NAMED of the names, then "and more" if there are more. They are shortened, and special characters are replaced.

    Takes all of them, with little work for each: there may be millions.
    """
    named: dict[str, None] = {}
    more = False
    for name in names:
        if len(named) < MAX_NAMED:
            named[name] = None
        elif name not in named:
            more = True
    return [re.sub(r"[^A-Za-z0-9_.$-]", "?", name[:MAX_NAME]) for name in named] + ["and more"] * more


class Body(Checked):
    """The whole body of a request."""

    refused: ClassVar[Refusals] = REFUSED
    model: str | None = Field(None, description="A name from /v1/models. Default: the model that is served.")
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """Paths of unknown fields in the body, as `shown_names` shows them."""
        return self._ignored

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        foreign = {name for name in data if name in cls.refused} - cls.model_fields.keys()
        for name in sorted(foreign):
            neutral, why = cls.refused[name]
            value = data[name]
            if value is not None and not any(type(value) is type(v) and value == v for v in neutral):
                raise field_error(name, why)
        return {name: value for name, value in data.items() if name not in foreign} if foreign else data

    @model_validator(mode="after")
    def _ignore_unknown(self) -> "Body":
        self._ignored = shown_names(take_unknown(self))
        return self
