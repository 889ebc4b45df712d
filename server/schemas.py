"""The bodies of completions, chats, embeddings, the tokenizer and adapters. body.py says how their fields are read."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec.structs import asdict
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from engine.protocol import ADAPTER_NAME, LIST_LIMIT, SMALLEST_REPETITION, Pooling, SamplingParams
from server.body import (
    ABSENT,
    REFUSED,
    STRICT,
    Body,
    Cacheable,
    Checked,
    FormatBody,
    Off,
    Refusals,
    Said,
    StopText,
    kind_of,
    neutral,
    of_type,
    refusals,
    without_effect,
)
from server.errors import field_error

INT64 = 2**63
MAX_CHOICES = 128
MAX_PROMPTS = 4096
MAX_STOPS = 16
MAX_BAD_WORDS, MAX_BAD_WORD = 128, 128  # texts, and characters of each; they are tokenized in the event loop
MAX_LISTED = 16384  # most allowed_token_ids, which are sent to the engine with each choice
MAX_TOOLS = 1024
MAX_USER = 256  # characters of `user` in the access log

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Salt = Annotated[str, Field(min_length=1, max_length=1000)]


def _not_zero(tokens: int | None) -> int | None:
    if tokens == 0:
        raise PydanticCustomError("invalid", "is 0; give at least 1, or -1 for what the context can hold")
    return tokens


Truncation = Annotated[int | None, AfterValidator(_not_zero)]


class StreamOptions(Checked):
    """Options of a stream. They have no effect without `stream`."""

    include_usage: bool | None = Field(None, description="A last chunk with `usage` and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="With `include_usage`: `usage` so far in every chunk.")
    include_obfuscation: Off | None = Field(None, description="Padding against traffic analysis is not supported.")


class SamplingBody(Body):
    """How all generating endpoints sample. `None` stands for the default that the description names, or that
    `--override-generation-config` sets."""

    min_tokens: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="Before this many tokens, only the end of a constraint ends the answer. Default 0.",
    )
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy. Default 1.")
    top_p: float | None = Field(
        None, ge=0, le=1, description="Keep the likeliest tokens that reach this probability. Default 1."
    )
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="Keep the k likeliest tokens; -1 and 0 keep all. Default 0.")
    min_p: float | None = Field(None, ge=0, le=1, description="Drop tokens below this share of the likeliest. Default 0.")
    seed: int | None = Field(
        None,
        ge=-INT64,
        lt=INT64,
        description="The same request with it gets the same answers: answer i, of all prompts, draws with seed + i. Default: random.",
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Default 0.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Default 0.")
    repetition_penalty: float | None = Field(
        None, ge=SMALLEST_REPETITION, le=100, description="Above 1 discourages what occurred before. Default 1."
    )
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024, description="Token id to a number that is added to its logit."
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None, min_length=1, max_length=MAX_LISTED, fail_fast=True, description="Generate only these tokens; at most 16,384."
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="Texts before which the answer ends."
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD)]] | None = Field(
        None,
        max_length=MAX_BAD_WORDS,
        description="Texts whose last token is not generated behind the tokens before it, with and without a space in front.",
    )
    stop_token_ids: list[TokenId] | None = Field(
        None, max_length=1024, fail_fast=True, description="Tokens that end the answer, besides EOS."
    )
    ignore_eos: bool | None = Field(None, description="Continue after EOS. Default false.")
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop text in the answer. Default false.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text. Default true.")
    thinking_token_budget: int | None = Field(
        None, ge=0, lt=2**31, description="After so many tokens of reasoning, its end is forced. Default: no limit."
    )
    cache_salt: Salt | None = Field(
        None, description="Reuse cached prefixes of requests with the same salt alone, and let those alone reuse this one's."
    )
    spaces_between_special_tokens: bool | None = Field(
        None, description="Either value gives the same text: tokens are joined as they are."
    )


# The names that are the engine's, too. A new one needs nothing else in server/.
SAMPLED: tuple[str, ...] = tuple(name for name in SamplingParams.__struct_fields__ if name in SamplingBody.model_fields)
EVERYWHERE = {"temperature", "top_p", "top_k"}  # parameters of all APIs


def _foreign_refusals() -> Refusals:
    """What the bodies of other APIs refuse, unless they have it. A sampling parameter may have the engine's default."""
    defaults = asdict(SamplingParams())
    sampling = {name: (neutral(defaults[name]), ABSENT) for name in SAMPLED if name not in EVERYWHERE}
    return REFUSED | sampling | refusals("other_apis")


FOREIGN_REFUSED: Refusals = _foreign_refusals()


