"""Models of the server's answers, for /openapi.json: a shape is laid out as the answer that it describes.

The answers themselves are built as plain dicts, which is faster. Tests compare them with these models.
"""

from dataclasses import dataclass
from typing import Any, Literal, Union

from pydantic import ConfigDict, create_model

from server.examples import Examples

Shape = dict[Any, Any]


@dataclass(frozen=True)
class May:
    """Of a field that an answer may lack, or have as null."""

    shape: Any


def answer(name: str, shape: Shape, about: str | None = None, others: bool = False) -> Any:
    """The model of an object with these fields. others: it may have more.

    A field is a type, or a shape in turn: a dict is an object, `{str: shape}` one of any names, a list of one shape a list of
    those, a tuple of shapes one of them.
    """
    fields: dict[str, Any] = {}
    for key, value in shape.items():
        inner = f"{name}{key.title().replace('_', '')}"
        given = isinstance(value, May)
        fields[key] = (_typed(inner, (value.shape, None)), None) if given else (_typed(inner, value), ...)
    return create_model(name, __config__=ConfigDict(extra="allow" if others else "forbid"), __doc__=about, **fields)


def _typed(name: str, shape: Any) -> Any:
    match shape:
        case dict() if str in shape:
            return dict[str, _typed(name, shape[str])]  # type: ignore[misc]
        case dict():
            return answer(name, shape)
        case [one] if isinstance(shape, list):
            return list[_typed(name, one)]  # type: ignore[misc]
        case tuple():
            return Union[tuple(_typed(name, one) for one in shape)]  # noqa: UP007
    return shape


# --- errors and the state ----------------------------------------------------------------------------------------------------

ErrorReply = answer("ErrorReply", {"error": {"message": str, "type": str, "param": str | None, "code": str | None}})
Health = answer("Health", {"status": Literal["ready", "loading", "recovering", "draining", "broken"]})
Version = answer("Version", {"version": str})
Load = answer("Load", {"server_load": int}, "Sequences that run or wait.")
Quantiles = answer("Quantiles", {"p50": float | None, "p95": float | None})
Drafts = answer(
    "Drafts",
    {"drafts": int, "tokens": int, "accepted": int},
    "Drafts of one source since the start, their tokens, and how many of these were right.",
)
StatsReply = answer(
    "StatsReply",
    {
        "status": str,
        "model": str,
        "variant": str | None,
        "communicator": str | None,
        "world_size": int | None,
        "device": str | None,
        "dtype": str | None,
        "max_model_len": int | None,
        "max_batch_tokens": int | None,  # of a step
        "running": int,
        "waiting": int,
        "kv_cache_usage": float,
        "kv_blocks_used": int,
        "kv_blocks_total": int,
        "generation_tokens_per_second": float,
        "prompt_tokens_per_second": float,
        "prompt_tokens": int,
        "generation_tokens": int,
        "prefix_hit_rate": float,
        "preemptions": int,
        "step_seconds": float,
        "all_reduce_share": float | None,
        "idle_share": float | None,
        "accepted_length": float | None,
        "drafts": {str: Drafts},
        "ttft_seconds": Quantiles,
        "inter_token_seconds": Quantiles,
        "uptime_seconds": float,
    },
    "The present state of the engine, and latencies of the last minute in seconds.",
)

# --- files and batches -------------------------------------------------------------------------------------------------------

FILE = dict.fromkeys(("id", "filename", "purpose", "status"), str) | dict.fromkeys(("bytes", "created_at", "expires_at"), int)
FileReply = answer("FileReply", {"object": Literal["file"], **FILE})
FileDeleted = answer("FileDeleted", {"id": str, "object": Literal["file"], "deleted": Literal[True]})
ENDS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
BATCH = {
    **dict.fromkeys(("id", "endpoint", "input_file_id", "completion_window", "status"), str),
    **dict.fromkeys(("created_at", "expires_at"), int),
    **dict.fromkeys(("output_file_id", "error_file_id"), str | None),
    **{f"{status}_at": int | None for status in ENDS},
    "request_counts": {"total": int, "completed": int, "failed": int},
    "metadata": May({str: str}),
    "output_expires_after": May({"anchor": str, "seconds": int}),
    "errors": May({"object": str, "data": [{"code": str, "line": int | None, "message": str, "param": str | None}]}),
}
BatchReply = answer("BatchReply", {"object": Literal["batch"], **BATCH})
PAGE = {"object": Literal["list"], "has_more": bool, "first_id": str | None, "last_id": str | None}
FileList, BatchList = answer("FileList", {**PAGE, "data": [FileReply]}), answer("BatchList", {**PAGE, "data": [BatchReply]})

