"""The parts of a Messages body: content blocks, messages, tools and options."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from server.body import MAX_NAME, STRICT, Cacheable, Checked, Said, kind_of, without_effect
from server.errors import field_error

TEXT_ONLY = "this server reads text alone"
OWN_TOOLS = "this server runs no tools and knows none; describe it with input_schema"
UNSEEN = (
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
    "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result", "mcp_tool_use",
    "mcp_tool_result", "container_upload",
)  # fmt: skip
MIN_BUDGET = 1024  # tokens; of the published API


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
    input: Any = Field(None, description="An object. What a model has not finished or got wrong is mended.")
    caller: Any = without_effect("the model is the only caller")
    toolset_name: Any = without_effect("there are no toolsets")


class TextSource(Checked):
    type: Literal["text"]
    data: str
    media_type: Any = without_effect("it is plain text")

    @property
    def text(self) -> str:
        return self.data


class BlockSource(Checked):
    type: Literal["content"]
    content: str | list[TextBlock]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(block.text for block in self.content)


class DocumentBlock(Cacheable):
    """A document of text. Templates get its title, context and text."""

    type: Literal["document"]
    source: Annotated[TextSource | BlockSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
    citations: Any = without_effect("templates have no citations")

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


class SearchResultBlock(Cacheable):
    type: Literal["search_result"]
    title: str
    source: str
    content: list[TextBlock]
    citations: Any = without_effect("templates have no citations")

    @property
    def text(self) -> str:
        return "\n".join((self.title, self.source, *(block.text for block in self.content)))


class ToolReferenceBlock(Cacheable):
    """A tool that a search has found. All tools are shown to the model anyhow."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


class UnseenBlock(Checked):
    """What another server's tools did in an earlier answer. It is named, and templates get nothing of it."""

    model_config = ConfigDict(json_schema_extra={"properties": {"type": {"enum": [*UNSEEN]}}})
    passes_on = True

    type: str


TextualBlock = TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock


class ToolResultBlock(Cacheable):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextualBlock, Field(discriminator="type")]] | None = None
    is_error: bool | None = Field(None, description="The template gets the content after `Error: `.")
    toolset_name: Any = without_effect("there are no toolsets")


SeenBlock = TextualBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
Block = Annotated[
    Annotated[Annotated[SeenBlock, Field(discriminator="type")], Tag("seen")] | Annotated[UnseenBlock, Tag("unseen")],
    Discriminator(lambda block: "unseen" if kind_of(block) in UNSEEN else "seen"),
]
TEXTUAL = ("text", "document", "search_result", "tool_reference")
BLOCKS = {
    "user": (*TEXTUAL, "tool_result"),
    "system": ("text",),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use", *UNSEEN),
}


class Message(Said):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None


class ServerTool(Cacheable):
    """A tool that another server runs or knows. It is not offered to the model."""

    model_config = ConfigDict(json_schema_extra={"not": {"properties": {"type": {"const": "custom"}}}})
    passes_on = True

    type: str = Field(max_length=MAX_NAME)


class OwnTool(Cacheable):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema.")
    strict: bool | None = Field(None, description=STRICT)
    defer_loading: Any = without_effect("all tools are shown to the model")
    allowed_callers: Any = without_effect("the model is the only caller")
    eager_input_streaming: Any = without_effect("inputs are streamed as they are written")
    input_examples: Any = without_effect("templates have no examples")


AnyTool = Annotated[
    Annotated[OwnTool, Tag("custom")] | Annotated[ServerTool, Tag("other")],
    Discriminator(lambda tool: "custom" if kind_of(tool, "custom") == "custom" else "other"),
]


class ToolChoice(Checked):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of the tool, with type tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="true keeps the first of several calls. Default false.")


class Thinking(Checked):
    """Whether the model thinks before it answers, if the template can switch it. Without it, as the template does."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(
        None, ge=MIN_BUDGET, description="Most tokens of the reasoning, where the chat template marks it."
    )
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
    user_id: str | None = Field(None, description="The first 256 characters are written to the access log.")


class Edit(Checked):
    passes_on = True

    type: str = Field(pattern="^clear_", description="Clearing saves tokens; this server reads the whole conversation.")


class ContextManagement(Checked):
    edits: list[Edit] | None = None


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raises an error that names the first content block that is known, but not served here."""
    for path, role, block in _blocks(body.get("messages")):
        kind = block.get("type")
        allowed = BLOCKS.get(role) if isinstance(role, str) else None
        if isinstance(kind, str) and allowed and kind not in allowed:
            has = f"a message of role {role} has {' and '.join(allowed)} blocks"
            why = has if kind in sum(BLOCKS.values(), ()) else TEXT_ONLY
            raise field_error(path, f"has the type {kind[:40]!r}; {why}")
        parts = block.get("content")
        nested = [(f"{path}.content.{i}", part) for i, part in enumerate(parts if isinstance(parts, list) else [])]
        for place, part in [(path, block), *nested]:
            kind, source = kind_of(part), kind_of(part.get("source")) if isinstance(part, dict) else None
            if part is not block and isinstance(kind, str) and kind not in TEXTUAL:
                raise field_error(place, f"has the type {kind[:40]!r}; {TEXT_ONLY}")
            if kind == "document" and source not in ("text", "content"):
                raise field_error(f"{place}.source", f"has the type {str(source)[:40]!r}; {TEXT_ONLY}")


def _blocks(messages: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The path, role and value of each content block that is an object."""
    for i, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for k, block in enumerate(content if isinstance(content, list) else []):
            if isinstance(block, dict):
                yield f"messages.{i}.content.{k}", message.get("role"), block
