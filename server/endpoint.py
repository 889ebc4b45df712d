"""How every generating endpoint answers an HTTP request, from its checked body to the response: read from top to bottom.

`respond` runs a request: `accept` checks it, reads its prompts and compiles its grammar, which makes a `GenerationRequest`. The
request collects its whole answer, or writes the events of its stream. It reads the same `Delta`s with and without streaming, so that
a streamed answer equals a whole one. An endpoint adds how it lays out a choice.
"""

import io
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from engine.calls.parser import PartList
from engine.constrain.grammars import Compiled
from engine.protocol import Turn
from engine.text import Delta
from server.body import Body, shown_names
from server.bounds import TokenBounds, check_answers
from server.calls import PartReader, grammar_for, kept_special_ids, name_left_out, thinking_budget
from server.errors import ApiError, bad
from server.generation import Plan, Prompt, Run, Usage, make_params, run
from server.http import DONE, EventStream, JsonResponse, error_event, to_json, unless_gone
from server.journal import Promise
from server.limits import LOWEST, Client, owner, sender
from server.logprobs import by_id_layout, chat_layout
from server.responses.schemas import ResponsesBody
from server.schemas import MAX_USER, GenerationBody, PoolingBody
from server.service import Service
from server.settings import Settings

HEARTBEAT = b": the ranks start again\n\n"

B = TypeVar("B", bound=GenerationBody)
G = TypeVar("G", bound="GenerationRequest")


async def respond(
    service: Service,
    request: Request,
    body: B,
    read: Callable[[Service, B, int], Coroutine[Any, Any, list[Prompt]]],
    make: Callable[[Service, B, list[Prompt], str], "GenerationRequest"],
) -> Response:
    """Run a request and return its answer, or its stream. See `accept`."""
    generation = await accept(service, request, body, read, make)
    log_fields = request.state.log_fields
    if body.stream:
        generation.count_unread = request.state.until_written.enter_context(request.state.backlog())
        return EventStream(generation.events(log_fields), generation.write_error, generation.stream_end)
    return JsonResponse(await unless_gone(request.receive, generation.answer(log_fields)))


async def accept(
    service: Service,
    request: Request,
    body: B,
    read: Callable[[Service, B, int], Coroutine[Any, Any, list[Prompt]]],
    make: Callable[[Service, B, list[Prompt], str], G],
) -> G:
    """Check and prepare a request, which can then be run.

    `read(service, body, size)` returns the tokenized prompts; size: bytes of the HTTP body. `make(service, body, prompts,
    grammar)` returns the endpoint's request. Raises ApiError.
    """
    turn = begin(service, request, body)
    raw = await request.body()

    async def prepare() -> tuple[list[Prompt], Compiled]:
        prompts = await read(service, body, len(raw))
        return prompts, await grammar_for(service, body, prompts[0].ids)

    prompts, compiled = await unless_gone(request.receive, prepare())
    generation = make(service, body, prompts, compiled.grammar)
    generation.plan.turn = turn
    if service.journal and turn.priority < LOWEST:  # a batch has a journal of its own
        data = Accepted.encode(generation, raw, compiled.grammar)
        ids = generation.id, request.state.request_id
        generation.promise = service.journal.promise(owner(request.scope), *ids, data, bool(body.store))
    if left_out := name_left_out(compiled):
        request.state.log_fields["not_enforced"] = left_out
    return generation


def begin(service: Service, request: Request, body: GenerationBody | PoolingBody | ResponsesBody) -> Turn:
    """Log the user, and check what does not depend on the prompts. Returns the place of its sequences in the order in which they
    start. Raises ApiError: with a full queue before the server works on the prompts; `generation.run` takes the places."""
    if body.user:
        request.state.log_fields["user"] = body.user[:MAX_USER]
    check_names(service, request, body)
    if body.priority and not service.settings.allow_priority:
        raise bad("priority", "this server treats all requests alike; leave it out, or start the server with --allow-priority")
    service.check_ready()
    client = sender(request.scope) if service.settings.fairness == "clients" else Client("")
    service.admission.check(client.name, body.places, service.client.active)
    # only the server itself gives a request the lowest priority
    priority = request.scope["state"].get("priority", min(body.priority or 0, LOWEST - 1))
    return Turn(client.name, client.weight, priority)


def check_names(service: Service, request: Request, body: Body) -> None:
    """Raises a 404 for an unknown model, and what `name_unknown` does for unknown fields."""
    name_unknown(service.settings, request, body.ignored)
    service.check_model(body.model)