class GenerationBody(FormatBody, SamplingBody):
    """The fields that completions and chat completions share."""

    refused: ClassVar[Refusals] = REFUSED | refusals("completions")
    stream: bool | None = Field(None, description="Server-sent events instead of one answer. Default false.")
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Answers for each prompt; see seed. Default 1.")
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    truncate_prompt_tokens: Truncation = Field(
        None, ge=-1, lt=2**31, description="Keep the last k tokens of the prompt; -1 keeps as many as the context can hold."
    )
    add_special_tokens: bool | None = Field(
        None, description="Put BOS in front as the checkpoint does. Default true; false for chat, whose template writes it."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=LIST_LIMIT,
        description="Log-probabilities of the prompt's tokens and of the k likeliest; not with stream.",
    )
    return_token_ids: bool | None = Field(None, description="Add `prompt_token_ids` and `token_ids`. Default false.")
    return_drafted: bool | None = Field(
        None, description="Add `drafted`: for each token whether `--speculate` had guessed it. Default false."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="In logprobs, write tokens as `token_id:N`. Default false."
    )
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$", description="Part of the answer's `id`.")
    priority: int | None = Field(
        None,
        ge=-INT64,
        lt=INT64,
        description="Requests with a lower number start earlier, and are preempted last. Other than 0 only with `--allow-priority`.",
    )
    user: str | None = Field(None, description="The first 256 characters are written to the access log.")
    metadata: Any = without_effect("nothing reads it")
    store: bool | None = Field(
        None, description="If the server has a journal: finish the request even if the client leaves. Default false."
    )
    service_tier: Any = without_effect("there is one tier")
    safety_identifier: Any = without_effect("the access log has `user`")
    prediction: Any = without_effect("a hint for speed, which chat uses")
    reasoning_effort: Any = without_effect("there is no template")
    verbosity: Any = without_effect("the models served here do not support it")
    prompt_cache_key: Any = without_effect("the prefix cache finds common prefixes by itself")
    prompt_cache_options: Any = without_effect("see `prompt_cache_key`")
    prompt_cache_retention: Any = without_effect("see `prompt_cache_key`")
    cache_control: Any = without_effect("see `prompt_cache_key`")

    @model_validator(mode="after")
    def _check_together(self) -> "GenerationBody":
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("prompt_logprobs", "cannot be combined with stream")
        if self.ignore_eos and self.constraint:
            raise field_error("ignore_eos", "cannot be combined with a constraint of the answer, whose end is EOS")
        for key in self.logit_bias or {}:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise field_error("logit_bias", f"has the key {key[:40]!r}; keys are token ids")
        return self

    @property
    def listed_logprobs(self) -> int | None:
        """How many of the likeliest tokens are listed with each token of the answer; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def engine_logprobs(self) -> tuple[int | None, int | None]:
        """The same of what the engine computes, for tokens of the answer and of the prompt."""
        return self.listed_logprobs, self.prompt_logprobs

    @property
    def choices(self) -> int:
        """How many answers are generated for each prompt."""
        return self.n or 1

    @property
    def places(self) -> int:
        return self.choices

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def usage_options(self) -> tuple[bool, bool]:
        """Whether a last chunk has the usage, and whether every chunk has it."""
        options = self.stream_options
        last = bool(options and options.include_usage)
        return last, last and bool(options and options.continuous_usage_stats)


Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompts = Texts | Ids | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionBody(GenerationBody):
    prompt: Prompts = Field(description="A text, texts, token ids, or lists of token ids.")
    max_tokens: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Default 16. 0 scores the prompt, with echo and logprobs."
    )
    echo: bool | None = Field(None, description="Put the prompt in front of the text and of logprobs. Default false.")
    logprobs: int | None = Field(
        None, ge=0, le=LIST_LIMIT, description="Log-probabilities of the tokens and of the k likeliest at each position."
    )
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="Generate this many and return the n likeliest; not with stream. Default: n."
    )

    @property
    def listed_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def engine_logprobs(self) -> tuple[int | None, int | None]:
        if self.logprobs is None:
            return (0 if self.choices > (self.n or 1) else None), self.prompt_logprobs  # best_of ranks by them
        return self.logprobs, max(self.logprobs, self.prompt_logprobs or 0) if self.echo else self.prompt_logprobs

    @property
    def choices(self) -> int:
        return max(self.best_of or 1, self.n or 1)

    @property
    def places(self) -> int:
        return len(listed(self.prompt)) * self.choices

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionBody":
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise field_error("best_of", f"is {self.best_of}, below n, which is {n}")
        if self.best_of is not None and self.best_of > n and self.stream:
            raise field_error("best_of", "above n cannot be combined with stream")
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise field_error("min_tokens", "is above max_tokens")
        return self


class TextPart(Cacheable):
    type: Annotated[Literal["text"], of_type(Literal["text", None])] = "text"
    text: str
    prompt_cache_breakpoint: Any = without_effect("see `cache_control`")


class RefusalPart(Checked):
    """What a model has written instead of an answer. Templates get it as text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


