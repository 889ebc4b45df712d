"""/v1/files and /v1/batches, as OpenAI's client uses them."""

import asyncio
import json
import os
import random
import signal
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from scripts.lib.process_tree import process_tree
from server import replies
from server.errors import ApiError
from server.files import read_form
from server.limits import LOWEST
from tests.support.command_line import HYBRID
from tests.support.server_process import ServerProcess, wait_until
from tests.support.server_thread import Site, wait_for

COMPLETIONS = "/v1/completions"
ENDED = ("completed", "failed", "cancelled", "expired")
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once", "max_tokens": 8, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0},
    "/v1/embeddings": {"input": ["a", "bc"]},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16, "temperature": 0},
}


def jsonl(bodies: dict[str, dict[str, Any]], url: str = COMPLETIONS) -> bytes:
    lines = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name, body in bodies.items()]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def prompts(count: int, **more: Any) -> dict[str, dict[str, Any]]:
    return {f"line {i}": {"prompt": f"Once {i}", "max_tokens": 8, "temperature": 0, **more} for i in range(count)}


def begun(client: openai.OpenAI, data: bytes, endpoint: Any = COMPLETIONS) -> Any:
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})


def ended(client: openai.OpenAI, id: str) -> Any:
    return wait_until(lambda: (one := client.batches.retrieve(id)).status in ENDED and one, 300, "the end of a batch")


def answers(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    """The answers in a file by their names, each of which is there once."""
    found = [json.loads(line) for line in client.files.content(file).text.splitlines()] if file else []
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


@pytest.fixture
def site(tmp_path: Path, seed: int) -> Iterator[Callable[..., Site]]:
    """A function that starts a frontend with a fake engine. Another one on the same journal is its next start."""
    sites = list[Site]()

    def start(**settings: Any) -> Site:
        for one in sites:
            one.server._leave() if not one.server.should_exit else None
            one.close()
        sites.append(Site(tmp_path, journal=str(tmp_path / "journal"), **settings).start())
        return sites[-1]

    yield start
    sites[-1].close()


def test_a_batch_gets_the_answers_of_its_requests(tmp_path: Path, seed: int) -> None:
    """Of all endpoints, from a real server; errors by line. Another key sees nothing of it. A kill of all processes repeats no line."""
    flags = ("--model", HYBRID, "--journal", tmp_path / "journal", "--api-key", "one", "--api-key", "two")
    with ServerProcess(*flags, "--batch-in-flight", 2) as server:
        client, other = server.ready().client("one"), server.client("two")
        for url, body in BODIES.items():
            batch = ended(client, begun(client, jsonl({"good": body, "bad": {**body, "model": "none"}}, url), url).id)
            replies.BatchReply.model_validate(batch.to_dict())
            counts = batch.request_counts
            assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 2, 1, 1)
            good, bad = answers(client, batch.output_file_id)["good"], answers(client, batch.error_file_id)["bad"]
            direct = server.http.post(url, json=body, headers={"authorization": "Bearer one"}).json()
            assert good["error"] is None and good["response"]["status_code"] == 200
            same = ("choices", "data", "output_text")
            assert [texts(good["response"]["body"].get(name)) for name in same] == [texts(direct.get(name)) for name in same]
            assert bad["response"]["status_code"] == 404 and bad["response"]["body"]["error"]["code"] == "model_not_found"
        listed = [one.id for one in client.files.list()]
        assert len(listed) == 12 and len(list(client.batches.list())) == 4
        assert not list(other.files.list()) and not list(other.batches.list())
        for call, id in (
            (other.files.retrieve, listed[0]),
            (other.files.content, listed[0]),
            (other.files.delete, listed[0]),
            (other.batches.retrieve, batch.id),
            (other.batches.cancel, batch.id),
        ):
            with pytest.raises(openai.NotFoundError, match="of yours"):
                call(id)
        assert client.files.delete(listed[0]).deleted and len(list(client.files.list())) == 11
        wanted = prompts(60, max_tokens=30)
        batch = begun(client, jsonl(wanted))
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 5, 300, "some answers")
        for pid in process_tree(server.process.pid):
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
    folder = tmp_path / "journal.files"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    before = next(folder.glob(f"*{batch.id[6:]}_output")).read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    with ServerProcess(*flags) as server:
        client = server.ready().client("one")
        last = ended(client, batch.id)
        assert (last.status, last.request_counts.completed) == ("completed", 60)
        assert client.files.content(last.output_file_id).content.startswith(before) and before.count(b"\n") > 5
        assert answers(client, last.output_file_id).keys() == wanted.keys()


