"""Who sends a request, and what all requests together, and those of one client, may hold: connections, bytes of bodies, places in
the queue, unread answers. Clients share the engine fairly (see `engine.protocol.Turn`).

`bounds.py` has what a single request may ask for. The gateway of replicas imports this file. Most of the server's packages
are missing where it runs, so this file needs none of them but those of errors.py.
"""

import asyncio
import hashlib
import ipaddress
import math
import random
import re
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Receive

from errors import UserError
from server.errors import CLOSE, ApiError, ClientGone, bad

SHARE = 4  # one client may have a quarter of the bytes
MOST_DESCRIPTORS = 65536  # that the server takes if it may
SLOWEST_UPLOAD = 32 << 10  # bytes/s; a body that arrives more slowly is refused after the idle timeout
UNREAD_BYTES = 1 << 30  # of all answers that clients have not read yet
RATE_SECONDS = 60.0  # over which the places that became free are counted
MOST_FREED = 4096  # of these places
LONGEST_RETRY = 120  # seconds
LOWEST = (1 << 63) - 1  # the priority of a batch's requests, behind all others

ENTRY = re.compile(r"(?P<key>.*?)(?:\s+name=(?P<name>[\w.@-]{1,64}))?(?:\s+weight=(?P<weight>[0-9]{1,9}))?", re.DOTALL)
MOST_WEIGHT = 1000
IPV6_SITE = 64  # bits of an IPv6 address that all addresses of a client have in common

# --- clients ---------------------------------------------------------------------------------------------------------

current_client = ContextVar("current_client", default="")  # the name of the client whose request the present task answers


@dataclass(frozen=True)
class Client:
    """`name`: never a key itself, because it may be logged. `weight`: of its share."""

    name: str
    weight: int = 1


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(entries: Sequence[str]) -> dict[bytes, Client]:
    """The clients by the digests of their keys. An entry is `KEY`, `KEY name=NAME`, `KEY weight=N` or `KEY name=NAME weight=N`;
    without a name, the client is named by the first digits of the digest. Raises UserError."""
    clients = {}
    for entry in entries:
        match = ENTRY.fullmatch(entry.strip())
        if match is None or not match["key"]:
            raise UserError("--api-key is empty; give a key, or leave the flag out")
        weight = int(match["weight"] or 1)
        if not 1 <= weight <= MOST_WEIGHT:
            raise UserError(f"the weight of an API key must be from 1 to {MOST_WEIGHT}, not {weight}")
        code = digest(match["key"])
        clients[code] = Client(match["name"] or f"key-{code.hex()[:8]}", weight)
    return clients


def owner(scope: Mapping[str, Any]) -> str:
    """Who may read the results of a request: the holder of its key, or clients of its address. Never a key itself."""
    key = scope["state"].get("key")
    return f"key {key.hex()}" if key else f"address {sender(scope).name}"


def sender(scope: Mapping[str, Any]) -> Client:
    """The client of an ASGI request: that of its key, if the server has keys, or else its address."""
    if known := scope["state"].get("client"):
        assert isinstance(known, Client)
        return known
    address = scope["client"][0][:64] if scope.get("client") else "-"
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # what a proxy wrote
        return Client(address)
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed  # as a proxy that listens for both writes those of IPv4
    return Client(str(ipaddress.ip_network((parsed, IPV6_SITE), strict=False) if parsed.version == 6 else parsed))


# --- connections -----------------------------------------------------------------------------------------------------


class Connection(Protocol):
    """What `server/connections.py` has for this module. sender: whose connection it is."""

    sender: str
    transport: asyncio.Transport


ByClient = dict[str, dict[Connection, None]]  # the oldest first


def raise_descriptor_limit() -> None:
    """Let this process have MOST_DESCRIPTORS, or as many as it may give itself. A shell's 1,024 are fewer than requests may
    wait."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Connections:
    """All connections, so that they leave descriptors for the server itself, and none of a client's keeps out others.

    Beyond `most`, a new connection takes the place of one that has no complete request to be answered: of the client that has
    most connections, the one that has waited longest. If there is none, it takes that of the newest one of the client that
    has most, if its own has fewer, and is closed otherwise.
    """

    def __init__(self, most: int | None = None) -> None:
        """most: by default three quarters of the descriptors that this process may have. New ones may come together, before one
        is closed for each."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors = sys.maxsize if soft == resource.RLIM_INFINITY else soft
        self.most = descriptors // 4 * 3 if most is None else most
        self._open: ByClient = {}
        self._waiting: ByClient = {}  # for a request

    def add(self, connection: Connection) -> None:
        if sum(map(len, self._open.values())) >= self.most:
            closed = self._to_close_for(connection)
            self.remove(closed)
            closed.transport.abort()
            if closed is connection:
                return
        self._open.setdefault(connection.sender, {})[connection] = None
        self.wait(connection)

    def remove(self, connection: Connection) -> None:
        self.answer(connection)
        _remove(self._open, connection)

    def wait(self, connection: Connection) -> None:
        """It waits for a request, or for the rest of one, unless it is closed."""
        if connection in self._open.get(connection.sender, ()):
            self._waiting.setdefault(connection.sender, {})[connection] = None

    def answer(self, connection: Connection) -> None:
        """It has a complete request, or is closed."""
        _remove(self._waiting, connection)

    def _to_close_for(self, new: Connection) -> Connection:
        client = max(self._waiting or self._open, key=lambda client: len(self._open[client]))
        if self._waiting:
            return next(iter(self._waiting[client]))
        fewer = len(self._open.get(new.sender, ())) + 1 < len(self._open[client])
        return next(reversed(self._open[client])) if fewer else new


