"""The body of POST /v1/responses. Like every body: each field is used, accepted without effect, or refused (server/schemas.py)."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from engine.protocol import LIST_LIMIT
from server.problems import field_error
from server.refusals import GENERATION_REFUSED, LENGTHS, NOT_HERE, REFUSED, Refusals, refusals
from server.schemas import (
    INT64,
    MAX_NAME,
    MAX_TOOLS,
    STRICT,
    Checked,
    JsonSchemaFormat,
    Off,
    RefusalPart,
    SamplingBody,
    without_effect,
)

MAX_PAIRS = 16  # of metadata
OWN_TOOLS = "this server runs no tools itself; offer a function of your own"
READS = "this server reads items of type message, function_call, function_call_output, reasoning and item_reference"

Id = Annotated[str, Field(max_length=256)]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]

REFUSED_HERE = refusals(
    (("conversation",), (), "is not supported; use previous_response_id, or send the items in input"),
    (("prompt",), (), "is not supported, because this server keeps no prompt templates; use instructions and input"),
    (("messages",), (), f"{NOT_HERE}; use input"),
    (("system",), ("",), f"{NOT_HERE}; use instructions"),
    (("max_tokens", "max_completion_tokens", *LENGTHS), (), f"{NOT_HERE}; use max_output_tokens"),
    (("stop_sequences",), ([],), f"{NOT_HERE}; use stop"),
    (("response_format", "json_schema", "guided_json"), ({"type": "text"},), f"{NOT_HERE}; use text.format"),
    (("output_config", "output_format"), (), f"{NOT_HERE}; use text.format and reasoning.effort"),
    (("reasoning_effort",), (), f"{NOT_HERE}; use reasoning.effort"),
    (("logprobs",), (False,), f"{NOT_HERE}; use include: ['message.output_text.logprobs']"),
    (("truncate_prompt_tokens",), (), f"{NOT_HERE}; use truncation: 'auto'"),
)


def _kind(value: Any) -> Any:
    """The `type` of an object of the body, or of one that is already checked."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _one_of(message: str) -> Discriminator:
    """Tells objects apart by their type. `message`: for other types."""
    return Discriminator(_kind, custom_error_type="unsupported", custom_error_message=message)


# --- input ---------------------------------------------------------------------------------------------------------------------


class ContentText(Checked):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = without_effect("the model reads text alone")
    logprobs: Any = without_effect("the model reads text alone")
    prompt_cache_breakpoint: Any = without_effect("the prefix cache finds common prefixes by itself")


class GivenReasoningText(Checked):
    type: Literal["reasoning_text", "text"]
    text: str


class GivenSummary(Checked):
    type: Literal["summary_text"]
    text: str


Part = Annotated[
    Annotated[ContentText, Tag("input_text")]
    | Annotated[ContentText, Tag("output_text")]
    | Annotated[ContentText, Tag("text")]
    | Annotated[RefusalPart, Tag("refusal")],
    _one_of("this server reads text alone: parts of type input_text and output_text"),
]


class GivenItem(Checked):
    id: Id | None = None
    status: Any = without_effect("all that is sent is complete")


class GivenMessage(GivenItem):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    phase: Any = without_effect("the order says it")


class GivenCall(GivenItem):
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(
        None, description="The model does not see a call whose arguments are cut off. It is an error if it is `completed`."
    )
    call_id: Id
    name: Annotated[str, Field(max_length=256)]
    arguments: str
    namespace: Annotated[str, Field(max_length=256)] | None = None
    caller: Any = without_effect("the model is the caller")


class GivenCallOutput(GivenItem):
    type: Literal["function_call_output"]
    call_id: Id
    output: str | list[Part]
    name: Any = without_effect("the call has it")
    namespace: Any = without_effect("the call has it")
    caller: Any = without_effect("the model is the caller")


