"""The store of several hosts: keys and values for those who know a secret.

Its server takes nothing but a proof from a connection before both ends have proved that they know the secret, and unpickles nothing.
"""

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from errors import UserError

SECRET = "RUNG_MEET_SECRET"  # environment variable
LEAST_SECRET = 16  # characters
BYTES = 32  # of a nonce and of a proof
REFUSED = bytes(BYTES)  # in place of the server's proof
PROOF_SECONDS = 10.0  # for a connection to prove that it knows the secret
MOST_UNPROVED = 256  # such connections
MOST_BYTES = 16 << 20  # of a message
POLL_SECONDS = 0.005


class Request(msgspec.Struct, array_like=True):
    """What a client asks for: `get`, `set`, `add` an integer to, `swap` an expected value of, or `delete` keys, or `count` all."""

    do: str
    keys: list[str]
    values: list[bytes] = []


_requests, _replies = msgspec.msgpack.Decoder(Request), msgspec.msgpack.Decoder(list[bytes | None])


def read_secret(path: str | None) -> str:
    """The secret in a file, or else in the environment, where ranks find it from now on. Raises UserError."""
    secret = os.environ.get(SECRET, "")
    if path is not None:
        try:
            if os.stat(path).st_mode & 0o077:
                raise UserError(f"other users may read --meet-secret-file {path}; take their rights with chmod 600")
            secret = Path(path).read_text().strip()
        except (OSError, ValueError) as e:
            raise UserError(f"--meet-secret-file {path} cannot be read ({e}); name another file") from None
    if len(secret) < LEAST_SECRET:
        raise UserError(
            f"several hosts need a secret of at least {LEAST_SECRET} characters, the same on all; write what openssl rand -hex 16 "
            f"prints to a file of mode 600 on each, and name it in --meet-secret-file, or set {SECRET}"
        )
    os.environ[SECRET] = secret
    return secret


def _proof(secret: str, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret.encode(), who + nonces, "sha256")


class MeetingServer:
    """The server, in a thread that ends with the process."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._secret, self._values, self._unproved, self._refused = secret, dict[str, bytes](), 0, set[str]()
        threading.Thread(target=lambda: asyncio.run(self._serve(listener)), daemon=True, name="meeting").start()

    async def _serve(self, listener: socket.socket) -> None:
        await (await asyncio.start_server(self._talk, sock=listener)).serve_forever()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError), contextlib.closing(writer):
            if self._unproved < MOST_UNPROVED and await self._knows_secret(reader, writer):
                while (size := int.from_bytes(await reader.readexactly(4))) <= MOST_BYTES:
                    reply = msgspec.msgpack.encode(self._reply(_requests.decode(await reader.readexactly(size))))
                    writer.write(len(reply).to_bytes(4) + reply)
                    await writer.drain()

    async def _knows_secret(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self._unproved += 1
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                writer.write(own := secrets.token_bytes(BYTES))
                theirs, proof = await reader.readexactly(BYTES), await reader.readexactly(BYTES)
        finally:
            self._unproved -= 1
        known = hmac.compare_digest(proof, _proof(self._secret, b"client", own + theirs))
        writer.write(_proof(self._secret, b"server", own + theirs) if known else REFUSED)
        address = writer.get_extra_info("peername")[0]
        if not known and address not in self._refused and len(self._refused) < MOST_UNPROVED:
            self._refused.add(address)
            print(f"{address} was refused: its secret is another one", file=sys.stderr, flush=True)
        return known

    def _reply(self, request: Request) -> list[bytes | None]:
        values, keys, given = self._values, request.keys, request.values
        match request.do:
            case "get":
                return [values.get(key) for key in keys]
            case "set":
                values.update(zip(keys, given, strict=True))
            case "add":
                values[keys[0]] = b"%d" % (int(values.get(keys[0], b"0")) + int(given[0]))
                return [values[keys[0]]]
            case "swap":
                expected, wanted = given
                if values.get(keys[0], b"") == expected:
                    values[keys[0]] = wanted
                return [values.get(keys[0], expected)]
            case "delete":
                return [values.pop(key, None) for key in keys]
            case "count":
                return [b"%d" % len(values)]
        return []


class MeetingStore(Store):
    """A client of the server, as a store of torch.distributed. Its methods raise DistNetworkError if the server has left, and
    DistStoreError if keys do not come within `timeout`."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        super().__init__()
        self._connection, self._lock = connection, threading.Lock()
        self.set_timeout(timedelta(seconds=timeout))
        _stores.append(self)

    def _ask(self, do: str, keys: Sequence[str], values: Sequence[bytes | str] = ()) -> list[bytes | None]:
        request = Request(do, list(keys), [value.encode() if isinstance(value, str) else value for value in values])
        message = msgspec.msgpack.encode(request)
        try:
            with self._lock:
                self._connection.sendall(len(message).to_bytes(4) + message)
                return _replies.decode(_read(self._connection, int.from_bytes(_read(self._connection, 4))))
        except OSError as e:
            raise dist.DistNetworkError(f"the host with the store has left: {e}") from None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, timeout)

    def _wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        end = time.monotonic() + (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        while None in (found := self._ask("get", keys)):
            if time.monotonic() > end:
                raise dist.DistStoreError(f"keys {', '.join(keys)} did not come")
            time.sleep(POLL_SECONDS)
        return [value for value in found if value is not None]

    def get(self, key: str) -> bytes:
        return self._wait([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait(keys)

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._ask("get", keys)

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        self._ask("set", keys, values)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], [str(amount)])[0] or 0)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._ask("swap", [key], [expected, desired])[0] or b""

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", [key]) != [None]

    def num_keys(self) -> int:
        return int(self._ask("count", [])[0] or 0)

    deleteKey, getNumKeys = delete_key, num_keys  # the names by which C++ calls them


_stores = list[MeetingStore]()  # C++ that has a store does not keep its Python object


def connect(host: str, port: int, secret: str, timeout: float) -> MeetingStore:
    """timeout: seconds for keys to come. Raises OSError if nothing answers, and UserError if one end does not know the other's secret."""
    connection = socket.create_connection((host, port), PROOF_SECONDS)
    try:
        nonces = _read(connection, BYTES) + (own := secrets.token_bytes(BYTES))
        connection.sendall(own + _proof(secret, b"client", nonces))
        if not hmac.compare_digest(_read(connection, BYTES), _proof(secret, b"server", nonces)):
            raise UserError(f"{host}:{port} has another secret than this host; give the same to all hosts")
        connection.settimeout(None)
        return MeetingStore(connection, timeout)
    except BaseException:
        connection.close()
        raise


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (piece := connection.recv(size - len(data))):
            raise ConnectionResetError("it closed the connection")
        data += piece
    return data