def texts(value: Any) -> Any:
    """The same without what differs between two runs."""
    if isinstance(value, dict):
        return {name: texts(one) for name, one in value.items() if name not in ("id", "created")}
    return [texts(one) for one in value] if isinstance(value, list) else value


def test_without_a_journal_a_clear_error(tmp_path: Path) -> None:
    site = Site(tmp_path).start()
    for call in (site.openai.batches.list, site.openai.files.list, lambda: begun(site.openai, b"x" * 100_000)):
        with pytest.raises(openai.BadRequestError, match="start it with --journal FILE"):
            call()
    site.close()


def test_batches_come_behind_other_requests(site: Callable[..., Site]) -> None:
    """Some of their lines at a time. Lines for which there is no room come again. They do not fill the journal."""
    server = site(batch_in_flight=3, max_num_seqs=8, max_queue=0)
    server.engine.hold = True
    others = [server.ask() for _ in range(6)]
    wait_for(lambda: len(server.engine.submits) == 6)
    batch = begun(server.openai, jsonl(prompts(20)))
    wait_for(lambda: len(server.engine.submits) == 8)
    assert sorted(one.turn.priority for one in server.engine.submits) == [0] * 6 + [LOWEST] * 2
    refused = 'rung:http_responses_total{model_name="tiny-hybrid",path="/v1/completions",status="429"}'
    wait_for(lambda: refused in server.http.get("/metrics").text)  # the third line
    server.engine.hold = False
    assert all(one.json()["choices"] for one in others)
    last = ended(server.openai, batch.id)
    assert (last.status, last.request_counts.completed) == ("completed", 20)
    assert answers(server.openai, last.output_file_id).keys() == prompts(20).keys()
    assert last.in_progress_at <= last.finalizing_at <= last.completed_at
    found = server.http.get(f"/v1/results/{batch.id.replace('_', '_req_')}_1")
    assert found.status_code == 404


def test_the_next_start_goes_on(site: Callable[..., Site]) -> None:
    """With what is missing, also of an answer that was written in part; a request that a client ended stays ended."""
    server = site(batch_in_flight=2)
    server.engine.reply = lambda submit: [50] * 5
    batch, cancelled = begun(server.openai, jsonl(prompts(3))), begun(server.openai, jsonl(prompts(5)))
    ended(server.openai, batch.id)
    ended(server.openai, cancelled.id)
    store = server.server.batches.store
    for id, status in (batch.id, "in_progress"), (cancelled.id, "cancelling"):  # as if it had been killed before
        output = store.folder / f"{id.replace('batch_', 'file-')}_output"
        done = output.read_bytes().splitlines(keepends=True)
        output.write_bytes(done[0] + done[1][:-5])
        store.records.pop(output.name)
        (store.folder / f"{output.name}.json").unlink()
        record = store.records[id]
        record.value |= {"status": status, "output_file_id": None}
        asyncio.run_coroutine_threadsafe(store.save(record), server.server._loop).result(60)
    (store.folder / "file-1.part").write_text("an upload")
    server = site(batch_in_flight=2)
    found = answers(server.openai, ended(server.openai, batch.id).output_file_id)
    assert found.keys() == prompts(3).keys() and found[json.loads(done[0])["custom_id"]] and len(server.engine.submits) == 2
    last = ended(server.openai, cancelled.id)
    assert (last.status, last.request_counts.completed) == ("cancelled", 1)
    assert not (store.folder / "file-1.part").exists()


