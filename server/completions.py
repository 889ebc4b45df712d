"""POST /v1/completions: tokenize the prompts, and lay answers out as choices and chunks of text."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.text import Delta
from errors import UserError
from server.bounds import TokenBounds, check_characters, fit_answer, fit_prompt
from server.endpoint import ChoicesRequest, Chunks, StreamWriter, WholeChoice, respond
from server.errors import bad
from server.generation import Prompt
from server.logprobs import completion_layout, text_offsets
from server.logs import log
from server.openapi import generating
from server.prompts import LONG_TEXT, SLOW_TEXT, prompt_texts, text_prompts
from server.replies import CompletionChunk, CompletionReply
from server.schemas import CompletionBody, listed
from server.service import Service

DEFAULT_MAX_TOKENS = 16
PROMPT_WORK = 64  # fixed cost of tokenizing a prompt, expressed in characters


def add(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", **generating(CompletionReply, CompletionChunk, "Continue a prompt"))
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await respond(service, request, body, read_prompts, CompletionRequest)


class CompletionRequest(ChoicesRequest):
    """The completions of a request's prompts. Raises a 400 as `fit_answer` and `GenerationRequest` do."""

    id_prefix, kind = "cmpl", "text_completion"

    def __init__(self, service: Service, body: CompletionBody, prompts: list[Prompt], grammar: str) -> None:
        self.n, self.echo = body.n or 1, bool(body.echo)
        context = service.max_model_len
        default = service.defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
        limits = [fit_answer(context, len(one.ids), body.max_tokens, default, "max_tokens", "prompt") for one in prompts]
        super().__init__(service, body, grammar, prompts, limits)
        self.every_delta = self.with_ids or self.with_drafted or self.top_logprobs is not None or self.continuous_usage

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self.top_logprobs is None:
            return None
        prompt, tokenizer = self.plan.prompt(delta.index), self.service.tokenizer
        ids, values, offsets = list(delta.token_ids), list[Any](delta.logprobs or []), delta.offsets
        if self.echo:
            text = prompt.text or ""
            offsets = [len(text) + offset for offset in offsets]
            if delta.first:
                offsets = text_offsets(tokenizer, prompt.ids, text, self.plan.params[0].skip_special) + offsets
                ids = prompt.ids + ids
                values = list(delta.prompt_logprobs or [None] * len(prompt.ids)) + values
        return completion_layout(tokenizer, ids, values, offsets, self.top_logprobs, self.tokens_as_ids)

    def reply(self) -> dict[str, Any]:
        each = self.plan.choices
        best: list[WholeChoice] = []
        for at in range(0, self.plan.total, each):  # the n choices of each prompt with the highest mean log-probability
            of_prompt = self.whole_choices[at : at + each]
            if each > self.n:
                of_prompt = sorted(of_prompt, key=lambda one: one.mean_logprob, reverse=True)[: self.n]
            best += of_prompt
        answers = [self._whole(i, self.plan.prompts[i // self.n], one) for i, one in enumerate(best)]
        return {**self.head(self.kind), "choices": answers, "usage": self.usage.report()}

    def _whole(self, index: int, prompt: Prompt, whole: WholeChoice) -> dict[str, Any]:
        logprobs = whole.logprobs.finish() or None
        choice = self.begin(index, whole.text, prompt, logprobs, whole.finish_reason)
        # null where nothing was asked for, as in vLLM's answers: its clients read these fields in any case
        nulls = {"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None}
        choice = nulls | choice | {"stop_reason": whole.stop_reason}
        if self.top_prompt_logprobs is not None:
            choice["prompt_logprobs"] = whole.prompt_logprobs
        return choice | whole.ids.finish()

    def begin(self, index: int, text: str, prompt: Prompt | None, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        """The first fields of a choice. `prompt`: given where the choice begins, which shows it with `echo`."""
        if prompt is not None and self.echo:
            text = (prompt.text or "") + text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if prompt is not None and self.with_ids:
            choice["prompt_token_ids"] = prompt.ids
        return choice

    def stream_writer(self) -> StreamWriter:
        return CompletionStream(self)


class CompletionStream(Chunks):
    """The chunks of a completion."""

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request, request.kind)
        self._request = request

    def push(self, delta: Delta) -> bytes:
        request, events = self._request, b""
        prompt = request.plan.prompt(delta.index) if delta.first else None
        # An incomplete character or a possible start of a stop string needs no chunk yet.
        if delta.text or request.every_delta or (delta.first and request.echo):
            choice = request.begin(delta.index, delta.text, prompt, request.logprobs(delta), None)
            events, prompt = self.event(choice | request.of_tokens(delta)), None
        if delta.finish_reason:  # in a chunk without text
            choice = request.begin(delta.index, "", prompt, None, delta.finish_reason)
            events += self.event(choice | {"stop_reason": delta.stop_reason})
        return events


async def read_prompts(service: Service, body: CompletionBody, size: int) -> list[Prompt]:
    """The prompts as token ids, and with `echo` their texts. Raises a 400 for a prompt that is too long.

    `size`: bytes of the request's body.
    """
    default = service.defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
    if body.max_tokens is None and (body.min_tokens or 0) > default:
        raise bad("min_tokens", f"is above max_tokens (default {default})")
    max_tokens = default if body.max_tokens is None else body.max_tokens
    limits = TokenBounds.of_request(service.max_model_len, body.truncate_prompt_tokens, max_tokens)
    prompts = await encode_prompts(service, listed(body.prompt), body.add_special_tokens is not False, limits, "prompt")
    if body.echo:
        await _add_texts(service, prompts, body.skip_special_tokens is not False)
    return prompts


async def encode_prompts(
    service: Service, given: Sequence[str | list[int]], add_special_tokens: bool, limits: TokenBounds, field: str
) -> list[Prompt]:
    """Texts and lists of token ids as prompts. Raises a 400, which names the request's `field`, for one that is too long."""
    texts = [one for one in given if isinstance(one, str)]
    for text in texts:
        check_characters(service.tokenizer, text, limits, field)
    encoded = iter(await _encode(service, texts, add_special_tokens, limits, field))
    prompts = []
    for one in given:
        ids, whole = next(encoded) if isinstance(one, str) else (one, True)
        kept = fit_prompt(ids, limits, service.vocab_size, field)
        prompts.append(Prompt(kept, one if isinstance(one, str) and whole and len(kept) == len(ids) else None))
    return prompts


async def _encode(
    service: Service, texts: list[str], add_special_tokens: bool, limits: TokenBounds, field: str
) -> list[tuple[list[int], bool]]:
    """The token ids of each text, and whether they cover all of it. Long texts, and those that the tokenizer may lengthen, are
    tokenized in a worker."""
    work = sum(map(len, texts)) + PROMPT_WORK * len(texts)
    if work > LONG_TEXT or (texts and service.tokenizer.covers is None):
        return await service.workers.run(text_prompts, texts, add_special_tokens, limits, field, slow=work > SLOW_TEXT)
    try:
        return [(service.tokenizer.encode(text, add_special_tokens=add_special_tokens), True) for text in texts]
    except UserError as e:
        log.warning("a text was refused: %s", e)  # the library has written a message of its own to the log
        raise


async def _add_texts(service: Service, prompts: list[Prompt], skip_special: bool) -> None:
    """Decode the prompts that have no text."""
    unknown = [prompt for prompt in prompts if prompt.text is None]
    ids = [prompt.ids for prompt in unknown]
    work = sum(map(len, ids))
    if work > LONG_TEXT:
        texts = await service.workers.run(prompt_texts, ids, skip_special, slow=work > SLOW_TEXT)
    else:
        texts = [service.tokenizer.decode(one, skip_special) for one in ids]
    for prompt, text in zip(unknown, texts, strict=True):
        prompt.text = text
