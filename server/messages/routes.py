"""The routes of the Messages API."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.chat import conversation, read_conversation
from server.endpoint import check_names, respond
from server.errors import MESSAGES_PATH, field_name
from server.generation import Prompt
from server.http import JsonResponse, unless_gone
from server.messages.answer import MessagesRequest
from server.messages.bodies import CountBody, MessagesBody
from server.openapi import errors_of, event_stream, json_text, one_of
from server.prompts import SLOW_TEXT, count_reply
from server.replies import EVENTS, MessageReply, MessagesError, TokenCount
from server.schemas import ChatBody
from server.service import Service
from server.translation import renamed


def add(app: FastAPI, service: Service) -> None:
    @app.post(
        MESSAGES_PATH,
        response_model=MessageReply,
        responses={200: {"content": _stream()}, **_errors()},
        tags=["generation"],
        summary="Answer a conversation, as Anthropic's Messages API does",
    )
    async def messages(body: MessagesBody, request: Request) -> Response:
        def make(service: Service, chat: ChatBody, prompts: list[Prompt], grammar: str) -> MessagesRequest:
            return MessagesRequest(service, body, chat, prompts, grammar, request.state.request_id)

        check_names(service, request, body)  # here, as `renamed` would take an unknown field for one of the chat's
        with renamed(field_name):
            return await respond(service, request, body.chat, read_conversation, make)

    @app.post(
        MESSAGES_PATH + "/count_tokens",
        response_model=TokenCount,
        responses=_errors(),
        tags=["tokens"],
        summary="The number of tokens of a message's prompt",
    )
    async def count_tokens(body: CountBody, request: Request) -> Response:
        check_names(service, request, body)
        slow = len(await request.body()) > SLOW_TEXT
        work = service.workers.run(count_reply, conversation(service, body.chat), slow=slow)
        return JsonResponse(await unless_gone(request.receive, work))


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {**described, "model": MessagesError} for status, described in errors_of(*statuses).items()}


def _stream() -> dict[str, Any]:
    """The content of a response with `stream`. An event's name is its data's `type`."""
    return event_stream({"enum": [*EVENTS]}, json_text(one_of(*EVENTS.values())), required=["event", "data"])
