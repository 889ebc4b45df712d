"""What clients and their batches keep in a folder beside the journal's file, whose lock protects it.

Each file and batch has a record `ID.json`, and a file its bytes in `ID`. A batch's answers get records when it ends. One thread reads
and writes, in the order in which it was asked, so that nobody waits for a disk but the requests themselves.
"""

import asyncio
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from email import message_from_string
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import ValidationError

from errors import UserError
from files import shown, write_whole
from server.endpoint import name_unknown
from server.errors import ApiError, bad, from_model
from server.limits import body_parts, owner
from server.schemas import UploadForm
from server.settings import Settings

FINAL = ("completed", "failed", "cancelled", "expired")  # statuses of batches
MOST_OWNED = 0.5  # of all bytes, and of all files and batches, that one client may have
MOST_HEAD = 8192  # bytes of the headers of a form's part, and of all its fields but the file
END = b"\r\n\r\n"  # of headers

T = TypeVar("T")


class Record(msgspec.Struct):
    """A file or a batch. `owner`: who may see it. `until`: when it goes, as time.time(). `bytes`: of the file, or of a running batch's
    answers. `value`: what its owner sees."""

    owner: str
    until: float
    bytes: int
    value: dict[str, Any]


class FileStore:
    """The folder. Methods are called in the event loop. Raises UserError if it cannot be used."""

    def __init__(self, settings: Settings) -> None:
        self.folder = folder = Path(os.path.realpath(settings.journal or "") + ".files")
        self.settings, self.seconds = settings, settings.files_hours * 3600
        self._bounds = int(settings.files_mb * 2**20), settings.files_kept
        self.records, self._arriving = dict[str, Record](), Counter[str]()  # by id; bytes of uploads by owner
        self._disk = ThreadPoolExecutor(1, "files")
        try:
            folder.mkdir(0o700, exist_ok=True)
            for part in folder.glob("*.part"):  # of a server that was killed
                part.unlink()
            for path in sorted(folder.glob("*.json")):
                self.records[path.stem] = msgspec.json.decode(path.read_bytes(), type=Record)
        except (OSError, msgspec.MsgspecError) as e:
            raise UserError(f"--journal: its folder {folder} cannot be used ({e}); mend it, or give another file") from e

    async def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """The result of `work` in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *arguments)

    def find(self, request: Request, id: str, kind: str) -> Record:
        """Raises a 404 unless the client has it. kind: file or batch."""
        if all(id != value["id"] for value in self.listed(request, kind)):
            raise ApiError(404, f"no {kind} of yours has the id {shown(id)}", None, f"{kind}_not_found")
        return self.records[id]

    def listed(self, request: Request, kind: str) -> list[dict[str, Any]]:
        """The client's files or batches, the newest first."""
        self._prune()
        own = [one.value for one in self.records.values() if one.owner == owner(request.scope) and one.value["object"] == kind]
        return sorted(own, key=lambda value: value["created_at"])[::-1]  # of one second, the last one is the newest

    async def save(self, record: Record) -> dict[str, Any]:
        """Keep a new or changed record. Returns its value."""
        id = record.value["id"]
        self.records[id] = record
        await self.do(write_whole, self.folder / f"{id}.json", msgspec.json.encode(record).decode())
        return record.value

    def lifetime(self, field: str, seconds: float | None) -> float:
        """The seconds that a request asks for, or the longest. Raises a 400 for more."""
        if seconds and seconds > self.seconds:
            raise bad(field, f"may be {int(self.seconds / 3600)}h at most, by this server's --files-hours")
        return seconds or self.seconds

    async def save_file(self, id: str, owner: str, name: str, purpose: str, size: int, seconds: float) -> dict[str, Any]:
        """Make the record of a file whose bytes are written. seconds: how long it is kept."""
        now, until = int(time.time()), time.time() + seconds
        value = {"id": id, "object": "file", "bytes": size, "created_at": now, "expires_at": int(until), "filename": name}
        return await self.save(Record(owner, until, size, {**value, "purpose": purpose, "status": "processed"}))

    def remove(self, id: str) -> None:
        """Raises a 400 for a file that a batch reads."""
        if reader := self._reader(id):
            raise bad(None, f"{reader} still reads the file; cancel it first")
        del self.records[id]
        for name in (f"{id}.json", id):
            self._disk.submit((self.folder / name).unlink, missing_ok=True)

    def check_room(self, owner: str, size: int, count: int = 0) -> None:
        """Raises a 400 if there is no room for `size` bytes more and `count` files or batches."""
        self._prune()
        for share, whose in (MOST_OWNED, {owner}), (1.0, {*self._arriving, *(one.owner for one in self.records.values())}):
            held = [one.bytes for one in self.records.values() if one.owner in whose]
            most, number = (int(share * bound) for bound in self._bounds)
            if sum(held) + sum(self._arriving[one] for one in whose) + size > most or len(held) + count > number:
                message = (
                    f"{'you have' if share < 1 else 'the server has'} {number} files and batches, or {most} bytes, at most"
                )
                raise bad(None, f"{message}; delete files, or start it with a larger --files-mb or --files-kept", "files_full")

    def _reader(self, id: str) -> str | None:
        values = [record.value for record in self.records.values()]
        return next((v["id"] for v in values if v.get("input_file_id") == id and v["status"] not in FINAL), None)

    def _prune(self) -> None:
        for id in [id for id, one in self.records.items() if one.until < time.time() and not self._reader(id)]:
            self.remove(id)

    async def receive(self, request: Request) -> dict[str, Any]:
        """Write the file of a form to the disk while it arrives, and keep it. Raises ApiError."""
        id, whose, fields, name, size = f"file-{uuid.uuid4().hex}", owner(request.scope), dict[str, bytes](), "", 0
        path, kind = self.folder / f"{id}.part", request.headers.get("content-type", "")
        self.check_room(whose, int(request.headers.get("content-length", "0")[:20]), 1)
        target = await self.do(path.open, "wb")
        try:
            async for field, filename, data in read_form(body_parts(request.receive, self.settings.idle_timeout), kind):
                if field != "file":
                    fields[field] = fields.get(field, b"") + data
                    if sum(len(one) + len(given) for one, given in fields.items()) > MOST_HEAD:
                        raise bad(field, "is too long")
                else:
                    self.check_room(whose, len(data), 1)
                    self._arriving[whose] += len(data)
                    name, size = (filename or "")[:255], size + len(data)
                    await self.do(target.write, data)
            if not name:
                raise bad("file", "must be a file with a name")
            given = {"file": name} | {field: data.decode(errors="replace") for field, data in fields.items()}
            name_unknown(self.settings, request, given, [one.alias or key for key, one in UploadForm.model_fields.items()])
            form = UploadForm.model_validate(given)
            if form.anchor and form.seconds is None:
                raise bad("expires_after[seconds]", "is missing")
            seconds = self.lifetime("expires_after", form.seconds)
            await self.do(target.close)
            await self.do(path.rename, self.folder / id)
            return await self.save_file(id, whose, name, form.purpose, size, seconds)
        except ValidationError as e:
            raise from_model(e, given) from None
        finally:
            self._arriving[whose] -= size
            await self.do(target.close)
            await self.do(partial(path.unlink, missing_ok=True))


