"""Reads the body of a request, with limits on its size and time.

The gateway of replicas runs where most of the server's packages are missing, and imports this.
"""

import asyncio
from collections.abc import Callable

from starlette.types import Receive

from server.writing import ClientGone

SLOWEST_UPLOAD = 32 << 10  # bytes/s; a body that arrives more slowly is refused after the idle timeout


class TooLarge(Exception):
    """The body exceeds the limit."""


class TooSlow(Exception):
    """The body stopped arriving, or arrives too slowly."""


async def read_body(receive: Receive, declared: str, limit: int, timeout: float, take: Callable[[int], None]) -> bytes:
    """The whole body. Raises TooLarge, TooSlow, ClientGone, and what `take` raises.

    declared: the header Content-Length, or "". limit: bytes. timeout: seconds between two parts. take: called with the size of
    each part before the next one is read.
    """
    if declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit)
    loop = asyncio.get_running_loop()
    began, parts, size, more = loop.time(), list[bytes](), 0, True
    while more:
        # Without this limit on the whole upload, a client could keep its connection with a few bytes at a time.
        left = began + timeout + size / SLOWEST_UPLOAD - loop.time()
        try:
            async with asyncio.timeout(min(left, timeout)):
                message = await receive()
        except TimeoutError as e:
            rate = f"less than {SLOWEST_UPLOAD >> 10} KiB/s after {timeout:g} s"
            raise TooSlow(f"the body stopped arriving for {timeout:g} s, or arrives too slowly: {rate}") from e
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        take(len(parts[-1]))
        more = message.get("more_body", False)
    return b"".join(parts)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit} bytes, this server's --max-body-mb")
