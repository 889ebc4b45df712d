"""What becomes of accepted requests while ranks end and start again. The real ranks: tests/server/test_chaos.py."""

import asyncio
import errno
import json
import math
import os
import random
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from engine.protocol import Attach, Drafted, Fatal, Outputs, Refused, SamplingParams, Starting, Stats, Submit, TokenOutput
from errors import UserError
from server import recovery
from server.engine_client import EngineClient
from server.errors import ApiError
from server.metrics import Metrics
from server.recovery import GOT_ON, REFUSED, SUSPECT, Recovery, Watchdog
from server.started import STARTED, note_start, read_started
from tests.support.server_thread import STORY, TOKENIZER, Site, ready, wait_for

DECODES = -1  # in place of a token: all but the first one since a request was sent
STORY_IDS = TOKENIZER.encode(STORY, add_special_tokens=False)


# --- the state machine ---------------------------------------------------------------------------------------------------


class Request:
    """A request of `needed` tokens. With `deadly` ranks end before they have computed that token, with DECODES before the second one
    since it was sent."""

    def __init__(self, name: int, needed: int, deadly: int | None = None) -> None:
        self.name, self.needed, self.deadly, self.tokens = str(name), needed, deadly, 0
        self.sent, self.attempts, self.stuck, self.alone, self.tokens_since_sent = False, 0, 0, 0, 0
        self.error: ApiError | None = None

    def wake(self) -> None:
        pass

    def on_error(self, error: ApiError) -> None:
        self.error = error

    def ends_the_ranks(self) -> bool:
        return self.tokens_since_sent > 0 if self.deadly == DECODES else self.deadly == self.tokens


class World:
    """Requests and ranks that compute a token of each of the first `places` requests in a step. Ranks may also end at any time by
    themselves."""

    def __init__(self, places: int = 1000) -> None:
        self.places = places
        self.there: list[Request] = []
        self.machine = Recovery(self.send, self.recall, Metrics("m"), Watchdog())
        self.requests: list[Request] = []
        self.alone: list[Request] = []
        self.ends = 0  # of ranks that served

    def send(self, request: Request) -> None:
        request.attempts += 1
        request.tokens_since_sent = 0
        self.there.append(request)

    def recall(self, request: Request) -> None:
        if request in self.there:  # else its last token came
            self.there.remove(request)

    def accept(self, request: Request) -> None:
        self.requests.append(request)
        self.machine.add(request)

    def end(self) -> None:
        if len(self.there) == 1 and self.there[0].stuck >= SUSPECT:
            self.alone.append(self.there[0])
        self.ends += self.machine.state == "serving"
        self.there.clear()
        self.machine.on_end()

    def step(self, accident: bool) -> None:
        if self.machine.state != "serving":
            self.machine.on_ready(0, 2048, 0.0, self.places)
            return
        suspects = [r for r in self.there if r.stuck >= SUSPECT]
        assert len(suspects) <= self.places, "more suspects than the ranks compute at once"
        running = self.there[: self.places]
        if accident or any(r.ends_the_ranks() for r in running):
            self.end()
            return
        for request in running:
            if request in self.there:  # else progress of an earlier one brought others
                request.tokens += 1
                request.tokens_since_sent += 1
                if request.tokens == request.needed:
                    self.there.remove(request)
                if request.stuck:
                    self.machine.went_on(request)
                if request.tokens == request.needed:
                    self.machine.remove(request)

    def run(self, accidents: float = 0.0) -> None:
        """Until all requests have ended."""
        steps = 0
        while any(r.error is None and r.tokens < r.needed for r in self.requests):
            self.step(random.random() < accidents)
            steps += 1
            assert steps < 50_000, "they do not come to an end"


