"""Ranks on several hosts: what they check before they form a group, and how each of them notices that a host has left.

A process group alone notices neither: with other flags on one host it computes nonsense or waits for minutes, and where no packet
comes any more, as from a host without power, it waits for ten minutes. So the ranks first compare what they are going to do,
through the launcher's store. Then each rank keeps a connection to rank 0 that carries nothing. The kernels at both ends probe
it, so it breaks within LOSS_SECONDS when a host or the network fails, however busy the ranks are, and at once when a rank ends.
"""

import contextlib
import fcntl
import hashlib
import hmac
import itertools
import json
import os
import secrets
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from errors import UserError
from files import ENGINE, model_folder, source_digest
from ranks import meeting
from ranks.processes import LAUNCHER, LOST_RANK, local_rank, lost_connection, rank

MEET_SECONDS = 120.0  # time for the ranks of all hosts to import what they need, once their launchers have met
ASK_SECONDS = 5.0  # between the signs of a rank that the others shall wait for
AWAITED = "rung/awaited"  # key of the launcher's store: how many of these signs there were
CONNECT_SECONDS = 30.0
IDLE, INTERVAL, PROBES = 2, 1, 3  # s, s: without an answer to so many probes, a connection breaks
LOSS_SECONDS = IDLE + INTERVAL * PROBES
MOST_STRANGERS = 64  # connections to the port of the watch, beside those of ranks
GRACE_SECONDS = 1.0  # between another rank's end and this one's, which may be ending by itself for the same reason
SIOCGIFADDR = 0x8915  # linux/sockios.h
CODE = (*ENGINE, "server/*.py")  # of which hosts need the same
SAMPLE = 1 << 20  # bytes of each file of a checkpoint that are compared
BYE, DRAIN = "bye", "drain"  # messages between ranks; any other is the reason for which all ranks end

_groups = itertools.count()  # that this process has begun to join


def join(facts: Mapping[str, str], error: UserError | None) -> Store:
    """Meet the ranks of the other hosts, compare, and watch them from now on. Returns a store for the process group.

    facts: what must be the same on all hosts, by its name in messages. error: of this rank, in which case `facts` may be anything.
    Raises UserError on every rank if one has an error, if facts differ, or if ranks do not come or cannot reach rank 0.
    """
    global _watch
    master, size = os.environ["MASTER_ADDR"], int(os.environ["WORLD_SIZE"])
    try:
        address = choose_interface(master)
    except UserError as e:
        address, error = "", error or e
    try:
        if LAUNCHER in os.environ:
            store: Store = meeting.connect(master, int(os.environ["MASTER_PORT"]), os.environ[meeting.SECRET], MEET_SECONDS)
        else:
            store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=MEET_SECONDS))))
    except (dist.DistError, OSError, ValueError):  # ValueError: an address that cannot be resolved
        raise UserError(
            f"host {socket.gethostname()} cannot reach {master} port {os.environ['MASTER_PORT']}, where its launcher says that rank 0 "
            "is; check that this name or address leads to rank 0's host from here, or give torchrun there --local-addr with another"
        ) from None
    known = {"Rung": source_digest(CODE), "PyTorch": torch.__version__, **facts}
    name = socket.gethostname() + (f" ({address})" if address else "")
    whole, store = store, PrefixStore(store_prefix(), store)
    store.set(f"rank {rank()}", json.dumps({"host": name, "address": address, "facts": known, "error": error and str(error)}))
    records = _gather(store, size, whole)
    check(records)
    if _watch is None:  # else an earlier group had no communicator
        _watch = Watch(rank(), _connect(store, address, [record["host"] for record in records]))
    return store


def forget_groups() -> None:
    """Count groups from the first one again, for ranks that meet in a new store."""
    global _groups
    _groups = itertools.count()


def store_prefix() -> str:
    """Of the keys of a new group in the launcher's store, where those of an earlier one would lead to ports that are closed: other for
    each start of the ranks, which keep one torchrun's store, and for each group of a start."""
    return f"rung/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_groups)}"


@contextlib.contextmanager
def awaited() -> Iterator[None]:
    """Keep the ranks of other hosts waiting in `join` for this one, which launch.py has started, until the body ends, or this process."""
    ended = threading.Event()

    def ask_for_time() -> None:
        with contextlib.suppress(dist.DistError, OSError, KeyError, UserError):  # `join` says what is wrong
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = meeting.connect(*address, os.environ[meeting.SECRET], MEET_SECONDS)
            while not ended.is_set():
                store.add(AWAITED, 1)
                ended.wait(ASK_SECONDS)

    threading.Thread(target=ask_for_time, daemon=True, name="awaited").start()
    yield
    ended.set()


