"""What is kept of responses: bounds in time, number and bytes, whose oldest goes, what turns share, and what is computed meanwhile."""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from server.responses import routes
from server.responses.answer import ResponsesRequest
from server.responses.routes import Background
from server.responses.store import LINK_BYTES, RECORD_BYTES, Items, Record, Store, StoreBounds
from tests.server.test_responses import PATH, TOOL, respond
from tests.support.server_thread import STORY, Site, wait_for


def test_the_store_is_bounded(seed: int) -> None:
    """In time, number and bytes. Who has most loses the oldest; a conversation costs what its turns add."""
    now = 0.0
    store = Store(StoreBounds(seconds=100, answers=10, bytes=200_000), lambda: now)

    def record(id: str, input: list[Items], size: int = 100) -> Record:
        output = [{"id": f"rs_{id}"}, {"id": f"msg_{id}", "text": "y" * size}]
        return Record(id, b"x" * 100, input, Items.of_output(output))

    assert store.put("modest", record("m", [Items(b"[]")]))
    for i in range(30):
        assert store.put("greedy", record(f"g{i}", [Items(b"[]")]))
    assert store.find("modest", "m") and not store.find("greedy", "g20") and store.find("greedy", "g21")
    found = store.items("greedy", ["msg_g29", "rs_g29", "msg_m"])
    assert {id: json.loads(item) for id, item in found.items()} == {
        "msg_g29": {"id": "msg_g29", "text": "y" * 100},
        "rs_g29": {"id": "rs_g29"},
    }
    assert not store.items("modest", ["msg_g29"]) and not store.items("nobody", ["msg_g29"])
    assert not store.put("greedy", record("huge", [], 60_000)) and store.find("greedy", "g29")
    now = 101.0
    assert store.find("modest", "m") is None and not store._owners and not store._ages
    slow = record("s", [Items(b"[]")])
    slow.running = Background.__new__(Background)
    assert store.put("modest", slow)
    now = 300.0
    assert store.find("modest", "s") is slow, "it is still computed"


def test_what_fits_is_kept(seed: int) -> None:
    """To the byte: a background response is announced once it is known to fit."""
    record = Record("a", b"x" * random.randrange(100), [Items(b" " * random.randrange(100)) for _ in range(5)])
    need = RECORD_BYTES + 5 * LINK_BYTES + len(record.answer) + sum(len(items.data) for items in record.input)
    for spare in (-1, 0):
        store = Store(StoreBounds(seconds=100, answers=1000, bytes=4 * (need + spare)), lambda: 0.0)
        assert store.fits(record) == store.put("o", record) == (spare == 0)


def test_responses_in_the_background_drive_out_nobody_elses() -> None:
    """They cannot be dropped, so those of a client have a bound in bytes, too, and so have all."""
    store = Store(StoreBounds(seconds=100, answers=1000, bytes=80_000), lambda: 0.0)

    def running(id: str) -> Record:
        return Record(id, b"", [Items(b" " * 8_000)], background=True, running=Background.__new__(Background))

    assert store.put("modest", Record("m", b"x" * 100, []))
    for owner in "abcd":
        for i in range(3):
            one = running(f"{owner}{i}")
            assert store.fits(one) and store.has_room(owner, one) == (i < 2 and owner in "ab")
            if store.has_room(owner, one):
                store.put(owner, one)
    assert store.find("modest", "m") and store.find("a", "a0") and store.find("b", "b1")


