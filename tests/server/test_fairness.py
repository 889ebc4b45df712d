"""Who counts as a client, how many places it may have, when a refused one should come again, and the order that the engine is
asked for."""

import asyncio
import logging
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from engine.protocol import SamplingParams, TokenOutput, Turn
from server import limits
from server.errors import ApiError
from server.generation import Plan, Prompt, Run, Usage
from server.http import error_response
from server.limits import LONGEST_RETRY, RATE_SECONDS, Admission, digest, read_keys, sender
from server.responses import routes
from tests.support.server_thread import CHAT, TOKENIZER, Site, wait_for


def test_the_turn_of_a_request(make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture) -> None:
    """It names the client by its key, never as the key, and has the request's priority, at both endpoints."""
    keys = ("sk-one", "sk-two name=team-a weight=3")
    site = make_site(api_key=keys, allow_priority=True)
    one, two = (openai.OpenAI(base_url=site.url + "/v1", api_key=key, max_retries=0) for key in ("sk-one", "sk-two"))
    unnamed = f"key-{digest('sk-one').hex()[:8]}"
    with caplog.at_level(logging.INFO):
        one.completions.create(model="tiny-hybrid", prompt=["Hi", "Ho"], n=2, extra_body={"priority": -7})
        assert [submit.turn for submit in site.engine.submits] == [Turn(unnamed, 1, -7)] * 4
        two.chat.completions.create(model="tiny-hybrid", messages=CHAT["messages"], extra_body={"priority": 2**63 - 1})
        assert site.last().turn == Turn("team-a", 3, 2**63 - 2)  # behind it are only batches
        two.completions.create(model="tiny-hybrid", prompt="Hi")
        assert site.last().turn == Turn("team-a", 3, 0)
        wait_for(lambda: sum(record.name == "rung.access" for record in caplog.records) >= 3)
    logged = "".join(str(getattr(record, "fields", record.getMessage())) for record in caplog.records)
    assert unnamed in logged and "team-a" in logged
    assert "sk-" not in logged + one.get("/../metrics", cast_to=httpx.Response).text


