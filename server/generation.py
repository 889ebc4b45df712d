"""Run a checked request: make the engine's parameters, and convert its outputs to text, ids and log-probabilities.

Both endpoints read the same `Delta`s with and without streaming, so that a streamed answer equals a whole one.
"""

import asyncio
import io
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from types import TracebackType
from typing import Any

import msgspec

from engine.protocol import Logprob, RequestParams, Submit, TokenLogprobs, TokenOutput
from server.http import to_json
from server.problems import ApiError, bad, context_error
from server.prompts import Room, check_logprobs, check_total
from server.schemas import INT64, GenerationBody
from server.service import Service
from server.text import TextStream

SMALLEST_TOP_P = 1e-9  # replaces top_p 0; keeps only the likeliest token


@dataclass
class Prompt:
    ids: list[int]
    text: str | None = None  # the client's text; None if the client sent ids or the prompt was cut


@dataclass
class Plan:
    """One HTTP request for the engine: `choices` sequences for each prompt."""

    id: str
    prompts: list[Prompt]
    params: list[RequestParams]  # one for each prompt; choice i samples with seed + i
    choices: int
    stop: list[str]
    include_stop: bool
    skip_special: bool
    hidden: bool = False  # max_tokens 0: the engine computes one token, which is not shown
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.stop_ids = frozenset(self.params[0].stop_token_ids)  # the same for all prompts

    @property
    def total(self) -> int:
        return len(self.prompts) * self.choices

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all sequences: a prompt counts once for each of its choices."""
        return sum(len(prompt.ids) for prompt in self.prompts) * self.choices


class Delta(msgspec.Struct):  # made for every token; a dataclass takes twice as long to make
    """The new part of one choice."""

    index: int
    first: bool
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    offsets: list[int]  # where each token begins in the choice's text
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: list[TokenLogprobs | None] | None


class Usage:
    """Token counts so far. A prompt counts once, regardless of its number of choices."""

    def __init__(self, plan: Plan) -> None:
        self.prompt = sum(len(prompt.ids) for prompt in plan.prompts)
        self.completion = 0
        self._cached: dict[int, int] = {}

    def add(self, prompt: int, output: TokenOutput) -> None:
        self._cached[prompt] = max(self._cached.get(prompt, 0), output.cached_tokens)

    def report(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


def new_id(prefix: str, body: GenerationBody) -> str:
    return f"{prefix}-{body.request_id or uuid.uuid4().hex}"


def room_for(service: Service, truncate: int | None, max_tokens: int | None) -> Room:
    """The limits of a prompt. `truncate`: truncate_prompt_tokens; -1 keeps what the context can hold with the answer."""
    answer = max(max_tokens or 1, 1)
    keep = max(0, service.max_model_len - answer) if truncate == -1 else truncate
    return Room(service.max_model_len, keep, answer)


def fit_prompt(
    service: Service, ids: list[int], truncate: int | None, max_tokens: int | None, part: str = "prompt"
) -> list[int]:
    """The prompt's ids, cut at the start if `truncate` says so.

    Raises a 400 for a prompt that is empty, too long or has an unknown id. `part`: the field of the prompt, "prompt" or
    "messages".
    """
    limit, keep = service.max_model_len, room_for(service, truncate, max_tokens).keep
    if keep is not None:
        ids = ids[max(0, len(ids) - keep) :]
    if not ids:
        raise bad(part, "has no tokens; give at least one")
    if (highest := max(ids)) >= service.vocab_size:
        raise bad(part, f"has the token id {highest}, but ids run from 0 to {service.vocab_size - 1}")
    if len(ids) + 1 > limit:
        raise context_error(limit, len(ids), max(max_tokens or 1, 1), part, part=part)
    return ids


def fit_answer(
    service: Service, prompt: int, max_tokens: int | None, default: int | None, name: str = "max_tokens", part: str = "prompt"
) -> int:
    """The most tokens that the answer may have, after `prompt` tokens of the prompt.

    `default` is reduced to what is left of the context; None takes all of it. Raises a 400 if `max_tokens` exceeds it.
    """
    left = service.max_model_len - prompt
    if max_tokens is None:
        return left if default is None else min(default, left)
    if max_tokens > left:
        raise context_error(service.max_model_len, prompt, max_tokens, name, part=part)
    return max_tokens


def make_params(
    service: Service,
    body: GenerationBody,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str | None,
) -> RequestParams:
    """The parameters that all sequences of a request share; see `with_limit`. Raises a 400 for an unknown token id."""
    stop_ids = set(body.stop_token_ids or [])
    if not body.ignore_eos:
        stop_ids |= set(service.tokenizer.eos_ids)
    bias = {int(key): value for key, value in (body.logit_bias or {}).items()}
    for name, ids in (
        ("logit_bias", bias),
        ("allowed_token_ids", body.allowed_token_ids),
        ("stop_token_ids", body.stop_token_ids),
    ):
        if ids and max(ids) >= service.vocab_size:
            raise bad(name, f"has the token id {max(ids)}, but ids run from 0 to {service.vocab_size - 1}")
    return RequestParams(
        max_tokens=max(max_tokens, 1),
        min_tokens=min(body.min_tokens or 0, max_tokens),
        temperature=_given(body.temperature, 1.0),
        top_k=max(body.top_k or 0, 0),
        top_p=max(_given(body.top_p, 1.0), SMALLEST_TOP_P),
        min_p=body.min_p or 0.0,
        seed=random.getrandbits(62) if body.seed is None else body.seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        logit_bias=bias,
        allowed_token_ids=body.allowed_token_ids,
        stop_token_ids=sorted(stop_ids),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def with_limit(params: RequestParams, body: GenerationBody, max_tokens: int) -> RequestParams:
    """`params` for an answer of at most `max_tokens` tokens."""
    return msgspec.structs.replace(params, max_tokens=max(max_tokens, 1), min_tokens=min(body.min_tokens or 0, max_tokens))


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def make_submits(plan: Plan) -> list[Submit]:
    unique = uuid.uuid4().hex  # clients may use a request id of their own more than once
    submits = []
    for p, (prompt, params) in enumerate(zip(plan.prompts, plan.params, strict=True)):
        for i in range(plan.choices):
            seed = (params.seed + i + INT64) % (2 * INT64) - INT64  # wraps around as a signed 64-bit number
            one = params if i == 0 else msgspec.structs.replace(params, seed=seed)
            submits.append(Submit(f"{unique}-{p * plan.choices + i}", prompt.ids, one))
    return submits


class _Choice:
    """The state of one running sequence."""

    def __init__(self, service: Service, plan: Plan, index: int) -> None:
        prompt = index // plan.choices
        params = plan.params[prompt]
        self.index, self.hidden, self.first, self.finished = index, plan.hidden, True, False
        self.text = TextStream(
            service.tokenizer,
            plan.prompts[prompt].ids,
            stop=plan.stop,
            stop_ids=plan.stop_ids,
            include_stop=plan.include_stop,
            skip_special=plan.skip_special,
            min_tokens=params.min_tokens,
        )
        self.with_logprobs = params.logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None

    def push(self, output: TokenOutput) -> Delta | None:
        """What `output` adds; None if it adds nothing, as between the parts of a long prompt."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if not output.token_ids and not output.finish_reason:
            return None
        text, offsets = "", list[int]()
        for token_id in () if self.hidden else output.token_ids:
            offsets.append(self.text.decoded)
            text += self.text.push(token_id)
            if isinstance(self.text.stop_reason, str):
                break
        ids = output.token_ids[: len(offsets)]
        finish_reason = "length" if self.hidden else output.finish_reason
        if isinstance(self.text.stop_reason, str):
            finish_reason = "stop"
        elif finish_reason:
            text += self.text.flush()
            finish_reason = "stop" if isinstance(self.text.stop_reason, str) else finish_reason
        self.finished = bool(finish_reason)
        logprobs = (output.logprobs or [])[: len(ids)] if self.with_logprobs else None
        first, self.first = self.first, False
        prompt_logprobs = self.prompt_logprobs if first else None
        return Delta(self.index, first, text, ids, logprobs, offsets, finish_reason, self.text.stop_reason, prompt_logprobs)


