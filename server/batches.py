"""/v1/batches: each line of a file is a request through the server's own application, behind the requests of all clients.

A line is done once its answer is in the output or the error file, where it has the line's number. So after the end of the server, its
next start goes on with the other lines.
"""

import asyncio
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from server import replies
from server.endpoint import name_unknown
from server.errors import ApiError, bad
from server.files import FINAL, FileStore, Record
from server.http import PIECE, JsonResponse, PacedResponse, to_json
from server.journal import BUSY, ENDS_OF_SERVERS
from server.limits import LOWEST, owner, read_keys
from server.logs import log
from server.openapi import errors_of
from server.schemas import BatchBody, UploadForm
from server.settings import Settings

AGAIN_SECONDS = 1.0  # until a line comes again for which there was no room
DONE = re.compile(rb'\{"id":"batch_req_[0-9a-f]+_([0-9]+)"')  # how an answer begins; the number of its line
KINDS = {"output": "completed", "error": "failed"}  # of files with answers, and how their lines count
FORM = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": UploadForm.model_json_schema()}}}}
CONTENT: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}}
CONTENT |= errors_of(400, 401, 404)
EXPIRED = {"code": "batch_expired", "message": "This request could not be executed before the completion window expired."}


class Line(msgspec.Struct):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, msgspec.Raw]