def test_a_batch_is_cancelled(site: Callable[..., Site]) -> None:
    """What is done stays, and the file may go."""
    server = site(batch_in_flight=2)
    asked = iter(range(100))
    server.engine.reply = lambda submit: [50] * (5 if next(asked) < 4 else 100)
    server.engine.delay = 0.01
    batch = begun(server.openai, jsonl(prompts(50, max_tokens=100)))
    wait_for(lambda: server.openai.batches.retrieve(batch.id).request_counts.completed >= 2)
    with pytest.raises(openai.BadRequestError, match="still reads"):
        server.openai.files.delete(batch.input_file_id)
    server.server.batches.store.records[batch.input_file_id].until = 0
    assert server.openai.files.retrieve(batch.input_file_id)  # an expired file stays as long as it is read
    assert server.openai.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    last = ended(server.openai, batch.id)
    assert last.status == "cancelled" and last.cancelling_at and 2 <= last.request_counts.completed < 50
    assert len(answers(server.openai, last.output_file_id)) == last.request_counts.completed
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        server.openai.batches.cancel(batch.id)
    assert batch.input_file_id not in {one.id for one in server.openai.files.list()}
    server.settle()


@pytest.mark.parametrize("ago", [0.01, 1])  # 0.01: before the time limit of its run, which ends 0.1 s late
def test_a_batch_expires(site: Callable[..., Site], ago: float) -> None:
    """Its rest gets an error in the error file, once."""
    server = site(batch_in_flight=1)
    answered = iter(range(100))
    server.engine.reply = lambda submit: [50] * (5 if next(answered) < 2 else 1000)
    server.engine.delay = 0.05
    store = server.server.batches.store
    batch = begun(server.openai, jsonl(prompts(6, max_tokens=200)))
    wait_for(lambda: server.openai.batches.retrieve(batch.id).request_counts.completed == 2)
    record = store.records[batch.id]
    server.server._loop.call_soon_threadsafe(lambda: server.server.batches._tasks[batch.id].cancel())
    wait_for(lambda: record.value["status"] == "cancelled")
    record.value |= {"status": "in_progress", "expires_at": time.time() - ago}
    server.server._loop.call_soon_threadsafe(lambda: server.server.batches._begin(record))
    last = wait_until(lambda: (one := server.openai.batches.retrieve(batch.id)).status == "expired" and one, 300, "its end")
    errors = answers(server.openai, last.error_file_id)
    assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"} and len(errors) == 4
    assert not errors.keys() & answers(server.openai, last.output_file_id).keys() and last.request_counts.failed == 4


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (b"", None, "all others are empty"),
        (jsonl(prompts(2)) + b"{", 3, "is no JSON object"),
        (jsonl(prompts(2)) + b'{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', 3, "method"),
        (jsonl({"a": {}}, "/v1/embeddings"), 1, "another url"),
        (jsonl(prompts(2)) * 2, 3, "custom_id of an earlier line"),
        (jsonl({"a": {}, "b": {"stream": True}}), 2, "stream"),
        (jsonl(prompts(11)), 11, "--batch-lines"),
        (jsonl({"a": {"prompt": "x" * 3000}}), 1, "--max-body-mb"),
    ],
)
def test_a_file_that_is_no_batch(site: Callable[..., Site], data: bytes, line: int | None, words: str) -> None:
    server = site(batch_lines=10, max_body_mb=2000 / 2**20)
    last = ended(server.openai, begun(server.openai, b"\n" + data if line else data or b"\n").id)
    error = last.errors.data[0]
    assert last.status == "failed" and last.failed_at and words in error.message and not server.engine.submits
    assert error.line == (line + 1 if line else 1)