# --- models and the tokenizer ------------------------------------------------------------------------------------------------

ModelCard = answer(
    "ModelCard",
    {
        "id": str,
        "object": Literal["model"],
        "created": int,
        "owned_by": str,
        "root": str,
        "parent": str | None,  # of an adapter: the base
        "max_model_len": int | None,
        "variant": str | None,  # null while the model loads
        "examples": Examples | None,  # the checkpoint's examples.json, for the page
        "error": str | None,  # of an adapter that could not be loaded again after a recovery: why
    },
)
ModelList = answer("ModelList", {"object": Literal["list"], "data": [ModelCard]})
TokenizeReply = answer("TokenizeReply", {"tokens": [int], "count": int, "max_model_len": int | None, "token_strs": May([str])})
DetokenizeReply = answer("DetokenizeReply", {"prompt": str})
TokenizerInfo = answer(
    "TokenizerInfo",
    {
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), str | None),
        "add_bos_token": bool,
        "vocab_size": int,
        "model_max_length": int,
        "chat_template": str | None,
    },
    "The names are those of `tokenizer_config.json`; null: the checkpoint has none.",
)

# --- what SGLang's router reads ----------------------------------------------------------------------------------------------

RankLoad = answer(
    "RankLoad",
    {
        "dp_rank": int,
        "num_reqs": int,  # sequences that run or wait
        "num_waiting_reqs": int,
        "num_tokens": int,  # of their prompts and of their answers so far
    },
    "The load as SGLang has it: a list of one object for each data-parallel rank. This server is one.",
)
ServerInfo = answer(
    "ServerInfo",
    {
        "status": str,
        "version": str,
        "model_path": str,
        "served_model_name": str,
        "tp_size": int | None,
        "dp_size": int,
        "max_total_tokens": int | None,  # of the KV cache
        "max_running_requests": int,
    },
    "The fields of SGLang's answer that its router reads. null: not known before the ranks are ready.",
)
ModelInfo = answer(
    "ModelInfo",
    {"model_path": str, "tokenizer_path": str, "is_generation": bool, "model_type": str | None, "architectures": ([str], None)},
    "The fields of SGLang's answer that its router reads. null: the checkpoint's config.json does not say.",
)

# --- completions and chats ---------------------------------------------------------------------------------------------------

Usage = answer(
    "Usage",
    {
        "prompt_tokens": int,
        "completion_tokens": int,
        "total_tokens": int,
        "prompt_tokens_details": {"cached_tokens": int},
        "completion_tokens_details": {
            "reasoning_tokens": int,  # up to the end of the reasoning, its markers included
            "accepted_prediction_tokens": int,  # drafted, for this request or from its prediction, and found right
            "rejected_prediction_tokens": int,
        },
    },
)
HEAD: Shape = {"id": str, "created": int, "model": str}
OF_TOKENS: Shape = {"stop_reason": May(str | int), "token_ids": May([int]), "drafted": May([bool])}
OF_PROMPT: Shape = {"prompt_logprobs": May([(dict[str, Any], None)]), "prompt_token_ids": May([int])}
FinishReason = Literal["stop", "length", "tool_calls"]
TopLogprob: Shape = {"token": str, "logprob": float, "bytes": ([int], None)}
TokenLogprob = answer("ChatTokenLogprob", {**TopLogprob, "top_logprobs": [TopLogprob]})
ChatLogprobs = answer("ChatLogprobs", {"content": [TokenLogprob], "refusal": None})
CHOICE: Shape = {"index": int, "logprobs": (ChatLogprobs, None), **OF_TOKENS}