ChatPart = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[RefusalPart, Tag("refusal")], Discriminator(lambda part: kind_of(part, "text"))
]


class FunctionCall(Checked):
    passes_on = True

    name: str
    arguments: Any = Field(
        None, description="An object or its JSON text. What a model has not finished or got wrong is mended."
    )


class ToolCall(Checked):
    passes_on = True

    id: str | None = None
    type: Annotated[Literal["function"], of_type(Literal["function", None])] = "function"
    function: FunctionCall


class ChatMessage(Said):
    """One message. Other fields are passed on to the chat template. Only an assistant's and a tool's may lack `content`."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
                {"properties": {"role": {"enum": ["assistant", "tool"]}}},
            ]
        }
    )
    passes_on = True

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ChatPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_no_template_reads(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("function_call") is not None:
            raise field_error("messages", "has a function_call, which templates do not know; send it as tool_calls")
        parts = data.get("content") if isinstance(data, dict) else None
        for part in parts if isinstance(parts, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in ("text", "refusal"):
                raise field_error("messages", f"has a content part of type {kind[:40]!r}; this server reads text alone")
        return data


class FunctionDefinition(Cacheable):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema. Default: no arguments.")
    strict: bool | None = Field(None, description=STRICT)


class Tool(Cacheable):
    type: Annotated[Literal["function"], of_type(Literal["function", None])] = "function"
    function: FunctionDefinition


class FunctionName(Checked):
    name: str


class NamedToolChoice(Checked):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Checked):
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(Checked):
    """The template gets all tools, so that their part of the prompt stays the same, but the model may call these alone."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Prediction(Checked):
    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TemplateBody(Body):
    """What the chat template gets besides the messages."""

    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_generation_prompt: bool | None = Field(None, description="Default true, and false with continue_final_message.")
    continue_final_message: bool | None = Field(None, description="Continue the last message instead of answering it.")
    documents: list[dict[str, Any]] | None = Field(None, description="For templates that read `documents`.")
    chat_template: str | None = Field(None, description="A Jinja template, or the name of one of the checkpoint's.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the template.")

    @model_validator(mode="after")
    def _check_continued(self) -> "TemplateBody":
        if self.continue_final_message and self.add_generation_prompt:
            raise field_error("continue_final_message", "excludes add_generation_prompt")
        return self


