"""Convert a Messages body to the body of a chat completion."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from server.messages.schemas import (
    JsonFormat,
    Message,
    OwnTool,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)

ID_PREFIX = "toolu_"
# Claude Code's first system block. It is not for the model, and as it varies, the prefix cache would find nothing behind it.
BILLING = "x-anthropic-billing-header:"
EFFORTS = {"xhigh": "high", "max": "high"}  # templates know three levels
CHOICES = {"auto": "auto", "any": "required", "none": "none"}

Chat = dict[str, Any]


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
        message["tool_calls"] = [
            {"id": _call_id(block.id), "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in calls
        ]
    return message


def _call_id(given: str) -> str:
    """As the model's family writes ids: some templates require them in this form."""
    return given.removeprefix(ID_PREFIX)


def _as_blocks(content: str | Sequence[Any] | None) -> Sequence[Any]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content or []


def _text(content: str | Sequence[Any] | None) -> str:
    """The text of a content that has text blocks alone."""
    return "\n".join(block.text for block in _as_blocks(content))


def chat_tools(tools: Sequence[OwnTool]) -> list[Chat]:
    functions = [(tool.name, tool.description, tool.input_schema, tool.strict) for tool in tools]
    return [
        {"type": "function", "function": {"name": name, "description": text, "parameters": schema, "strict": strict}}
        for name, text, schema, strict in functions
    ]


def chat_tool_choice(choice: ToolChoice) -> Chat:
    """The fields of a chat body that say which tools may be called."""
    if choice.type == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        chosen = CHOICES[choice.type]
    return {"tool_choice": chosen, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}


def chat_format(wanted: JsonFormat) -> Chat:
    return {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}


def template_variables(thinking: Thinking | None) -> Chat | None:
    """Switch the template's thinking on or off, by the names that families of models have for it."""
    return dict.fromkeys(("enable_thinking", "thinking"), thinking.type != "disabled") if thinking else None
