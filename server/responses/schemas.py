"""The body of POST /v1/responses. Like every body: each field is used, accepted without effect, or refused (server/body.py)."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from engine.protocol import LIST_LIMIT
from server.body import MAX_NAME, STRICT, Checked, JsonSchemaFormat, Off, Refusals, Said, kind_of, refusals, without_effect
from server.errors import field_error
from server.schemas import FOREIGN_REFUSED, INT64, MAX_TOOLS, RefusalPart, SamplingBody

MAX_PAIRS = 16  # of metadata
OWN_TOOLS = "this server runs no tools itself; offer a function of your own"
READS = "this server reads messages, reasoning, references, and calls of tools with their text outputs"

# Calls of tools that are no functions, with the field that has what they get; and items with what such calls brought.
CALLS = {
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "tool_search_call": "arguments",
    "mcp_call": "arguments",
    "code_interpreter_call": "code",
}
OUTPUTS = {
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "apply_patch_call_output": "output",
    "tool_search_output": "tools",
    "mcp_call": "output",
    "code_interpreter_call": "outputs",
}
UNSEEN = (
    "web_search_call", "file_search_call", "image_generation_call", "mcp_list_tools", "mcp_approval_request",
    "mcp_approval_response", "compaction", "compaction_summary", "compaction_trigger", "configuration_update",
)  # fmt: skip

Id = Annotated[str, Field(max_length=256)]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


def _by(kind: Callable[[Any], Any], message: str) -> Discriminator:
    """Tells objects apart by their kind. `message`: for other kinds."""
    return Discriminator(kind, custom_error_type="unsupported", custom_error_message=message)


# --- input ---------------------------------------------------------------------------------------------------------------------


class ContentText(Checked):
    type: Literal["input_text", "output_text", "text"] | None = None
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


def _kind_of_part(value: Any) -> Any:
    kind = kind_of(value, "text")
    return "text" if kind in ("input_text", "output_text") else kind


Part = Annotated[
    Annotated[ContentText, Tag("text")] | Annotated[RefusalPart, Tag("refusal")],
    _by(_kind_of_part, "this server reads text alone: parts of type input_text and output_text"),
]


class GivenItem(Checked):
    id: Id | None = None
    status: Any = without_effect("all that is sent is complete")


class GivenMessage(GivenItem, Said):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part] | None = None
    phase: Any = without_effect("the order says it")


class GivenCall(GivenItem):
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    call_id: Id
    name: Annotated[str, Field(max_length=256)]
    arguments: Any = Field(None, description="JSON text. What a model has not finished or got wrong is mended.")
    namespace: Annotated[str, Field(max_length=256)] | None = None
    caller: Any = without_effect("the model is the caller")


class GivenCallOutput(GivenItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Id
    output: str | list[Part] | None = None
    name: Any = without_effect("the call has it")
    namespace: Any = without_effect("the call has it")
    caller: Any = without_effect("the model is the caller")


class GivenReasoning(GivenItem):
    type: Literal["reasoning"]
    summary: list[GivenSummary] | None = None
    content: list[GivenReasoningText] | None = None
    encrypted_content: str | None = Field(None, description="Read if this server wrote it.")


class OtherItem(GivenItem):
    """A call of another tool or what it brought, as text; or an item that the model does not see, which is named."""

    model_config = ConfigDict(json_schema_extra={"properties": {"type": {"enum": [*CALLS, *OUTPUTS, *UNSEEN]}}})
    passes_on: ClassVar[bool] = True

    type: str
    call_id: Id | None = None
    name: Annotated[str, Field(max_length=256)] | None = None


class AdditionalTools(GivenItem):
    type: Literal["additional_tools"]
    role: Any = without_effect("the developer is the only one that gives tools")
    tools: "list[AnyTool]" = Field(max_length=MAX_TOOLS, description="Offered as those of the body are.")


class ItemReference(Checked):
    type: Literal["item_reference"]
    id: Id


def _kind_of_item(value: Any) -> Any:
    kind = kind_of(value, "message")
    if kind == "custom_tool_call_output":
        return "function_call_output"
    return "other" if isinstance(kind, str) and kind in {*CALLS, *OUTPUTS, *UNSEEN} else kind


AnyItem = Annotated[
    Annotated[GivenMessage, Tag("message")]
    | Annotated[GivenCall, Tag("function_call")]
    | Annotated[GivenCallOutput, Tag("function_call_output")]
    | Annotated[GivenReasoning, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")]
    | Annotated[AdditionalTools, Tag("additional_tools")]
    | Annotated[ItemReference, Tag("item_reference")],
    _by(_kind_of_item, READS),
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


OFFERED = ("function", "custom", "namespace")  # types of tools


class FunctionTool(Flat):
    type: Literal["function"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema. Default: no arguments.")
    strict: bool | None = Field(None, description=STRICT)
    defer_loading: Any = without_effect("all functions are offered at once")
    allowed_callers: Any = without_effect("the model is the caller")
    output_schema: Any = without_effect("outputs are not checked")


class CustomFormat(Checked):
    type: Literal["text", "grammar"]
    syntax: str | None = Field(None, max_length=64)
    definition: str | None = Field(None, description="Shown to the model, and not enforced.")


class CustomTool(Checked):
    """A tool that takes a text. It is offered as a function with one argument, `input`."""

    strict: ClassVar[None] = None

    type: Literal["custom"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    format: CustomFormat | None = None
    defer_loading: Any = without_effect("all tools are offered at once")
    allowed_callers: Any = without_effect("the model is the caller")

    @property
    def parameters(self) -> dict[str, Any]:
        text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        return {**text, "additionalProperties": False}

    @property
    def about(self) -> str | None:
        """The description that the model sees."""
        rules = self.format.definition if self.format else None
        return "\n\n".join(filter(None, (self.description, rules and f"The grammar of the input:\n{rules}"))) or None


class OtherTool(Checked):
    """A tool that this server does not run. It is not offered to the model."""

    model_config = ConfigDict(json_schema_extra={"not": {"properties": {"type": {"enum": [*OFFERED]}}}})
    passes_on: ClassVar[bool] = True

    type: str = Field(max_length=64)


def _kind_of_tool(value: Any) -> str:
    kind = kind_of(value)
    return kind if kind in OFFERED else "other"


class Namespace(Checked):
    """Functions of one source, as coding agents send those of an MCP server. They are offered as NAMESPACE__NAME."""

    type: Literal["namespace"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    tools: list[
        Annotated[
            Annotated[FunctionTool, Tag("function")]
            | Annotated[CustomTool, Tag("custom")]
            | Annotated[OtherTool, Tag("other")],
            Discriminator(_kind_of_tool),
        ]
    ] = Field(max_length=MAX_TOOLS)


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(_kind_of_tool),
]


class Offered(NamedTuple):
    """A function that the model sees. `path`: in the body."""

    path: str
    tool: FunctionTool | CustomTool
    namespace: str | None = None

    @property
    def name(self) -> str:
        return joined_name(self.namespace, self.tool.name)


def joined_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a function."""
    return f"{namespace}__{name}" if namespace else name