LOGPROBS = {"tokens": [str], "token_logprobs": [float | None], "top_logprobs": [(dict[str, float], None)], "text_offset": [int]}
CompletionChoice = answer(
    "CompletionChoice",
    {"index": int, "text": str, "logprobs": (LOGPROBS, None), "finish_reason": FinishReason | None, **OF_TOKENS, **OF_PROMPT},
)
COMPLETION: Shape = {**HEAD, "object": Literal["text_completion"], "choices": [CompletionChoice], "usage": May(Usage)}
CompletionReply = answer("CompletionReply", COMPLETION)
CompletionChunk = answer(
    "CompletionChunk", COMPLETION, "An event of a stream. Only the last chunk of a choice has a finish_reason."
)
ChatReply = answer(
    "ChatReply",
    {
        **HEAD,
        "object": Literal["chat.completion"],
        "choices": [
            {
                **CHOICE,
                "message": {
                    "role": Literal["assistant"],
                    "content": str | None,
                    "refusal": None,
                    "reasoning_content": May(str),
                    "tool_calls": May([{"id": str, "type": Literal["function"], "function": {"name": str, "arguments": str}}]),
                },
                "finish_reason": FinishReason,
            }
        ],
        "usage": Usage,
        **OF_PROMPT,
    },
)
AnswerDelta = answer(
    "AnswerDelta",
    {
        "role": May(Literal["assistant"]),
        "reasoning_content": May(str),
        "content": May(str),
        "tool_calls": May(
            [{"index": int, "id": May(str), "type": May(Literal["function"]), "function": {"name": May(str), "arguments": str}}]
        ),
    },
    "The new part of a message, the role first. The first chunk of a call has its id, type and name. The next ones of the same "
    "index have more of the arguments.",
)
ChatChunk = answer(
    "ChatChunk",
    {
        **HEAD,
        "object": Literal["chat.completion.chunk"],
        "choices": [{**CHOICE, "delta": AnswerDelta, "finish_reason": FinishReason | None}],
        "usage": May(Usage),
        "prompt_token_ids": May([int]),
    },
    "An event of a stream. With include_usage the last one has no choices.",
)
Unfinished = answer(
    "Unfinished",
    {"id": str, "object": Literal["result"], "status": Literal["unfinished"]},
    "A request of the journal that runs, or waits for its turn.",
)

# --- embeddings --------------------------------------------------------------------------------------------------------------

EmbeddingReply = answer(
    "EmbeddingReply",
    {
        "object": Literal["list"],
        "data": [{"object": Literal["embedding"], "index": int, "embedding": ([float], str)}],  # a text with base64
        "model": str,
        "usage": {"prompt_tokens": int, "total_tokens": int},
    },
)
ScoreReply = answer(
    "ScoreReply",
    {
        **HEAD,
        "object": Literal["list"],
        "data": [{"index": int, "object": Literal["score"], "score": float}],
        "usage": {"prompt_tokens": int, "total_tokens": int, "completion_tokens": Literal[0]},
    },
)

# --- Messages ----------------------------------------------------------------------------------------------------------------

MessagesError = answer("MessagesError", {"type": Literal["error"], "error": {"type": str, "message": str}, "request_id": str})
TokenCount = answer("TokenCount", {"input_tokens": int})
MessageUsage = answer(
    "MessageUsage",
    {
        "input_tokens": int,  # without those that were cached
        "cache_creation_input_tokens": int,
        "cache_read_input_tokens": int,
        "output_tokens": int,
        "output_tokens_details": May({"thinking_tokens": int}),
    },
)
Content = (
    answer("TextContent", {"type": Literal["text"], "text": str}),
    answer("ThinkingContent", {"type": Literal["thinking"], "thinking": str, "signature": str}),
    answer("ToolUseContent", {"type": Literal["tool_use"], "id": str, "name": str, "input": dict[str, Any]}),
)
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
MessageReply = answer(
    "MessageReply",
    {
        "id": str,
        "type": Literal["message"],
        "role": Literal["assistant"],
        "model": str,
        "content": [Content],
        "stop_reason": StopReason | None,  # null only where a stream begins
        "stop_sequence": str | None,
        "usage": MessageUsage,
    },
)
ContentDelta = (
    answer("TextDelta", {"type": Literal["text_delta"], "text": str}),
    answer("ThinkingDelta", {"type": Literal["thinking_delta"], "thinking": str}),
    answer("SignatureDelta", {"type": Literal["signature_delta"], "signature": str}),
    answer("InputJsonDelta", {"type": Literal["input_json_delta"], "partial_json": str}),
)
Stop = answer("StopDelta", {"stop_reason": StopReason, "stop_sequence": str | None})
EVENTS = {  # of a stream, by their names, which are the types of their data
    "message_start": answer("MessageStart", {"type": Literal["message_start"], "message": MessageReply}),
    "ping": answer("Ping", {"type": Literal["ping"]}),
    "content_block_start": answer(
        "ContentBlockStart", {"type": Literal["content_block_start"], "index": int, "content_block": Content}
    ),
    "content_block_delta": answer(
        "ContentBlockDelta", {"type": Literal["content_block_delta"], "index": int, "delta": ContentDelta}
    ),
    "content_block_stop": answer("ContentBlockStop", {"type": Literal["content_block_stop"], "index": int}),
    "message_delta": answer("MessageDelta", {"type": Literal["message_delta"], "delta": Stop, "usage": MessageUsage}),
    "message_stop": answer("MessageStop", {"type": Literal["message_stop"]}),
    "error": MessagesError,
}

