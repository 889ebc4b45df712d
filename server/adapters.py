"""The adapters that the ranks serve, as the frontend knows them, and the requests that load and unload them."""

import asyncio
import uuid
from collections.abc import Callable

from engine.protocol import AdapterDone, LoadAdapter, Ready, UnloadAdapter
from server.errors import ApiError
from server.logs import log

MOST_LOST = 256
ANSWER_SECONDS = 150.0  # until the ranks must have answered: longer than they read at most


class ServedAdapters:
    """paths: the adapters' folders, by name. lost: folder and error of those that could not be loaded again after a recovery."""

    def __init__(self, send: Callable[[LoadAdapter | UnloadAdapter], None]) -> None:
        self.paths: dict[str, str] = {}
        self.lost: dict[str, tuple[str, str]] = {}
        self._send, self._known = send, False
        self._waiting: dict[str, asyncio.Future[str]] = {}

    async def load(self, name: str, path: str) -> None:
        """Raises ApiError."""
        await self._answer(LoadAdapter(uuid.uuid4().hex, name, path))

    async def unload(self, name: str) -> None:
        """Raises ApiError. One that was lost is forgotten."""
        if self.lost.pop(name, None) is None:
            await self._answer(UnloadAdapter(uuid.uuid4().hex, name))

    async def _answer(self, message: LoadAdapter | UnloadAdapter) -> None:
        future = self._waiting[message.request_id] = asyncio.get_running_loop().create_future()
        self._send(message)
        try:
            error = await asyncio.wait_for(future, ANSWER_SECONDS)
        except TimeoutError:
            raise ApiError(503, f"the ranks have not answered within {ANSWER_SECONDS:g} s", None, "timeout") from None
        finally:
            self._waiting.pop(message.request_id, None)
        if error:
            raise ApiError(400, error, None, "adapter_refused")

    def on_done(self, done: AdapterDone) -> None:
        again = not done.request_id  # what `on_ready` asked for
        if done.path is not None and not done.error:
            self.paths[done.name] = done.path
            self.lost.pop(done.name, None)
        elif again == bool(done.error):
            self.paths.pop(done.name, None)
        if again and done.error:
            log.error("after the ranks have started again, the adapter %s is not served any more: %s", done.name, done.error)
            if done.path is not None:
                self.lost = dict([*self.lost.items(), (done.name, (done.path, done.error))][-MOST_LOST:])
        if (future := self._waiting.pop(done.request_id, None)) is not None and not future.done():
            future.set_result(done.error)

    def on_ready(self, ready: Ready) -> None:
        """Learn what the first ranks have. Let later ranks load and unload what differs from those before them."""
        wanted, found = self.paths if self._known else ready.adapters, ready.adapters
        self._known, self.paths = True, dict(wanted)
        for name in [name for name, path in found.items() if wanted.get(name) != path]:
            self._send(UnloadAdapter("", name))
        for name in [name for name, path in wanted.items() if found.get(name) != path]:
            self._send(LoadAdapter("", name, wanted[name]))
        self.fail("the ranks have started again meanwhile; send the request again")

    def fail(self, message: str) -> None:
        """Nobody answers what was sent so far."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ApiError(503, message, None, "engine_failed"))
        self._waiting.clear()