class NamedFunction(Flat):
    type: Literal["function", "custom"]
    name: Annotated[str, Field(max_length=64)]


class AllowedFunctions(Checked):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1, max_length=MAX_TOOLS)


NamedTool = Annotated[
    Annotated[NamedFunction, Tag("function")]
    | Annotated[NamedFunction, Tag("custom")]
    | Annotated[AllowedFunctions, Tag("allowed_tools")],
    _by(kind_of, OWN_TOOLS),
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

    refused: ClassVar[Refusals] = FOREIGN_REFUSED | refusals("responses")
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
    user: str | None = Field(None, description="The first 256 characters are written to the access log.")
    priority: int | None = Field(None, ge=-INT64, lt=INT64, description="As of /v1/chat/completions.")
    safety_identifier: str | None = Field(None, description="Returned as given.")
    prompt_cache_key: str | None = Field(None, description="Returned as given: common prefixes are found anyhow.")
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
        """The functions that the model may call. One in `input` may repeat another."""
        found, names = list[Offered](), set[str]()
        for one in self._tools():
            if isinstance(one, Offered):
                if one.path.startswith("tools.") or one.name not in names:
                    found.append(one)
                names.add(one.name)
        return found

    @property
    def left_out(self) -> list[str]:
        """The tools that are not offered, with their types."""
        return [one for one in self._tools() if isinstance(one, str)]

    def _tools(self) -> Iterator[Offered | str]:
        given = [(f"tools.{i}", tool) for i, tool in enumerate(self.tools or [])]
        for k, item in enumerate(self.input if isinstance(self.input, list) else []):
            if isinstance(item, AdditionalTools):
                given += [(f"input.{k}.tools.{i}", tool) for i, tool in enumerate(item.tools)]
        for path, tool in given:
            if isinstance(tool, (FunctionTool, CustomTool)):
                yield Offered(path, tool)
            elif isinstance(tool, Namespace):
                for j, inner in enumerate(tool.tools):
                    inside = f"{path}.tools.{j}"
                    if isinstance(inner, OtherTool) or len(joined_name(tool.name, inner.name)) > MAX_NAME:
                        yield f"{inside}.{inner.type}"
                    else:
                        yield Offered(inside, inner, tool.name)
            else:
                yield f"{path}.{tool.type}"

    @property
    def with_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    @property
    def with_encrypted(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())
