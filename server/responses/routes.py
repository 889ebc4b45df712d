"""The routes of /v1/responses."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from server.chat import conversation
from server.endpoint import accept, begin, check_names, respond
from server.errors import ApiError, bad, internal_error
from server.generation import Prompt
from server.http import JsonResponse, to_json, unless_gone
from server.limits import owner
from server.logs import log
from server.openapi import errors_of, event_stream, json_text, one_of
from server.prompts import SLOW_TEXT, count_reply
from server.replies import ErrorReply, InputTokens, ResponseDeleted, ResponseItems, ResponsesReply
from server.responses.answer import ResponsesRequest, read_prompt
from server.responses.convert import Converted, convert, page, references, renamed
from server.responses.schemas import OWN_TOOLS, ResponsesBody
from server.responses.store import Items, Record, Store, StoreBounds
from server.schemas import ChatBody
from server.service import Service

MAX_BACKGROUND = 64  # responses that a client may have in the background at a time


def add(app: FastAPI, service: Service) -> None:
    settings = service.settings
    bounds = StoreBounds(settings.responses_hours * 3600, settings.responses_kept, int(settings.responses_mb * 2**20))
    responses = Responses(service, Store(bounds))

    @app.post(
        "/v1/responses",
        response_model=ResponsesReply,
        responses={200: {"content": _stream()}, **errors_of()},
        tags=["responses"],
        summary="Answer a conversation, as items",
    )
    async def create(body: ResponsesBody, request: Request) -> Response:
        return await responses.create(body, request)

    @app.post(
        "/v1/responses/input_tokens",
        response_model=InputTokens,
        responses=errors_of(),
        tags=["tokens"],
        summary="The number of tokens of a response's prompt",
    )
    async def input_tokens(body: ResponsesBody, request: Request) -> Response:
        return JsonResponse(await responses.count(body, request))

    @app.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> Response:
        raise bad(None, "this server does not compact conversations; send fewer items or a summary, or set truncation: 'auto'")

    _add_reading(app, responses)
    _add_ending(app, responses)


def _stream() -> dict[str, Any]:
    """The content of a response with `stream`. `event` is the type within `data`."""
    payload = {
        "type": "object",
        "properties": {"type": {"type": "string"}, "sequence_number": {"type": "integer"}},
        "required": ["type", "sequence_number"],
    }
    text = "One of OpenAI's events of responses; the last one is response.completed, response.incomplete or response.failed."
    return event_stream({"type": "string"}, json_text(payload), json_text(one_of(ErrorReply)), description=text)


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The descriptions of error responses of a route for one stored response."""
    return {**errors_of(*statuses), 404: errors_of(404)[404] | {"description": "No such response"}}


def _add_reading(app: FastAPI, responses: "Responses") -> None:
    @app.get(
        "/v1/responses/{id}",
        response_model=ResponsesReply,
        responses=_errors(400, 401),
        tags=["responses"],
        summary="A stored response",
    )
    async def retrieve(id: str, request: Request, stream: bool = False) -> Response:
        if stream:
            raise bad("stream", "a stored response is not streamed; leave it out")
        return JsonResponse(responses.find(request, id).json)

    @app.get(
        "/v1/responses/{id}/input_items",
        response_model=ResponseItems,
        responses=_errors(400, 401),
        tags=["responses"],
        summary="The items that a response answers, with those of earlier turns",
    )
    async def input_items(
        id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(description="The id of an item; those behind it are listed.")] = None,
    ) -> Response:
        kept = [items.data for items in responses.find(request, id).input]
        work = responses.service.compute(request.receive, sum(map(len, kept)), page, kept, limit, order == "desc", after)
        return JsonResponse(await work)


def _add_ending(app: FastAPI, responses: "Responses") -> None:
    @app.delete(
        "/v1/responses/{id}",
        response_model=ResponseDeleted,
        responses=_errors(401, 413),
        tags=["responses"],
        summary="Forget a response; one in the background is ended",
    )
    async def delete(id: str, request: Request) -> Response:
        record = responses.find(request, id)
        responses.store.remove(owner(request.scope), id)
        if record.running:
            await record.running.cancel()
        return JsonResponse({"id": id, "object": "response", "deleted": True})

    @app.post(
        "/v1/responses/{id}/cancel",
        response_model=ResponsesReply,
        responses=_errors(400, 401, 413),
        tags=["responses"],
        summary="End a response in the background",
    )
    async def cancel(id: str, request: Request) -> Response:
        record = responses.find(request, id)
        if not record.background:
            raise bad(None, "only a response with background: true can be cancelled; close the connection of another one")
        if record.running:
            await record.running.cancel()
        return JsonResponse(record.json)