def test_lists_come_in_pages(site: Callable[..., Site], seed: int) -> None:
    """As the client iterates over them, the newest first; what comes meanwhile changes nothing behind."""
    client = (server := site()).openai
    files = [client.files.create(file=(f"{i}", jsonl(prompts(1))), purpose="batch") for i in range(7)]
    batches = [
        client.batches.create(input_file_id=files[0].id, endpoint=COMPLETIONS, completion_window="24h") for _ in range(23)
    ]
    for one in batches:
        ended(client, one.id)
    for path, model, made, resource in (
        ("/v1/files", replies.FileList, files, client.files),
        ("/v1/batches", replies.BatchList, batches, client.batches),
    ):
        size = random.randint(1, 6)
        expected = [one.id for one in reversed(made)]
        for limit in ({"limit": 100}, {"limit": size}, {}):
            found = [one.id for one in resource.list(**limit)]
            assert [id for id in found if id in expected] == expected and len(set(found)) == len(found)
        page = server.http.get(path, params={"limit": size}).json()
        model.model_validate(page)
        assert [one["id"] for one in page["data"]] == found[:size] and page["has_more"]
        assert (page["first_id"], page["last_id"]) == (found[0], found[size - 1])
        ended(client, begun(client, jsonl(prompts(1))).id)
        assert [one.id for one in resource.list(limit=size, after=page["last_id"])] == found[size:]
        last = resource.list(limit=len(found) - size, after=page["last_id"])
        assert last.has_more is False and [one.id for one in last.data] == found[size:]
        empty = server.http.get(path, params={"after": found[-1]}).json()
        assert empty == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}
        assert [one["id"] for one in server.http.get(path, params={"order": "asc"}).json()["data"]][:3] == found[:-4:-1]
        oldest = server.http.get(path, params={"order": "asc", "limit": size, "after": found[-1]}).json()
        assert [one["id"] for one in oldest["data"]] == found[-2 : -2 - size : -1]
        for wrong, status in ({"limit": 0}, 400), ({"limit": 10_001}, 400), ({"limit": "x"}, 400), ({"after": "x"}, 404):
            assert server.http.get(path, params=wrong).status_code == status
        assert server.http.get(path, params={"order": "up"}).status_code == 400
        named = server.http.get(path, params={"api-version": "1", "limit": 1, "order": "desc", "purpose": "batch"})
        assert named.headers["x-rung-ignored"] == ("api-version" if path == "/v1/files" else "api-version, purpose")
        assert "x-rung-ignored" not in server.http.get(path, params={"after": found[0], "limit": 1}).headers
    kinds = [{one.purpose for one in client.files.list(purpose=name)} for name in ("batch", "batch_output", "vision")]
    assert kinds == [{"batch"}, {"batch_output"}, set()]
    outputs, pages = [one.id for one in client.files.list(purpose="batch_output")], client.files.list(purpose="batch", limit=3)
    assert len(outputs) > 20 and not {one.id for one in pages} & set(outputs) and pages.has_more
    assert len(client.batches.list().data) == 20 and server.http.get("/v1/batches?limit=101").status_code == 400


def test_files_have_bounds(site: Callable[..., Site]) -> None:
    """In number, bytes and time; one client has half. What would exceed them is refused, and leaves nothing."""
    server = site(files_mb=0.02, files_kept=6, api_key=("one", "two"))
    one, two = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
    keep = lambda client, size: client.files.create(file=("a", random.randbytes(size)), purpose="batch")  # noqa: E731
    first, asked = keep(one, 5000), dict[str, Any](endpoint=COMPLETIONS, completion_window="1h")
    with pytest.raises(openai.BadRequestError, match=r"you have .* at most; delete files"):
        keep(one, 9000)

    def chunks() -> Iterator[bytes]:  # without Content-Length
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        yield from [bytes(1000)] * 9
        yield b"\r\n--x--\r\n"

    headers = {"authorization": "Bearer one", "content-type": "multipart/form-data; boundary=x"}
    assert server.http.post("/v1/files", content=chunks(), headers=headers).json()["error"]["code"] == "files_full"
    keep(one, 10), keep(one, 10)
    for create in (keep, lambda client, size: client.batches.create(**asked, input_file_id=first.id)):
        with pytest.raises(openai.BadRequestError, match="3 files and batches"):
            create(one, 10)
    keep(two, 9000)
    store = server.server.batches.store
    assert len(store.records) == 4 and len(list(store.folder.iterdir())) == 8 and not store._arriving.total()
    store.records[first.id].until = time.time() - 1
    with pytest.raises(openai.NotFoundError):
        one.files.content(first.id)
    wait_for(lambda: len(list(store.folder.iterdir())) == 6)


