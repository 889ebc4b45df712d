"""ASGI middleware of every request: request id, access log, API key, limits of the body, and uncaught exceptions.

uvicorn is started without WebSockets and lifespan, so all that comes is HTTP.
"""

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import CLIENT_GONE, CLOSE, ApiError, ClientGone, internal_error, is_messages
from server.http import error_response
from server.limits import Full, HeldBytes, current_client, digest, read_body, read_keys, sender
from server.logs import HEALTH_PATHS, METRIC_PATHS, PAGE_PATHS, STATIC, access_line, log
from server.service import Service

OPEN_PATHS = frozenset({"/version", "/docs", "/openapi.json", *PAGE_PATHS, *HEALTH_PATHS})
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
BODIES_BYTES = 1 << 30  # of requests without an answer; one client may have a quarter. Parsed, they take as much again
FREE_BYTES = 16384  # of each body, which do not count
UPLOAD_PATH = "/v1/files"  # bodies go to the disk, not into memory
LOGGED_PATH = 256  # characters; a client may send 64 KiB


class RequestScope:
    """The outermost layer. Sets request ids, writes the access log, answers HEAD, and sends a 500 for uncaught exceptions."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        if method == "HEAD":  # answered as GET; uvicorn keeps the original scope and leaves the body out
            scope = {**scope, "method": "GET"}
        state = self._fill_state(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(MutableHeaders(scope=message), scope)
            if message.get("more_body"):  # of a stream, whose `Writer` limits the time
                await send(message)
                return
            try:  # it waits as long as the client leaves the answer to its previous request unread
                async with asyncio.timeout(state["write_timeout"]):
                    await send(message)
            except TimeoutError as e:
                state["abandon"]()  # now: uvicorn would wait without a limit to send a 500 if this was one
                raise ClientGone from e

        started = time.monotonic()
        self.service.open_requests += 1
        try:
            await self.app(scope, receive, send_with_id)
        except ClientGone:
            status = CLIENT_GONE
            state["abandon"]()
        except asyncio.CancelledError:
            status = status or CLIENT_GONE
            raise
        except Exception:
            log.exception("request %s failed", state["request_id"])
            if not status:
                await error_response(internal_error(), scope)(scope, receive, send_with_id)
            status = 500
        finally:
            state["until_written"].close()
            self.service.open_requests -= 1
            self._record(scope, method, status, time.monotonic() - started)

    def _fill_state(self, scope: Scope) -> dict[str, Any]:
        """What the layers below need of the request. Returns the scope's state."""
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state: dict[str, Any] = scope.setdefault("state", {})
        state.update(
            request_id=request_id,
            log_fields={"request_id": request_id},
            until_written=ExitStack(),  # what is left when the response has been written
            write_timeout=self.service.settings.idle_timeout,
            backlog=lambda: self.service.backlog.hold(sender(scope).name, state["abandon"]),
        )
        return state

    def _add_headers(self, headers: MutableHeaders, scope: Scope) -> None:
        """Add those that every response has, and what the request's work has noted for its client."""
        request_id, log_fields = scope["state"]["request_id"], scope["state"]["log_fields"]
        headers["x-request-id"] = request_id
        if is_messages(scope["path"]):
            headers["request-id"] = request_id
        if self.service.draining:  # a router's next request on this connection might come when the server has ended
            headers["connection"] = "close"
        if ignored := log_fields.get("ignored"):
            headers["x-rung-ignored"] = ignored
        if left_out := log_fields.get("not_enforced"):
            headers["x-rung-not-enforced"] = left_out

    def _record(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        log_fields = scope["state"]["log_fields"]
        path, client = scope["path"], scope.get("client")
        route = getattr(scope.get("route"), "path", "other")
        self.service.metrics.responses.labels(self.service.model_name, route, str(status)).inc()
        fields = {"request_id": log_fields["request_id"], "client": client[0][:64] if client else "-", "method": method}
        fields |= {"path": quote(path[:LOGGED_PATH]), "status": status, "seconds": round(seconds, 4), **log_fields}
        access_line(fields)


class ApiKey:
    """Requires a bearer token or an `x-api-key`, if there are keys, and compares it with every key in constant time.

    Notes whose it is.

    Open to all are OPEN_PATHS and the page's files, and without `protect_metrics` METRIC_PATHS.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], protect_metrics: bool) -> None:
        self.app = app
        self._clients = read_keys(keys)
        self._open = OPEN_PATHS if protect_metrics else OPEN_PATHS.union(METRIC_PATHS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # what the server itself sends for a batch has its client already
        if self._is_open(scope["path"]) or scope["state"].get("client") or self._has_key(scope):
            await self.app(scope, receive, send)
            return
        message = "the API key is missing or wrong; send it as the header Authorization: Bearer KEY, or x-api-key: KEY"
        await error_response(ApiError(401, message, None, "invalid_api_key"), scope)(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return not self._clients or path in self._open or path.startswith(STATIC)

    def _has_key(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = digest(key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "").strip())
        # all are compared, so that timing reveals nothing
        matches = [client for known, client in self._clients.items() if hmac.compare_digest(given, known)]
        if not matches:
            return False
        scope["state"].update(client=matches[0], key=given)
        scope["state"]["log_fields"]["key"] = matches[0].name
        return True


class BodyLimit:
    """Reads the whole body before the application runs, and holds it until the answer is written.

    Responds 413 if the body is too large, 400 if it stops arriving or arrives too slowly, 415 if it is compressed, and 429 if
    there is no room for it.
    """

    def __init__(self, app: ASGIApp, limit: int, timeout: float) -> None:
        self.app, self.limit, self.timeout = app, limit, timeout
        self.bodies = HeldBytes(BODIES_BYTES, limit, FREE_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        current_client.set(sender(scope).name)
        if scope["method"] in ("GET", "OPTIONS") or scope["path"] == UPLOAD_PATH:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if headers.get("content-encoding", "").lower() not in ("", "identity"):
            message = "the server reads no compressed bodies; send it without Content-Encoding"
            error = ApiError(415, message, None, "compressed_body", {"accept-encoding": "identity"})
            await error_response(error, scope)(scope, receive, send)
            return
        with self.bodies.hold(current_client.get()) as take:
            try:
                length = headers.get("content-length", "")
                body = await read_body(receive, length, self.limit, self.timeout, take)
            except ApiError as e:
                error = e
            except Full as e:
                error = ApiError(429, str(e), None, "bodies_full", CLOSE)
            else:
                await self._run(body, scope, receive, send)
                return
        await error_response(error, scope)(scope, receive, send)

    async def _run(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["body"] = body
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self.app(scope, replay, send)