def name_unknown(settings: Settings, request: Request, given: Iterable[str], known: Container[str] = ()) -> None:
    """Name unknown parameters in the log and a response header. With --strict-requests they raise a 400."""
    if names := shown_names(name for name in given if name not in known):
        if settings.strict_requests:
            raise bad(names[0], "unknown parameter; it is not in the API that /docs describes")
        request.state.log_fields["ignored"] = ", ".join(names)


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """All that a request's answer depends on, apart from the checkpoint's files and the server's flags: what the journal keeps."""

    model: str  # the checkpoint
    kind: str  # of the answer, which says the endpoint
    answer_id: str
    created: int
    body: bytes  # JSON
    prompts: list[tuple[list[int], bytes | None, list[int]]]  # they are not made again: a template may write the date
    grammar: str
    seed: int
    turn: Turn

    @classmethod
    def encode(cls, request: "GenerationRequest", body: bytes, grammar: str) -> bytes:
        """The request, as `Resumer` reads it. body: of the HTTP request."""
        plan, model = request.plan, checkpoint_of(request.service)
        seed, turn = plan.params[0].seed, plan.turn
        prompts = [
            (p.ids, None if p.text is None else p.text.encode(errors="surrogatepass"), p.prediction) for p in plan.prompts
        ]
        accepted = cls(model, request.kind, request.id, request.created, body, prompts, grammar, seed, turn)
        return msgspec.msgpack.encode(accepted)


def checkpoint_of(service: Service) -> str:
    """The checkpoint's folder, or the name of a preset."""
    model = service.settings.model
    return os.path.realpath(model) if os.path.exists(model) else model


class StreamWriter(Protocol):
    """Encodes one stream as server-sent events, in the layout of its endpoint."""

    def push(self, delta: Delta) -> bytes:
        """The events of a delta, perhaps none."""

    def last(self) -> bytes:
        """The events after all choices have ended, perhaps none."""