def _gather(store: Store, size: int, whole: Store) -> list[dict[str, Any]]:
    """whole: with the key of `awaited`, which `store` does not have."""
    keys, asked, end = [f"rank {other}" for other in range(size)], -1, 0.0
    while not store.check(keys):
        if (now := whole.add(AWAITED, 0)) != asked:
            if asked < 1 <= now and local_rank() == 0:
                print("waiting for another host, which fetches files …", file=sys.stderr, flush=True)
            asked, end = now, time.monotonic() + MEET_SECONDS
        if time.monotonic() > end:
            came = sum(store.check([key]) for key in keys)
            raise UserError(f"{came} of {size} ranks came within {MEET_SECONDS:g} s; see the terminals of the other hosts")
        time.sleep(meeting.POLL_SECONDS)
    return [json.loads(store.get(key)) for key in keys]


def check(records: list[dict[str, Any]]) -> None:
    """Raises UserError with the first error, or the first difference, of the ranks' records."""
    for record in records:
        if record["error"]:
            raise UserError(f"{record['error']} (on host {record['host']})")
    first = records[0]
    for record in records:
        for what in sorted(first["facts"].keys() | record["facts"].keys()):
            one, other = (r["facts"].get(what, "not given") for r in (first, record))
            if one != other:
                raise UserError(
                    f"the hosts disagree: {what} is {one} on {first['host']} and {other} on {record['host']}; start all hosts with "
                    "the same flags, model and code"
                )
        if ip_address(record["address"]).is_loopback != ip_address(first["address"]).is_loopback:
            local = record if ip_address(record["address"]).is_loopback else first
            raise UserError(
                f"on {local['host']} the name {os.environ['MASTER_ADDR']} is a loopback address, which no other host can reach; "
                "give torchrun there --local-addr with the host's address in the common network"
            )


def model_fact(model: str) -> str:
    """Identifies a checkpoint: a digest of the names, the sizes and the first MiB of its files. A preset's is its name."""
    path, found = Path(model), hashlib.sha256()
    if not path.exists():
        return model
    for each in [path] if path.suffix == ".json" else sorted(model_folder(path).glob("*")):
        if each.is_file() and (each == path or each.suffix in (".json", ".safetensors", ".model", ".pth", ".bin")):
            found.update(f"{each.name} {each.stat().st_size} ".encode())
            with each.open("rb") as file:
                found.update(file.read(SAMPLE))
    return found.hexdigest()[:12]


# --- the network interface ---------------------------------------------------------------------------------------------------


def choose_interface(master: str) -> str:
    """Make gloo and NCCL use the interface that leads to `master`, unless the environment names another. Returns its IPv4 address.

    Raises UserError for a GLOO_SOCKET_IFNAME that this host lacks, or that is lo though rank 0 is elsewhere.
    """
    towards, found = address_towards(master), interfaces()
    leading = next((name for name, address in found.items() if address == towards), None)
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    if given:
        hint = f"leave it out, or name the one that leads to rank 0{f', {leading}' if leading else ''}"
        if given not in found:
            raise UserError(f"GLOO_SOCKET_IFNAME is {given}, but there is no such interface; {hint}")
        if ip_address(found[given]).is_loopback and not ip_address(towards).is_loopback:
            raise UserError(f"GLOO_SOCKET_IFNAME is {given}, which no other host can reach; {hint}")
        return found[given]
    if leading:
        os.environ["GLOO_SOCKET_IFNAME"] = leading
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={leading}")
    return towards


def address_towards(host: str) -> str:
    """This host's IPv4 address from which packets to `host` leave. Sends nothing. Raises UserError if there is none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        name: str = probe.getsockname()[0]
        return name
    raise UserError(
        f"host {socket.gethostname()} has no way to {host}, where rank 0 is; check the name and the network, or give torchrun on "
        "rank 0's host --local-addr with an address that all hosts reach"
    )


def interfaces() -> dict[str, str]:
    """The first IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                packed = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(packed[20:24])
    return found


# --- the watch ---------------------------------------------------------------------------------------------------------------


def _connect(store: Store, address: str, names: list[str]) -> dict[socket.socket, str]:
    """The connections to watch, with the names of the hosts at their ends: rank 0 has one to each other rank."""
    if rank():
        host, port, token = json.loads(store.get("watch"))
        try:
            connection = socket.create_connection((host, port), CONNECT_SECONDS, (address, 0))
        except OSError as e:
            raise UserError(
                f"{names[rank()]} cannot reach rank 0 on {names[0]} ({e.strerror or e}); check the network and its firewalls, and name "
                "the interface of the common network in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on both"
            ) from None
        connection.sendall(greeting(token, rank()))
        return {_probed(connection): names[0]}
    token = secrets.token_hex(16)
    with socket.create_server((address, 0), backlog=len(names)) as server:
        store.set("watch", json.dumps([*server.getsockname()[:2], token]))
        found = accept_ranks(server, token, len(names), CONNECT_SECONDS)
    if missing := sorted(set(range(1, len(names))) - found.keys()):
        who = ", ".join(f"rank {other} on {names[other]}" for other in missing)
        raise UserError(
            f"{who} did not reach rank 0 on {names[0]} within {CONNECT_SECONDS:g} s; check the network and its firewalls, and name "
            "the interface of the common network in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on both"
        )
    return {_probed(connection): names[number] for number, connection in found.items()}


