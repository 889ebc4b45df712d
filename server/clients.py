"""Who sends a request: the holder of an API key, or an address. Clients share the engine fairly (see
`engine.protocol.Turn`)."""

import hashlib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from errors import UserError

ENTRY = re.compile(r"(?P<key>.*?)(?:\s+name=(?P<name>[\w.@-]{1,64}))?(?:\s+weight=(?P<weight>[0-9]{1,9}))?", re.DOTALL)
MOST_WEIGHT = 1000
IPV6_SITE = 64  # bits of an IPv6 address that all addresses of a client have in common


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