class GenerationRequest(ABC):
    """One request of a generating endpoint. `log_fields` collects fields of the access log."""

    id_prefix: ClassVar[str]
    streams_whole: ClassVar[bool] = False  # whether a stream keeps its whole answer, too
    kind: ClassVar[str]  # `object` of an answer
    stream_end: ClassVar[bytes] = DONE
    heartbeat: ClassVar[bytes] = HEARTBEAT  # tells the client of a stream that has begun to wait

    def __init__(
        self, service: Service, body: GenerationBody, grammar: str, prompts: list[Prompt], max_tokens: Sequence[int]
    ) -> None:
        """`grammar`: empty for free text. `max_tokens`: of each prompt's answers. Raises a 400 for an unknown token id."""
        self.service = service
        tokenizer, size = service.tokenizer, service.vocab_size
        kept = kept_special_ids(service, body)
        params = make_params(body, tokenizer, size, max_tokens, grammar or None, prompts[0].prediction, kept, service.defaults)
        if body.thinking_token_budget is not None:
            budgets = [thinking_budget(service, body, prompt.ids) for prompt in prompts]
            params = [one.changed(thinking=own) for one, own in zip(params, budgets, strict=True)]
        self.plan = Plan(prompts, params, body.choices, adapter=service.adapter_of(body.model), hidden=body.max_tokens == 0)
        self.usage = Usage(self.plan)
        self.top_logprobs, self.tokens_as_ids = body.listed_logprobs, bool(body.return_tokens_as_token_ids)
        self.promise: Promise | None = None  # of a server with a journal
        self.count_unread: Callable[[int], None] | None = None  # counts bytes of a stream that its client has not read yet
        self.id = f"{self.id_prefix}-{body.request_id or uuid.uuid4().hex}"
        self.created, self.model = int(time.time()), body.model or service.model_name

    # --- defined by each endpoint ------------------------------------------------------------------------------------

    @abstractmethod
    def collect(self, delta: Delta) -> None:
        """Add `delta` to the whole answer."""

    @abstractmethod
    def reply(self) -> dict[str, Any]:
        """The answer, as far as it is collected."""

    @abstractmethod
    def stream_writer(self) -> StreamWriter:
        """What encodes the events of the stream."""

    def write_error(self, error: ApiError) -> bytes:
        """The event of an error after the stream has begun."""
        return error_event(error)

    # --- shared by all endpoints -------------------------------------------------------------------------------------

    async def answer(self, log_fields: dict[str, Any]) -> bytes:
        """Run the request and return its whole answer, as JSON."""
        self._check_whole()
        async with self._running(log_fields) as running:
            while running.unfinished:
                for delta in await running.next():
                    self.collect(delta)
            return self._finish()

    async def events(self, log_fields: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Run the request and yield the events of its stream.

        Events of outputs that arrived together are yielded together. If one fails, the events before it are yielded before the
        exception is raised. While new ranks start, a stream that has begun gets comments, so that no proxy or client closes it
        as idle.
        """
        writer = self.stream_writer()
        begun = False
        if self.promise or self.streams_whole:
            self._check_whole()
        async with self._running(log_fields) as running:
            while running.unfinished:
                events: list[bytes] = []
                failure: Exception | None = None
                try:
                    for delta in await running.next():
                        if self.promise:
                            self.collect(delta)
                        events.append(writer.push(delta))
                except Exception as e:
                    failure = e
                if data := b"".join(events):
                    begun = True
                    yield data
                elif begun and self.service.client.recovery.state == "recovering":
                    yield self.heartbeat
                if failure is not None:
                    raise failure
            if self.promise:
                self._finish()
        if data := writer.last():
            yield data

    @asynccontextmanager
    async def _running(self, log_fields: dict[str, Any]) -> AsyncIterator[Run]:
        """Run the request, with a journal once it is written there."""
        with run(self.service, self.plan, self.usage, log_fields) as running:
            running.count_unread(self.count_unread)
            with self.promise.given() if self.promise else nullcontext():
                if self.promise:
                    await self.promise.written()
                yield running

    def _check_whole(self) -> None:
        """Raises a 400 if the whole answer may become too long to be kept."""
        if self.top_logprobs is not None:
            tokens = self.plan.choices * sum(params.max_tokens for params in self.plan.params)
            check_answers(tokens, TokenBounds(self.service.max_model_len), self.top_logprobs)

    def _finish(self) -> bytes:
        """The whole answer, which also fulfils the promise."""
        body = to_json(self.reply())
        if self.promise:
            self.promise.finish(200, body)
        return body

    def logprobs(self, delta: Delta) -> dict[str, list[Any] | None] | None:
        """The log-probabilities of `delta` in the endpoint's layout, mostly a chat's; None if the request does not ask for them."""
        if self.top_logprobs is None:
            return None
        return chat_layout(self.service.tokenizer, delta.logprobs or [], self.top_logprobs, self.tokens_as_ids)


class ChoicesRequest(GenerationRequest):
    """A request whose answer is a list of choices: a completion or a chat completion."""

    def __init__(
        self, service: Service, body: GenerationBody, grammar: str, prompts: list[Prompt], max_tokens: Sequence[int]
    ) -> None:
        super().__init__(service, body, grammar, prompts, max_tokens)
        self.with_ids, self.with_drafted = bool(body.return_token_ids), bool(body.return_drafted)
        self.include_usage, self.continuous_usage = body.usage_options
        self.top_prompt_logprobs = body.prompt_logprobs

    @cached_property
    def whole_choices(self) -> list["WholeChoice"]:
        return [WholeChoice(self.part_reader(i)) for i in range(self.plan.total)]

    def part_reader(self, index: int) -> PartReader | None:
        """A new reader of the parts of one answer; None: the endpoint has text alone."""
        return None

    def collect(self, delta: Delta) -> None:
        self.whole_choices[delta.index].add(delta, self.logprobs(delta), self.prompt_logprobs(delta), self.of_tokens(delta))

    def prompt_logprobs(self, delta: Delta) -> list[dict[str, Any] | None] | None:
        """The log-probabilities of the `prompt_logprobs` extension: a dict by token id for each position."""
        if self.top_prompt_logprobs is None or delta.prompt_logprobs is None:
            return None
        return by_id_layout(self.service.tokenizer, delta.prompt_logprobs, self.top_prompt_logprobs)

    def of_tokens(self, delta: Delta) -> dict[str, list[Any] | None]:
        """The lists that the request asks for with a value for each token, besides the log-probabilities."""
        found: dict[str, list[Any] | None] = {"token_ids": delta.token_ids} if self.with_ids else {}
        if self.with_drafted:
            found["drafted"] = [i < delta.drafted for i in range(len(delta.token_ids))]
        return found

    def head(self, kind: str) -> dict[str, Any]:
        """The first fields of a completion, of a chat completion, and of their chunks."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class WholeChoice:
    """Collects one choice until it is complete. Does not keep its deltas, which take hundreds of bytes for each token."""

    def __init__(self, reader: PartReader | None = None) -> None:
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.reader, self.parts = reader, PartList()
        self.prompt_logprobs: msgspec.Raw | None = None  # in the answer's layout
        self.logprobs, self.ids = JsonLists(), JsonLists()
        self._text = io.StringIO()
        self._tokens, self._likelihood = 0, 0.0

    def add(
        self,
        delta: Delta,
        logprobs: dict[str, list[Any] | None] | None,
        prompt_logprobs: Any,
        of_tokens: dict[str, list[Any] | None],
    ) -> None:
        """Append `delta`. `logprobs`, `prompt_logprobs`: those of `delta` in the answer's layout. `of_tokens`: its other lists."""
        if self.reader is None:
            self._text.write(delta.text)
        else:
            for part in self.reader.push(delta):
                self.parts.add(part)
        self._tokens += len(delta.token_ids)
        self._likelihood += sum(one.chosen.logprob for one in delta.logprobs or [])
        if logprobs is not None:
            self.logprobs.extend(logprobs)
        self.ids.extend(of_tokens)
        if prompt_logprobs is not None:
            self.prompt_logprobs = msgspec.Raw(to_json(prompt_logprobs))
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def mean_logprob(self) -> float:
        return self._likelihood / max(self._tokens, 1)


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


class Chunks:
    """Encodes the chunks of a completion or chat completion as events, the fields that they share only once."""

    def __init__(self, request: ChoicesRequest, kind: str) -> None:
        """kind: `object` of a chunk."""
        self._head = b"data: " + to_json(request.head(kind))[:-1] + b',"choices":['
        self._usage = request.usage
        self._include_usage, self._continuous_usage = request.include_usage, request.continuous_usage
        self._end = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

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