async def read_form(chunks: AsyncIterator[bytes], content_type: str) -> AsyncIterator[tuple[str, str | None, bytes]]:
    """Read a form with files (multipart/form-data, RFC 7578) while it arrives. Yields pieces of its parts: the field's name, that of its
    file, if it is one, and bytes. Raises a 400."""
    boundary = message_from_string(f"Content-Type: {content_type}\n\n").get_boundary()
    if not boundary or not content_type.lower().startswith("multipart/form-data"):
        raise bad(None, "send a form (Content-Type: multipart/form-data) with the fields purpose and file")
    mark, held, part, names = b"\r\n--" + boundary.encode(), b"\r\n", None, list[str]()
    sought = mark  # behind it come headers, and behind END data
    async for chunk in chunks:
        held += chunk
        while (at := held.find(sought)) >= 0:
            found, held = held[:at], held[at + len(sought) :]
            if sought is END:
                head = message_from_string(found.decode(errors="replace").lstrip())
                part = str(head.get_param("name", "", "content-disposition")), head.get_filename()
                names.append(part[0])
            elif part:
                yield *part, found
            sought = mark if sought is END else END
        if (sought is END and len(held) > MOST_HEAD) or len(set(names)) < len(names):
            raise bad(None, f"parts of the form must have names of their own, and at most {MOST_HEAD} bytes of headers")
        if sought is mark and part:
            size = max(0, len(held) - len(mark) + 1)  # the rest may be the beginning of a mark
            yield *part, held[:size]
            held = held[size:]
    if sought is mark or not held.startswith(b"--"):
        raise bad(None, "the form ends before its last boundary; send it whole")