@pytest.mark.parametrize("places", [1000, 4, 1])
@pytest.mark.parametrize("accidents", [0.0, 0.02])
def test_only_what_ends_the_ranks_is_refused(accidents: float, places: int, seed: int) -> None:
    """Some requests end the ranks whenever these come to some token, or to the second one. All others are answered, unless accidents
    look like it."""
    world = World(places)
    for i in range(300):
        needed = random.randint(20, 30)
        deadly = random.choice([DECODES, random.randrange(needed)]) if i % 20 == 0 else None
        world.accept(Request(i, needed, deadly))
        for _ in range(random.randrange(4)):
            world.step(random.random() < accidents)
    world.run(accidents)
    for request in world.requests:
        if request.deadly is not None:
            assert request.error is not None and request.error.status_code == 500
            assert f"request {request.name} " in request.error.message
        elif not accidents:
            assert request.error is None
        assert request.error is None or request in world.alone


@pytest.mark.parametrize(("deadly", "ends"), [(0, 5), (DECODES, 6)])
def test_two_requests_that_end_the_ranks_are_found_in_a_few_ends(deadly: int, ends: int) -> None:
    """The limit of restarts ends the server soon. Others that were there are answered, although they got on no further."""
    world = World()
    requests = [Request(i, 30, deadly if i in (2, 3) else None) for i in range(5)]
    for request in requests:
        world.accept(request)
    world.run()
    assert [r.error is None for r in requests] == [True, True, False, False, True]
    assert world.ends == ends


def test_who_has_tokens_is_refused_after_two_ends_alone() -> None:
    """One alone may be an accident, and ends beside others prove nothing."""
    world = World()
    requests = [Request(i, 30) for i in range(3)]
    for request in requests:
        world.accept(request)
    for ends in range(1, 5):
        world.step(False)
        assert world.there == (requests if ends <= SUSPECT else requests[2:])
        world.step(False)
        assert [r.tokens_since_sent for r in world.there] == [1] * len(world.there)
        world.end()
        assert (requests[2].stuck, requests[2].error is None) == (ends, ends < 4)
    assert requests[0].error is None and requests[1].error is None


def test_of_many_that_wait_few_are_tried_alone() -> None:
    """Two accidents while 300 requests wait for 4 places. The next ranks get at most 4 of them at a time, and have no fewer to
    compute for it."""
    world = World(places=4)
    for i in range(300):
        world.accept(Request(i, 24))
    for _ in range(2):
        while world.machine.state != "serving":
            world.step(False)
        world.step(True)
    steps = 0
    while any(r.tokens < r.needed for r in world.requests):
        world.step(False)
        steps += 1
    assert steps <= 1 + 300 * 24 / 4 + 24


def test_ranks_that_end_while_they_load_accuse_nobody() -> None:
    world = World()
    request = Request(0, 5)
    world.accept(request)
    for _ in range(5):
        world.machine.on_starting(0)
    assert (request.sent, request.stuck) == (False, 0)
    world.machine.on_ready(0, 2048)
    assert request.sent and world.there == [request]
    for n in range(1, REFUSED):
        world.end()
        world.machine.on_starting(0)
        assert request.stuck == n
        world.machine.on_ready(0, 2048)
    request.tokens_since_sent = GOT_ON - 1
    world.machine.went_on(request)
    assert request.stuck > 0
    request.tokens_since_sent = GOT_ON
    world.machine.went_on(request)
    assert request.stuck == 0 and request.error is None


def test_ranks_are_served_although_clients_have_all_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their end is then known once the next ones start."""

    def none_left(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", none_left)
    world = World()
    request = Request(0, 5)
    world.accept(request)
    for ends in range(2):
        world.machine.on_starting(os.getpid())
        assert request.stuck == ends
        world.machine.on_ready(os.getpid(), 2048)
        assert world.machine.state == "serving" and request.sent


def test_ranks_whose_start_was_not_heard_are_watched() -> None:
    """Without their process, their end would be known only when new ranks start."""

    async def run() -> None:
        machine = World().machine
        for pid in (0, os.getpid(), os.getpid()):
            machine.on_ready(pid, 2048)
            assert machine.pid == pid
        assert machine._descriptor >= 0
        machine.give_up()

    asyncio.run(run())


class Client(EngineClient):
    """The frontend's client, without sockets. Its ranks are ready."""

    def __init__(self) -> None:
        super().__init__("", "", Metrics("m"))
        self.messages: list[Any] = []
        self._dispatch(ready())

    def _send(self, message: Any) -> None:
        self.messages.append(message)

    def restart(self) -> list[Any]:
        """What new ranks get."""
        self.recovery.on_end()
        self.messages.clear()
        self._dispatch(ready())
        return list(self.messages)


