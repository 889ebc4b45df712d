"""The loop of every rank: take events, compute a step, send what is new. Rank 0 alone talks to the frontend.

Before each step rank 0 tells the others how many bytes of events there are: 8 bytes over gloo. Only when something arrived do
the events themselves follow. An idle rank 0 waits for the frontend, and lets the others hear of it every second, so that a
dead rank is noticed within that time.
"""

import gc
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import zmq

from engine.core import Engine
from engine.protocol import (
    Abort,
    FromEngine,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Submit,
    SubmitAll,
    ToEngine,
    decode_to_engine,
    encode,
)
from tp import World

IDLE_SECONDS = 1.0  # longest silence towards the other ranks
COMPILING_SECONDS = 0.005  # between looks at grammars, while nothing else is to do
STATS_SECONDS = 0.25


class FrontendLink:
    """Rank 0's two sockets. `receive` never blocks longer than asked; `send` never blocks."""

    def __init__(self, to_engine: str, from_engine: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.inbox, self.outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (self.inbox, self.outbox):
            socket.set_hwm(0)  # outputs wait in memory rather than hold up a step
        self.inbox.bind(to_engine)
        self.outbox.connect(from_engine)

    def receive(self, timeout: float) -> list[bytes]:
        """All messages that are there; waits up to `timeout` seconds for the first."""
        found: list[bytes] = []
        if self.inbox.poll(int(timeout * 1000)):
            try:
                while True:
                    found.append(self.inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                pass
        return found

    def send(self, message: FromEngine) -> None:
        self.outbox.send(encode(message))

    def close(self) -> None:
        """Give what was sent a moment to leave."""
        self.outbox.close(linger=1000)
        self.inbox.close(linger=0)


def share(world: World, events: list[bytes]) -> list[bytes]:
    """Rank 0's events on every rank, in the same order."""
    if world.world_size == 1:
        return events
    length = torch.tensor(sum(8 + len(e) for e in events) if world.rank == 0 else 0)
    dist.broadcast(length, src=0, group=world.control)
    if length == 0:
        return []
    payload = torch.empty(int(length), dtype=torch.uint8)
    if world.rank == 0:
        joined = b"".join(len(e).to_bytes(8, "little") + e for e in events)
        payload = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
    dist.broadcast(payload, src=0, group=world.control)
    return _split(payload.numpy().tobytes())


def _split(joined: bytes) -> list[bytes]:
    events, at = [], 0
    while at < len(joined):
        length = int.from_bytes(joined[at : at + 8], "little")
        events.append(joined[at + 8 : at + 8 + length])
        at += 8 + length
    return events


def serve(engine: Engine, world: World, link: FrontendLink | None, ready: Ready, alive: Callable[[], bool]) -> None:
    """Run until the frontend says Shutdown or is gone. `link` is rank 0's, and stays open; `alive` tells it whether the frontend
    runs."""
    send: Callable[[FromEngine], None] = link.send if link else lambda _: None
    gc.collect()  # or freezing would keep what is garbage by now, with its memory
    gc.freeze()  # the garbage collector never walks over what was loaded: that takes longer than a step
    engine.grammars.warm_up()
    send(ready)
    last_stats = 0.0
    while True:
        timeout = 0.0 if engine.has_work() else COMPILING_SECONDS if engine.compiling else IDLE_SECONDS
        events = link.receive(timeout) if link else []
        if link and not alive():
            events.append(encode(Shutdown()))
        if not apply(engine, share(world, events), send):
            return
        engine.admit()
        if engine.has_work() and (outputs := engine.step()):
            send(Outputs(outputs))
        for refused in engine.refused:
            send(refused)
        engine.refused.clear()
        now = time.monotonic()
        idle = not engine.has_work() and not engine.compiling
        if idle:
            engine.runner.model.comm.check()
        if link and (now - last_stats > STATS_SECONDS or idle):
            send(engine.stats())
            last_stats = now


def apply(engine: Engine, events: list[bytes], send: Callable[[FromEngine], None]) -> bool:
    """Hand events to the engine; False once the frontend asked to end."""
    for event in events:
        message: ToEngine = decode_to_engine(event)
        if isinstance(message, Shutdown):
            return False
        if isinstance(message, Abort):
            engine.abort(message)
        elif isinstance(message, (Submit, SubmitAll)):
            refused: Refused | None = engine.submit(message)
            if refused:
                send(refused)
    return True
