"""Who counts as a client, how many places it may have, when a refused one may come again, and the order that the engine is asked
for."""

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
from server import admission as admission_module
from server.admission import LONGEST_RETRY, WINDOW, Admission, Progress
from server.clients import digest, read_keys, sender
from server.generation import Plan, Prompt, Run, Usage
from server.problems import ApiError
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
        assert site.last().turn == Turn("team-a", 3, 2**63 - 1)
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


def test_one_client_leaves_places_for_others(make_site: Callable[..., Site]) -> None:
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
        for n, status in ((1, 429), (17, 400)):  # it may have 2 + 14
            refused = site.http.post("/v1/completions", json={"prompt": "x", "n": n})
            assert refused.status_code == status
        for n, status in ((3, 429), (2, 200)):
            other = threading.Thread(target=lambda: setattr(site.engine, "hold", False))
            if status == 200:
                other.start()
            found = site.http.post("/v1/completions", json={"prompt": "x", "n": n}, headers={"x-forwarded-for": "8.8.8.8"})
            assert found.status_code == status
            assert status == 200 or 1 <= int(found.headers["retry-after"]) <= LONGEST_RETRY
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
    return int(caught.value.response({"path": "/"}).headers["retry-after"])


def test_retry_after_is_when_there_will_be_room(seed: int) -> None:
    """At a steady rate of ends, a client that comes back after the time finds a place, and does not after half of it."""
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
        held = admission._held["greedy"]
        wanted = random.randint(1, min(held, 20))
        seconds = refusal(admission, "greedy", 150 - held + wanted, 0)
        assert abs(seconds - wanted / rates["greedy"]) <= 2 + 0.2 * seconds
        seconds = refusal(admission, "new", 1000 - active + wanted, active)
        assert abs(seconds - wanted / sum(rates.values())) <= 2 + 0.2 * seconds
        now += 10 * WINDOW  # nothing ends any more
        assert refusal(admission, "greedy", 150, 0) == LONGEST_RETRY
        assert refusal(admission, "new", 1, 1000) == WINDOW
    assert not admission._held


def test_retry_after_before_any_end(seed: int) -> None:
    """It follows from the speed of the answers and what is left of them: those that wait begin when others end."""
    speed, now = random.uniform(0.01, 0.1), 100.0  # seconds for a token
    running = [Progress("a", 41, 40 * speed, 300), Progress("b", 21, 20 * speed, 100), Progress("a", 1, 0.0, 200)]
    waiting = [Progress("b", 0, 0.0, 50), Progress("a", 0, 0.0, 900)]
    ends = {None: [100, 150, 200, 300, 1050], "a": [200, 300, 1050], "b": [100, 150]}
    for client, left in ends.items():
        for place in (*range(1, 6), 100):
            admission = Admission(10, 10, lambda: now, lambda: [*running, *waiting])
            with admission.hold("c", 1, 0):
                seconds = min(LONGEST_RETRY, max(1.0, left[min(place, len(left)) - 1] * speed))
                assert seconds - 1e-6 <= admission.retry_after(place, client) < seconds + 1 + 1e-6
    admission = Admission(10, 10, lambda: now, lambda: waiting)
    with admission.hold("c", 1, 0):
        now += 7
        assert admission.retry_after(1) == 7, "no token tells the speed"
        with admission.hold("d", 1, 0):
            now += 1
            assert admission.retry_after(1) == 8, "another client does not begin the time anew"


def test_retry_after_of_more_ends_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before them is not known, and counts as nothing."""
    monkeypatch.setattr(admission_module, "MOST_ENDS", 16)
    now = 0.0
    admission = Admission(10, 10, lambda: now)
    with admission.hold("a", 1, 0):
        for _ in range(25):
            now += 1
            with admission.hold("b", 1, 1):
                pass
        assert admission.retry_after(1) == 1 and admission.retry_after(15) == 15


def test_each_refused_request_is_told_the_time_of_another_place(seed: int) -> None:
    """One client has all places, and one of them becomes free each second. Times that are over count no longer, and no refused
    request keeps a place from others."""
    now = 0.0
    admission = Admission(10, 10, lambda: now)
    places = [ExitStack() for _ in range(10)]
    for place in places:
        place.enter_context(admission.hold("a", 1, 0))
    for place in places[:8]:
        now += 1
        place.close()
    with admission.hold("b", 8, 2):
        several = random.randint(2, 5)
        told = [refusal(admission, "c", 1, 10) for _ in range(3)]
        assert told == [1, 2, 3]
        assert refusal(admission, "d", several, 10) == 3 + several
        assert refusal(admission, "d", 1, 10) == 4 + several
        now += 2.5
        assert refusal(admission, "d", 1, 10) > 2 + several
        now += several + 10  # all these times are over
        first, second = (refusal(admission, "d", 1, 10) for _ in range(2))
        assert (first, second) == (admission.retry_after(1), admission.retry_after(2))
        now += first  # and the first one of these
        assert refusal(admission, "d", 1, 10) == admission.retry_after(2)
        assert len(admission._told) == 2
        assert all(refusal(admission, "d", 1, 10) <= LONGEST_RETRY for _ in range(50))
        assert len(admission._told) == 10, "one for each place"
    with admission.hold("new", 10, 0):
        pass
    admission = Admission(100, 10, lambda: now)
    for _ in range(2):  # the same for the places of a client; the second time nobody has been told anything
        with admission.hold("a", 10, 0):
            now += 1
            assert [refusal(admission, "a", 1, 0) for _ in range(2)] == [1, 2]
        now += 0.01
    assert not admission._told_of, "a client without places takes no memory"
