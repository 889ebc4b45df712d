"""What errors of each HTTP status have in common. The gateway of replicas, which lacks most of the server's packages, imports this."""

from collections.abc import Mapping

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRY_SECONDS = {429: "1", 503: "2"}
NO_RETRY = {"x-should-retry": "false"}  # else the SDKs of OpenAI and Anthropic repeat a request at every status from 500 on


def error_type(status: int) -> str:
    """The type of an error in OpenAI's format."""
    return TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def with_retry(status: int, headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers of an error, with Retry-After unless they have it or NO_RETRY."""
    found = dict(headers or {})
    if status in RETRY_SECONDS and not found.keys() & NO_RETRY.keys():
        found.setdefault("retry-after", RETRY_SECONDS[status])
    return found