def test_the_store_drops_as_its_definition_says(seed: int) -> None:
    """Whatever comes, it keeps what a plain list of owners and their records keeps by the rule. Turns share what was before."""
    store, kept = Store(StoreBounds(seconds=100, answers=12, bytes=20_000), lambda: 0.0), list[tuple[str, Record]]()

    def bytes_of(owner: str) -> int:
        own = [record for name, record in kept if name == owner]
        once = {items for record in own for items in record.items}
        return sum(record.size for record in own) + sum(len(items.data) for items in once)

    def count_of(owner: str) -> int:
        return sum(name == owner for name, _ in kept)

    for i in range(300):
        owner = random.choice("aaabc")
        earlier = random.choice([[], *(record.items[-5:] for name, record in kept if name == owner)])
        output = random.choice([None, Items.of_output([{"id": f"msg_{i}", "text": "y" * random.randrange(500)}])])
        record = Record(str(i), b"x" * random.randrange(1500), [*earlier, Items(b" " * random.randrange(900))], output)
        record.running = Background.__new__(Background) if random.random() < 0.2 else None
        if store.put(owner, record):
            kept.append((owner, record))
        else:  # too large: nothing makes room for it
            assert record.whole > 5_000
            continue
        for amount, most in ((count_of, 12), (bytes_of, 20_000)):
            while sum(map(amount, "abc")) > most:
                ranking = sorted("abc", key=lambda name: (amount(name), name), reverse=True)
                finished = [one for name in ranking for one in kept if one[0] == name and not one[1].running]
                if not finished:
                    break
                kept.remove(finished[0])
        for owner, record in random.sample(kept, min(len(kept), random.choice([0, 0, 0, 2]))):
            if record.running:
                record.running = None
            else:
                kept.remove((owner, record))
                store.remove(owner, record.id)
        found = {(name, id) for name, held in store._owners.items() for id in held.records}
        assert found == {(name, record.id) for name, record in kept}
        assert {name: held.bytes for name, held in store._owners.items()} == {name: bytes_of(name) for name, _ in kept}
        there = {id for _, record in kept for items in record.items for id in items.places}
        assert {id for held in store._owners.values() for id in held.outputs} == there


def test_background(site: Site) -> None:
    """It is polled, cancelled while it runs and after its end, and deleted while it runs; then the engine is free."""
    site.says(STORY)
    client = site.openai.responses
    made = client.create(model="tiny-hybrid", input="Hi", background=True)
    assert made.status in ("queued", "in_progress")
    wait_for(lambda: client.retrieve(made.id).status == "completed")
    assert client.cancel(made.id).status == "completed" and client.retrieve(made.id).output_text == STORY
    site.engine.hold = True
    running = client.create(model="tiny-hybrid", input="Hi", background=True)
    refused = site.refused(PATH, {"input": "on", "previous_response_id": running.id})
    assert refused["param"] == "previous_response_id"
    assert client.cancel(running.id).status == "cancelled" and client.cancel(running.id).status == "cancelled"
    gone = client.create(model="tiny-hybrid", input="Hi", background=True)
    client.delete(gone.id)
    assert site.http.get(f"{PATH}/{gone.id}").status_code == 404
    site.settle()
    assert len(site.engine.aborts) >= 2
    site.engine.hold = False
    assert site.refused(PATH, {"input": "a", "background": True, "store": False})["param"] == "background"
    assert site.refused(PATH, {"input": "a", "background": True, "max_output_tokens": 999})["param"] == "max_output_tokens"