class ChatBody(TemplateBody, GenerationBody):
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="Default: what is left of the context.")
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Log-probabilities of the answer's tokens. Default false.")
    top_logprobs: int | None = Field(
        None, ge=0, le=LIST_LIMIT, description="Also those of the k likeliest tokens; above 0 only with logprobs. Default 0."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None = Field(
        None, description="`required` and a named function force one call by grammar. Default auto with tools, else none."
    )
    parallel_tool_calls: bool | None = Field(None, description="false keeps the first of several calls. Default true.")
    prediction: Prediction | None = Field(
        None, description="A text that the answer may repeat; such an answer is faster if the server runs with `--speculate`."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="The template's variable of this name. `none` and `minimal` set `enable_thinking` to false if the template has it.",
    )
    include_reasoning: bool | None = Field(None, description="false leaves `reasoning_content` out. Default true.")

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs: true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise field_error("max_completion_tokens", "differs from max_tokens; give one of them")
        if (self.min_tokens or 0) > (self.limit or INT64):
            raise field_error("min_tokens", "is above the maximum length of the answer")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = {tool.function.name for tool in self.tools or []}
        if len(names) < len(self.tools or []):
            raise field_error("tools", "has two functions of the same name")
        choice = self.tool_choice
        if choice not in (None, "none", "auto") and not names:
            raise field_error("tool_choice", "needs tools")
        for name in self._chosen or ():
            if name not in names:
                raise field_error("tool_choice", f"names {name[:64]!r}, which is not in tools")
        if self.ignore_eos and self.forced_tools:
            raise field_error("ignore_eos", "cannot be combined with a forced tool call, whose end is EOS")

    @property
    def listed_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def _chosen(self) -> list[str] | None:
        """The names of tools in `tool_choice`; None if it has none, so that all may be called."""
        match self.tool_choice:
            case NamedToolChoice(function=function):
                return [function.name]
            case AllowedToolsChoice(allowed_tools=allowed):
                return [one.function.name for one in allowed.tools]
        return None

    @property
    def is_mostly_free(self) -> bool:
        return super().is_mostly_free and not self.forced_tools

    @property
    def insists(self) -> bool:
        allowed = self.forced_tools or isinstance(self.tool_choice, AllowedToolsChoice)
        return bool(self.constraint or allowed) or any(tool.function.strict for tool in self.callable_tools)

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        chosen = None if self._chosen is None else set(self._chosen)
        if self.tool_choice == "none":
            return []
        return [tool for tool in self.tools or [] if chosen is None or tool.function.name in chosen]

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools from which one must be called; empty if none must."""
        match self.tool_choice:
            case "required" | NamedToolChoice() | AllowedToolsChoice(allowed_tools=AllowedTools(mode="required")):
                return self.callable_tools
        return []


class TokenizeBody(TemplateBody):
    """A prompt or a conversation, to be tokenized as the two generation endpoints do."""

    prompt: str | None = Field(None, description="A text; or give messages.")
    messages: list[ChatMessage] | None = Field(None, min_length=1, fail_fast=True)
    add_special_tokens: bool | None = Field(None, description="Default true for prompt, false for messages.")
    return_token_strs: bool | None = Field(None, description="Add each token's text.")

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "give either prompt or messages")
        return self


class DetokenizeBody(Body):
    tokens: list[TokenId] = Field(fail_fast=True, description="Token ids.")
    skip_special_tokens: bool | None = Field(None, description="Default false, so that the text shows all tokens.")


class UnloadAdapterBody(Checked):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str = Field(pattern=f"^{ADAPTER_NAME}$", description="The adapter's name in /v1/models.")


class LoadAdapterBody(UnloadAdapterBody):
    """The body of /v1/load_lora_adapter."""

    lora_path: str = Field(min_length=1, max_length=4096, description="Its folder on the server's host, within --lora-root.")


class UploadForm(BaseModel):
    """The form of /v1/files."""

    file: str = Field(json_schema_extra={"format": "binary"})
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = Field(None, alias="expires_after[anchor]")
    seconds: int | None = Field(
        None, ge=3600, le=2_592_000, alias="expires_after[seconds]", description="At most `--files-hours`."
    )


class Expiry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000, description="At most `--files-hours`.")


class BatchBody(BaseModel):
    """The body of /v1/batches."""

    model_config = ConfigDict(extra="forbid", strict=True)
    input_file_id: str = Field(max_length=100, description="A file with a request in each line.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: str = Field(pattern="^[1-9][0-9]{0,3}h$", description="Hours after which the rest expires, as `24h`.")
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    output_expires_after: Expiry | None = None


class PoolingBody(Body):
    """The fields that embeddings and scores share. `None` stands for the default that the description names, or that
    `--override-generation-config` sets."""

    pooling: Pooling | None = Field(
        None, description="Take the mean of all tokens' hidden states, or the last token's. Default: `--embedding-pooling`."
    )
    truncate_prompt_tokens: Truncation = Field(
        None, ge=-1, lt=2**31, description="Keep the last k tokens of each text; -1 keeps as many as the context can hold."
    )
    add_special_tokens: bool | None = Field(None, description="Put BOS in front as the checkpoint does. Default true.")
    priority: int | None = Field(
        None, ge=-INT64, lt=INT64, description="A lower number starts earlier. Other than 0 only with `--allow-priority`."
    )
    cache_salt: Salt | None = Field(None, description="As of /v1/completions, with which it shares the prefix cache.")
    user: str | None = Field(None, description="The first 256 characters are written to the access log.")


class EmbeddingBody(PoolingBody):
    input: Prompts = Field(description="A text, texts, token ids, or lists of token ids.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of the numbers in fp32, little-endian. Default float."
    )
    dimensions: int | None = Field(None, ge=1, lt=2**31, description="Keep the first numbers alone. Default: all.")
    normalize: bool | None = Field(
        None,
        description="Scale each embedding to length 1. Default true, unless the checkpoint's `modules.json` has no `Normalize`.",
    )


class ScoreBody(PoolingBody):
    text_1: Texts = Field(description="A text that is compared with each of `text_2`, or as many texts as `text_2` has.")
    text_2: Texts

    @model_validator(mode="after")
    def _check_lengths(self) -> "ScoreBody":
        first, second = listed(self.text_1), listed(self.text_2)
        if len(first) not in (1, len(second)):
            raise field_error("text_1", f"has {len(first)} texts, but text_2 has {len(second)}; give one text, or as many")
        return self


def listed(prompt: Any) -> list[Any]:
    """A prompt in any of its four forms as a list of texts, or of lists of token ids."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
