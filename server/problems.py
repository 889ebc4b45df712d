"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`, never a 422 or a stack trace."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from errors import UserError
from server.sse import to_json

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRY_SECONDS = {429: "1", 503: "2"}


class ApiError(HTTPException):
    """What goes wrong with one request, with its HTTP status. Before the stream starts a response, after it an event."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(status, message)
        self.message, self.param, self.code = message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = dict(self.headers or {})
        if self.status_code in RETRY_SECONDS:
            headers["retry-after"] = RETRY_SECONDS[self.status_code]
        if self.status_code == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(to_json(self.body), self.status_code, headers, media_type="application/json")


def bad(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {message}" if param else message, param, code)


def field_error(param: str, message: str) -> PydanticCustomError:
    """For validators of a whole model, which pydantic would report without a field."""
    return PydanticCustomError("invalid", "{message}", {"message": message, "param": param})


def from_validation(error: RequestValidationError) -> ApiError:
    errors = error.errors()
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "syntax error")
        return ApiError(400, f"the body is not valid JSON: {reason}", None, "invalid_json")
    param = _param(first, error.body)
    if param:  # of the branches of a union, the one that got furthest was meant
        field = param.split(".")[0]
        paths = [path for e in errors if (path := _param(e, error.body)) and path.split(".")[0] == field]
        param = max(paths, key=lambda path: path.count("."))
    same = [e for e in errors if _param(e, error.body) == param]
    message = " or ".join(dict.fromkeys(_message(e) for e in same))
    if not param and not isinstance(error.body, dict):
        message = "the body must be a JSON object, sent with Content-Type: application/json"
    return bad(param, message)


def _param(error: Any, body: Any) -> str | None:
    """The path that the client wrote: `loc` also names types and union branches, which are not in the body."""
    if param := (error.get("ctx") or {}).get("param"):
        return str(param)
    location: Sequence[Any] = error["loc"]
    if location and location[0] in ("path", "query", "header"):
        return str(location[-1])
    path, here = [], body
    for i, part in enumerate(location[1:], 2):
        inside = (isinstance(here, dict) and part in here) or (
            isinstance(here, list) and isinstance(part, int) and part < len(here)
        )
        if inside:
            path.append(str(part))
            here = here[part]
        elif i == len(location) and error["type"] == "missing":
            path.append(str(part))
    return ".".join(path) or None


def _message(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown parameter; it is not in the API that /docs describes"
    return str(error["msg"]).removeprefix("Value error, ")


def install(app: FastAPI) -> None:
    async def on_validation(request: Request, e: Exception) -> Response:
        assert isinstance(e, RequestValidationError)
        return from_validation(e).response()

    async def on_http(request: Request, e: Exception) -> Response:
        assert isinstance(e, HTTPException)
        if not isinstance(e, ApiError):
            message = f"no such path: {request.method} {request.url.path}" if e.status_code == 404 else str(e.detail)
            e, headers = ApiError(e.status_code, message), e.headers
            e.headers = headers
        return e.response()

    async def on_user_error(request: Request, e: Exception) -> Response:
        return bad(None, str(e)).response()

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(UserError, on_user_error)
