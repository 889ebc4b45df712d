"""What request bodies share. Every field is used, accepted without effect, or refused. Unknown fields are removed and reported.

A field of a body's class is used, unless it is made by `without_effect`. `refused.toml` lists what is refused, each with what to use
instead; its neutral values, which change nothing, are accepted. In every field `null` means "not given".
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine.constrain.demand import Constraint, Kind
from server.errors import field_error

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


# --- parameters that would change the answer and that an endpoint does not have: each is refused, with what to use instead ------

ABSENT = "is not a parameter of this endpoint; leave it out, or use /v1/chat/completions"

# by name: neutral values, and the error of others, behind the name and a colon
Refusals = dict[str, tuple[tuple[Any, ...], str]]
_REFUSED = tomllib.loads(Path(__file__).with_name("refused.toml").read_text())


def refusals(endpoints: str) -> Refusals:
    """A table of `refused.toml`."""
    return {name: (tuple(neutral), why) for names, neutral, why in _REFUSED[endpoints] for name in names}


def neutral(default: Any) -> tuple[Any, ...]:
    """The values that change nothing for a parameter with this default. None has no value of its own."""
    if default is None:
        return ()
    return (default,) if isinstance(default, (bool, list, dict)) else (int(default), float(default))


REFUSED = refusals("everywhere")


# --- a whole body ----------------------------------------------------------------------------------------------------


class Body(Checked):
    """The whole body of a request."""

    refused: ClassVar[Refusals] = REFUSED
    model: str | None = Field(None, description="A name from /v1/models. Default: the model that is served.")
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """Paths of unknown fields in the body, as `shown_names` shows them."""
        return self._ignored

    @property
    def places(self) -> int:
        """How many places of the queue must be free for the request."""
        return 1

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


# --- what a request may demand of its whole answer: `response_format`, `structured_outputs`, and the older `guided_` fields --------

ANY_OBJECT = {"type": "object"}  # a JSON schema
MAX_CHOSEN = 16384  # most texts of which an answer is one
MAX_TAGS = 128

KINDS: tuple[Kind, ...] = get_args(Kind)
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOSEN, fail_fast=True)]


class JsonSchemaFormat(Checked):
    model_config = ConfigDict(populate_by_name=True)

    name: str = Field("schema", max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description=STRICT)


class TextFormat(Checked):
    type: Literal["text"]


class JsonObjectFormat(Checked):
    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="A JSON schema. Default: any object.")

    @model_validator(mode="before")
    @classmethod
    def _other_type(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("json_schema") is not None:
            raise field_error(
                "response_format", "has type json_object and json_schema; use type json_schema, or the name schema"
            )
        return data


class JsonSchemaResponseFormat(Checked):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


class Structure(Checked):
    """A part of a text: `begin`, JSON that fits the schema, and `end`."""

    model_config = ConfigDict(populate_by_name=True)

    begin: str = Field(min_length=1, max_length=1000)
    schema_: dict[str, Any] = Field(alias="schema")
    end: str = Field(max_length=1000)


class Structures(Checked):
    """Free text. Where it has a trigger, a structure follows, whose `begin` starts with the trigger."""

    type: Literal["structural_tag"] | None = None
    structures: list[Structure] = Field(min_length=1, max_length=MAX_TAGS)
    triggers: list[StopText] = Field(min_length=1, max_length=MAX_TAGS)


class StructuralTagFormat(Structures):
    type: Literal["structural_tag"]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaResponseFormat | StructuralTagFormat, Field(discriminator="type")
]


class StructuredOutputs(Checked):
    """One constraint of the answer."""

    model_config = ConfigDict(populate_by_name=True)

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema, or its text.")
    json_object: bool | None = Field(None, description="true: any JSON object.")
    regex: str | None = Field(None, description="A regular expression of the whole answer, in the syntax of Rust's regex.")
    choice: Choices | None = Field(None, description="One of these texts.")
    grammar: str | None = Field(None, description="A context-free grammar in Lark's syntax, or in GBNF.")
    structural_tag: Structures | Json[Structures] | None = Field(
        None, description="Structures within free text, or their JSON text; as `response_format` of type structural_tag."
    )
    whitespace_pattern: str | None = Field(
        None, max_length=1000, description="What may stand between JSON tokens. Default: `[ ]?`."
    )
    disable_any_whitespace: bool | None = Field(None, description="No whitespace between JSON tokens. Default false.")
    disable_fallback: Any = without_effect("there is one grammar library")
    disable_additional_properties: Any = without_effect("an object is closed unless its schema opens it")


class FormatBody(Body):
    """The fields that constrain the answer. More than one of them is an error, unless they say the same under two names."""

    response_format: ResponseFormat | None = Field(None, description="Constrain the answer to JSON, or to a JSON schema.")
    structured_outputs: StructuredOutputs | None = Field(None, description="Constrain the answer in another way.")
    guided_json: dict[str, Any] | str | None = Field(None, description="The older name of `structured_outputs.json`.")
    guided_regex: str | None = Field(None, description="The older name of `structured_outputs.regex`.")
    guided_choice: Choices | None = Field(None, description="The older name of `structured_outputs.choice`.")
    guided_grammar: str | None = Field(None, description="The older name of `structured_outputs.grammar`.")
    guided_whitespace_pattern: str | None = Field(
        None, max_length=1000, description="The older name of `structured_outputs.whitespace_pattern`."
    )
    guided_decoding_backend: Any = without_effect("there is one grammar library")

    @model_validator(mode="after")
    def _check_constraints(self) -> "FormatBody":
        constraints = self._constraints
        if any(one._replace(param="") != constraints[0]._replace(param="") for one in constraints[1:]):
            raise field_error(constraints[1].param, f"cannot be combined with {constraints[0].param}; give one constraint")
        if self.structured_outputs is not None and not any(one.param.startswith("structured_outputs.") for one in constraints):
            raise field_error("structured_outputs", "has no constraint; give json, regex, choice, grammar, or another")
        if self.guided_whitespace_pattern is not None and self.guided_json is None:
            raise field_error("guided_whitespace_pattern", "says what stands between JSON tokens; it needs guided_json")
        asked = self.structured_outputs
        if asked and asked.whitespace_pattern is not None and asked.json_ is None and not asked.json_object:
            message = "says what stands between JSON tokens; it needs json or json_object"
            raise field_error("structured_outputs.whitespace_pattern", message)
        return self

    @property
    def constraint(self) -> Constraint | None:
        """What the whole answer must be; None for any text."""
        return next(iter(self._constraints), None)

    @property
    def is_mostly_free(self) -> bool:
        """Whether a grammar constrains only parts of the answer, such as calls."""
        return self.constraint is None or self.constraint.kind == "structural_tag"

    @property
    def insists(self) -> bool:
        """Whether the request says itself that its answer is constrained. Otherwise calls are constrained where that is possible."""
        return True

    @property
    def _constraints(self) -> list[Constraint]:
        """All that the request gives. More than one is an error, unless they are the same under two names."""
        found = []
        match self.response_format:
            case JsonObjectFormat(schema_=schema):
                found.append(Constraint("json", schema or ANY_OBJECT, "response_format", not schema))
            case JsonSchemaResponseFormat(json_schema=given):
                found.append(Constraint("json", given.schema_, "response_format", given.strict is True))
            case StructuralTagFormat() as tags:
                found.append(Constraint("structural_tag", tags.model_dump(by_alias=True, exclude={"type"}), "response_format"))
        for kind in KINDS[:4]:
            if (value := getattr(self, f"guided_{kind}")) is not None:
                found.append(Constraint(kind, value, f"guided_{kind}", whitespace=self.guided_whitespace_pattern))
        if (asked := self.structured_outputs) is not None:
            whitespace = "" if asked.disable_any_whitespace else asked.whitespace_pattern
            if asked.json_object:
                found.append(Constraint("json", ANY_OBJECT, "structured_outputs.json_object", True, whitespace))
            for kind in KINDS:
                if (value := getattr(asked, "json_" if kind == "json" else kind)) is not None:
                    plain = value.model_dump(by_alias=True, exclude={"type"}) if isinstance(value, Structures) else value
                    found.append(Constraint(kind, plain, f"structured_outputs.{kind}", whitespace=whitespace))
        return found
