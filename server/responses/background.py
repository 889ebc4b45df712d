"""Responses that are computed after their request was answered."""

import asyncio
from collections.abc import Callable
from typing import Any

from server.http import to_json
from server.logs import log
from server.problems import ApiError, internal_error
from server.responses.answer import ResponsesRequest
from server.service import Service


class Background:
    """One of them. `ended(request)` is called when it ends in another way than with an answer, which the request itself keeps."""

    def __init__(self, service: Service, request: ResponsesRequest, ended: Callable[[ResponsesRequest], None]) -> None:
        self._service, self._request, self._ended = service, request, ended
        self._task: asyncio.Task[None] | None = None

    async def start(self, log_fields: dict[str, Any]) -> None:
        """Start it. Raises ApiError if it is refused, which its first step shows."""
        self._task = asyncio.create_task(self._request.answer(log_fields))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        if self._task.done() and isinstance(refusal := self._task.exception(), ApiError):
            raise refusal
        self._service.open_requests += 1  # a drain waits for it
        self._task.add_done_callback(self._on_done)
        await self._request.promise.written()

    def json(self) -> bytes:
        return to_json(self._request.response())

    async def cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    def _on_done(self, task: "asyncio.Task[Any]") -> None:
        self._service.open_requests -= 1
        if task.cancelled():
            self._request.cancel()
        elif (e := task.exception()) is not None:
            if not isinstance(e, ApiError):
                log.error("a background response failed", exc_info=e)
            self._request.fail(e if isinstance(e, ApiError) else internal_error())
        else:
            return
        self._ended(self._request)
