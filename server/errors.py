"""Errors in the format of OpenAI's clients: `{"error": {"message", "type", "param", "code"}}`, never a 422 or a stack trace.

The paths of the Messages API have that of Anthropic's clients: `{"type": "error", "error": {"type", "message"}, "request_id"}`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import PydanticCustomError, ValidationError
from starlette.exceptions import HTTPException

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
RETRY_SECONDS = {429: "1", 503: "2"}
CLOSE = {"connection": "close"}  # the rest of the body is not read
CLIENT_GONE = 499  # nginx's status for the log; it is sent to nobody
NO_RETRY = {"x-should-retry": "false"}  # else the SDKs of OpenAI and Anthropic repeat a request at every status from 500 on
MOST_ERRORS = 100  # most validation errors that are examined; the rest are of the same kind
TOO_LONG = "context_length_exceeded"
NO_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"
MAX_MESSAGE = 2000  # characters
MAX_PARAM = 256  # of a field's path, which may have keys of the client's
SHOWN = 20  # characters quoted of a body that is not JSON


def error_type(status: int) -> str:
    """The type of an error in OpenAI's format."""
    return TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def with_retry(status: int, headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers of an error, with Retry-After unless they have it or NO_RETRY."""
    found = dict(headers or {})
    if status in RETRY_SECONDS and not found.keys() & NO_RETRY.keys():
        found.setdefault("retry-after", RETRY_SECONDS[status])
    return found


class ClientGone(Exception):
    """The client closed its connection, or reads no more, so that no response can be sent."""


class ApiError(HTTPException):
    """An error of one request, with its HTTP status. Sent as a response, or as an event if a stream has started."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = shortened(message, MAX_MESSAGE)  # it may quote what a client sent
        super().__init__(status, message, headers)
        self.message, self.param, self.code = message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = error_type(self.status_code)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and its end if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def bad(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    param = param and shortened(param, MAX_PARAM)
    return ApiError(400, f"{param}: {message}" if param else message, param, code)


def internal_error() -> ApiError:
    return ApiError(500, "internal error; the server's log has the details")


def field_error(param: str, message: str) -> PydanticCustomError:
    """An error for validators of a whole model. It names the field, which pydantic would not report."""
    return PydanticCustomError("invalid", "{message}", {"message": message, "param": param})


def context_error(
    limit: int, prompt: int, answer: int, param: str, *, part: str = "prompt", at_least: bool = False
) -> ApiError:
    """A 400 for `prompt` and `answer` tokens that a context of `limit` tokens cannot hold together.

    `param`: the field to change. `part`: what holds the prompt, "prompt" or "messages". `at_least`: `prompt` is a lower bound.
    The first sentences are exactly OpenAI's and vLLM's: some clients match them with regular expressions and then shorten the
    conversation. Other clients look for the code, but only in the text. The rest of the text is specific to this server.
    """
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + answer} tokens "
        f"({prompt} in the {part}, {answer} in the completion). Please reduce the length of the {part} or completion. "
        f"Error code: {TOO_LONG}."
    )
    if at_least:
        message += f" The {part} may be longer still: counting ended there."
    if prompt < limit:
        message += f" With this prompt, {param} can be at most {limit - prompt}."
    else:
        message += " truncate_prompt_tokens cuts the prompt at its start."
    return ApiError(400, message, param, TOO_LONG)


def unparsable(error: Exception) -> ApiError:
    """A 400 for a body that the JSON parser refused with `error`. Says what was expected, where, and what was found."""
    if isinstance(error, json.JSONDecodeError):
        rest = error.doc[error.pos : error.pos + SHOWN]
        found = json.dumps(rest, ensure_ascii=False) if rest else "its end"
        reason = f"{error.msg} at line {error.lineno}, column {error.colno} (character {error.pos}), found {found}"
    elif isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        reason = f"it is not {error.encoding.upper()} text: byte 0x{byte:02x} at position {error.start}: {error.reason}"
    elif isinstance(error, RecursionError):
        reason = "its lists and objects are nested too deeply"
    else:
        reason = str(error)[:200] or type(error).__name__
    return ApiError(400, f"the body is not valid JSON: {reason}", None, "invalid_json")


def from_model(error: ValidationError, body: Any) -> ApiError:
    """The 400 of a body that does not fit its model."""
    return from_errors([{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)], body)


def from_errors(errors: Sequence[Any], body: Any) -> ApiError:
    """Convert pydantic's errors about `body` to one 400, which names the first wrong field."""
    errors = errors[:MOST_ERRORS]
    first = errors[0]
    param = _param(first, body)
    if param:  # for a union, assume that the client meant the branch that is only too long, or that with the deepest error
        field = param.split(".")[0]
        paths = [(e["type"], path) for e in errors if (path := _param(e, body)) and path.split(".")[0] == field]
        _, param = max(paths, key=lambda one: (one[0] == "too_long", one[1].count(".")))
    same = [e for e in errors if _param(e, body) == param]
    message = " or ".join(dict.fromkeys(str(e["msg"]) for e in same))
    if not param and not isinstance(body, dict):
        message = NO_OBJECT
    return bad(param, message)


def _param(error: Any, body: Any) -> str | None:
    """The path of the error in the body. pydantic's `loc` also has types and union branches, which are not in the body."""
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


# --- the Messages API ------------------------------------------------------------------------------------------------

MESSAGES_PATH = "/v1/messages"
MESSAGES_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Fields of the chat body that a Messages body becomes, and the fields from which they come.
MESSAGES_FIELDS = (
    (re.compile(r"tools\.(\d+)\.function\.parameters"), r"tools.\1.input_schema"),
    (re.compile(r"tools\.(\d+)\.function"), r"tools.\1"),
    (re.compile(r"response_format"), "output_config.format"),
    (re.compile(r"stop\b"), "stop_sequences"),
    (re.compile(r"user\b"), "metadata.user_id"),
)
LENGTHS = re.compile(r"maximum context length is (\d+) tokens\. However, you requested \d+ tokens \((\d+) in the messages")


def is_messages(path: str) -> bool:
    """Whether a request of this path is answered in this format."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def messages_error_type(status: int) -> str:
    return MESSAGES_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def field_name(path: str) -> str:
    """The path in a Messages body of the field at `path` of the chat body that it becomes. Text after the path stays."""
    for pattern, name in MESSAGES_FIELDS:
        if found := pattern.match(path):
            return found.expand(name) + path[found.end() :]
    return path


def messages_error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """The body of a response, and the data of an `error` event."""
    if too_long := LENGTHS.search(message):  # coding agents search for these words, and then shorten the conversation
        message = f"prompt is too long: {too_long[2]} tokens > {int(too_long[1]) - 1} maximum"
    return {"type": "error", "error": {"type": messages_error_type(status), "message": message}, "request_id": request_id}