class Responses:
    """Runs and keeps responses."""

    def __init__(self, service: Service, store: Store) -> None:
        self.service, self.store = service, store

    def find(self, request: Request, id: str, param: str | None = None) -> Record:
        """Raises a 404. param: the field of the body that has the id."""
        record = self.store.find(owner(request.scope), id)
        if record is None or record.too_large:
            why = f"no stored response of yours has the id {id[:64]!r}"
            if record is not None:
                why = f"the response {id[:64]!r} was too long to be stored; send its items, or raise --responses-mb"
            code = f"{param.removesuffix('_id') if param else 'response'}_not_found"
            raise ApiError(404, f"{param}: {why}" if param else why, param, code)
        return record

    async def create(self, body: ResponsesBody, request: Request) -> Response:
        begin(self.service, request, body)  # here, as `renamed` would take an unknown field for one of the chat's
        earlier = self._earlier(request, body)
        chat, items, repeated = await self._converted(request, body, earlier)
        kept = Record("", b"", [*earlier, Items(items)], background=bool(body.background))

        def make(service: Service, chat: ChatBody, prompts: list[Prompt], grammar: str) -> ResponsesRequest:
            return ResponsesRequest(
                service, body, chat, prompts, grammar, repeated, lambda made: self._keep(request, kept, made)
            )

        async def read(service: Service, chat: ChatBody, size: int) -> list[Prompt]:
            whole = max(size, len(items)) + sum(len(part.data) for part in earlier)
            return await read_prompt(service, body, chat, whole)

        with renamed(body):
            if not body.background:
                return await respond(self.service, request, chat, read, make)
            return await self._start(request, kept, await accept(self.service, request, chat, read, make))

    async def count(self, body: ResponsesBody, request: Request) -> bytes:
        """The encoded number of tokens of the prompt."""
        check_names(self.service, request, body)
        chat, items, _ = await self._converted(request, body, self._earlier(request, body))
        with renamed(body):
            check_names(self.service, request, chat)
            given = conversation(self.service, chat)
            work = self.service.workers.run(count_reply, given, "response.input_tokens", slow=len(items) > SLOW_TEXT)
            return await unless_gone(request.receive, work)

    async def _start(self, request: Request, kept: Record, made: ResponsesRequest) -> Response:
        """Run a response in the background. Counts and keeps it at once, so that requests that come together stay in the bound."""
        if self.store.running(owner(request.scope)) >= MAX_BACKGROUND:
            message = f"you have {MAX_BACKGROUND} responses in the background; wait until one of them has ended"
            raise ApiError(429, message, "background", "too_many_responses")
        running = Background(self.service, made)
        kept.id, kept.running = made.id, running
        if not self.store.fits(kept):
            raise bad("input", "is too long to be stored, as background needs; raise --responses-mb")
        if not self.store.has_room(owner(request.scope), kept):
            message = "the responses in the background are too long to be kept with this one; wait until one of them has ended"
            raise ApiError(429, message, "background", "too_many_responses")
        self.store.put(owner(request.scope), kept)
        try:
            await running.start(request.state.log_fields)
        except ApiError:
            self.store.remove(owner(request.scope), kept.id)
            raise
        return JsonResponse(kept.json)

    def _keep(self, request: Request, record: Record, made: ResponsesRequest) -> None:
        """Keep a response that has ended, unless its owner has deleted it meanwhile."""
        name = owner(request.scope)
        if made.body.store is False or (record.running and self.store.find(name, made.id) is not record):
            return
        self.store.remove(name, made.id)
        record.id, record.running, record.answer = made.id, None, to_json(made.reply())
        record.output = Items.of_output(made.output.items)
        if not self.store.put(name, record):
            log.warning("the response %s is too long to be stored (--responses-mb)", made.id)
            self.store.put(name, Record(made.id, b"", [], too_large=True))

    def _earlier(self, request: Request, body: ResponsesBody) -> list[Items]:
        """The items of the conversation before this turn. Raises a 404, and a 400 if they are not complete or too long."""
        if body.previous_response_id is None:
            return []
        record = self.find(request, body.previous_response_id, "previous_response_id")
        if record.running:
            raise bad("previous_response_id", "names a response that is not finished; wait until it is")
        if sum(len(items.data) for items in record.items) > self.service.settings.max_body_bytes:
            raise bad("previous_response_id", "names a conversation that is longer than --max-body-mb")
        return record.items

    async def _converted(self, request: Request, body: ResponsesBody, earlier: list[Items]) -> Converted:
        if self.service.settings.strict_requests and body.left_out:
            raise bad(body.left_out[0], OWN_TOOLS)
        found = self.store.items(owner(request.scope), references(body))
        history = [items.data for items in earlier]
        size = len(await request.body()) + sum(map(len, (*history, *found.values())))
        return await self.service.compute(request.receive, size, convert, body, history, found)


class Background:
    """A response that is computed after its request was answered."""

    def __init__(self, service: Service, request: ResponsesRequest) -> None:
        self._service, self._request = service, request
        self._task: asyncio.Task[bytes] | None = None

    async def start(self, log_fields: dict[str, Any]) -> None:
        """Start it. Raises ApiError if it is refused, which its first step shows."""
        self._task = asyncio.create_task(self._request.answer(log_fields))
        await asyncio.sleep(0)
        if self._task.done() and isinstance(refusal := self._task.exception(), ApiError):
            raise refusal
        self._service.open_requests += 1  # a drain waits for it
        self._task.add_done_callback(self._on_done)
        if self._request.promise:
            await self._request.promise.written()

    def json(self) -> bytes:
        return to_json(self._request.reply())

    async def cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    def _on_done(self, task: asyncio.Task[bytes]) -> None:
        self._service.open_requests -= 1
        if task.cancelled():
            self._request.cancel()
        elif (e := task.exception()) is not None:
            if not isinstance(e, ApiError):
                log.error("a background response failed", exc_info=e)
            self._request.fail(e if isinstance(e, ApiError) else internal_error())
        else:
            return  # it was kept with its last event
        self._request.keep(self._request)
