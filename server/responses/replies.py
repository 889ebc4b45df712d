"""Models of the answers of /v1/responses, for /openapi.json. As in server/replies.py, only tests compare them."""

from typing import Any, Literal

from pydantic import ConfigDict

from server.openapi import event_stream, json_text, one_of
from server.replies import ErrorReply, Reply


class OutputTopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int]


class OutputLogprob(OutputTopLogprob):
    top_logprobs: list[OutputTopLogprob]


class OutputText(Reply):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[OutputLogprob]


class ListedText(Reply):
    type: Literal["input_text"]
    text: str


class OutputReasoningText(Reply):
    type: Literal["reasoning_text"]
    text: str


class OutputItem(Reply):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputMessage(OutputItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ListedMessage(OutputItem):
    type: Literal["message"]
    role: Literal["user", "system", "developer"]
    content: list[ListedText]


class OutputReasoning(OutputItem):
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[OutputReasoningText]
    encrypted_content: str | None = None


class CalledItem(OutputItem):
    call_id: str
    name: str
    namespace: str | None = None


class OutputCall(CalledItem):
    type: Literal["function_call"]
    arguments: str


class OutputCustomCall(CalledItem):
    type: Literal["custom_tool_call"]
    input: str


class ListedCallOutput(OutputItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str


class ListedOther(Reply):
    """An item of another type, as it was sent."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str


class ResponseError(Reply):
    code: str
    message: str


class IncompleteDetails(Reply):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(Reply):
    effort: str | None
    summary: None


class ResponseText(Reply):
    format: dict[str, Any]
    verbosity: Literal["low", "medium", "high"]


class ResponseTool(Reply):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ResponseCustomTool(Reply):
    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class ResponseNamespace(Reply):
    type: Literal["namespace"]
    name: str
    description: str
    tools: list[ResponseTool | ResponseCustomTool]


class InputTokensDetails(Reply):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Reply):
    reasoning_tokens: int


class ResponsesUsage(Reply):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesReply(Reply):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall | OutputCustomCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[ResponseTool | ResponseCustomTool | ResponseNamespace]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["auto", "disabled"]
    usage: ResponsesUsage | None
    user: str | None
    metadata: dict[str, str]


class ResponseItems(Reply):
    object: Literal["list"]
    data: list[ListedMessage | OutputMessage | OutputReasoning | OutputCall | ListedCallOutput | ListedOther]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Reply):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseDeleted(Reply):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


def events() -> dict[str, Any]:
    """The content of a response with `stream`. `event` is the type within `data`."""
    payload = {
        "type": "object",
        "properties": {"type": {"type": "string"}, "sequence_number": {"type": "integer"}},
        "required": ["type", "sequence_number"],
    }
    text = "One of OpenAI's events of responses; the last one is response.completed, response.incomplete or response.failed."
    return event_stream({"type": "string"}, json_text(payload), json_text(one_of(ErrorReply)), description=text)