@pytest.mark.parametrize(
    ("settings", "forwarded", "client"),
    [
        ({}, "8.8.8.8", "127.0.0.1"),
        ({"trusted_proxy": ("127.0.0.1",)}, "8.8.8.8", "8.8.8.8"),
        ({"trusted_proxy": ("127.0.0.1",)}, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ({"trusted_proxy": ("127.0.0.1",)}, "::ffff:8.8.8.8", "8.8.8.8"),
        ({"trusted_proxy": ("127.0.0.1",)}, "x" * 100, "x" * 64),
        ({"trusted_proxy": ("127.0.0.1",), "fairness": "off"}, "8.8.8.8", ""),
    ],
    ids=["no proxy", "a proxy", "IPv6", "IPv4 in IPv6", "not an address", "off"],
)
def test_without_keys_a_client_is_an_address(
    make_site: Callable[..., Site], settings: dict[str, object], forwarded: str, client: str
) -> None:
    site = make_site(**settings)
    assert site.http.post("/v1/completions", json={"prompt": "Hi"}, headers={"x-forwarded-for": forwarded}).status_code == 200
    assert site.last().turn == Turn(client)


def test_keys_may_have_spaces_and_attributes() -> None:
    clients = read_keys(["a", " b c ", "d  weight=7", "e name=x", "f weight=y", "g name=x weight=2"])
    assert clients[digest("b c")].weight == 1 and clients[digest("d")].weight == 7
    assert (clients[digest("e")].name, clients[digest("g")].name, clients[digest("g")].weight) == ("x", "x", 2)
    assert digest("f weight=y") in clients, "what is no attribute belongs to the key"
    assert sender({"state": {}, "client": None}).name == "-"


def test_one_client_leaves_places_for_others(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    site = make_site(max_num_seqs=2, max_queue=16, trusted_proxy=("127.0.0.1",))
    site.engine.hold = True
    body = {"prompt": "x", "n": 8}
    with httpx.Client(base_url=site.url, timeout=120) as http, ExitStack() as stack:
        stack.callback(lambda: [thread.join() for thread in threads])
        threads = [threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": body}) for _ in range(2)]
        for thread in threads:
            thread.start()
        stack.callback(setattr, site.engine, "hold", False)
        wait_for(lambda: site.server.client.active == 16)
        workers = site.server.service.workers
        with monkeypatch.context() as patch:  # nothing is prepared for a request that is refused
            patch.setattr(workers, "run", None)
            patch.setattr(routes, "convert", None)
            site.refused("/v1/responses", {"input": "x"}, 429)
            site.refused("/v1/completions", {"prompt": ["x" * 4999, "x"], "n": 9})  # it may have 2 + 14
            for n, status in ((1, 429), (17, 400)):
                for path, given in (("completions", {"prompt": "x" * 9999}), ("chat/completions", CHAT)):
                    site.refused(f"/v1/{path}", {**given, "n": n}, status)
        for n, status in ((3, 429), (2, 200)):
            other = threading.Thread(target=lambda: setattr(site.engine, "hold", False))
            if status == 200:
                other.start()
            found = site.http.post("/v1/completions", json={"prompt": "x", "n": n}, headers={"x-forwarded-for": "8.8.8.8"})
            assert found.status_code == status
            assert status == 200 or 2 <= int(found.headers["retry-after"]) <= LONGEST_RETRY
        other.join()
    site.settle()
    assert not site.server.service.admission._held


def test_a_place_is_free_once_its_sequence_has_ended() -> None:
    """Not only when the whole request has."""
    plan, left = Plan([Prompt([1])], [SamplingParams(max_tokens=4)], 2), list[int]()

    async def arrive() -> list[tuple[int, TokenOutput]]:
        return [(0, TokenOutput("a", [5])), (1, TokenOutput("b", [5], finish_reason="length"))]

    outputs: Any = SimpleNamespace(next=arrive, stop=lambda index, used: None)
    running = Run(plan, TOKENIZER, outputs, Usage(plan), {}, lambda: left.append(running.unfinished))
    assert [delta.index for delta in asyncio.run(running.next())] == [0, 1] and left == [1]


def refusal(admission: Admission, client: str, sequences: int, active: int) -> int:
    """Seconds that a refused client should wait."""
    with pytest.raises(ApiError) as caught, admission.hold(client, sequences, active):
        pass
    assert caught.value.status_code == 429 and caught.value.code == "queue_full"
    return int(error_response(caught.value, {"path": "/"}).headers["retry-after"])


def without_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "random", SimpleNamespace(uniform=lambda low, high: low))


def test_retry_after_follows_the_rate_of_the_last_minute(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a steady rate of ends, of the client whose places are missing, or of all."""
    now = 100.0
    admission, active = Admission(1000, 150, lambda: now), 1000
    rates = {"greedy": random.uniform(0.5, 3), "other": random.uniform(0.5, 3)}  # ends a second
    with ExitStack() as stack:
        leave = {name: stack.enter_context(admission.hold(name, 100, 0)) for name in rates}
        due = sorted((now + i / rate, name) for name, rate in rates.items() for i in range(1, 61))
        for at, name in due:
            if at < 100 + 20:
                now = at
                leave[name]()
                active -= 1
        without_jitter(monkeypatch)
        held = admission._held["greedy"]
        wanted = random.randint(1, min(held, 20))
        for client, rate, seconds in (
            ("greedy", rates["greedy"], refusal(admission, "greedy", 150 - held + wanted, 0)),
            ("new", sum(rates.values()), refusal(admission, "new", 1000 - active + wanted, active)),
        ):
            assert abs(seconds - wanted / rate) <= 2 + 0.2 * seconds, client
        now += 2 * RATE_SECONDS  # nothing ends any more
        assert refusal(admission, "new", 1, 1000) == RATE_SECONDS
        assert refusal(admission, "greedy", 150, 0) == LONGEST_RETRY // 2
    assert not admission._held


def test_retry_after_spreads_those_that_are_refused() -> None:
    now = 0.0
    admission = Admission(10, 10, lambda: now)
    with admission.hold("a", 10, 0):
        assert {refusal(admission, "b", 1, 10) for _ in range(200)} == {2}, "a second, and up to another one"
        now = 10.0
        found = {refusal(admission, "b", 1, 10) for _ in range(200)}
        assert min(found) >= 10 and max(found) <= 20 and len(found) > 5


def test_retry_after_before_any_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place takes longer than all have been taken for."""
    now = 100.0
    without_jitter(monkeypatch)
    admission = Admission(10, 10, lambda: now)
    with admission.hold("c", 1, 0):
        now += 7
        assert admission.retry_after(1) == 7 and admission.retry_after(2, "c") == 14
        with admission.hold("d", 1, 0):
            now += 1
            assert admission.retry_after(1) == 8, "another client does not begin the time anew"
    now += 5
    with admission.hold("c", 1, 0):
        now += 3
        assert admission.retry_after(1) == 3, "an idle server does"


def test_retry_after_of_a_client_counts_its_own_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    without_jitter(monkeypatch)
    admission = Admission(10, 10, lambda: now)
    with admission.hold("a", 1, 0):
        for _ in range(20):
            now += 1
            with admission.hold("b", 1, 1):
                pass
        assert admission.retry_after(1) == admission.retry_after(1, "b") == 1 and admission.retry_after(1, "a") == 20


def test_retry_after_of_more_ends_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time before the first of them does not count."""
    monkeypatch.setattr(limits, "MOST_FREED", 16)
    without_jitter(monkeypatch)
    now = 0.0
    admission = Admission(10, 10, lambda: now)
    with admission.hold("a", 1, 0):
        for _ in range(25):
            now += 1
            with admission.hold("b", 1, 1):
                pass
        assert admission.retry_after(1) == 1 and admission.retry_after(15) == 15