def _remove(connections: ByClient, one: Connection) -> None:
    if own := connections.get(one.sender):
        own.pop(one, None)
        if not own:
            del connections[one.sender]


# --- bodies ----------------------------------------------------------------------------------------------------------


class Full(Exception):
    """There is no room for so many bytes now."""


class HeldBytes:
    """Bytes of what requests hold in memory: their bodies, for example, until they have their answers."""

    def __init__(self, most: int, largest: int, free: int = 0) -> None:
        """most: bytes of all requests. largest: bytes of one; all, and a client, may always have as many. free: the first
        bytes of each request, which do not count, so that there is always room for short ones."""
        self._most, self.share, self._free = max(most, largest), max(most // SHARE, largest), free
        self._held = Counter[str]()  # by client

    @property
    def held(self) -> int:
        """Bytes of all clients."""
        return self._held.total()

    @contextmanager
    def hold(self, client: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes bytes until the end of the `with` block. It raises Full if they do not fit."""
        free, taken = self._free, 0

        def take(size: int) -> None:
            nonlocal free, taken
            uncounted = min(size, free)
            free -= uncounted
            size -= uncounted
            if not size:
                return
            if self._held[client] + size > self.share:
                raise _full(self.share, " of one client")
            if self.held + size > self._most:
                raise _full(self._most, "")
            self._held[client] += size
            taken += size

        try:
            yield take
        finally:
            self._held[client] -= taken
            if not self._held[client]:
                del self._held[client]


def _full(size: int, whose: str) -> Full:
    return Full(f"requests{whose} without an answer may hold at most {size >> 20} MiB; try again soon")


async def read_body(receive: Receive, declared: str, limit: int, timeout: float, take: Callable[[int], None]) -> bytes:
    """The whole body. Raises ApiError, ClientGone, and what `take` raises.

    declared: the header Content-Length, or "". limit: bytes. timeout: seconds between two parts. take: called with the size of
    each part before the next one is read.
    """
    message = f"the body is larger than {limit} bytes, this server's --max-body-mb"
    too_large = ApiError(413, message, None, "body_too_large", CLOSE)
    if declared.isdigit() and int(declared[:20]) > limit:
        raise too_large
    parts, size = list[bytes](), 0
    async for part in body_parts(receive, timeout):
        parts.append(part)
        size += len(part)
        if size > limit:
            raise too_large
        take(len(part))
    return b"".join(parts)


async def body_parts(receive: Receive, timeout: float) -> AsyncIterator[bytes]:
    """The parts of a body as they come, at most `timeout` seconds apart. Raises ApiError and ClientGone."""
    loop = asyncio.get_running_loop()
    began, size, more = loop.time(), 0, True
    while more:
        # Without this limit on the whole upload, a client could keep its connection with a few bytes at a time.
        remaining = began + timeout + size / SLOWEST_UPLOAD - loop.time()
        try:
            async with asyncio.timeout(min(remaining, timeout)):
                message = await receive()
        except TimeoutError as e:
            rate = f"less than {SLOWEST_UPLOAD >> 10} KiB/s after {timeout:g} s"
            why = f"the body stopped arriving for {timeout:g} s, or arrives too slowly: {rate}"
            raise ApiError(400, why, None, "timeout") from e
        if message["type"] == "http.disconnect":
            raise ClientGone
        size += len(part := message.get("body", b""))
        yield part
        more = message.get("more_body", False)


# --- places in the queue ---------------------------------------------------------------------------------------------


class Admission:
    """Bounds how many sequences are in the server, in all and of one client. A request beyond that gets a 429."""

    def __init__(self, capacity: int, per_client: int, clock: Callable[[], float] = time.monotonic) -> None:
        """capacity: sequences in all. per_client: of one client. clock: as time.monotonic."""
        self.capacity, self.per_client, self._clock = capacity, per_client, clock
        self._held = Counter[str]()  # places by client
        self._freed: deque[tuple[float, str]] = deque(maxlen=MOST_FREED)  # when places became free, and whose they were
        self._busy_since = 0.0

    def check(self, client: str, sequences: int, active: int) -> None:
        """Raises a 429 if there is no room for a client's sequences now, and a 400 if there never is. active: the sequences in the
        engine."""
        most = min(self.capacity, self.per_client)
        if sequences > most:
            message = (
                f"the request asks for {sequences} answers, but the server's queue holds {most}; send fewer prompts at once"
            )
            raise bad(None, message, "too_many_choices")
        if (missing := active + sequences - self.capacity) > 0:
            raise self._refusal(f"the queue has {active} sequences, and holds {self.capacity}", missing, None)
        if (missing := self._held[client] + sequences - self.per_client) > 0:
            message = f"the queue has {self._held[client]} sequences of this client, and holds {self.per_client}"
            raise self._refusal(message, missing, client)

    @contextmanager
    def hold(self, client: str, sequences: int, active: int) -> Iterator[Callable[[], None]]:
        """Take places for a client's sequences until the end of the `with` block. Yields a function that gives one back
        earlier. Raises as `check`."""
        self.check(client, sequences, active)
        if not self._held:
            self._busy_since = self._clock()
        self._held[client] += sequences
        holding = sequences

        def leave() -> None:
            nonlocal holding
            holding -= 1
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]
            self._freed.append((self._clock(), client))

        try:
            yield leave
        finally:
            while holding:
                leave()

    def _refusal(self, message: str, missing: int, client: str | None) -> ApiError:
        seconds = self.retry_after(missing, client)
        return ApiError(429, f"{message}; try again in {seconds} s", None, "queue_full", {"retry-after": str(seconds)})

    def retry_after(self, missing: int, client: str | None = None) -> int:
        """Whole seconds, from 2 to LONGEST_RETRY, until so many places become free, of one client if given, at the rate of the last
        minute; at random up to twice as long, so that refused clients do not come back together."""
        now = self._clock()
        since = max(self._busy_since, now - RATE_SECONDS)
        if len(self._freed) == MOST_FREED:  # older ones are not known
            since = max(since, self._freed[0][0])
        freed = sum(at >= since and client in (None, name) for at, name in self._freed)
        seconds = min(max(1.0, missing * (now - since) / max(freed, 1)), LONGEST_RETRY / 2)
        return math.ceil(seconds * random.uniform(1, 2))


# --- unread answers --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Answer:
    close: Callable[[], None]
    bytes: int = 0
    closed: bool = False


class Backlog:
    """How many bytes of answers wait in memory for clients that read slowly.

    Beyond the bounds connections are closed, that of the answer first that has waited longest: of a client that exceeds its
    share, or else of the one that has most. So nobody's answers keep others from theirs. A client's only answer does not exceed
    its share.
    """

    def __init__(self, most: int = UNREAD_BYTES) -> None:
        """most: bytes of all answers."""
        self._most, self._share = most, most // SHARE
        self._answers: dict[str, dict[_Answer, None]] = {}  # by client: those that wait, the oldest first
        self._bytes = Counter[str]()  # by client

    @property
    def total(self) -> int:
        """Bytes of all answers."""
        return self._bytes.total()

    @contextmanager
    def hold(self, client: str, close: Callable[[], None]) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes of an answer until the end of the `with` block; negative ones have been read.

        close: closes the answer's connection. It is called while bytes of this or another answer are counted.
        """
        answer = _Answer(close)

        def count(size: int) -> None:
            if answer.closed:
                return
            self._add(client, answer, size)
            while size > 0 and (most := self._exceeding(client)) is not None:
                oldest = next(iter(self._answers[most]))
                self._add(most, oldest, -oldest.bytes)
                oldest.closed = True
                oldest.close()

        try:
            yield count
        finally:
            self._add(client, answer, -answer.bytes)

    def _add(self, client: str, answer: _Answer, size: int) -> None:
        if not size:
            return
        answer.bytes += size
        self._bytes[client] += size
        if answer.bytes:
            self._answers.setdefault(client, {})[answer] = None
        else:
            del self._answers[client][answer]
            if not self._answers[client]:
                del self._answers[client], self._bytes[client]

    def _exceeding(self, client: str) -> str | None:
        """The client whose answers are too many after one of `client` has grown."""
        if self._bytes[client] > self._share and len(self._answers.get(client, ())) > 1:
            return client
        return max(self._bytes, key=self._bytes.__getitem__) if self.total > self._most else None