def sequences(name: str, count: int = 1) -> list[Submit]:
    return [Submit(f"{name}-{i}", [1, 2], SamplingParams(max_tokens=4)) for i in range(count)]


def test_an_answer_that_waits_for_its_reader_stops_nobody() -> None:
    """It is complete, so it has no part in what becomes of the ranks."""
    client = Client()
    with client.generate(sequences("slow", 2)) as slow, client.generate(sequences("other")):
        answer = [TokenOutput(f"slow-{i}", [5, 6, 7, 8], finish_reason="length") for i in range(2)]
        client._dispatch(Outputs(answer))
        for _ in range(SUSPECT):
            assert [m.request_id.partition("+")[0] for m in client.restart()] == ["other-0"]
        other = client.messages[-1].request_id
        client._dispatch(Outputs([TokenOutput(other, [1] * GOT_ON)]))
        client.messages.clear()
        with client.generate(sequences("new")):
            assert [m.request_id for m in client.messages] == ["new-0"]
            client.restart()
        for _ in range(REFUSED):
            client.restart()
        assert [output for _, output in _completed(slow.next())] == answer


def test_a_request_without_a_token_is_refused_after_one_end_alone() -> None:
    client = Client()
    with client.generate(sequences("first")) as first, client.generate(sequences("other")):
        for _ in range(REFUSED):
            client.restart()
        with pytest.raises(ApiError, match="is refused: the ranks ended 3 times"):
            first.next().send(None)


def test_a_refused_request_is_not_sent_again() -> None:
    """Its other sequences end at once, although its client has not read the error."""
    client = Client()
    with client.generate(sequences("a", 3)) as queue:
        client._dispatch(Outputs([TokenOutput("a-2", [1])]))
        client.messages.clear()
        client._dispatch(Refused("a-0", "too complex", "invalid_schema"))
        assert [m.request_id for m in client.messages] == ["a-1", "a-2"] and client.active == 0
        assert client.restart() == []
        assert _completed(queue.next()) == [(2, TokenOutput("a-2", [1]))]
        with pytest.raises(ApiError, match="too complex") as error:
            queue.next().send(None)
        assert error.value.status_code == 400


def test_what_new_ranks_refuse_is_no_fault_of_the_client() -> None:
    """They may have less memory for keys and values than those before them, which had accepted the request."""
    client = Client()
    with client.generate(sequences("a")) as queue:
        client.restart()
        client._dispatch(Refused(client.messages[-1].request_id, "there are only 31 blocks"))
        with pytest.raises(ApiError, match="only 31") as error:
            queue.next().send(None)
    assert error.value.status_code == 503


@pytest.mark.parametrize("attempts", [1, 2])
def test_an_overflow_is_an_error_of_the_server(attempts: int, caplog: pytest.LogCaptureFixture) -> None:
    """Logged and counted, and not to be repeated: the same numbers would overflow again."""
    client = Client()
    with client.generate(sequences("a"), "named so") as queue, client.generate(sequences("b")) as other:
        if attempts == 2:
            client.restart()
        client._dispatch(Refused(queue.ids[0], "numbers overflowed", "overflow"))
        with pytest.raises(ApiError, match="numbers overflowed") as error:
            queue.next().send(None)
        client._dispatch(Outputs([TokenOutput(other.ids[0], [1], "stop")]))
        assert len(_completed(other.next())) == 1
    assert (error.value.status_code, error.value.code, error.value.headers) == (500, "overflow", {"x-should-retry": "false"})
    assert "named so: numbers overflowed" in caplog.text
    assert b'rung:overflowed_requests_total{model_name="m"} 1.0' in client.metrics.render()