def test_answers_have_bounds(site: Callable[..., Site]) -> None:
    """A batch whose answers have no room fails, says why, and keeps what is done."""
    server = site(files_mb=0.02, batch_in_flight=1)
    last = ended(server.openai, begun(server.openai, jsonl(prompts(40))).id)
    assert last.status == "failed" and "--files-mb" in last.errors.data[0].message
    done = answers(server.openai, last.output_file_id)
    assert 0 < len(done) == last.request_counts.completed < 40


def test_forms_come_in_any_pieces(seed: int) -> None:
    """As httpx writes them. What is no form is a 400."""
    boundary = "".join(random.choices("ab-", k=random.randint(1, 20))).strip("-") or "a"
    mark, data = b"\r\n--" + boundary.encode(), b""
    while len(data) < 2000:
        more = data + random.choice([b"\r\n", b"--", mark[:-1], mark[2:], random.randbytes(9)])
        if (b"\r\n" + more + mark).find(mark) == len(more) + 2:  # a boundary is not in the data
            data = more
    name = f"x{''.join(random.choices('aé 🐉', k=9))}x"
    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    request = httpx.Request("POST", "http://x", data={"purpose": "batch"}, files={"file": (name, data)}, headers=headers)
    body, kind = request.read(), request.headers["content-type"]

    async def read(
        body: bytes, kind: str = kind, sizes: tuple[int, ...] = (1, 2, 30, 1000)
    ) -> dict[str, tuple[str | None, bytes]]:
        async def chunks() -> AsyncIterator[bytes]:
            left = body
            while left:
                size = random.choice(sizes)
                yield left[:size]
                left = left[size:]

        found: dict[str, tuple[str | None, bytes]] = {}
        async for field, filename, piece in read_form(chunks(), kind):
            found[field] = filename, found.get(field, (None, b""))[1] + piece
        return found

    for sizes in (1,), (7,), (1, 2, 30, 1000):
        assert asyncio.run(read(body, kind, sizes)) == {"purpose": (None, b"batch"), "file": (name, data)}
    wrong = [(body[: -len(boundary) - 6], kind), (body, "application/json"), (body, "multipart/form-data"), (b"", kind)]
    half = body.removesuffix(f"--{boundary}--\r\n".encode())
    wrong += [(half + body, kind), (f"--{boundary}\r\nA: ".encode() + bytes(10_000), kind)]
    for bad, given in wrong:
        with pytest.raises(ApiError) as caught:
            asyncio.run(read(bad, given))
        assert caught.value.status_code == 400


@pytest.mark.parametrize(
    ("fields", "files", "words"),
    [
        ({"purpose": "fine-tune"}, {"file": ("a", b"x")}, "purpose: Input should be 'batch'"),
        ({}, {"file": ("a", b"x")}, "purpose: Field required"),
        ({"purpose": "batch", "expires_after[seconds]": "60"}, {"file": ("a", b"x")}, "greater than or equal to 3600"),
        ({"purpose": "batch", "expires_after[seconds]": "2000000"}, {"file": ("a", b"x")}, "--files-hours"),
        ({"purpose": "batch", "expires_after[anchor]": "now"}, {"file": ("a", b"x")}, "expires_after[anchor]"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, {"file": ("a", b"x")}, "expires_after[seconds]"),
        ({"purpose": "batch", "file": "x"}, {"other": ("a", b"x")}, "must be a file with a name"),
        ({"purpose": "x" * 9000}, {"file": ("a", b"x")}, "too long"),
    ],
)
def test_uploads_that_are_refused(site: Callable[..., Site], fields: dict[str, str], files: dict[str, Any], words: str) -> None:
    server = site()
    reply = server.http.post("/v1/files", data=fields, files=files)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"]
    assert not list(server.server.batches.store.folder.iterdir())


