"""POST /v1/completions: convert prompts to a `Plan`, and `Delta`s to OpenAI's choices and chunks."""

from collections.abc import AsyncGenerator
from typing import Any

from server.generation import (
    Chunks,
    Delta,
    Plan,
    Prompt,
    Run,
    Usage,
    Whole,
    check_answers,
    collect,
    fit_answer,
    fit_prompt,
    make_params,
    new_id,
    prompt_logprobs_by_id,
    room_for,
    stream,
    with_limit,
)
from server.json_schema import Compiled
from server.logprobs import completion_layout
from server.prompts import LONG_TEXT, SLOW_TEXT, Room, check_length, prompt_texts, text_prompts
from server.schemas import CompletionBody
from server.service import Service
from server.text import text_offsets

DEFAULT_MAX_TOKENS = 16
PROMPT_WORK = 64  # fixed cost of tokenizing a prompt, expressed in characters


class Completion:
    """One request. `prompts` and `echoes` come from `read_prompts`."""

    def __init__(
        self, service: Service, body: CompletionBody, prompts: list[Prompt], echoes: list[str], compiled: Compiled
    ) -> None:
        self.service, self.body, self.echoes, self.compiled = service, body, echoes, compiled
        self.skip_special = body.skip_special_tokens is not False
        scores = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scores = max(body.logprobs, scores or 0)
        self.n, choices = body.n or 1, max(body.best_of or 1, body.n or 1)
        wanted = 0 if choices > self.n and body.logprobs is None else body.logprobs  # best_of ranks by them
        limits = [fit_answer(service, len(prompt.ids), body.max_tokens, DEFAULT_MAX_TOKENS) for prompt in prompts]
        shared = make_params(service, body, limits[0], wanted, scores, compiled.grammar or None)
        params = [with_limit(shared, body, limit) for limit in limits]
        self.plan = Plan(
            id=new_id("cmpl", body),
            prompts=prompts,
            params=params,
            choices=choices,
            stop=body.stops,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special=self.skip_special,
            hidden=body.max_tokens == 0,
        )
        self.usage = Usage(self.plan)
        self.include_usage, self.continuous_usage = body.usage_options
        self.says_all = bool(body.return_token_ids or body.logprobs is not None or self.continuous_usage)

    # ------------------------------------------------------------------------------------------------ answers

    async def answer(self, note: dict[str, Any]) -> dict[str, Any]:
        body = self.body
        if body.logprobs is not None:
            check_answers(self.service, self.plan)

        def take(choice: Whole, delta: Delta) -> None:
            choice.add(delta, self._logprobs(delta), bool(body.return_token_ids), self._prompt_logprobs(delta))

        choices = await collect(self.service, self.plan, self.usage, note, take)
        best = self._best(choices) if self.plan.choices > self.n else choices
        return {**self._head(), "choices": [self._whole(i, one) for i, one in enumerate(best)], "usage": self.usage.report()}

    def events(self, note: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(self._head(), self.usage, self.include_usage, self.continuous_usage)

        def events_of(delta: Delta) -> bytes:
            return chunks.event(self._choice(delta)) if self._says_something(delta) else b""

        return stream(Run(self.service, self.plan, self.usage, note), events_of, chunks.last)

    def _head(self) -> dict[str, Any]:
        name = self.body.model or self.service.model_name
        return {"id": self.plan.id, "object": "text_completion", "created": self.plan.created, "model": name}

    def _says_something(self, delta: Delta) -> bool:
        """Whether to send a chunk. An incomplete character or a possible start of a stop string needs none yet."""
        return bool(delta.text or delta.finish_reason or self.says_all or (delta.first and self.body.echo))

    def _choice(self, delta: Delta) -> dict[str, Any]:
        """The choice in a chunk: only what is new."""
        choice = self._begin(delta.index, delta.text, delta.first, self._logprobs(delta), delta.finish_reason)
        if delta.finish_reason:
            choice["stop_reason"] = delta.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _whole(self, index: int, whole: Whole) -> dict[str, Any]:
        assert whole.last is not None
        choice = self._begin(index, whole.text, True, whole.logprobs.finish() or None, whole.last.finish_reason)
        choice["stop_reason"] = whole.last.stop_reason
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = whole.prompt_logprobs
        return choice | whole.ids.finish()

    def _begin(self, index: int, text: str, first: bool, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        prompt = index // self.plan.choices
        if first and self.body.echo:
            text = self.echoes[prompt] + text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if first and self.body.return_token_ids:
            choice["prompt_token_ids"] = self.plan.prompts[prompt].ids
        return choice

    def _prompt_logprobs(self, delta: Delta) -> list[dict[str, Any] | None] | None:
        limit = self.body.prompt_logprobs
        return None if limit is None else prompt_logprobs_by_id(self.service, delta.prompt_logprobs, limit)

    def _logprobs(self, delta: Delta) -> dict[str, list[Any]] | None:
        if self.body.logprobs is None:
            return None
        prompt = self.plan.prompts[delta.index // self.plan.choices]
        echo = self.echoes[delta.index // self.plan.choices] if self.body.echo else ""
        ids, values = list(delta.token_ids), list[Any](delta.logprobs or [])
        offsets = [len(echo) + offset for offset in delta.offsets]
        if self.body.echo and delta.first:
            starts = text_offsets(self.service.tokenizer, prompt.ids, self.skip_special)
            offsets = [min(start, len(echo)) for start in starts] + offsets
            ids = prompt.ids + ids
            values = list(delta.prompt_logprobs or [None] * len(prompt.ids)) + values
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return completion_layout(self.service.tokenizer, ids, values, offsets, self.body.logprobs or 0, as_ids)

    def _best(self, choices: list[Whole]) -> list[Whole]:
        """The n choices of each prompt with the highest mean log-probability. Sets `plan.choices` to n."""
        kept: list[Whole] = []
        for at in range(0, len(choices), self.plan.choices):
            kept += sorted(choices[at : at + self.plan.choices], key=lambda one: one.mean_logprob, reverse=True)[: self.n]
        self.plan.choices = self.n
        return kept


async def read_prompts(service: Service, body: CompletionBody) -> tuple[list[Prompt], list[str]]:
    """The prompts as token ids, and with `echo` their texts. Raises a 400 for a prompt that is too long."""
    given = _split(body.prompt)
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    room = room_for(service, body.truncate_prompt_tokens, limit)
    texts = [one for one in given if isinstance(one, str)]
    for text in texts:
        check_length(service.tokenizer, text, room, "prompt")
    encoded = iter(await _encode(service, texts, body.add_special_tokens is not False, room))
    prompts = []
    for one in given:
        ids, whole = next(encoded) if isinstance(one, str) else (one, True)
        kept = fit_prompt(service, ids, body.truncate_prompt_tokens, limit)
        prompts.append(Prompt(kept, one if isinstance(one, str) and whole and len(kept) == len(ids) else None))
    return prompts, await _echoes(service, prompts, body.skip_special_tokens is not False) if body.echo else []


async def _encode(service: Service, texts: list[str], add_special_tokens: bool, room: Room) -> list[tuple[list[int], bool]]:
    """The token ids of each text, and whether they cover all of it. Long texts are tokenized in a worker."""
    work = sum(map(len, texts)) + PROMPT_WORK * len(texts)
    if work > LONG_TEXT:
        return await service.workers.run(text_prompts, texts, add_special_tokens, room, slow=work > SLOW_TEXT)
    return [(service.tokenizer.encode(text, add_special_tokens=add_special_tokens), True) for text in texts]


async def _echoes(service: Service, prompts: list[Prompt], skip_special: bool) -> list[str]:
    """The text of each prompt: as the client wrote it, or else decoded from its ids."""
    unknown = [prompt.ids for prompt in prompts if prompt.text is None]
    work = sum(map(len, unknown))
    if work > LONG_TEXT:
        found = iter(await service.workers.run(prompt_texts, unknown, skip_special, slow=work > SLOW_TEXT))
    else:
        found = iter([service.tokenizer.decode(ids, skip_special) for ids in unknown])
    return [next(found) if prompt.text is None else prompt.text for prompt in prompts]


def _split(prompt: Any) -> list[str | list[int]]:
    """Convert a prompt in any of its four forms to a list. Each item is a text or a list of token ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)