def greeting(token: str, number: int) -> bytes:
    """What a rank sends first on the connection that rank 0 watches."""
    return f"{token} {number}\n".encode()


def accept_ranks(server: socket.socket, token: str, ranks: int, seconds: float) -> dict[int, socket.socket]:
    """The connections of ranks 1 to `ranks` - 1, or those that came within `seconds`. Connections without a rank's greeting delay no
    rank. Of more than MOST_STRANGERS the oldest are closed."""
    expected = {greeting(token, number): number for number in range(1, ranks)}
    found, strangers, end = dict[int, socket.socket](), list[socket.socket](), time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(found) < len(expected) and (remaining := end - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                if key.fileobj is server:
                    strangers.append(server.accept()[0])
                    selector.register(strangers[-1], selectors.EVENT_READ)
                elif (connection := key.fileobj) in strangers:  # else it was closed in this turn
                    strangers.remove(connection)
                    selector.unregister(connection)
                    number = _rank_of(connection, expected)
                    if number is None or number in found:
                        connection.close()
                    else:
                        found[number] = connection
            while len(strangers) > ranks + MOST_STRANGERS:
                selector.unregister(strangers[0])
                strangers.pop(0).close()
    for stranger in strangers:
        stranger.close()
    return found


def _rank_of(connection: socket.socket, expected: dict[bytes, int]) -> int | None:
    """The rank whose greeting has come. It comes whole, because it is sent at once and is shorter than a packet."""
    said = b""
    with contextlib.suppress(OSError):
        said = connection.recv(128)
    return next((number for known, number in expected.items() if hmac.compare_digest(known, said)), None)


def _probed(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", IDLE), ("TCP_KEEPINTVL", INTERVAL), ("TCP_KEEPCNT", PROBES)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOSS_SECONDS * 1000)
    return connection


class Watch:
    """Ends this process when a connection breaks, unless the rank at its other end has said BYE."""

    def __init__(self, number: int, peers: dict[socket.socket, str]) -> None:
        """number: this rank. peers: connections, and the names of the hosts at their ends."""
        self._is_first, self._is_silent, self._peers = number == 0, False, peers
        self.first = next(iter(peers.values()), "")  # on another rank: rank 0's host
        self.on_loss: Callable[[str], None] = lambda reason: None  # called before the end, in another thread
        self.on_drain: Callable[[], None] = lambda: None  # on rank 0, when another one asks for it; in another thread
        threading.Thread(target=self._run, daemon=True, name="hosts").start()

    def send(self, message: str) -> None:
        for connection in self._peers:
            with contextlib.suppress(OSError):
                connection.sendall(f"{message}\n".encode())

    def _run(self) -> None:
        left = {connection.fileno(): connection for connection in self._peers}
        poll = select.poll()
        for descriptor in left:
            poll.register(descriptor, select.POLLIN)
        while left:
            for descriptor, _ in poll.poll():
                try:
                    messages = left[descriptor].recv(4096).decode(errors="replace").splitlines()
                    cause = "" if messages else "a rank there ended or was killed"
                except ConnectionResetError:
                    messages, cause = [], "a rank there ended or was killed"
                except OSError:
                    messages, cause = [], f"nothing has come from it for {LOSS_SECONDS} s, so it or the network is down"
                    self._is_silent = True
                if DRAIN in messages:
                    self.on_drain()
                if BYE in messages:
                    poll.unregister(descriptor)
                    del left[descriptor]
                elif cause:
                    time.sleep(GRACE_SECONDS)
                    self._end(f"host {self._peers[left[descriptor]]} has left: {cause}; the server or job ends on all hosts")
                elif reason := next((message for message in messages if message != DRAIN), ""):
                    self._end(reason)

    def _end(self, reason: str) -> None:
        if self._is_first:
            self.send(reason)
        if local_rank() == 0:
            print(f"error: {reason}", file=sys.stderr, flush=True)
        self.on_loss(reason)
        if self._is_silent and local_rank() == 0:
            end_torchrun()
        os._exit(LOST_RANK)


def end_torchrun() -> None:
    """End this rank's launcher if it is torchrun: it may be asking its rendezvous on the silent host for news, and would wait there
    for minutes before it sees that its ranks have ended. A signal that it can handle comes first."""
    launcher = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER not in os.environ:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if os.getppid() == launcher > 1:
                os.kill(launcher, number)
                time.sleep(GRACE_SECONDS)


_watch: Watch | None = None


def watch() -> Watch | None:
    """This rank's watch; None on one host."""
    return _watch


def say_goodbye() -> None:
    """Tell the other hosts that this rank ends as it should."""
    if _watch:
        _watch.send(BYE)


def await_cause(error: BaseException) -> None:
    """If `error` says that a connection was lost, wait for the watch: it knows which host has left, and ends this process."""
    if _watch and lost_connection(str(error)):
        time.sleep(LOSS_SECONDS + 2 * GRACE_SECONDS)