class Run:
    """Runs a plan. A context manager, which aborts unfinished sequences at its end.

    `note` collects fields of the access log. Raises ApiError: 400, 429, 503.
    """

    def __init__(self, service: Service, plan: Plan, usage: Usage, note: dict[str, Any]) -> None:
        self.unfinished = plan.total
        self._service, self._plan, self._usage, self._note = service, plan, usage, note

    def __enter__(self) -> "Run":
        service, plan = self._service, self._plan
        service.admit(plan.total)
        check_total(plan.prompt_tokens, Room(service.max_model_len), plan.params[0].prompt_logprobs)
        self._choices = [_Choice(service, plan, i) for i in range(plan.total)]
        self._note |= {"prompt_tokens": self._usage.prompt, "completion_tokens": 0}
        self._started = time.monotonic()
        self._generation = service.client.generate(make_submits(plan))
        self._generation.__enter__()
        # One timer for the whole request: a timeout around each wait would need a timer for every token.
        seconds = service.settings.request_timeout
        error = ApiError(503, f"the request took longer than {seconds:g} s and was ended", None, "timeout")
        self._deadline = asyncio.get_running_loop().call_later(seconds, self._generation.on_error, error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._deadline.cancel()
        self._generation.__exit__(kind, error, trace)

    async def next(self) -> Iterator[Delta]:
        """Wait for outputs and return an iterator over their deltas, perhaps an empty one.

        The caller must exhaust the iterator. It processes each output only when the caller gets to it. So the usage includes
        exactly the deltas up to the current one, and an output that fails does not discard the deltas before it.
        """
        arrived = await self._generation.next()
        return filter(None, starmap(self._take, arrived))

    def _take(self, index: int, output: TokenOutput) -> Delta | None:
        choice, usage = self._choices[index], self._usage
        if choice.finished:  # the output is from after a stop string
            return None
        if output.cached_tokens:
            usage.add(index // self._plan.choices, output)
        if (delta := choice.push(output)) is None:
            return None
        usage.completion += len(delta.token_ids)
        self._note["completion_tokens"] = usage.completion
        if "ttft" not in self._note:
            self._note["ttft"] = round(time.monotonic() - self._started, 4)
        if delta.finish_reason:
            self.unfinished -= 1
            self._note["finish"] = delta.finish_reason
            self._generation.stop(index)
        return delta


class Chunks:
    """Encodes the chunks of one stream as events, the fields that they share only once. `head`: fields before `choices`."""

    def __init__(self, head: dict[str, Any], usage: Usage, include_usage: bool, continuous_usage: bool) -> None:
        self._head = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._usage, self._include_usage, self._continuous_usage = usage, include_usage, continuous_usage
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def event(self, choice: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
        """The event of one chunk. `more`: other fields of this chunk."""
        if self._continuous_usage:
            more = {**(more or {}), "usage": self._usage.report()}
        elif more and self._include_usage:
            more = {**more, "usage": None}
        return self._head + to_json(choice) + (b"]," + to_json(more)[1:] + b"\n\n" if more else self._end)

    def last(self) -> bytes:
        """The event of the last chunk, which has the usage; empty without `include_usage`."""
        return self._head + b"]," + to_json({"usage": self._usage.report()})[1:] + b"\n\n" if self._include_usage else b""


async def stream(run: Run, events_of: Callable[[Delta], bytes], last: Callable[[], bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the events of all deltas, then `last()`.

    Events of outputs that arrived together are yielded together. If one fails, the events before it are yielded before the
    exception is raised.
    """
    with run:
        while run.unfinished:
            events: list[bytes] = []
            failure: Exception | None = None
            try:
                for delta in await run.next():
                    events.append(events_of(delta))
            except Exception as e:
                failure = e
            if data := b"".join(events):
                yield data
            if failure is not None:
                raise failure
    if data := last():
        yield data


def finite(logprob: float) -> float:
    """`logprob` for JSON, which has no -inf: an excluded token gets -9999, as in OpenAI's API."""
    return max(logprob, -9999.0)


def prompt_logprobs_by_id(
    service: Service, values: Sequence[TokenLogprobs | None] | None, limit: int
) -> list[dict[str, Any] | None] | None:
    """Convert to the layout of the `prompt_logprobs` extension: a dict by token id per position, the prompt's token first."""
    if values is None:
        return None

    def entry(one: Logprob) -> dict[str, Any]:
        return {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": service.token_text(one.token_id)}

    return [v if v is None else {str(one.token_id): entry(one) for one in (v.chosen, *v.top[:limit])} for v in values]


def merge(parts: Sequence[Delta]) -> Delta:
    """Merge successive deltas of one choice into one."""
    first, last = parts[0], parts[-1]
    if first is last:
        return first
    logprobs = None if first.logprobs is None else [one for part in parts for one in part.logprobs or []]
    return Delta(
        index=first.index,
        first=first.first,
        text="".join(part.text for part in parts),
        token_ids=[one for part in parts for one in part.token_ids],
        logprobs=logprobs,
        offsets=[one for part in parts for one in part.offsets],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=first.prompt_logprobs,
    )


class JsonLists:
    """An object of growing lists, kept as encoded JSON, which takes a tenth of the memory of their values."""

    def __init__(self) -> None:
        self._parts: dict[str, bytearray | None] = {}

    def extend(self, more: dict[str, list[Any] | None]) -> None:
        """Append to each list. A None stays None."""
        for name, values in more.items():
            part = self._parts.setdefault(name, None if values is None else bytearray())
            if values and part is not None:
                part += b"," * bool(part) + to_json(values)[1:-1]

    def finish(self) -> dict[str, msgspec.Raw | None]:
        """Return the object, for `to_json`, and reset this one."""
        parts, self._parts = self._parts, {}
        return {name: None if part is None else msgspec.Raw(b"[" + part + b"]") for name, part in parts.items()}


class Whole:
    """Collects one choice until it is complete. Does not keep its deltas, which take hundreds of bytes for each token."""

    def __init__(self) -> None:
        self.last: Delta | None = None
        self.prompt_logprobs: msgspec.Raw | None = None  # in the answer's layout
        self.logprobs, self.ids = JsonLists(), JsonLists()
        self._text = io.StringIO()
        self._tokens, self._likelihood = 0, 0.0

    def add(self, delta: Delta, logprobs: dict[str, Any] | None, ids: bool, prompt_logprobs: Any = None) -> None:
        """Append `delta`, and remove its log-probabilities to free memory.

        `logprobs`, `prompt_logprobs`: those of `delta` in the answer's layout. `ids`: whether the answer has the token ids.
        """
        self._text.write(delta.text)
        self._tokens += len(delta.token_ids)
        self._likelihood += sum(one.chosen.logprob for one in delta.logprobs or [])
        if logprobs is not None:
            self.logprobs.extend(logprobs)
        if ids:
            self.ids.extend({"token_ids": delta.token_ids})
        if prompt_logprobs is not None:
            self.prompt_logprobs = msgspec.Raw(to_json(prompt_logprobs))
        delta.logprobs = delta.prompt_logprobs = None
        self.last = delta

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def mean_logprob(self) -> float:
        return self._likelihood / max(self._tokens, 1)


async def collect(
    service: Service, plan: Plan, usage: Usage, note: dict[str, Any], take: Callable[[Whole, Delta], None]
) -> list[Whole]:
    """Run the plan and return all choices when they are complete. `take` adds each delta to its choice."""
    choices = [Whole() for _ in range(plan.total)]
    with Run(service, plan, usage, note) as run:
        while run.unfinished:
            for delta in await run.next():
                take(choices[delta.index], delta)
    return choices


def check_answers(service: Service, plan: Plan) -> None:
    """Raises a 400 if the answers may have more log-probabilities than can be kept until the answers are complete."""
    values = (1 + (plan.params[0].logprobs or 0)) * plan.choices * sum(params.max_tokens for params in plan.params)
    check_logprobs(values, Room(service.max_model_len))