# --- Responses ---------------------------------------------------------------------------------------------------------------

ITEM: Shape = {"id": str, "status": Literal["in_progress", "completed", "incomplete"]}
CALLED: Shape = {**ITEM, "call_id": str, "name": str, "namespace": May(str)}
OUTPUT_TEXT: Shape = {"type": Literal["output_text"], "text": str, "annotations": list[Any], "logprobs": [TokenLogprob]}
OutputMessage = answer(
    "OutputMessage", {**ITEM, "type": Literal["message"], "role": Literal["assistant"], "content": [OUTPUT_TEXT]}
)
OutputReasoning = answer(
    "OutputReasoning",
    {
        **ITEM,
        "type": Literal["reasoning"],
        "summary": list[Any],
        "content": [{"type": Literal["reasoning_text"], "text": str}],
        "encrypted_content": May(str),
    },
)
OutputCall = answer("OutputCall", {**CALLED, "type": Literal["function_call"], "arguments": str})
OutputCustomCall = answer("OutputCustomCall", {**CALLED, "type": Literal["custom_tool_call"], "input": str})
ListedMessage = answer(
    "ListedMessage",
    {
        **ITEM,
        "type": Literal["message"],
        "role": Literal["user", "system", "developer"],
        "content": [{"type": Literal["input_text"], "text": str}],
    },
)
ListedCallOutput = answer(
    "ListedCallOutput",
    {**ITEM, "type": Literal["function_call_output", "custom_tool_call_output"], "call_id": str, "output": str},
)
ListedOther = answer("ListedOther", {"id": str, "type": str}, "An item of another type, as it was sent.", others=True)
Tools = (
    answer(
        "ResponseTool",
        {
            "type": Literal["function"],
            "name": str,
            "description": str | None,
            "parameters": dict[str, Any] | None,
            "strict": bool | None,
        },
    ),
    answer(
        "ResponseCustomTool", {"type": Literal["custom"], "name": str, "description": May(str), "format": May(dict[str, Any])}
    ),
)
Namespace = answer("ResponseNamespace", {"type": Literal["namespace"], "name": str, "description": str, "tools": [Tools]})
ResponsesReply = answer(
    "ResponsesReply",
    {
        "id": str,
        "object": Literal["response"],
        "created_at": int,
        "status": Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"],
        "background": bool,
        "completed_at": int | None,
        "error": ({"code": str, "message": str}, None),
        "incomplete_details": ({"reason": Literal["max_output_tokens"]}, None),
        "instructions": str | None,
        "max_output_tokens": int | None,
        "max_tool_calls": int | None,
        "model": str,
        "output": [(OutputMessage, OutputReasoning, OutputCall, OutputCustomCall)],
        "parallel_tool_calls": bool,
        "previous_response_id": str | None,
        "prompt_cache_key": str | None,
        "reasoning": {"effort": str | None, "summary": None},
        "safety_identifier": str | None,
        "service_tier": Literal["default"],
        "store": bool,
        "temperature": float,
        "text": {"format": dict[str, Any], "verbosity": Literal["low", "medium", "high"]},
        "tool_choice": str | dict[str, Any],
        "tools": [(Tools, Namespace)],
        "top_logprobs": int,
        "top_p": float,
        "presence_penalty": float,
        "frequency_penalty": float,
        "truncation": Literal["auto", "disabled"],
        "usage": (
            {
                "input_tokens": int,
                "input_tokens_details": {"cached_tokens": int, "cache_write_tokens": int},
                "output_tokens": int,
                "output_tokens_details": {"reasoning_tokens": int},
                "total_tokens": int,
            },
            None,
        ),
        "user": str | None,
        "metadata": dict[str, str],
    },
)
ResponseItems = answer(
    "ResponseItems",
    {
        "object": Literal["list"],
        "data": [(ListedMessage, OutputMessage, OutputReasoning, OutputCall, ListedCallOutput, ListedOther)],
        "first_id": str | None,
        "last_id": str | None,
        "has_more": bool,
    },
)
InputTokens = answer("InputTokens", {"object": Literal["response.input_tokens"], "input_tokens": int})
ResponseDeleted = answer("ResponseDeleted", {"id": str, "object": Literal["response"], "deleted": Literal[True]})