class Batches:
    """The batches of a server, which run from `start` to `close`. Raises UserError."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings, self._store = app, settings, FileStore(settings) if settings.journal else None
        self._clients = read_keys(settings.api_key)
        self._places = asyncio.Semaphore(settings.batch_in_flight or max(1, settings.max_num_seqs // 2))
        self._running, self._tasks = False, dict[str, asyncio.Task[None]]()  # by id

    @property
    def store(self) -> FileStore:
        """Raises a 400 without a journal."""
        if self._store is None:
            raise bad(None, "this server keeps no files and batches; start it with --journal FILE", "no_journal")
        return self._store

    def start(self) -> None:
        """Run what an earlier server left, and what comes. Called once requests can run."""
        self._running = True
        for record in self._store.records.values() if self._store else ():
            if record.value["object"] == "batch" and record.value["status"] not in FINAL:
                self._begin(record)

    def close(self) -> None:
        """Leave the rest to the next server."""
        self._running = False
        for task in self._tasks.values():
            task.cancel()

    async def create(self, body: BatchBody, request: Request) -> dict[str, Any]:
        """A new batch. Raises ApiError."""
        now, seconds, whose = int(time.time()), 3600 * int(body.completion_window[:-1]), owner(request.scope)
        self.store.find(request, body.input_file_id, "file")
        self.store.lifetime("completion_window", seconds)
        self.store.lifetime("output_expires_after", body.output_expires_after.seconds if body.output_expires_after else None)
        self.store.check_room(whose, 0, 1)
        value = dict.fromkeys(replies.BATCH) | body.model_dump() | {"created_at": now, "expires_at": now + seconds}
        value |= {"id": f"batch_{uuid.uuid4().hex}", "object": "batch", "status": "validating"}
        value["request_counts"] = {"total": 0, "completed": 0, "failed": 0}
        record = Record(whose, now + seconds + self.store.seconds, 0, value)
        await self.store.save(record)
        self._begin(record)
        return {**value}

    def _begin(self, record: Record) -> None:
        if self._running:
            self._tasks[record.value["id"]] = asyncio.create_task(self._run(record))

    async def cancel(self, record: Record) -> dict[str, Any]:
        """End a batch. What is done of it stays. Raises a 400 if it has ended."""
        if record.value["status"] in (*FINAL, "finalizing"):
            raise bad(None, f"the batch is {record.value['status']} and cannot be cancelled")
        await self._set(record, "cancelling")
        if task := self._tasks.get(record.value["id"]):
            task.cancel()
        return record.value

    async def _run(self, record: Record) -> None:
        batch, settings, status = record.value, self._settings, "failed"
        try:
            if batch["status"] == "cancelling":
                raise asyncio.CancelledError
            if batch["status"] == "validating":
                path, bounds = self.store.folder / batch["input_file_id"], (settings.batch_lines, settings.max_body_bytes)
                batch["request_counts"]["total"] = await self.store.do(check, path, [batch["endpoint"]], *bounds)
                await self._set(record, "in_progress")
            try:
                async with asyncio.timeout(batch["expires_at"] - time.time() + 0.1):  # late rather than early
                    await self._send_lines(record)
                status = "completed" if time.time() < batch["expires_at"] else "expired"  # amid the 0.1 s
            except TimeoutError:
                await self._send_lines(record)  # the rest gets an error
                status = "expired"
        except asyncio.CancelledError:
            if not self._running:
                raise
            status = "cancelled"
        except Exception as e:
            error: BaseException = e
            while isinstance(error, BaseExceptionGroup):  # of the lines
                error = error.exceptions[0]
            if not isinstance(error, ApiError):
                error = ApiError(500, f"{type(error).__name__}: {error}", None, "batch_failed")
            log.error("batch %s failed: %s", batch["id"], error.message)
            fields = {"code": error.code, "message": error.message, "param": None}
            batch["errors"] = {"object": "list", "data": [{**fields, "line": int(error.param) if error.param else None}]}
        del self._tasks[batch["id"]]
        if status == "completed":
            await self._set(record, "finalizing")
        await self.store.do(self._read_done, record)
        for kind, count in KINDS.items():
            if batch["request_counts"][count]:
                path, name = self._answers(record, kind), f"{batch['id']}_{kind}.jsonl"
                seconds = (batch.get("output_expires_after") or {}).get("seconds", self.store.seconds)
                await self.store.save_file(path.name, record.owner, name, "batch_output", path.stat().st_size, seconds)
                batch[f"{kind}_file_id"] = path.name
        record.bytes, record.until = 0, time.time() + self.store.seconds
        await self._set(record, status)

    async def _set(self, record: Record, status: str) -> None:
        """Change the status of a batch, and note when."""
        record.value |= {"status": status, f"{status}_at": int(time.time())}
        await self.store.save(record)

    async def _send_lines(self, record: Record) -> None:
        """Run the lines that are not done."""
        done, number = await self.store.do(self._read_done, record), 0
        with await self.store.do((self.store.folder / record.value["input_file_id"]).open, "rb") as file:
            async with asyncio.TaskGroup() as group:
                while raw := await self.store.do(file.readline):
                    number += 1
                    if number not in done and raw.strip():
                        await self._places.acquire()
                        task = group.create_task(self._answer(record, number, msgspec.json.decode(raw, type=Line)))
                        task.add_done_callback(lambda _: self._places.release())

    async def _answer(self, record: Record, number: int, line: Line) -> None:
        """Run a line, and keep its answer or error."""
        batch, response, kind = record.value, None, "error"
        id = f"{batch['id'].replace('_', '_req_')}_{number}"
        while response is None and time.time() < batch["expires_at"]:
            status, data = await self._post(record.owner, id, line)
            kind = "output" if status == 200 else "error"
            if is_for_later(status, data):
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                response = {"status_code": status, "request_id": id, "body": msgspec.Raw(data)}
        entry = {"id": id, "custom_id": line.custom_id, "response": response, "error": None if response else EXPIRED}
        data = to_json(entry) + b"\n"
        self.store.check_room(record.owner, len(data))
        await self.store.do(self._append, record, kind, data)

    async def _post(self, owner: str, id: str, line: Line) -> tuple[int, bytes]:
        """The application's status and answer."""
        kind, _, name = owner.partition(" ")
        state = {"priority": LOWEST, "abandon": lambda: None}
        if kind == "key" and (client := self._clients.get(bytes.fromhex(name))):
            state |= {"client": client, "key": bytes.fromhex(name)}
        headers = [(b"content-type", b"application/json"), (b"x-request-id", id.encode())]
        scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": line.url}
        scope |= {"query_string": b"", "headers": headers, "client": ("-" if kind == "key" else name, 0), "state": state}
        pending: list[Message] = [{"type": "http.request", "body": to_json(line.body), "more_body": False}]
        sent = list[Message]()

        async def receive() -> Message:
            return pending.pop() if pending else await asyncio.Future[Message]()  # nobody leaves

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    # --- in the store's thread ---------------------------------------------------------------------------------------------

    def _answers(self, record: Record, kind: str) -> Path:
        """The file of a batch's answers. kind: output or error."""
        return self.store.folder / f"{record.value['id'].replace('batch_', 'file-')}_{kind}"

    def _append(self, record: Record, kind: str, data: bytes) -> None:
        with self._answers(record, kind).open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        record.bytes += len(data)
        record.value["request_counts"][KINDS[kind]] += 1

    def _read_done(self, record: Record) -> set[int]:
        """The numbers of the lines that are done. Counts them, and their bytes."""
        done, record.bytes = set[int](), 0
        for kind, count in KINDS.items():
            size, before = 0, len(done)
            with suppress(FileNotFoundError), self._answers(record, kind).open("r+b") as file:
                for line in file:
                    if line.endswith(b"\n") and (found := DONE.match(line)):
                        done.add(int(found[1]))
                        size += len(line)
                file.truncate(size)  # the server was killed, or the disk full, while it wrote the last line
            record.bytes += size
            record.value["request_counts"][count] = len(done) - before
        return done


