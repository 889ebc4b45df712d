"""The frontend process: the HTTP application with its middleware and pages, uvicorn, signals, draining, the banner, and the exit when
the ranks have ended for good.

Addresses are `ipc://` paths. The receiving side binds: this process binds `from_engine`, and the engine connects to it. The
process that started this one connects to it, too, to send Fatal (process.py).
"""

import asyncio
import gc
import inspect
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Coroutine
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles

from cli import USER_ERROR
from engine.protocol import Ready
from errors import UserError
from server import batches, chat, completions, embeddings, logs, routes
from server.batches import Batches
from server.calls import warn_of_unknown_calls
from server.connections import Connection, Turns
from server.downloading import tls_context
from server.engine_client import EngineClient
from server.errors import NO_OBJECT, ApiError, bad, from_errors
from server.http import error_response
from server.limits import Connections, raise_descriptor_limit
from server.logs import log
from server.messages import routes as messages
from server.metrics import Metrics
from server.middleware import ApiKey, BodyLimit, RequestScope
from server.openapi import describe, render_docs
from server.recovery import Watchdog
from server.responses import routes as responses
from server.resume import Resumer
from server.service import Service, read_chat_template
from server.settings import VERSION, Settings
from server.started import FAILED, SIGNALLED, TICK, Started
from server.tracing import Spans
from text.tokenizer import Tokenizer
from text.tokenizer_files import tokenizer_of

STATIC = Path(__file__).parent / "static"
JSON_TYPE = re.compile(r"application/([^/]+\+)?json")
FLUSH_SECONDS = 2.0  # time to send the last responses after their requests were ended