def test_the_background_is_bounded(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """By client, and by the queue; what is refused leaves nothing."""
    monkeypatch.setattr(routes, "MAX_BACKGROUND", 1)
    site = make_site(max_num_seqs=1, max_queue=2, fairness="off")
    site.engine.hold = True
    body = {"input": "Hi", "background": True}
    with ThreadPoolExecutor(3) as threads:  # they come together, and are prepared before the first one runs
        replies = [one.json() for one in threads.map(lambda _: site.http.post(PATH, json=body), range(3))]
    ids = [one["id"] for one in replies if not one["error"]]
    assert len(ids) == 1
    monkeypatch.setattr(routes, "MAX_BACKGROUND", 2)
    ids.append(respond(site, **body)["id"])
    assert site.refused(PATH, body, 429)["code"] == "too_many_responses"
    monkeypatch.setattr(routes, "MAX_BACKGROUND", 4)
    ids.append(respond(site, **body)["id"])
    for _ in range(3):  # a refused one does not count
        assert site.refused(PATH, body, 429)["code"] == "queue_full"
    for id in ids:
        assert site.http.delete(f"{PATH}/{id}").json()["deleted"]
    site.engine.hold = False
    assert respond(site)["status"] in ("completed", "incomplete")


def test_a_cancelled_response_has_its_text(site: Site) -> None:
    site.says(STORY)
    site.engine.delay = 0.2
    made = respond(site, background=True)["id"]
    wait_for(lambda: site.openai.responses.retrieve(made).status == "in_progress")
    reply = site.openai.responses.cancel(made)
    assert reply.status == "cancelled" and STORY.startswith(reply.output_text) and reply.output_text
    assert site.openai.responses.retrieve(made).output_text == reply.output_text


def test_only_the_owner_finds_a_response(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key=("a", "b"), strict_requests=True)
    a, b = ({"authorization": f"Bearer {key}"} for key in "ab")
    id = site.http.post(PATH, json={"input": "Hi"}, headers=a).json()["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        assert site.http.request(method, f"{PATH}/{id}{path}", headers=b).status_code == 404
    later = site.http.post(PATH, json={"input": "Hi", "previous_response_id": id}, headers=b)
    assert later.status_code == 404 and later.json()["error"]["param"] == "previous_response_id"
    assert site.http.get(f"{PATH}/{id}", headers=a).status_code == 200
    strict = site.http.post(PATH, json={"input": "Hi", "tools": [TOOL, {"type": "mcp"}]}, headers=a)
    counted = site.http.post(f"{PATH}/input_tokens", json={"input": "Hi", "tools": [TOOL, {"type": "mcp"}]}, headers=a)
    assert strict.status_code == counted.status_code == 400
    assert strict.json()["error"]["param"] == counted.json()["error"]["param"] == "tools.1.mcp"


def test_a_background_response_without_room_is_refused(make_site: Callable[..., Site]) -> None:
    site = make_site(responses_mb=0.1)
    site.engine.hold = True
    body = {"input": "word " * 3_000, "truncation": "auto", "max_output_tokens": 5, "background": True}
    made = respond(site, **body)
    refused = site.refused(PATH, body, 429)
    assert refused["code"] == "too_many_responses" and refused["param"] == "background"
    assert site.refused(PATH, {**body, "input": "word " * 10_000})["param"] == "input"
    assert site.http.delete(f"{PATH}/{made['id']}").json()["deleted"]
    respond(site, **body)


def test_a_response_that_is_too_long_for_the_store_says_so(make_site: Callable[..., Site]) -> None:
    site = make_site(responses_mb=0.02)
    body = {"input": "Hi", "instructions": "x" * 6000, "truncation": "auto", "max_output_tokens": 5}
    id = respond(site, **body)["id"]
    for error in (
        json.loads(site.http.get(f"{PATH}/{id}").content)["error"],
        site.refused(PATH, {"input": "on", "previous_response_id": id}, 404),
    ):
        assert "too long to be stored" in error["message"] and error["code"].endswith("response_not_found")


def test_a_background_response_that_breaks_at_once_is_failed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(self: ResponsesRequest, log_fields: dict[str, Any]) -> bytes:
        raise RuntimeError("broken")

    monkeypatch.setattr(ResponsesRequest, "answer", answer)
    made = respond(site, background=True)
    wait_for(lambda: site.http.get(f"{PATH}/{made['id']}").json()["status"] == "failed")
    assert site.server.service.open_requests == 0


@pytest.mark.parametrize("store", [True, None])
def test_a_journal_does_not_finish_what_was_cancelled(
    make_site: Callable[..., Site], tmp_path: Path, store: bool | None
) -> None:
    site = make_site(journal=str(tmp_path / "journal"))
    site.engine.hold = True
    made = respond(site, background=True, store=store)["id"]
    assert site.openai.responses.cancel(made).status == "cancelled"
    assert site.http.get(f"/v1/results/{made}").status_code == 404
