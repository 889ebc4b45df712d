"""How every generating endpoint answers an HTTP request, from its checked body to the response."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from engine.protocol import Turn
from server import grammar
from server.answers import GenerationRequest
from server.body import Body
from server.clients import Client, owner, sender
from server.embedding_bodies import PoolingBody
from server.generation import Prompt
from server.http import JsonResponse, unless_gone
from server.json_schema import Compiled
from server.parsers import syntax_for
from server.problems import bad
from server.resume import record
from server.schemas import MAX_USER, GenerationBody
from server.service import Service
from server.sse import EventStream

B = TypeVar("B", bound=GenerationBody)
G = TypeVar("G", bound=GenerationRequest)


def check_names(service: Service, request: Request, body: Body) -> None:
    """Raises a 404 for an unknown model.

    Unknown fields are named in the log and a response header. With --strict-requests they raise a 400.
    """
    if body.ignored:
        if service.settings.strict_requests:
            raise bad(body.ignored[0], "unknown parameter; it is not in the API that /docs describes")
        request.state.log_fields["ignored"] = ", ".join(body.ignored)
    service.check_model(body.model)


def begin(service: Service, request: Request, body: GenerationBody | PoolingBody) -> Turn:
    """Log the user, and check what does not depend on the prompts. Returns when the sequences start. Raises ApiError."""
    if body.user:
        request.state.log_fields["user"] = body.user[:MAX_USER]
    check_names(service, request, body)
    if body.priority and not service.settings.allow_priority:
        raise bad("priority", "this server treats all requests alike; leave it out, or start the server with --allow-priority")
    service.check_ready()
    client = sender(request.scope) if service.settings.fairness == "clients" else Client("")
    return Turn(client.name, client.weight, body.priority or 0)


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
        return prompts, await grammar.for_request(service, body, *syntax_for(service, body, prompts[0].ids))

    prompts, compiled = await unless_gone(request.receive, prepare())
    generation = make(service, body, prompts, compiled.grammar)
    generation.plan.turn = turn
    if service.journal:
        data = record(generation, raw, compiled.grammar)
        ids = generation.id, request.state.request_id
        generation.promise = service.journal.promise(owner(request.scope), *ids, data, bool(body.store))
    if left_out := grammar.name_left_out(compiled):
        request.state.log_fields["not_enforced"] = left_out
    return generation


async def respond(
    service: Service,
    request: Request,
    body: B,
    read: Callable[[Service, B, int], Coroutine[Any, Any, list[Prompt]]],
    make: Callable[[Service, B, list[Prompt], str], GenerationRequest],
) -> Response:
    """Run a request and return its answer, or its stream. See `accept`."""
    generation = await accept(service, request, body, read, make)
    log_fields = request.state.log_fields
    if body.stream:
        generation.count_unread = request.state.until_written.enter_context(request.state.backlog())
        return EventStream(generation.events(log_fields), generation.write_error, generation.stream_end)
    return JsonResponse(await unless_gone(request.receive, generation.answer(log_fields)))