def is_for_later(status: int, data: bytes) -> bool:
    """Whether an answer says that the line may be accepted later."""
    return status == 429 or (status == 503 and msgspec.json.decode(data)["error"]["code"] in (*BUSY, *ENDS_OF_SERVERS))


def check(path: Path, endpoints: Sequence[str], most: int, longest: int) -> int:
    """The number of requests in a file. most: of them. longest: bytes of a line. Raises an ApiError, whose `param` is the number of the
    wrong line."""
    names, number = set[str](), 0

    def wrong(what: str) -> ApiError:
        return ApiError(400, f"line {number} {what}", str(number), "invalid_file")

    with path.open("rb") as file:
        while raw := file.readline(longest + 1):
            number += 1
            if not raw.strip():
                continue
            if len(raw) > longest or len(names) == most:
                raise wrong(f"has more than {longest} bytes (--max-body-mb), or comes behind {most} requests (--batch-lines)")
            try:
                line = msgspec.json.decode(raw, type=Line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as e:
                raise wrong(f"is no JSON object with custom_id, method POST, url and body: {e}") from None
            if line.url not in endpoints:
                raise wrong(f"has another url than the batch's endpoint, {' or '.join(endpoints)}")
            if line.custom_id in names:
                raise wrong("has the custom_id of an earlier line")
            if any(bytes(line.body.get(name, b"")) == b"true" for name in ("stream", "background")):
                raise wrong("asks for stream or background, which a batch does not have")
            names.add(line.custom_id)
    if not names:
        raise wrong("and all others are empty")
    return len(names)


def add(app: FastAPI, settings: Settings) -> Batches:
    """Add the routes of files and batches. Returns what runs batches. Raises UserError."""
    batches = Batches(app, settings)
    get, post, remove = (
        partial(one, responses=errors_of(400, 401, 404, 413), tags=["batches"]) for one in (app.get, app.post, app.delete)
    )

    def add_kind(kind: str, path: str, one: Any, many: Any, usual: int, most: int) -> None:
        @get(path, response_model=many, summary=f"Your {path[4:]}, the newest first; `after`: behind this id")
        async def listed(
            request: Request,
            after: str | None = None,
            limit: Annotated[int, Query(ge=1, le=most)] = usual,
            order: Literal["asc", "desc"] = "desc",
            purpose: Annotated[str | None, Query(include_in_schema=kind == "file")] = None,
        ) -> Response:
            name_unknown(settings, request, request.query_params, ("after", "limit", "order", *["purpose"] * (kind == "file")))
            found = batches.store.listed(request, kind)[:: 1 if order == "desc" else -1]
            before = 1 + found.index(batches.store.find(request, after, kind).value) if after is not None else 0
            rest = [one for one in found[before:] if one.get("purpose") in (None, purpose or one.get("purpose"))]
            data = rest[:limit]
            ends = {name: data[at]["id"] if data else None for name, at in (("first_id", 0), ("last_id", -1))}
            return JsonResponse({"object": "list", "data": data, "has_more": len(rest) > limit, **ends})

        @get(path + "/{id}", response_model=one, summary=f"One of your {path[4:]}")
        async def retrieve(id: str, request: Request) -> Response:
            return JsonResponse(batches.store.find(request, id, kind).value)

    @post("/v1/files", response_model=replies.FileReply, openapi_extra=FORM, summary="Keep a file; needs --journal")
    async def upload(request: Request) -> Response:
        return JsonResponse(await batches.store.receive(request))

    add_kind("file", "/v1/files", replies.FileReply, replies.FileList, 10_000, 10_000)

    @app.get("/v1/files/{id}/content", responses=CONTENT, tags=["batches"], summary="The bytes of a file")
    async def content(id: str, request: Request) -> Response:
        file = batches.store.folder / batches.store.find(request, id, "file").value["id"]
        return PacedResponse(_pieces(file), "application/octet-stream")

    @remove("/v1/files/{id}", response_model=replies.FileDeleted, summary="Forget a file")
    async def delete(id: str, request: Request) -> Response:
        batches.store.remove(batches.store.find(request, id, "file").value["id"])
        return JsonResponse({"id": id, "object": "file", "deleted": True})

    @post("/v1/batches", response_model=replies.BatchReply, summary="Run the requests in a file; needs --journal")
    async def create(body: BatchBody, request: Request) -> Response:
        return JsonResponse(await batches.create(body, request))

    add_kind("batch", "/v1/batches", replies.BatchReply, replies.BatchList, 20, 100)

    @post("/v1/batches/{id}/cancel", response_model=replies.BatchReply, summary="End a batch; what is done of it stays")
    async def cancel(id: str, request: Request) -> Response:
        return JsonResponse(await batches.cancel(batches.store.find(request, id, "batch")))

    return batches


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(partial(file.read, PIECE), b"")