def test_an_output_that_cannot_be_handled_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine sends the tokens of all requests in a message. Of the others none is lost."""
    client = Client()
    with client.generate(sequences("bad")) as bad, client.generate(sequences("good")) as good:
        monkeypatch.delitem(bad._index, "bad-0")
        outputs = [TokenOutput("bad-0", [1]), TokenOutput("good-0", [5])]
        client._dispatch(Outputs(outputs))
        assert _completed(good.next()) == [(0, outputs[1])]
        with pytest.raises(ApiError, match="internal error"):
            bad.next().send(None)
        assert client.active == 1, "the ranks compute nothing more for it"


def _completed(work: Any) -> Any:
    """The result of a coroutine that waits for nothing."""
    with pytest.raises(StopIteration) as end:
        work.send(None)
    return end.value.value


def test_when_ranks_hang() -> None:
    measured = Watchdog(seconds=None, max_batch_tokens=2048)
    assert measured.limit(None) == recovery.UNKNOWN_HANG
    assert measured.limit(1e-6) == recovery.LEAST_HANG
    assert measured.limit(0.01) == pytest.approx(204.8)
    assert Watchdog(seconds=0.0).limit(1.0) == float("inf") and Watchdog(seconds=7.0).limit(1.0) == 7.0


def test_silence_is_counted_from_the_last_report_or_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of 7 s are killed after 8 ticks without a report. A report, new ranks and a kill each begin the count anew."""
    kills, ticks = list[int](), 0
    machine = Recovery(print, print, Metrics("m"), Watchdog(lambda: kills.append(ticks), 7.0))
    events = {6: machine.heard, 12: machine.on_end, 18: lambda: machine.on_ready(0, 2048)}
    monkeypatch.setattr(recovery, "LEAST_START", 0.0)

    async def tick(seconds: float) -> None:
        nonlocal ticks
        assert seconds == recovery.TICK
        if ticks == 40:
            raise asyncio.CancelledError
        ticks += 1
        if event := events.get(ticks):
            event()

    monkeypatch.setattr(recovery.asyncio, "sleep", tick)
    machine.on_ready(0, 2048)
    with pytest.raises(asyncio.CancelledError):
        machine.watch().send(None)
    assert kills == [25, 33]


def test_streams_hear_every_few_seconds_that_there_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes, ticks = list[int](), 0
    machine = Recovery(lambda request: setattr(request, "attempts", 1), print, Metrics("m"), Watchdog())
    request: Any = Request(0, 100)
    request.wake = lambda: wakes.append(ticks)
    machine.on_ready(0, 2048)
    machine.add(request)

    async def tick(seconds: float) -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 7:
            machine.on_end()
        if ticks == 20:
            machine.on_ready(0, 2048)
        if ticks == 40:
            raise asyncio.CancelledError

    monkeypatch.setattr(recovery.asyncio, "sleep", tick)
    with pytest.raises(asyncio.CancelledError):
        machine.watch().send(None)
    assert wakes == [7, 12, 17]


def test_ranks_hang_by_the_steps_of_those_before_them() -> None:
    """Until they have computed one of their own."""
    machine = Recovery(print, print, Metrics("m"), Watchdog(seconds=None))
    machine.on_ready(0, 2048)
    assert machine.limit() == recovery.UNKNOWN_HANG
    machine._metrics.on_stats(Stats(token_seconds=0.01))
    assert machine.limit() == pytest.approx(204.8)
    machine.on_end()
    machine.on_ready(0, 2048)
    assert machine._metrics.stats.token_seconds is None and machine.limit() == pytest.approx(204.8)


def test_the_first_error_of_a_request_counts() -> None:
    client = Client()
    with client.generate(sequences("a")) as queue:
        queue.on_error(ApiError(503, "first"))
        client.fail_all(ApiError(500, "second"))
        queue.on_error(ApiError(500, "third"))
        with pytest.raises(ApiError, match="first"):
            queue.next().send(None)


def test_restarts_leave_no_descriptor_open() -> None:
    async def run() -> None:
        machine = Recovery(print, print, Metrics("m"), Watchdog())
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with subprocess.Popen(["sleep", "60"]) as rank:  # stands for rank 0
                machine.on_starting(rank.pid)
                machine.on_ready(rank.pid, 2048)
                rank.kill()
                assert len(os.listdir("/proc/self/fd")) == len(before) + hasattr(os, "pidfd_open")
                while machine.state == "serving":
                    await asyncio.sleep(0)
            assert os.listdir("/proc/self/fd") == before

    asyncio.run(run())


