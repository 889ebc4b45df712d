"""What a request may demand of its whole answer: `response_format`, `structured_outputs`, and the older `guided_` fields."""

from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import ConfigDict, Field, model_validator

from server.body import STRICT, Body, Checked, StopText, without_effect
from server.errors import field_error

ANY_OBJECT = {"type": "object"}  # a JSON schema
MAX_CHOSEN = 16384  # most texts of which an answer is one
MAX_TAGS = 128

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]  # of constraints
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


class StructuralTagFormat(Checked):
    """Free text. Where it has a trigger, a structure follows, whose `begin` starts with the trigger."""

    type: Literal["structural_tag"]
    structures: list[Structure] = Field(min_length=1, max_length=MAX_TAGS)
    triggers: list[StopText] = Field(min_length=1, max_length=MAX_TAGS)


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
    structural_tag: dict[str, Any] | str | None = Field(
        None, description="Structures within free text, or their JSON text; as `response_format` of type structural_tag."
    )
    whitespace_pattern: str | None = Field(
        None, max_length=1000, description="What may stand between JSON tokens. Default: `[ ]?`."
    )
    disable_any_whitespace: bool | None = Field(None, description="No whitespace between JSON tokens. Default false.")
    disable_fallback: Any = without_effect("there is one grammar library")
    disable_additional_properties: Any = without_effect("an object is closed unless its schema opens it")


class Constraint(NamedTuple):
    """What the whole answer must be. `param`: the field of the request that says so."""

    kind: Kind
    value: Any
    param: str
    strict: bool = False  # all of a JSON schema must be enforced
    whitespace: str | None = None  # the regex of what may stand between JSON tokens; None: the default


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
                found.append(Constraint("structural_tag", tags.model_dump(by_alias=True), "response_format"))
        for kind in KINDS[:4]:
            if (value := getattr(self, f"guided_{kind}")) is not None:
                found.append(Constraint(kind, value, f"guided_{kind}", whitespace=self.guided_whitespace_pattern))
        if (asked := self.structured_outputs) is not None:
            whitespace = "" if asked.disable_any_whitespace else asked.whitespace_pattern
            if asked.json_object:
                found.append(Constraint("json", ANY_OBJECT, "structured_outputs.json_object", True, whitespace))
            for kind in KINDS:
                if (value := getattr(asked, "json_" if kind == "json" else kind)) is not None:
                    found.append(Constraint(kind, value, f"structured_outputs.{kind}", whitespace=whitespace))
        return found
