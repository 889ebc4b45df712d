"""The bodies of the two endpoints, and the chat body that each becomes."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr, model_validator

from server.body import Body, Refusals, StopText, refusals, shown_names, without_effect
from server.errors import ApiError, field_error, field_name
from server.messages.schemas import (
    OWN_TOOLS,
    AnyTool,
    ContextManagement,
    JsonFormat,
    Message,
    Metadata,
    OutputConfig,
    OwnTool,
    ServerTool,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    UnseenBlock,
    refuse_unsupported,
)
from server.schemas import FOREIGN_REFUSED, MAX_STOPS, MAX_TOOLS, ChatBody
from server.translation import Chat, chat_call, chat_function, chat_of, chat_schema

ID_PREFIX = "toolu_"
# Claude Code's first system block. It is not for the model, and as it varies, the prefix cache would find nothing behind it.
BILLING = "x-anthropic-billing-header:"
EFFORTS = {"xhigh": "high", "max": "high"}  # templates know three levels
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountBody(Body):
    """The fields that make the prompt."""

    refused: ClassVar[Refusals] = FOREIGN_REFUSED | refusals("messages")
    messages: list[Message] = Field(
        min_length=1, fail_fast=True, description="A last one of role assistant is continued, unless it calls."
    )
    system: str | list[TextBlock] | None = None
    tools: list[AnyTool] | None = Field(
        None, max_length=MAX_TOOLS, description="Those that another server runs are not offered to the model, and are named."
    )
    tool_choice: ToolChoice | None = Field(
        None, description="`any` and `tool` force one call by grammar. Default auto with tools, else none."
    )
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="The older name of `output_config.format`.")
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = Field(None, description="Named, and not used: see `tools`.")
    cache_control: Any = without_effect("the prefix cache finds common prefixes by itself")
    betas: Any = without_effect("the header `anthropic-beta` has none, either")
    speed: Any = without_effect("there is one speed")
    user_profile_id: Any = without_effect("the access log has `metadata.user_id`")
    workspace_id: Any = without_effect("there are no workspaces")
    _chat: ChatBody | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _refuse_blocks(cls, data: Any) -> Any:
        if isinstance(data, dict):
            refuse_unsupported(data)
        return data

    @model_validator(mode="after")
    def _convert(self) -> "CountBody":
        self._check()
        try:
            self._chat = chat_of(self._chat_fields())
        except ApiError as e:
            raise field_error(field_name(e.param or ""), e.message.removeprefix(f"{e.param}: ")) from None
        self._chat._ignored = self._ignored = [*self.ignored, *shown_names(self._left_out)]
        return self

    @property
    def chat(self) -> ChatBody:
        """The chat body that has the same prompt and answer."""
        assert self._chat is not None
        return self._chat

    @property
    def format(self) -> JsonFormat | None:
        return self.output_config.format if self.output_config and self.output_config.format else self.output_format

    @property
    def functions(self) -> list[OwnTool]:
        return [tool for tool in self.tools or [] if isinstance(tool, OwnTool)]

    @property
    def _left_out(self) -> Iterator[str]:
        """What the model does not see, with its types."""
        for i, tool in enumerate(self.tools or []):
            if isinstance(tool, ServerTool):
                yield f"tools.{i}.{tool.type}"
        if self.mcp_servers:
            yield "mcp_servers"
        for i, message in enumerate(self.messages):
            for k, block in enumerate(message.content or []):
                if isinstance(block, UnseenBlock):
                    yield f"messages.{i}.content.{k}.{block.type}"

    def _check(self) -> None:
        names = [tool.name for tool in self.functions]
        if self.mcp_servers and not names:
            raise field_error("mcp_servers", OWN_TOOLS)
        if self.tools and not names:
            kind = self.tools[0].type or ""
            raise field_error("tools.0", f"has the type {kind[:40]!r}; {OWN_TOOLS}")
        choice = self.tool_choice
        if len(set(names)) < len(names):
            raise field_error("tools", "has two tools of the same name")
        if choice and choice.type in ("any", "tool") and not names:
            raise field_error("tool_choice", "needs tools")
        if choice and choice.type == "tool" and choice.name not in names:
            raise field_error("tool_choice.name", f"names {(choice.name or '')[:64]!r}, which is not in tools")
        if self.output_format and self.output_config and self.output_config.format:
            raise field_error("output_format", "is the older name of output_config.format; give one of them")
        if self.thinking and self.thinking.type == "enabled" and self.thinking.budget_tokens is None:
            raise field_error("thinking.budget_tokens", "is required with type enabled")

    def _chat_fields(self) -> Chat:
        choice, thinking, last = self.tool_choice, self.thinking, self.messages[-1]
        chosen: Any = choice and (chat_function(choice.name or "") if choice.type == "tool" else CHOICES[choice.type])
        continues = last.role == "assistant" and not any(isinstance(block, ToolUseBlock) for block in last.content or [])
        thinks = thinking is None or thinking.type != "disabled"
        effort = self.output_config.effort if self.output_config and thinks else None
        return {
            "model": self.model,
            "messages": chat_messages(self.system, self.messages),
            "tools": self.tools and [_chat_tool(tool) for tool in self.functions],
            "tool_choice": chosen,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "response_format": self.format and chat_schema(self.format.schema_),
            # families of models have two names for it
            "chat_template_kwargs": thinking and {"enable_thinking": thinks, "thinking": thinks},
            "reasoning_effort": EFFORTS.get(effort, effort) if effort else None,
            "continue_final_message": continues,
        }


class MessagesBody(CountBody):
    max_tokens: int = Field(ge=1, le=2**31 - 1, description="Reduced to what is left of the context.")
    stream: bool | None = Field(None, description="Server-sent events instead of one answer. Default false.")
    temperature: float | None = Field(None, ge=0, le=1, description="0 is greedy. Default 1.")
    top_p: float | None = Field(
        None, ge=0, le=1, description="Keep the likeliest tokens that reach this probability. Default 1."
    )
    top_k: int | None = Field(None, ge=0, lt=2**31, description="Keep the k likeliest tokens; 0 keeps all. Default 0.")
    stop_sequences: list[StopText] | None = Field(None, max_length=MAX_STOPS, description="Texts before which the answer ends.")
    metadata: Metadata | None = None
    container: None = Field(None, description="This server runs no code.")
    service_tier: Any = without_effect("there is one tier")
    inference_geo: Any = without_effect("there is one place")
    diagnostics: Any = without_effect("they explain another server's cache")

    def _check(self) -> None:
        super()._check()
        budget = self.thinking and self.thinking.budget_tokens
        if budget and budget >= self.max_tokens and not self.tools:  # between tool calls it may span several answers
            raise field_error("max_tokens", f"must be greater than thinking.budget_tokens, which is {budget}")

    def _chat_fields(self) -> Chat:
        user = self.metadata and self.metadata.user_id
        return super()._chat_fields() | {
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "user": user,
        }

    @property
    def shows_thinking(self) -> bool:
        return not (self.thinking and self.thinking.display == "omitted")


def chat_messages(system: str | Sequence[TextBlock] | None, messages: Sequence[Message]) -> list[Chat]:
    """The messages of a chat: the system prompt, then turns of alternating roles. Successive messages of one role are joined."""
    prompt = _text([block for block in _as_blocks(system) if not block.text.startswith(BILLING)])
    found: list[Chat] = [{"role": "system", "content": prompt}] if prompt else []
    for role, group in groupby(messages, key=lambda message: message.role):
        blocks = [block for message in group for block in _as_blocks(message.content)]
        found += [_answer(blocks)] if role == "assistant" else _turn(role, blocks)
    return found


def _turn(role: str, blocks: Iterable[Any]) -> list[Chat]:
    """What user or system says: a message for each tool result, and one for the texts between them."""
    found: list[Chat] = []
    for is_result, group in groupby(blocks, key=lambda block: isinstance(block, ToolResultBlock)):
        some = list(group)
        found += map(_result, some) if is_result else [{"role": role, "content": _text(some)}]
    return found or [{"role": role, "content": ""}]


def _result(block: ToolResultBlock) -> Chat:
    text = "Error: " * bool(block.is_error) + _text(block.content)
    return {"role": "tool", "tool_call_id": _call_id(block.tool_use_id), "content": text}


def _answer(blocks: Sequence[Any]) -> Chat:
    """One assistant's message of all its blocks."""
    message: Chat = {"role": "assistant", "content": _text([block for block in blocks if isinstance(block, TextBlock)])}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = [chat_call(_call_id(block.id), block.name, block.input) for block in calls]
    return message


def _call_id(given: str) -> str:
    """As the model's family writes ids: some templates require them in this form."""
    return given.removeprefix(ID_PREFIX)


def _as_blocks(content: str | Sequence[Any] | None) -> Sequence[Any]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content or []


def _text(content: str | Sequence[Any] | None) -> str:
    """The text of a content that has text blocks alone."""
    return "\n".join(block.text for block in _as_blocks(content))


def _chat_tool(tool: OwnTool) -> Chat:
    return chat_function(tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