class GivenReasoning(GivenItem):
    type: Literal["reasoning"]
    summary: list[GivenSummary] | None = None
    content: list[GivenReasoningText] | None = None
    encrypted_content: str | None = Field(None, description="Read if this server wrote it.")


class ItemReference(Checked):
    type: Literal["item_reference"]
    id: Id


AnyItem = Annotated[
    Annotated[GivenMessage, Tag("message")]
    | Annotated[GivenCall, Tag("function_call")]
    | Annotated[GivenCallOutput, Tag("function_call_output")]
    | Annotated[GivenReasoning, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(lambda value: _kind(value) or "message", custom_error_type="unsupported", custom_error_message=READS),
]


# --- tools and formats ---------------------------------------------------------------------------------------------------------


class Flat(Checked):
    """An object whose fields are those of `nested` in the object that chat completions have for it."""

    nested: ClassVar[str] = "function"

    @model_validator(mode="before")
    @classmethod
    def _refuse_nested(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get(cls.nested), dict):
            raise PydanticCustomError("nested", "is the form of /v1/chat/completions; put its fields beside type")
        return data


class FunctionTool(Flat):
    type: Literal["function"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema. Default: no arguments.")
    strict: bool | None = Field(None, description=STRICT)
    defer_loading: Any = without_effect("all functions are offered at once")
    allowed_callers: Any = without_effect("the model is the caller")
    output_schema: Any = without_effect("outputs are not checked")


class OtherTool(Checked):
    """A tool that this server does not run. It is not offered to the model."""

    model_config = ConfigDict(json_schema_extra={"not": {"properties": {"type": {"enum": ["function", "namespace"]}}}})
    passes_on: ClassVar[bool] = True

    type: str = Field(max_length=64)


def _kind_of_tool(value: Any) -> str:
    kind = _kind(value)
    return kind if kind in ("function", "namespace") else "other"


class Namespace(Checked):
    """Functions of one source, as coding agents send those of an MCP server. They are offered as NAMESPACE__NAME."""

    type: Literal["namespace"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    tools: list[
        Annotated[
            Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")],
            Discriminator(lambda value: "function" if _kind(value) == "function" else "other"),
        ]
    ] = Field(max_length=MAX_TOOLS)


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[Namespace, Tag("namespace")] | Annotated[OtherTool, Tag("other")],
    Discriminator(_kind_of_tool),
]


class Offered(NamedTuple):
    """A function that the model sees. `path`: in the body."""

    path: str
    tool: FunctionTool
    namespace: str | None = None

    @property
    def name(self) -> str:
        return joined_name(self.namespace, self.tool.name)


def joined_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a function."""
    return f"{namespace}__{name}" if namespace else name


class NamedFunction(Flat):
    type: Literal["function"]
    name: Annotated[str, Field(max_length=64)]


class AllowedFunctions(Checked):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1, max_length=MAX_TOOLS)


NamedTool = Annotated[
    Annotated[NamedFunction, Tag("function")] | Annotated[AllowedFunctions, Tag("allowed_tools")], _one_of(OWN_TOOLS)
]


class FlatSchemaFormat(JsonSchemaFormat, Flat):
    nested = "json_schema"

    type: Literal["json_schema"]


class PlainFormat(Checked):
    type: Literal["text", "json_object"]


class TextOptions(Checked):
    format: Annotated[PlainFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="Accepted, without effect: the models served here do not support it."
    )


class ReasoningOptions(Checked):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="A variable of the chat template."
    )
    summary: Any = without_effect("the reasoning itself is in the answer")
    generate_summary: Any = without_effect("see `summary`")
    context: Any = without_effect("the chat template says which reasoning the model sees again")
    mode: Any = without_effect("there is one mode")


class ResponseStreamOptions(Checked):
    include_obfuscation: Off | None = Field(None, description="Padding against traffic analysis is not supported.")


Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    # of items that this server never writes
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesBody(SamplingBody):
    model_config = ConfigDict(json_schema_extra={"examples": [{"input": "Hi", "max_output_tokens": 1}]})

    refused: ClassVar[Refusals] = REFUSED | GENERATION_REFUSED | REFUSED_HERE
    input: str | Annotated[list[AnyItem], Field(min_length=1)] | None = Field(None, description="A text, or items.")
    instructions: str | None = Field(None, description="A system message of this turn alone.")
    previous_response_id: Id | None = Field(None, examples=[None], description="Continue the conversation of a stored answer.")
    stream: bool | None = Field(None, description="Server-sent events instead of one answer. Default false.")
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = Field(None, description="Answer at once, and compute the response meanwhile. Not with stream.")
    store: bool | None = Field(None, description="Keep the answer for a while. Default true.")
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="Default: what is left of the context.")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=LIST_LIMIT,
        description="Likeliest tokens to list; above 0 only with include message.output_text.logprobs.",
    )
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Includable] | None = Field(None, max_length=32)
    tools: list[AnyTool] | None = Field(
        None, max_length=MAX_TOOLS, description="Functions, and namespaces of them. Others are not offered to the model."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="`required` and a named function force one call by grammar. Default auto with tools."
    )
    parallel_tool_calls: bool | None = Field(None, description="false keeps the first of several calls. Default true.")
    max_tool_calls: int | None = Field(
        None, ge=0, lt=2**31, description="Accepted, without effect: it counts calls of tools that the server runs."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto cuts the prompt at its start, to what the context can hold. Default disabled."
    )
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=MAX_PAIRS, description="Returned as given.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the template.")
    user: str | None = Field(None, max_length=256, description="Written to the access log.")
    priority: int | None = Field(None, ge=-INT64, lt=INT64, description="As of /v1/chat/completions.")
    safety_identifier: str | None = Field(None, max_length=256, description="Returned as given.")
    prompt_cache_key: str | None = Field(
        None, max_length=256, description="Returned as given: common prefixes are found anyhow."
    )
    service_tier: Any = without_effect("there is one tier")
    prompt_cache_options: Any = without_effect("the prefix cache finds common prefixes by itself")
    prompt_cache_retention: Any = without_effect("see `prompt_cache_options`")
    client_metadata: Any = without_effect("see `metadata`")

    @model_validator(mode="after")
    def _check_responses(self) -> "ResponsesBody":
        if self.input is None and self.previous_response_id is None:
            raise field_error("input", "Field required")
        if self.background and self.stream:
            raise field_error("background", "cannot be combined with stream; poll GET /v1/responses/ID")
        if self.background and self.store is False:
            raise field_error("background", "needs store: only a stored answer can be fetched later")
        if self.top_logprobs and not self.with_logprobs:
            raise field_error("top_logprobs", "needs include: ['message.output_text.logprobs']")
        if self.tools and not self.functions and self.tool_choice != "none":
            raise field_error("tools", f"has no function, but the type {self.tools[0].type!r}; {OWN_TOOLS}")
        return self

    @property
    def functions(self) -> list[Offered]:
        return [one for one in self._tools() if isinstance(one, Offered)]

    @property
    def left_out(self) -> list[str]:
        """The tools that are not offered, with their types."""
        return [one for one in self._tools() if isinstance(one, str)]

    def _tools(self) -> Iterator[Offered | str]:
        for i, tool in enumerate(self.tools or []):
            if isinstance(tool, FunctionTool):
                yield Offered(f"tools.{i}", tool)
            elif isinstance(tool, Namespace):
                for j, inner in enumerate(tool.tools):
                    fits = isinstance(inner, FunctionTool) and len(joined_name(tool.name, inner.name)) <= MAX_NAME
                    path = f"tools.{i}.tools.{j}"
                    yield (
                        Offered(path, inner, tool.name) if isinstance(inner, FunctionTool) and fits else f"{path}.{inner.type}"
                    )
            else:
                yield f"tools.{i}.{tool.type}"

    @property
    def with_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    @property
    def with_encrypted(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())