def test_files_expire_when_their_owner_says(site: Callable[..., Site]) -> None:
    """Also the answers of a batch, and a form that comes in small pieces. What else a form has is named."""
    server, after = site(), {"anchor": "created_at", "seconds": 7200}
    client, data = server.openai, jsonl(prompts(1) | {"bad": {"prompt": "a", "model": "none"}})
    file = client.files.create(file=("a", data), purpose="batch", expires_after=after)  # type: ignore[arg-type]
    plain = client.files.create(file=("a", data), purpose="batch")
    batch: Any = {"input_file_id": plain.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    last = ended(client, client.batches.create(**batch, output_expires_after=after).id)
    outputs = [client.files.retrieve(id) for id in (last.output_file_id, last.error_file_id)]
    for made, seconds in (file, 7200), (plain, 168 * 3600), *((one, 7200) for one in outputs):
        assert abs((made.expires_at or 0) - made.created_at - seconds) <= 1
    store = server.server.batches.store
    assert abs(store.records[last.id].until - time.time() - 168 * 3600) < 3600  # from its end on
    store.records[file.id].until = time.time() - 1
    assert file.id not in {one.id for one in client.files.list()}
    headers, form = {"content-type": "multipart/form-data; boundary=x"}, {"purpose": "batch", "user": "me"}
    body = httpx.Request("POST", "http://x", data=form, files={"file": ("a", bytes(200_000))}, headers=headers).read()
    at = body.index(b"batch") + 5  # of these bytes only the first is passed on before more come
    content = (time.sleep(0.3 * i) or part for i, part in enumerate((body[:at], body[at:])))
    reply = server.http.post("/v1/files", content=content, headers=headers)
    assert (reply.json()["bytes"], reply.headers["x-rung-ignored"]) == (200_000, "user")
    strict = site(strict_requests=True).http
    for refused, name in (strict.get("/v1/files?m=x"), "m"), (strict.post("/v1/files", content=body, headers=headers), "user"):
        assert refused.json()["error"]["param"] == name


def test_batches_that_are_refused(site: Callable[..., Site]) -> None:
    server = site()
    file = server.openai.files.create(file=("a", b"x"), purpose="batch")
    good = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    for change, status, words in (
        ({"input_file_id": "file-x"}, 404, "no file of yours"),
        ({"endpoint": "/v1/images"}, 400, "endpoint"),
        ({"completion_window": "200h"}, 400, "--files-hours"),
        ({"completion_window": "1d"}, 400, "completion_window"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "a")}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, 400, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 2_000_000}}, 400, "--files-hours"),
        ({"other": 1}, 400, "other"),
    ):
        assert words in server.refused("/v1/batches", {**good, **change}, status)["message"]


def test_answers_that_are_stored_are_their_client_s(site: Callable[..., Site]) -> None:
    server, url = site(api_key=("one", "two")), "/v1/responses"
    one, two = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
    last = ended(one, begun(one, jsonl({"a": BODIES[url]}, url), url).id)
    id = answers(one, last.output_file_id)["a"]["response"]["body"]["id"]
    assert one.responses.retrieve(id).id == id
    with pytest.raises(openai.NotFoundError):
        two.responses.retrieve(id)


def test_a_key_that_is_gone(site: Callable[..., Site]) -> None:
    """Its lines are refused as its requests are."""
    server = site(api_key=("one",))
    server.engine.hold = True
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0)
    batch = begun(client, jsonl(prompts(2)))
    server = site(api_key=("two",))
    store = server.server.batches.store
    wait_for(lambda: store.records[batch.id].value["status"] == "completed")
    assert store.records[batch.id].value["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
