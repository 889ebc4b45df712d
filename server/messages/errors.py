"""Errors in the format of Anthropic's clients: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

import re
from typing import Any

PATH = "/v1/messages"
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Fields of the chat body that a Messages body becomes, and the fields from which they come.
NAMES = (
    (re.compile(r"tools\.(\d+)\.function\.parameters"), r"tools.\1.input_schema"),
    (re.compile(r"tools\.(\d+)\.function"), r"tools.\1"),
    (re.compile(r"response_format"), "output_config.format"),
    (re.compile(r"stop\b"), "stop_sequences"),
    (re.compile(r"user\b"), "metadata.user_id"),
)
TOO_LONG = re.compile(r"maximum context length is (\d+) tokens\. However, you requested \d+ tokens \((\d+) in the messages")


def is_messages(path: str) -> bool:
    """Whether a request of this path is answered in this format."""
    return path == PATH or path.startswith(PATH + "/")


def error_type(status: int) -> str:
    return TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def field_name(path: str) -> str:
    """The path in a Messages body of the field at `path` of the chat body that it becomes. Text after the path stays."""
    for pattern, name in NAMES:
        if found := pattern.match(path):
            return found.expand(name) + path[found.end() :]
    return path


def error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """The body of a response, and the data of an `error` event."""
    if too_long := TOO_LONG.search(message):  # coding agents search for these words, and then shorten the conversation
        message = f"prompt is too long: {too_long[2]} tokens > {int(too_long[1]) - 1} maximum"
    return {"type": "error", "error": {"type": error_type(status), "message": message}, "request_id": request_id}
