"""Ranks connect, though a stranger connects to their ports before they do, and with the numbers that they expect from each other."""

import contextlib
import os
import random
import signal
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comms import private_gloo
from errors import UserError
from tests.support.ranks import Ranks
from tp import World

SECONDS = timedelta(seconds=60)
KNOWN = 7  # the number that gloo expects from rank 0
NOTHING = struct.pack("QQQQQQ", 48, 2, 0, 0, 0, 0)  # an operation of gloo that announces one


def stranger(port: tuple[str, int], numbers: list[int]) -> int:
    """The process id of a stranger who has connected to the port with each of the numbers, and goes on to send what gloo takes for
    operations until it is killed."""
    told, tell = os.pipe()
    if child := os.fork():
        os.close(tell)
        assert os.read(told, 1) == b"."
        os.close(told)
        return child
    os.closerange(3, tell)  # else a socket that the rank closes stays open, and in gloo's epoll set
    os.closerange(tell + 1, 1 << 16)
    connections = [socket.create_connection(port) for _ in numbers]
    for connection, number in zip(connections, numbers, strict=True):
        connection.sendall(struct.pack("q", number))
    os.write(tell, b".")
    while True:
        time.sleep(0.01)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(NOTHING)


def connected(world: World, folder: str, attempts: int, numbers: list[int], known: bool) -> tuple[Any, bool]:
    """The sum over a group's ranks (an error's text if they do not connect), and whether anybody else can connect now. In so many
    attempts, a stranger connects to each port as soon as it listens. known: the first number that gloo expects is KNOWN."""
    store = dist.FileStore(str(Path(folder, "store")), -1)
    made, device, children = list[tuple[str, int]](), private_gloo._device, list[int]()

    def attacked(interface: str) -> Any:
        before = {address for _, address in private_gloo._listening()}
        found = device(interface)
        made.extend({address for _, address in private_gloo._listening()} - before)
        if len(made) <= attempts:
            children.append(stranger(made[-1], numbers))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_gloo, "_device", attacked)
        if known:
            patch.setattr(random, "SystemRandom", lambda: SimpleNamespace(randrange=lambda *_: KNOWN))
        try:
            group = private_gloo.connect(store, world.rank, world.world_size, SECONDS)
            value = torch.tensor([10.0**world.rank])
            group.allreduce([value]).wait()
            with contextlib.suppress(TimeoutError):
                socket.create_connection(made[-1], 0.5).close()
                return value.item(), True
            return value.item(), False
        except UserError as e:
            return str(e), False
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("known", [False, True])
def test_a_stranger_is_no_rank(attempts: int, known: bool, ranks: Ranks, tmp_path: Path) -> None:
    n = random.choice([2, 3])
    numbers = list(range(KNOWN, KNOWN + n)) if known else [0, 1, 2, 1 << 40]
    for total, open_to_others in ranks.run(n, connected, str(tmp_path), attempts, numbers, known):
        assert (total, open_to_others) == (float("1" * n), False)


def test_a_stranger_who_never_gives_up_is_named(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks.run(2, connected, str(tmp_path), private_gloo.ATTEMPTS, [KNOWN, KNOWN + 1], True)
    assert all("ss -tp" in str(error) for error, _ in errors)


def backends(world: World, folder: str) -> tuple[str, str, list[Any]]:
    """The backends of a default group and of one like it, though the ranks are bound to GPUs, and objects gathered in the second."""
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder, "store")), -1)
    dist.init_process_group(private_gloo.PRIVATE_GLOO, store=store, rank=world.rank, world_size=world.world_size)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)  # type: ignore[union-attr]
    group, found = dist.new_group(), [None] * world.world_size
    dist.all_gather_object(found, (world.rank,), group=group)
    return dist.get_backend(), dist.get_backend(group), found


def test_further_groups_are_private_too(ranks: Ranks, tmp_path: Path) -> None:
    for answer in ranks.run(2, backends, str(tmp_path)):
        assert answer == (private_gloo.PRIVATE_GLOO, private_gloo.PRIVATE_GLOO, [(0,), (1,)])
