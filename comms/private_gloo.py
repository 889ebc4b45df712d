"""gloo groups that no other process can join, as a backend of torch.distributed: `dist.new_group(backend=PRIVATE_GLOO)`.

gloo's ranks connect over TCP, and whoever connects to a rank's port and sends the number that the rank expects from a peer is taken
for this peer. The numbers count from 0. So here they begin at a random one, and a port lets others connect only while the ranks do.
Then all ranks compare, through their store, which connections they have made and which they read. If a rank reads a stranger's, all
connect anew. So nothing is taken from a connection before it is known to be a rank's.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from errors import UserError

PRIVATE_GLOO = "private_gloo"
ATTEMPTS = 10  # to connect without a stranger
MOST_NUMBERS = 2_000  # of which the first one is drawn; a thousand take about 1 ms
LOOKS, LOOK_SECONDS = 50, 0.0005  # for other ranks' values, before a FileStore looks every 10 ms
SO_ATTACH_FILTER = 26  # asm-generic/socket.h
REFUSE_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # linux/filter.h: a program that returns 0, for each packet
WATCHED = re.compile(r"^tfd: +(\d+) events: +([0-9a-f]+)", re.MULTILINE)  # in /proc/self/fdinfo of an epoll instance
ONCE = 1 << 30  # EPOLLONESHOT

_gloo: Any = dist.ProcessGroupGloo
Address = tuple[str, int]


def connect(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A `ProcessGroupGloo` of `size` ranks. Collective. Raises UserError if strangers disturb every attempt."""
    for attempt in range(ATTEMPTS):
        own = PrefixStore(str(attempt), store)
        _exchange(own, "here", rank, size, None)  # so that the ports let others connect for milliseconds only
        before = {address for _, address in _listening()}
        options = _options([_device(name) for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")])
        options._timeout = timeout
        group = _gloo(own, rank, size, options)
        ports = {address for _, address in _listening()} - before
        ends = _exchange(own, "connections", rank, size, _connections(ports))
        for listener, address in _listening():
            if address in ports:  # all ranks are connected
                _refuse_all(listener)
        made = [connection for made, _ in ends for connection in made]
        if all([theirs, ours] in made for _, read in ends for ours, theirs in read):
            return group
    raise UserError(
        "a program of another user connects to the ports of the ranks whenever they start; find it with ss -tp, and end it"
    )


# of GPUs, too, as gloo is: torch asks a group for the backend of the GPU to which the ranks are bound
dist.Backend.register_backend(PRIVATE_GLOO, connect, devices=["cpu", "cuda"])


def _exchange(store: Store, what: str, rank: int, size: int, value: Any) -> list[Any]:
    """The value of each rank, by rank, as JSON has it. Collective."""
    keys = [f"{what} {other}" for other in range(size)]
    store.set(keys[rank], json.dumps(value))
    for _ in range(LOOKS):
        if store.check(keys):
            break
        time.sleep(LOOK_SECONDS)
    return [json.loads(store.get(key)) for key in keys]


class _Deaf(Store):
    """A store with which no group can be made."""

    def set(self, key: str, value: str) -> None:
        raise BrokenPipeError


def _options(devices: list[Any]) -> Any:
    options = _gloo._Options()
    options._devices, options._threads = devices, 2 * len(devices)  # as gloo's default
    return options


def _device(interface: str) -> Any:
    """A port that listens at this interface, or at that of the host's name if it is empty, and expects numbers from a random one on."""
    device = _gloo.create_device(interface=interface, lazy_init=False) if interface else _gloo.create_default_device(False)
    with contextlib.suppress(BrokenPipeError):  # each rank of this group takes a number
        _gloo(_Deaf(), 0, random.SystemRandom().randrange(1, MOST_NUMBERS), _options([device]))
    return device


def _refuse_all(listener: socket.socket) -> None:
    """Let nobody connect any more. To close it is up to gloo."""
    program = ctypes.create_string_buffer(REFUSE_ALL)
    with contextlib.suppress(OSError):  # not Linux: a stranger's connection stays unread
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def _connections(ports: set[Address]) -> tuple[list[tuple[Address, Address]], list[tuple[Address, Address]]]:
    """This process's TCP connections, each by its own and its other end: those that it has made, and those to `ports` that gloo reads.
    gloo reads others only once, for their number."""
    made, read, once = [], [], _read_once()
    for number, found in _sockets():
        with contextlib.suppress(OSError):  # it is not connected
            here, there = found.getsockname()[:2], found.getpeername()[:2]
            if here not in ports:
                made.append((here, there))
            elif number not in once:
                read.append((here, there))
    return made, read


def _read_once() -> set[int]:
    """The descriptors from which an epoll instance of this process waits for one event, or waited. Empty on systems other than
    Linux."""
    found = set[int]()
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # it has been closed
            if os.readlink(descriptor) == "anon_inode:[eventpoll]":
                watched = WATCHED.findall(Path("/proc/self/fdinfo", descriptor.name).read_text())
                found |= {int(number) for number, events in watched if int(events, 16) & ONCE}
    return found


def _listening() -> Iterator[tuple[socket.socket, Address]]:
    for _, found in _sockets():
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield found, found.getsockname()[:2]


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """The descriptors of this process's TCP sockets, each with a copy that is closed before the next one."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # it has been closed
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                        yield int(name), found
