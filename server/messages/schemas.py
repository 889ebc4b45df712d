"""The parts of a Messages body: content blocks, messages, tools and options."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from server.problems import field_error
from server.refusals import NOT_HERE, refusals
from server.schemas import STRICT, Cacheable, Checked, without_effect

TEXT_ONLY = "this server reads text alone"
MIN_BUDGET = 1024  # tokens; of the published API

REFUSED_HERE = refusals(
    (("stop",), ([],), f"{NOT_HERE}; use stop_sequences"),
    (("instructions",), ("",), f"{NOT_HERE}; use system"),
    (("input",), (), f"{NOT_HERE}; use messages"),
    (("previous_response_id", "conversation"), (), f"{NOT_HERE}; send the whole conversation in messages"),
    (("response_format", "json_schema", "guided_json"), ({"type": "text"},), f"{NOT_HERE}; use output_config.format"),
    (("reasoning_effort",), (), f"{NOT_HERE}; use output_config.effort or thinking"),
    (("include_reasoning",), (True,), f"{NOT_HERE}; use thinking.display"),
    (("parallel_tool_calls",), (True,), f"{NOT_HERE}; use tool_choice.disable_parallel_tool_use"),
)


class TextBlock(Cacheable):
    type: Literal["text"]
    text: str
    citations: Any = without_effect("templates have no citations")


class ThinkingBlock(Cacheable):
    """What the model thought in an earlier answer. Templates get it as the message's reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: Any = without_effect("this server does not check signatures")


class RedactedThinkingBlock(Cacheable):
    """Nothing of it can be read, so templates get nothing of it."""

    type: Literal["redacted_thinking"]
    data: Any = without_effect("it is encrypted by another server")


class ToolUseBlock(Cacheable):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = without_effect("the model is the only caller")
    toolset_name: Any = without_effect("there are no toolsets")


class ToolResultBlock(Cacheable):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = Field(None, description="The template gets the content after `Error: `.")
    toolset_name: Any = without_effect("there are no toolsets")


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
BLOCKS = {
    "user": ("text", "tool_result"),
    "system": ("text",),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


class Message(Cacheable):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CustomTool(Cacheable):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema.")
    strict: bool | None = Field(None, description=STRICT)
    defer_loading: Any = without_effect("all tools are shown to the model")
    allowed_callers: Any = without_effect("the model is the only caller")
    eager_input_streaming: Any = without_effect("inputs are streamed as they are written")
    input_examples: Any = without_effect("templates have no examples")


class ToolChoice(Checked):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of the tool, with type tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="true keeps the first of several calls. Default false.")


class Thinking(Checked):
    """Whether the model thinks before it answers, if the template can switch it. Without it, as the template does."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=MIN_BUDGET, description="Checked, but not enforced: max_tokens limits both.")
    display: Literal["summarized", "omitted"] | None = Field(None, description="omitted leaves the thinking's text empty.")


class JsonFormat(Checked):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    name: Any = without_effect("a schema needs no name")


class OutputConfig(Checked):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Reaches templates as `reasoning_effort`, of which `high` is the highest."
    )
    format: JsonFormat | None = Field(None, description="Constrain the answer to a JSON schema.")


class Metadata(Checked):
    user_id: str | None = Field(None, max_length=1024, description="The first 256 characters are written to the access log.")


class Edit(Checked):
    passes_on = True

    type: str = Field(pattern="^clear_", description="Clearing saves tokens; this server reads the whole conversation.")


class ContextManagement(Checked):
    edits: list[Edit] | None = None


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raises an error that names the first content block or tool that is known, but not served here."""
    for path, role, block in _blocks(body.get("messages")):
        kind = block.get("type")
        allowed = BLOCKS.get(role) if isinstance(role, str) else None
        if isinstance(kind, str) and allowed and kind not in allowed:
            has = f"a message of role {role} has {' and '.join(allowed)} blocks"
            why = has if kind in sum(BLOCKS.values(), ()) else TEXT_ONLY
            raise field_error(path, f"has the type {kind[:40]!r}; {why}")
        parts = block.get("content")
        for i, part in enumerate(parts if isinstance(parts, list) else []):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise field_error(f"{path}.content.{i}", f"has the type {kind[:40]!r}; {TEXT_ONLY}")
    tools = body.get("tools")
    for i, tool in enumerate(tools if isinstance(tools, list) else []):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            message = f"has the type {kind[:40]!r}; this server runs no tools and knows none; describe it with input_schema"
            raise field_error(f"tools.{i}", message)


def _blocks(messages: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The path, role and value of each content block that is an object."""
    for i, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for k, block in enumerate(content if isinstance(content, list) else []):
            if isinstance(block, dict):
                yield f"messages.{i}.content.{k}", message.get("role"), block
