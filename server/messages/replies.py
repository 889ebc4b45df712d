"""Models of the responses, for /openapi.json."""

from typing import Any, Literal

from pydantic import BaseModel

from server.replies import Reply


class MessagesErrorDetail(Reply):
    type: str
    message: str


class MessagesError(Reply):
    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class TokenCount(Reply):
    input_tokens: int


class MessageTokensDetails(Reply):
    thinking_tokens: int


class MessageUsage(Reply):
    input_tokens: int  # without those that were cached
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails | None = None


class TextContent(Reply):
    type: Literal["text"]
    text: str


class ThinkingContent(Reply):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(Reply):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageReply(Reply):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None  # null only where a stream begins
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(Reply):
    type: Literal["message_start"]
    message: MessageReply


class Ping(Reply):
    type: Literal["ping"]


class ContentBlockStart(Reply):
    type: Literal["content_block_start"]
    index: int
    content_block: Content


class TextDelta(Reply):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Reply):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(Reply):
    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(Reply):
    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(Reply):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Reply):
    type: Literal["content_block_stop"]
    index: int


class StopDelta(Reply):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Reply):
    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage


class MessageStop(Reply):
    type: Literal["message_stop"]


EVENTS: tuple[type[BaseModel], ...] = (
    MessageStart,
    Ping,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
    MessagesError,
)
