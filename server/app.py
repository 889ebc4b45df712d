"""The HTTP application: its routes, how their bodies are parsed, the middleware, and the pages."""

import inspect
import re
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles

from errors import UserError
from server import batches, chat, completions, embeddings, routes
from server.calls import warn_of_unknown_calls
from server.engine_client import EngineClient
from server.errors import NO_OBJECT, ApiError, bad, from_errors
from server.http import error_response
from server.messages import routes as messages
from server.middleware import ApiKey, BodyLimit, RequestScope
from server.openapi import describe, render_docs
from server.responses import routes as responses
from server.service import Service, read_chat_template
from server.settings import VERSION, Settings
from server.tracing import Spans
from text.tokenizer import Tokenizer

STATIC = Path(__file__).parent / "static"
JSON_TYPE = re.compile(r"application/([^/]+\+)?json")


def create_app(settings: Settings, client: EngineClient, tokenizer: Tokenizer) -> FastAPI:
    service = Service(read_chat_template(settings, tokenizer), client, tokenizer)
    warn_of_unknown_calls(service)
    app = FastAPI(title="Rung", version=VERSION, docs_url=None, redoc_url=None, summary="An OpenAI-compatible server")
    app.servers = [{"url": f"/{settings.root_path.strip('/')}"}] if settings.root_path else []
    app.state.service = service
    app.router.route_class = BoundedRoute
    _add_error_handlers(app)
    generating = completions.add, chat.add, responses.add, messages.add, embeddings.add, routes.add_results
    for add in (*generating, routes.add_tokens, routes.add_models, routes.add_state, routes.add_routers):  # as in /docs
        add(app, service)
    app.state.batches = batches.add(app, settings)
    _add_pages(app)
    describe(app)
    # The middleware that is added last is the outermost layer.
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes, timeout=settings.idle_timeout)
    app.add_middleware(ApiKey, keys=settings.api_key, protect_metrics=settings.protect_metrics)
    if settings.cors_origin:  # outside of ApiKey: browsers send preflight requests without a key
        exposed = ["X-Request-Id", "Request-Id", "X-Rung-Ignored", "X-Rung-Not-Enforced", "Retry-After", "X-Should-Retry"]
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origin, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
        )
    app.add_middleware(RequestScope, service=service)
    if service.tracing:
        app.add_middleware(Spans, tracing=service.tracing)
    return app


class BoundedRoute(APIRoute):
    """A route that parses its parameter `body`, if it has one, within bounds, as the model of the parameter's annotation.

    FastAPI would parse bodies of any length in the event loop. Besides `body`, such a route has the parameter `request` alone.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        parameter = inspect.signature(self.endpoint).parameters.get("body")
        if parameter is None:
            return super().get_route_handler()
        model: type[BaseModel] = parameter.annotation

        async def handle(request: Request) -> Response:
            raw = request._body = request.state.body  # Starlette would copy it
            content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if not raw or not JSON_TYPE.fullmatch(content_type):
                raise bad(None, NO_OBJECT)
            body = await request.app.state.service.parse(raw, model, request.receive)
            response: Response = await self.endpoint(body=body, request=request)
            return response

        return handle


def _add_error_handlers(app: FastAPI) -> None:
    async def on_validation(request: Request, e: Exception) -> Response:
        assert isinstance(e, RequestValidationError)
        # of the path or the query: `BoundedRoute` reads bodies
        return error_response(from_errors(e.errors(), None), request.scope)

    async def on_http(request: Request, e: Exception) -> Response:
        assert isinstance(e, HTTPException)
        if not isinstance(e, ApiError):
            path, message = request.url.path, str(e.detail)
            if e.status_code == 404:
                message = f"no such path: {request.method} {path}"
                message += "" if path.startswith("/v1/") else "; the API's paths begin with /v1/, as /docs shows"
            headers = {**(e.headers or {})}
            if headers.get("Allow") == "GET":
                headers["Allow"] = "GET, HEAD"  # RequestScope answers HEAD as GET
            e = ApiError(e.status_code, message, headers=headers)
        return error_response(e, request.scope)

    async def on_user_error(request: Request, e: Exception) -> Response:
        return error_response(bad(None, str(e)), request.scope)

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(UserError, on_user_error)


def _add_pages(app: FastAPI) -> None:
    page_of_docs = cache(lambda: render_docs(app.openapi()))  # it takes 0.1 s, which nobody may ask for again and again

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(page_of_docs())

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        index = STATIC / "index.html"
        if not index.is_file():
            raise ApiError(404, "this installation has no page; see /docs for the API")
        return FileResponse(index)

    app.mount("/static", StaticFiles(directory=STATIC, check_dir=False))
