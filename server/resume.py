"""Finish the requests of the journal that have no client any more, because an earlier server ended, or because they asked for it."""

import asyncio
from collections import Counter, deque
from functools import partial

import msgspec

from server.chat import ChatRequest
from server.completions import CompletionRequest
from server.endpoint import Accepted, GenerationRequest, checkpoint_of
from server.errors import ApiError
from server.generation import Prompt
from server.journal import Promise, is_for_later
from server.logs import log
from server.messages.answer import MessagesRequest
from server.messages.bodies import MessagesBody
from server.responses.answer import ResponsesRequest
from server.responses.convert import repeated, to_chat
from server.responses.schemas import ResponsesBody
from server.schemas import ChatBody, CompletionBody
from server.service import Service

AGAIN_SECONDS = 1.0  # until a request comes again for which there is no room


class Resumer:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._tasks = set[asyncio.Task[None]]()
        self._waiting = dict[str, deque[int]]()  # numbers of requests by owner; the owner whose turn was last is the last
        self._running = Counter[str]()  # requests by owner

    def start(self) -> None:
        """Go on with all that an earlier server left. Called once requests can run."""
        journal = self._service.journal
        if journal is None:
            return
        journal.on_orphan = self._add
        if journal.unfinished:
            log.warning(
                "%d requests of an earlier server go on; GET /v1/results/ID will have their answers", len(journal.unfinished)
            )
        for number, owner in journal.unfinished:
            self._add(number, owner)

    def close(self) -> None:
        """Leave the rest to the next server."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()

    def _add(self, number: int, owner: str) -> None:
        self._service.metrics.resumed.inc()
        self._waiting.setdefault(owner, deque()).append(number)
        self._begin()

    def _begin(self) -> None:
        """Begin requests while there is room. Next is one of the owner with the fewest that run, as in the engine."""
        while self._waiting and len(self._tasks) < self._service.settings.max_num_seqs:
            owner = min(self._waiting, key=lambda one: self._running[one])
            numbers = self._waiting.pop(owner)
            task = asyncio.create_task(self._finish(numbers.popleft()))
            if numbers:
                self._waiting[owner] = numbers
            self._running[owner] += 1
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, owner))

    def _ended(self, owner: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._begin()

    async def _finish(self, number: int) -> None:
        assert self._service.journal is not None
        try:
            if found := await self._service.journal.load(number):
                await self._answer(*found)
        except ApiError as e:
            log.warning("request %d of the journal: %s", number, e.message)
        except Exception:
            log.exception("request %d of the journal failed", number)

    async def _answer(self, data: bytes, promise: Promise) -> None:
        """Run a request once there is room for it. The promise keeps the answer or error, wherever it is raised."""
        try:
            accepted = msgspec.msgpack.decode(data, type=Accepted)
            while not await self._answered(accepted, promise):
                await asyncio.sleep(AGAIN_SECONDS)
        except Exception as e:
            promise.fail(e)
            raise

    async def _answered(self, accepted: Accepted, promise: Promise) -> bool:
        """Run a request. False if there is no room for it now."""
        try:
            request = await self._again(accepted)
            request.promise = promise
            await request.answer({"request_id": request.id})
        except ApiError as e:
            if not is_for_later(e):
                raise
            return False
        return True

    async def _again(self, accepted: Accepted) -> GenerationRequest:
        """The request as it was accepted. Raises ApiError if this server cannot run it."""
        service = self._service
        if accepted.model != checkpoint_of(service):
            message = f"the server was started with another model before the request was finished: {service.model_name}"
            raise ApiError(503, message, None, "model_changed")
        prompts = [
            Prompt(ids, None if text is None else text.decode(errors="surrogatepass"), prediction)
            for ids, text, prediction in accepted.prompts
        ]
        seed = {"seed": accepted.seed}
        request: GenerationRequest
        if accepted.kind == ChatRequest.kind:
            chat = await service.parse(accepted.body, ChatBody)
            request = ChatRequest(service, chat.model_copy(update=seed), prompts, accepted.grammar)
        elif accepted.kind == ResponsesRequest.kind:
            asked = await service.parse(accepted.body, ResponsesBody)
            chat = to_chat(asked, [{"role": "user", "content": ""}])  # the prompt is already made
            request = ResponsesRequest(service, asked, chat.model_copy(update=seed), prompts, accepted.grammar, repeated(asked))
        elif accepted.kind == MessagesRequest.kind:
            given = await service.parse(accepted.body, MessagesBody)
            request = MessagesRequest(service, given, given.chat.model_copy(update=seed), prompts, accepted.grammar)
        else:
            body = await service.parse(accepted.body, CompletionBody)
            request = CompletionRequest(service, body.model_copy(update=seed), prompts, accepted.grammar)
        service.check_model(request.model)  # its adapter may be gone
        request.id, request.created, request.plan.turn = accepted.answer_id, accepted.created, accepted.turn
        return request