def test_statistics_of_new_ranks_begin_at_0() -> None:
    metrics = Metrics("m")
    metrics.on_stats(Stats(steps=100, preemptions=7, prefix_hits=50, drafted={"ngram": Drafted(9, 9, 9)}))
    metrics.on_recovery(2.5)
    metrics.on_stats(Stats(steps=3, preemptions=1, prefix_hits=2, drafted={"ngram": Drafted(1, 1, 1)}))
    text = metrics.render().decode()
    counted = {"engine_steps": 103.0, "num_preemptions": 8.0, "prefix_cache_hits": 52.0, "recovery_seconds": 2.5}
    for name, value in counted.items():
        assert f'rung:{name}_total{{model_name="m"}} {value}' in text
    assert 'rung:spec_decode_num_drafts_total{model_name="m",source="ngram"} 10.0' in text


def test_how_long_ranks_may_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start has no limit, and the longest one counts for all later ones, whichever frontend saw it."""

    def frontend(attach: bool = True) -> Recovery:
        found = read_started(tmp_path) if attach else None
        return Recovery(lambda _: None, lambda _: None, Metrics("m"), Watchdog(seconds=5.0), found)

    first, second = frontend(attach=False), frontend()
    for machine in (first, second):  # the second one takes the place of the first while the ranks load
        assert machine.state == "loading" and machine.limit() == float("inf")
    warnings: list[str] = []
    monkeypatch.setattr(recovery.log, "warning", lambda text, *_: warnings.append(text))
    second.on_ready(0, 2048, note_start(tmp_path, 300.0))
    assert second.limit() == 5.0
    assert "the ranks serve a new frontend" in warnings[0], "they may have been ready before it asked"
    third = frontend()
    assert third.state == "recovering" and third.limit() == 5.0, "ranks that were ready answer"
    third.on_starting(0)
    assert third.limit() == 900.0
    with subprocess.Popen(["true"]) as ended:
        pass
    with monkeypatch.context() as patch:  # a rank 0 that has ended since: the next ranks may just be starting
        patch.setattr(os, "getpid", lambda: ended.pid)
        note_start(tmp_path, 20.0)
    assert frontend().state == "recovering" and frontend().limit() == 900.0
    third.on_ready(0, 2048, note_start(tmp_path, 20.0))
    for machine in (second, third):
        machine.on_end()
        assert machine.limit() == 900.0
    short = Recovery(lambda _: None, lambda _: None, Metrics("m"), Watchdog(seconds=5.0))
    short.on_ready(0, 2048, 1.0)
    short.on_end()
    assert short.limit() == recovery.LEAST_START


def test_ranks_start_again_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    note_start(tmp_path, 20.0)
    monkeypatch.setattr(Path, "write_text", full)
    assert note_start(tmp_path, 300.0) == 300.0 and read_started(tmp_path).longest == 20.0
    (tmp_path / STARTED).unlink()
    with pytest.raises(UserError, match=r"No space left on device.*TMPDIR"):  # nobody would start such ranks again
        note_start(tmp_path, 20.0)


# --- the frontend ----------------------------------------------------------------------------------------------------------


def texts_of(stream: str) -> dict[int, str]:
    """The text of each choice of a stream."""
    texts: dict[int, str] = {}
    for event in stream.split("\n\n"):
        if event.startswith("data: {"):
            for choice in json.loads(event[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_requests_outlive_the_ranks(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two choices of a stream that has begun, a whole answer, and a request that comes while there are no ranks."""
    monkeypatch.setattr(recovery, "TICK", 0.05)
    monkeypatch.setattr(recovery, "HEARTBEAT_SECONDS", 0.1)
    site = make_site()
    site.engine.delay = 0.02
    stream, whole = site.ask(stream=True, n=2, seed=3), site.ask(logprobs=1, prompt_logprobs=1)
    assert stream.begun.wait(60)
    wait_for(lambda: len(site.engine.submits) == 3)
    site.engine.hold = True
    before = {s.request_id: s for s in site.engine.submits}
    site.engine.send(Starting(0))
    wait_for(lambda: site.health() == "recovering")
    assert site.http.get("/health").status_code == 503
    late = site.ask(stream=True)
    wait_for(lambda: site.server.client.active == 4 and ": the ranks start again" in stream.text)
    assert len(site.engine.submits) == 3, "nothing is sent while there are no ranks"
    site.engine.send(ready())
    wait_for(lambda: site.health() == "ready" and len(site.engine.submits) == 7)
    again = site.engine.submits[3:]
    assert not {s.request_id for s in again[:3]} & set(before)
    for submit in again[:3]:
        old = before[submit.request_id.partition("+")[0]]
        assert (submit.prompt_ids, submit.params) == (old.prompt_ids, old.params)
        assert submit.generated == STORY_IDS[: len(submit.generated)]
    assert again[0].generated and again[3].generated == []
    site.engine.hold = False
    assert texts_of(stream.join().text) == {0: STORY, 1: STORY}
    assert ": the ranks start again\n\n" in stream.text and stream.text.endswith("data: [DONE]\n\n")
    answer = whole.json()
    assert answer["choices"][0]["text"] == STORY and len(answer["choices"][0]["logprobs"]["tokens"]) == len(STORY_IDS)
    assert answer["usage"]["completion_tokens"] == len(STORY_IDS)
    assert texts_of(late.join().text) == {0: STORY}
    metrics = site.http.get("/metrics").text
    replayed = sum(len(s.prompt_ids) + len(s.generated) for s in again[:3])
    assert 'rung:recoveries_total{model_name="tiny-hybrid"} 1.0' in metrics
    assert f'rung:replayed_tokens_total{{model_name="tiny-hybrid"}} {replayed:.1f}' in metrics
    site.engine.send(Stats(running=5))
    wait_for(lambda: site.http.get("/stats").json()["running"] == 5)


