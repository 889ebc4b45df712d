"""Models of the server's responses, for /openapi.json.

The responses themselves are built as plain dicts, which is faster. Tests compare them with these models.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from server.examples import Examples


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    error: ErrorDetail


class PromptTokensDetails(Reply):
    cached_tokens: int


class CompletionTokensDetails(Reply):
    reasoning_tokens: int  # up to the end of the reasoning, its markers included
    accepted_prediction_tokens: int  # tokens that were drafted, for this request or from its prediction, and found right
    rejected_prediction_tokens: int


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(Reply):
    id: str
    object: str
    created: int
    model: str


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    drafted: list[bool] | None = None


class CompletionReply(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class CompletionChunk(CompletionReply):
    """An event of a stream. Only the last chunk of a choice has a finish_reason."""


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(Reply):
    name: str
    arguments: str


class CalledTool(Reply):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(Reply):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    drafted: list[bool] | None = None


class ChatReply(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class Unfinished(Reply):
    """A request of the journal that runs, or waits for its turn."""

    id: str
    object: Literal["result"]
    status: Literal["unfinished"]


class CalledFunctionChunk(Reply):
    name: str | None = None
    arguments: str


class CalledToolChunk(Reply):
    """The first chunk of a call has its id, type and name. The next ones of the same index have more of the arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionChunk


class AnswerDelta(Reply):
    """The new part of a message. The role comes first."""

    role: Literal["assistant"] | None = None
    reasoning_content: str | None = None
    content: str | None = None
    tool_calls: list[CalledToolChunk] | None = None


class ChatChunkChoice(Reply):
    index: int
    delta: AnswerDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    drafted: list[bool] | None = None


class ChatChunk(Answer):
    """An event of a stream. With include_usage the last one has no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class EmbeddingUsage(Reply):
    prompt_tokens: int
    total_tokens: int


class Embedding(Reply):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # a text with base64


class EmbeddingReply(Reply):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Score(Reply):
    index: int
    object: Literal["score"]
    score: float


class ScoreUsage(EmbeddingUsage):
    completion_tokens: Literal[0]


class ScoreReply(Answer):
    object: Literal["list"]
    data: list[Score]
    usage: ScoreUsage


class ModelCard(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None  # of an adapter: the base
    max_model_len: int | None
    variant: str | None  # null while the model loads
    examples: Examples | None  # the checkpoint's examples.json, for the page
    error: str | None  # of an adapter that could not be loaded again after a recovery: why


class ModelList(Reply):
    object: Literal["list"]
    data: list[ModelCard]


class Health(Reply):
    status: Literal["ready", "loading", "recovering", "draining", "broken"]


class Version(Reply):
    version: str


class TokenizeReply(Reply):
    tokens: list[int]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None = None


class DetokenizeReply(Reply):
    prompt: str


class TokenizerInfo(Reply):
    """The names are those of `tokenizer_config.json`; null: the checkpoint has none."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    add_bos_token: bool
    vocab_size: int
    model_max_length: int
    chat_template: str | None


class Load(Reply):
    server_load: int  # sequences that run or wait


class RankLoad(Reply):
    """The load as SGLang has it: a list of one object for each data-parallel rank. This server is one."""

    dp_rank: int
    num_reqs: int  # sequences that run or wait
    num_waiting_reqs: int
    num_tokens: int  # of their prompts and of their answers so far


class ServerInfo(Reply):
    """The fields of SGLang's answer that its router reads. null: not known before the ranks are ready."""

    status: str
    version: str
    model_path: str
    served_model_name: str
    tp_size: int | None
    dp_size: int
    max_total_tokens: int | None  # of the KV cache
    max_running_requests: int


class ModelInfo(Reply):
    """The fields of SGLang's answer that its router reads. null: the checkpoint's config.json does not say."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    model_type: str | None
    architectures: list[str] | None


class Quantiles(Reply):
    p50: float | None
    p95: float | None


class Drafts(Reply):
    """Drafts of one source since the start, their tokens, and how many of these were right."""

    drafts: int
    tokens: int
    accepted: int


class StatsReply(Reply):
    """The present state of the engine, and latencies of the last minute in seconds."""

    status: str
    model: str
    variant: str | None
    communicator: str | None
    world_size: int | None
    device: str | None
    dtype: str | None
    max_model_len: int | None
    max_batch_tokens: int | None  # of a step
    running: int
    waiting: int
    kv_cache_usage: float
    kv_blocks_used: int
    kv_blocks_total: int
    generation_tokens_per_second: float
    prompt_tokens_per_second: float
    prompt_tokens: int
    generation_tokens: int
    prefix_hit_rate: float
    preemptions: int
    step_seconds: float
    all_reduce_share: float | None
    idle_share: float | None
    accepted_length: float | None
    drafts: dict[str, Drafts]
    ttft_seconds: Quantiles
    inter_token_seconds: Quantiles
    uptime_seconds: float
