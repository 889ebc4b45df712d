"""The main loop of every rank: receive events, compute a step, send new outputs. The frontend is connected to rank 0 only.

Events are the frontend's messages, encoded. Before each step rank 0 broadcasts their total size over gloo, an integer of 8
bytes, and the events themselves only if there are any. An idle rank 0 waits for the frontend, but broadcasts at least once a
second, so that a dead rank is noticed within that time.
"""

import gc
import time
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist
import zmq

from engine.core import Engine
from engine.protocol import (
    Abort,
    Attach,
    FromEngine,
    LoadAdapter,
    Outputs,
    Ready,
    Shutdown,
    ToEngine,
    UnloadAdapter,
    decode_to_engine,
    encode,
)
from tp import World

IDLE_SECONDS = 1.0  # longest time between broadcasts to the other ranks
COMPILING_SECONDS = 0.005  # between checks of grammars and adapters, while there is no other work
STATS_SECONDS = 0.25


class FrontendLink:
    """Rank 0's two sockets. `receive` blocks at most for its timeout; `send` never blocks."""

    def __init__(self, to_engine: str, from_engine: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.inbox, self.outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (self.inbox, self.outbox):
            socket.set_hwm(0)  # no limit: outputs wait in memory, and `send` does not block a step
        self.inbox.bind(to_engine)
        self.outbox.connect(from_engine)

    def receive(self, timeout: float) -> list[bytes]:
        """All messages that have arrived; waits up to `timeout` seconds for the first."""
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
        """Close the sockets. Messages that were sent have one second to leave."""
        self.outbox.close(linger=1000)
        self.inbox.close(linger=0)


def share(world: World, events: list[bytes]) -> list[bytes]:
    """Broadcast rank 0's events and return them in the same order. Collective. events: ignored on other ranks."""
    if world.world_size == 1:
        return events
    encoded = msgspec.msgpack.encode(events) if events and world.rank == 0 else b""
    length = torch.tensor(len(encoded))
    dist.broadcast(length, src=0, group=world.control)
    if length == 0:
        return []
    payload = (
        torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else torch.empty(int(length), dtype=torch.uint8)
    )
    dist.broadcast(payload, src=0, group=world.control)
    return msgspec.msgpack.decode(payload.numpy().tobytes(), type=list[bytes])


def serve(
    engine: Engine, world: World, link: FrontendLink | None, ready: Ready, alive: Callable[[], bool] | None = None
) -> None:
    """Run until the frontend sends Shutdown or has ended. Collective.

    link: only on rank 0; it stays open. alive: whether the frontend is running; None: a launcher watches it.
    """
    send: Callable[[FromEngine], None] = link.send if link else lambda _: None
    gc.collect()  # `freeze` would keep existing garbage and its memory
    gc.freeze()  # the garbage collector then skips what was loaded: going through it takes longer than a step
    engine.grammars.warm_up()
    events = shutdowns_before_ready(link) if link else []
    send(ready_now(engine, ready))
    last_stats = 0.0
    while True:
        timeout = 0.0 if engine.has_work() else COMPILING_SECONDS if engine.preparing else IDLE_SECONDS
        if link:
            time.sleep(engine.pace.pause())
            events += link.receive(timeout)
            if alive and not alive():
                events.append(encode(Shutdown()))
        if not apply(engine, share(world, events), send, ready):
            return
        events = []
        engine.admit()
        outputs = engine.step() if engine.has_work() else []
        now = time.monotonic()
        idle = not engine.has_work() and not engine.preparing
        if link and (now - last_stats > STATS_SECONDS or idle):
            # before the outputs: who has all answers finds them counted
            send(msgspec.structs.replace(engine.stats(), pid=ready.pid))
            last_stats = now
        if outputs:
            send(Outputs(outputs))
        for refused in engine.refused:
            send(refused)
        engine.refused.clear()
        if engine.adapters:
            for done in engine.adapters.done:
                send(done)
            engine.adapters.done.clear()
        if idle:
            engine.runner.model.comm.check()


def ready_now(engine: Engine, ready: Ready) -> Ready:
    """`ready` with the adapters that are loaded now."""
    return msgspec.structs.replace(ready, adapters=engine.adapters.paths) if engine.adapters else ready


def shutdowns_before_ready(link: FrontendLink) -> list[bytes]:
    """The Shutdowns among what came before Ready. The rest was meant for ranks that have ended."""
    return [event for event in link.receive(0) if isinstance(decode_to_engine(event), Shutdown)]


def apply(engine: Engine, events: list[bytes], send: Callable[[FromEngine], None], ready: Ready) -> bool:
    """Pass events to the engine. Returns False after a Shutdown."""
    for event in events:
        message: ToEngine = decode_to_engine(event)
        if isinstance(message, Shutdown):
            return False
        if isinstance(message, Attach):
            engine.abort_all()
            send(ready_now(engine, ready))
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            engine.change_adapters(message)
        elif isinstance(message, Abort):
            engine.abort(message)
        elif refused := engine.submit(message):
            send(refused)
    return True