class FrontendServer(uvicorn.Server):
    """uvicorn, except that a signal starts a drain: new requests are refused, /health answers, and running requests go on."""

    def __init__(self, config: uvicorn.Config, service: Service, batches: Batches) -> None:
        super().__init__(config)
        self.service, self.client = service, service.client
        self.resumer, self.batches = Resumer(service), batches
        self.exit_code = 0
        self._ending: asyncio.Task[None] | None = None
        self._signals, self._last_signal = 0, float("-inf")
        self._second_signal = asyncio.Event()  # set at a second signal, which ends the wait for requests

    async def serve(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.client.on_ready = self._on_ready
        self.client.on_fatal = self._on_fatal
        self.client.start()
        if self.service.journal:
            self.service.journal.start()
        try:
            await super().serve(sockets)
        finally:
            if self.service.tracing:
                await self.service.tracing.close()
            self.client.shutdown()
            if self.service.journal:
                await self.service.journal.close()
            await self.service.workers.close()
            await self.client.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the drain, the second one ends it, and the third one ends the process.

        Signals within a second count as one: a terminal, systemd or torchrun may signal several processes for the same cause,
        of which each forwards its signal.
        """
        if time.monotonic() - self._last_signal <= 1:
            return
        self._last_signal = time.monotonic()
        self._signals += 1
        if self._signals == 1:
            self.service.draining = True
            self._loop.call_soon_threadsafe(self.drain)
        elif self._signals == 2:
            self.exit_code = SIGNALLED + sig
            self._loop.call_soon_threadsafe(self._second_signal.set)
        else:
            self.client.shutdown()
            time.sleep(0.05)  # time for ZeroMQ's I/O thread to send it
            os._exit(SIGNALLED + sig)

    def drain(self) -> None:
        self.service.draining = True
        if self._ending is None:
            self._ending = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        limit = self.service.settings.drain_timeout
        log.info("draining: %d requests have up to %g s; a second signal ends at once", self.service.open_requests, limit)
        if not await self._wait_for_requests(limit):
            reason = "a second signal came" if self._second_signal.is_set() else "the drain timeout is over"
            log.warning("%s; ending %d requests", reason, self.service.open_requests)
            self._second_signal.clear()
            self.client.fail_all(ApiError(503, f"the server is shutting down{self.client.later}", None, "draining"))
            await self.service.workers.close()  # else what waits for them would get no answer
            await self._wait_for_requests(FLUSH_SECONDS)
        self._leave()

    async def _wait_for_requests(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.service.open_requests and time.monotonic() < end and not self._second_signal.is_set():
            await asyncio.sleep(0.05)
        return not self.service.open_requests

    def _leave(self) -> None:
        """End the server. What is unfinished is for the next one."""
        if self.service.journal:
            self.service.journal.ending = True
        self.resumer.close()
        self.batches.close()
        self.should_exit = True

    def _on_fatal(self, message: str) -> None:
        """Wait until the error responses are sent, then exit with FAILED, so that a supervisor restarts the server.

        The client has already failed every waiting request.
        """
        self.exit_code = FAILED

        async def end() -> None:
            await self.service.workers.close()
            await self._wait_for_requests(FLUSH_SECONDS)
            self._leave()

        self._ending = asyncio.get_running_loop().create_task(end())

    def _on_ready(self, ready: Ready) -> None:
        self.service.workers.start()  # not earlier: it would compete with the ranks, which load the model
        self.resumer.start()
        self.batches.start()
        self._announcing = self._loop.create_task(self._announce(ready))

    async def _announce(self, ready: Ready) -> None:
        while not self.started:  # the ranks can be ready before the address is
            await asyncio.sleep(TICK / 10)
        print(banner(self.service, ready, self._address()), file=sys.stderr, flush=True)

    def _address(self) -> str:
        settings = self.service.settings
        scheme = "https" if settings.ssl_certfile else "http"
        if settings.uds:
            return f"{scheme}://localhost"
        port = self.servers[-1].sockets[-1].getsockname()[1]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def make_server(
    settings: Settings,
    tokenizer: Tokenizer,
    to_engine: str,
    from_engine: str,
    kill: Callable[[], None] = lambda: None,
    before: Started | None = None,
) -> FrontendServer:
    """kill: kills the ranks. before: see `Recovery`."""
    watchdog = Watchdog(kill, settings.hang_seconds)
    client = EngineClient(to_engine, from_engine, Metrics(settings.model_names[0]), watchdog, before)
    app = create_app(settings, client, tokenizer)
    protocol = partial(Connection, idle_timeout=settings.idle_timeout, all_connections=Connections(), turns=Turns())
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        uds=settings.uds,
        http=protocol,  # type: ignore[arg-type]  # uvicorn only calls it
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxy),  # uvicorn's default trusts every process on this machine
        forwarded_allow_ips=list(settings.trusted_proxy),
        backlog=2048,
        timeout_keep_alive=max(1, round(settings.idle_timeout)),
        timeout_graceful_shutdown=round(FLUSH_SECONDS),
    )
    config.load()
    config.ssl = tls_context(settings)
    return FrontendServer(config, app.state.service, app.state.batches)


def run_frontend(
    settings: Settings,
    to_engine: str,
    from_engine: str,
    kill: Callable[[], None] = lambda: None,
    before: Started | None = None,
    beats: Any = None,
) -> NoReturn:
    """Serve until a signal or the end of the engine, then exit this process. See `make_server`. beats: a counter, whose `value` grows
    as long as the event loop runs.

    Exit codes: 0 after a drain, 128 + the signal if a second one ended the drain, 1 if the engine failed, 2 for bad input.
    """
    logs.configure(settings.log_format, settings.log_level)
    raise_descriptor_limit()
    try:
        server = make_server(settings, tokenizer_of(settings.model), to_engine, from_engine, kill, before)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        os._exit(USER_ERROR)
    gc.collect()  # otherwise freezing would keep the present garbage
    gc.freeze()  # the garbage collector then skips all imported objects: scanning them would delay every stream
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(serve_and_leave(server, beats))
    os._exit(FAILED)


async def count(beats: Any) -> None:
    while True:
        beats.value += 1
        await asyncio.sleep(TICK / 2)


async def serve_and_leave(server: FrontendServer, beats: Any) -> NoReturn:
    """Serve, then exit the process from within the event loop.

    The normal end of the event loop would join its thread pool, where a thread may be busy for a long time.
    """
    code, _beating = FAILED, None if beats is None else asyncio.create_task(count(beats))
    try:
        await server.serve()
        code = server.exit_code if server.started else FAILED
    except SystemExit as e:  # uvicorn raises it when the port is taken
        code = e.code if isinstance(e.code, int) and e.code else FAILED
    except Exception:
        log.exception("the frontend failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def banner(service: Service, ready: Ready, address: str) -> str:
    """What is printed when the server is ready: its model, and curl commands to try it."""
    name = service.model_name
    kv_tokens = ready.kv_blocks * ready.block_size
    noise = "\n  random weights: the text is noise" if service.settings.random_weights else ""
    own = service.examples or {"chat": [], "completion": []}  # prompts that this model can answer
    prompt, question = (*own["completion"], "Once upon a time")[0], (*own["chat"], "Tell me a story about a fox.")[0]
    requests: list[tuple[str, dict[str, Any]]] = [("completions", {"prompt": prompt, "max_tokens": 40})]
    if not ready.causal:
        requests = [("embeddings", {"input": prompt})]
    elif service.chat_template is not None or "default" in service.tokenizer.chat_templates:
        requests.append(("chat/completions", {"messages": [{"role": "user", "content": question}], "max_tokens": 40}))
    uds, with_key = service.settings.uds, bool(service.settings.api_key)
    where = f"--unix-socket {shlex.quote(uds)} {address}" if uds else address
    curls = "\n\n".join(curl(f"{where}/v1/{path}", {"model": name, **body}, with_key) for path, body in requests)
    return f"""
Serving {name}: {ready.variant}, {ready.world_size} rank{"s" * (ready.world_size > 1)} on {ready.device}, {ready.communicator}, {ready.dtype}
  context {ready.max_model_len} tokens, KV cache {kv_tokens} tokens{noise}

Try it:

{curls}

The page: {address}/   the API: {address}/docs{f"   on the socket {uds}" if uds else ""}
"""


def curl(url: str, body: dict[str, Any], with_key: bool) -> str:
    """A curl command to copy into a shell."""
    headers = ["Authorization: Bearer YOUR_KEY"] * with_key + ["Content-Type: application/json"]
    parts = [f"curl {url}", *(f"-H '{header}'" for header in headers), f"-d {shlex.quote(json.dumps(body))}"]
    return "  " + " \\\n    ".join(parts)


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
