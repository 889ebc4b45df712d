"""Routes that check request bodies within bounds. Long bodies are checked in a worker process.

FastAPI would check bodies of any length in the event loop.
"""

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from server.bounds import MAX_VALUES, Bounds, parse
from server.http import unless_gone
from server.prompts import SLOW_TEXT
from server.service import Service

INLINE = 16384  # bytes, about 2,000 token ids or a few pages of text; larger bodies are checked in a worker


class BoundedRoute(APIRoute):
    """A route that reads its parameter `body`, if it has one, as the pydantic model of the parameter's annotation."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        parameter = inspect.signature(self.endpoint).parameters.get("body")
        if parameter is None:
            return handler
        model: type[BaseModel] = parameter.annotation

        async def handle(request: Request) -> Response:
            raw = await request.body()
            if raw and "json" in request.headers.get("content-type", "").partition(";")[0].lower():
                # FastAPI uses this as the parsed body and does not check it again
                request._json = await read(request, raw, model)
            return await handler(request)

        return handle


async def read(request: Request, raw: bytes, model: type[BaseModel]) -> BaseModel:
    """Parse the body as `model`. Raises a 400 that says what is wrong, or ClientGone if the client leaves."""
    service: Service = request.app.state.service
    ready = service.client.ready
    bounds = Bounds(max(MAX_VALUES, 2 * ready.max_model_len)) if ready else Bounds()
    if len(raw) <= INLINE:
        return parse(raw, model, bounds)
    return await unless_gone(request.receive, service.workers.run(parse, raw, model, bounds, slow=len(raw) > SLOW_TEXT))