def test_ranks_that_end_after_the_server_failed_are_not_awaited(
    make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    """As rank 0 on several hosts, which ends after its launcher has said that another host has left."""
    site = make_site()
    rank = subprocess.Popen(["sleep", "60"])  # stands for rank 0
    try:
        site.engine.send(msgspec.structs.replace(ready(), pid=rank.pid))
        wait_for(lambda: site.server.client.recovery.pid == rank.pid)
        site.server.client.on_fatal = lambda message: None  # the server stays until the end of the test
        site.engine.send(Fatal("a host has left"))
        wait_for(lambda: site.health() == "broken")
    finally:
        rank.kill()
        rank.wait()
    assert [site.health() for _ in range(2)] == ["broken"] * 2  # by now the event loop has seen that it ended
    assert "wait until they have started again" not in caplog.text


def test_late_statistics_of_ended_ranks_do_not_count(make_site: Callable[..., Site]) -> None:
    """They come after those of the new ranks. A message that cannot be used takes nothing from later ones."""
    site = make_site()
    late = subprocess.Popen(["sleep", "60"])  # stands for rank 0
    try:
        site.engine.send(msgspec.structs.replace(ready(), pid=late.pid))
        wait_for(lambda: site.server.client.recovery.pid == late.pid)
        for pid, drafts, running in ((late.pid, 2, 3), (late.pid + 1, 9, 4), (late.pid, 5, 6)):
            site.engine.send(Stats(running, drafted={"ngram": Drafted(drafts, drafts, drafts)}, pid=pid))
        wait_for(lambda: site.http.get("/stats").json()["running"] == 6)
        assert (
            'rung:spec_decode_num_drafts_total{model_name="tiny-hybrid",source="ngram"} 5.0' in site.http.get("/metrics").text
        )
        site.engine.send(Stats(7, drafted={"ngram": Drafted(1, 1, 1)}, pid=late.pid))  # less than before
        wait_for(lambda: site.http.get("/stats").json()["running"] == 7)
        site.server.client.metrics.on_stats = lambda stats: 1 / 0  # type: ignore[assignment,method-assign]
        site.engine.send(Stats(8, pid=late.pid))
        assert site.complete()["choices"][0]["text"] == STORY
    finally:
        late.kill()
        late.wait()


def test_a_new_frontend_counts_the_seconds_of_its_own_reports() -> None:
    """The first one comes from ranks that have computed many steps, but has the mean time of the last ones alone."""
    metrics = Metrics("m")
    metrics.on_stats(Stats(steps=100_000, step_seconds=0.5, batch_tokens=[1, 1], idle_share=0.25))
    metrics.on_stats(Stats(steps=100_001, step_seconds=0.1, batch_tokens=[1], idle_share=0.0))
    text = metrics.render().decode()
    for name, value in {"engine_step_seconds": 1.1, "gpu_idle_seconds": 0.25, "engine_steps": 100_001.0}.items():
        assert f'rung:{name}_total{{model_name="m"}} {value}' in text


def test_the_shares_of_a_step_stay_those_of_the_last_steps() -> None:
    """A report without steps knows none, and the one after it that has some is new, unless it is of a GPU, which measures no waits."""
    metrics, shares = Metrics("m"), []
    for steps, waited, idle in ((3, 0.5, 0.25), (3, None, None), (4, 0.0, 0.75), (5, None, 0.5)):
        metrics.on_stats(Stats(steps=steps, all_reduce_share=waited, idle_share=idle))
        shares.append((metrics.all_reduce_share._value.get(), metrics.idle_share._value.get()))
    assert shares[:3] == [(0.5, 0.25), (0.5, 0.25), (0.0, 0.75)]
    assert math.isnan(shares[3][0]) and shares[3][1] == 0.5
    assert metrics.steps._value.get() == 5


def test_a_request_that_ends_the_ranks_is_refused(make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture) -> None:
    """The error and the log name it as its client does, and OpenAI's client does not repeat it."""
    site = make_site()
    site.engine.hold = True
    client, named = site.openai.with_options(max_retries=2), {"x-request-id": "mine"}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(client.completions.create, model="tiny-hybrid", prompt="Hi", extra_headers=named)
        for sent in range(1, REFUSED + 1):
            wait_for(lambda sent=sent: len(site.engine.submits) == sent)
            site.engine.send(Starting(0))
            site.engine.send(ready())
        site.engine.hold = False  # a second call would be answered
        with pytest.raises(openai.InternalServerError, match="request mine is refused: ") as refused:
            asked.result(60)
    assert (refused.value.status_code, refused.value.code) == (500, "poisoned")
    assert len(site.engine.submits) == REFUSED
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")]
    (message,) = [f["message"] for f in fields if f["request_id"] == "mine" and "message" in f]
    assert message.startswith("refused: ") and message in refused.value.message
    assert site.complete()["choices"][0]["text"] == STORY


def test_an_accepted_request_waits_for_its_grammar(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """Many grammars at once are refused, but not those of requests that were accepted before."""
    monkeypatch.setattr(recovery, "BUSY_SECONDS", 0.05)
    site = make_site()
    site.engine.hold = True
    asked = site.ask(stream=True)
    wait_for(lambda: len(site.engine.submits) == 1)
    site.engine.send(Starting(0))
    site.engine.send(ready())
    wait_for(lambda: len(site.engine.submits) == 2)
    site.engine.send(Refused(site.last().request_id, "too many", "grammars_busy"))
    wait_for(lambda: len(site.engine.submits) == 3)
    site.engine.hold = False
    assert texts_of(asked.join().text) == {0: STORY}


def test_ranks_that_report_nothing_are_killed(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "TICK", 0.05)
    site = make_site(hang_seconds=0.5)
    killed = threading.Event()
    site.server.client.recovery._watchdog.kill = killed.set
    assert killed.wait(60)


def test_a_new_frontend_says_that_it_is_new(tmp_path: Any) -> None:
    site = Site(tmp_path)
    site.server.client.attach = True
    taken: list[Any] = []
    site.engine._take = lambda message, work: taken.append(message)  # type: ignore[method-assign]
    site.start()
    try:
        wait_for(lambda: taken)
        assert isinstance(taken[0], Attach)
    finally:
        site.close()
