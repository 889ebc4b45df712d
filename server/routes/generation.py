"""The routes of completions and chats, and of the answers to earlier requests."""

from fastapi import FastAPI, Request
from starlette.responses import Response

from files import shown
from server import replies
from server.chat import ChatRequest, read_conversation
from server.clients import owner
from server.completions import CompletionRequest, read_prompts
from server.endpoint import respond
from server.errors import NO_RETRY, ApiError
from server.http import JsonResponse
from server.messages.replies import MessageReply
from server.openapi import errors_of, stream_of
from server.responses.replies import ResponsesReply
from server.schemas import ChatBody, CompletionBody
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await respond(service, request, body, read_prompts, CompletionRequest)

    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await respond(service, request, body, read_conversation, ChatRequest)

    for route, path, reply, chunk, summary in (
        (completions, "/v1/completions", replies.CompletionReply, replies.CompletionChunk, "Continue a prompt"),
        (chat_completions, "/v1/chat/completions", replies.ChatReply, replies.ChatChunk, "Answer a conversation"),
    ):
        responses = {200: {"content": stream_of(chunk)}, **errors_of()}
        app.post(path, response_model=reply, responses=responses, tags=["generation"], summary=summary)(route)


def add_results(app: FastAPI, service: Service) -> None:
    unfinished = {"model": replies.Unfinished, "description": "It is not finished"}

    @app.get(
        "/v1/results/{id}",
        response_model=replies.CompletionReply | replies.ChatReply | ResponsesReply | MessageReply,
        responses={**errors_of(400, 401, 404, 500, 503), 202: unfinished},
        tags=["generation"],
        summary="The answer to an earlier request, by the answer's id or the request's X-Request-Id; needs --journal",
    )
    async def result(id: str, request: Request) -> Response:
        row = await service.journal.find(owner(request.scope), id) if service.journal else None
        if row is None:
            advice = "ids are kept for a while" if service.journal else "this server keeps none; start it with --journal"
            raise ApiError(404, f"no result of yours has the id {shown(id)}; {advice}", None, "result_not_found")
        if not row.status:
            return JsonResponse({"id": row.answer_id, "object": "result", "status": "unfinished"}, 202, {"retry-after": "1"})
        return JsonResponse(row.data, row.status, None if row.status == 200 else NO_RETRY)  # a kept error stays
