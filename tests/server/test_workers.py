"""The worker processes: limits of time and memory, queues, cancellation; none outlives the frontend."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from errors import UserError
from server import workers
from server.errors import ApiError
from server.http import error_response
from server.limits import current_client
from server.workers import LAST_RESORT_SECONDS, Workers, _Caller, _Job
from tests import ROOT
from tests.support.server_process import runs, wait_until
from tests.support.worker_jobs import count_runs, encode, endless_in_c, hold_memory, limited, panic, refuse, until_there

MODEL = str(Path(ROOT) / "models" / "tiny-hybrid")


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what happens without a delay, except on a busy machine."""
    while not condition():
        await asyncio.sleep(0.001)


def with_workers(body: Callable[[Workers], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        pool = Workers(MODEL, **options)
        try:
            return await body(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def test_a_job_has_the_tokenizer_and_no_torch_and_its_errors_come_back() -> None:
    async def body(pool: Workers) -> None:
        from text.tokenizer_files import load_tokenizer

        assert await pool.run(encode, "Once upon a time") == load_tokenizer(MODEL).encode("Once upon a time")
        has_torch, pid = await pool.run(limited)
        assert not has_torch and pid == pool.pids[0] != os.getpid()
        with pytest.raises(ApiError) as api:
            await pool.run(refuse, "api")
        assert (api.value.status_code, api.value.message, api.value.param, api.value.code) == (400, "no", "prompt", "bad")
        with pytest.raises(UserError, match="mend it"):
            await pool.run(refuse, "user")
        with pytest.raises(RuntimeError, match="KeyError"):
            await pool.run(refuse, "bug")
        assert (await pool.run(limited))[1] == pid  # the process survives errors

    with_workers(body)


def test_a_panic_of_a_library_is_a_400_and_not_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    async def body(pool: Workers) -> None:
        await pool.run(limited)
        pid = pool.pids[0]
        with pytest.raises(ApiError, match=r"a library failed .*retry-limit") as error:
            await pool.run(panic)
        assert error.value.status_code == 400 and (await pool.run(limited))[1] == pid

    with_workers(body, count=1)
    assert "panicked" not in capfd.readouterr().err


def test_a_job_beyond_its_time_is_killed_and_the_quick_lane_goes_on() -> None:
    async def body(pool: Workers) -> None:
        await pool.run(limited, slow=True)
        pid = pool.pids[1]
        endless = (endless_in_c,), (time.sleep, 600)
        jobs = [asyncio.create_task(pool.run(*job, slow=True)) for job in endless]
        for _ in range(5):
            await pool.run(limited)  # while the slow jobs occupy their worker
        for job in jobs:
            with pytest.raises(ApiError, match="longer than 3 s") as error:
                await job
            assert error.value.status_code == 400
        assert not runs(pid)
        assert (await pool.run(limited, slow=True))[1] != pid

    with_workers(body, seconds=3)


def test_a_job_beyond_its_memory_fails_alone() -> None:
    async def body(pool: Workers) -> None:
        with pytest.raises(ApiError, match="MiB"):
            await pool.run(hold_memory, 4 << 30, slow=True)
        with pytest.raises(ApiError, match="MiB"):
            await pool.run(os.abort, slow=True)  # as a library does when an allocation fails
        assert await pool.run(hold_memory, 1 << 20, slow=True) == 1 << 20

    with_workers(body)


def test_a_worker_that_cannot_be_started_again_takes_no_quick_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*arguments: Any) -> None:
        raise OSError("no memory")

    async def body(pool: Workers) -> None:
        await pool.run(limited)
        await pool.run(limited, slow=True)
        os.kill(pid := pool.pids[1], signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(workers._Process, "start", fail)
        with pytest.raises(ApiError, match="cannot prepare"):
            await pool.run(limited, slow=True)
        await asyncio.gather(pool.run(time.sleep, 1.5), pool.run(limited))  # worker 1 tries again after a second

    with_workers(body)


@pytest.mark.parametrize("share", [False, True])
def test_the_job_of_a_client_that_left_holds_no_worker(share: bool) -> None:
    """Nor one whose callers have all left, running or not."""

    async def body(pool: Workers) -> None:
        def ask(seconds: int) -> list["asyncio.Task[None]"]:
            return [asyncio.create_task(pool.run(time.sleep, seconds, slow=True, share=share)) for _ in range(1 + share)]

        await pool.run(limited, slow=True)
        pid = pool.pids[1]
        await until(lambda: 1 in pool._idle)
        running = ask(600)
        await until(lambda: 1 not in pool._idle and len(pool._slow) == 0)
        waiting = ask(601)
        await until(lambda: len(pool._slow) == 1)
        for one in running + waiting:
            one.cancel()
        assert (await pool.run(limited, slow=True))[1] != pid
        assert not pool._shared and not runs(pid)

    with_workers(body, seconds=300)


def test_the_queues_are_bounded() -> None:
    async def body(pool: Workers) -> None:
        await pool.run(limited, slow=True)
        await until(lambda: 1 in pool._idle)
        running = asyncio.create_task(pool.run(time.sleep, 600, slow=True))
        await until(lambda: 1 not in pool._idle and not pool._slow)
        waiting = [asyncio.create_task(pool.run(time.sleep, 600, slow=True)) for _ in range(2)]
        await until(lambda: len(pool._slow) == 2)
        with pytest.raises(ApiError, match="too many") as error:
            await pool.run(limited, slow=True)
        assert error.value.code == "queue_full" and "retry-after" in error_response(error.value, {"path": "/"}).headers
        for job in waiting:
            job.cancel()
        await asyncio.wait(waiting)
        with pytest.raises(ApiError, match=r"waited longer than 0\.1 s"):
            await pool.run(time.sleep, 600, slow=True, wait_seconds=0.1)
        running.cancel()
        await pool.run(limited, slow=True)

    with_workers(body, seconds=300, max_queue=2)


def test_who_makes_room_in_a_full_queue() -> None:
    """The newest caller of who has most, unless the new one's client would then have as many. A job that is not shared takes no place
    of an equal one that is."""

    async def run() -> None:
        def wait(client: str) -> _Caller:
            caller = _Caller(client, _Job(b"same", "f"))
            caller.job.callers[caller] = pool._callers[id(queue)][caller] = None
            return caller

        for waiting, new, leaves in (
            ("aabb", "c", 1),
            ("aaac", "c", 2),
            ("aabb", "a", None),
            ("aabc", "c", None),
            ("aab", "b", 3),
        ):
            pool = Workers("", max_queue=4)
            queue = pool._quick
            callers = [wait(client) for client in waiting]
            if leaves is None:
                with pytest.raises(ApiError, match="too many requests wait"):
                    pool._place(queue, new)
            else:
                assert pool._place(queue, new) is dict(enumerate(callers)).get(leaves)
        pool._shared[b"same"] = callers[0].job
        for caller in (callers[1], callers[0]):
            assert pool._shared == {b"same": callers[0].job}
            pool._leave(caller, queue)
        assert not pool._shared

    asyncio.run(run())


def test_clients_take_turns(tmp_path: Path) -> None:
    """Who sends many slow jobs delays another client by the one that runs, and takes no place in the queue from it."""
    ended: list[str] = []

    async def body(pool: Workers) -> None:
        async def job(name: str) -> None:
            current_client.set(name[0])
            function, *arguments = (until_there, str(tmp_path / "go")) if name == "a0" else (limited,)
            try:
                await pool.run(function, *arguments, slow=True)
                ended.append(name)
            except ApiError as e:
                ended.append(f"{name} {e.code}")

        tasks = [asyncio.create_task(job("a0"))]
        await until(lambda: 1 in pool.pids and not pool._slow)  # it runs
        for name in ("a1", "a2", "a3", "a4", "a5", "b1", "b2", "c1", "a6"):
            started = len(tasks)
            tasks.append(asyncio.create_task(job(name)))
            await until(lambda started=started: len(pool._slow) + len(ended) == started)  # all but a0 wait or have ended
        (tmp_path / "go").touch()
        await asyncio.gather(*tasks)

    with_workers(body, seconds=60.0, max_queue=6)
    assert ended == ["a5 queue_full", "a4 queue_full", "a6 queue_full", "a0", "a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_clients_share_of_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Large jobs of one client leave room for its short ones, and for those of others. All end at some time."""
    monkeypatch.setattr(workers, "JOBS_BYTES", 8_000_000)
    gate = str(tmp_path / "go")

    async def body(pool: Workers) -> None:
        async def job(client: str, size: int) -> None:
            current_client.set(client)
            await pool.run(until_there, gate, bytes(size), slow=True)

        def start(client: str, size: int) -> "asyncio.Task[None]":
            return asyncio.create_task(job(client, size))

        tasks = [start("a", 900_000), start("a", 900_000)]
        await until(lambda: pool._bytes._held["a"] > 1_600_000)
        with pytest.raises(ApiError, match="too much text") as error:
            await start("a", 900_000)
        assert (error.value.status_code, error.value.code) == (429, "bodies_full")
        tasks += [start("a", 50_000), start("b", 900_000)]
        await until(lambda: len(pool._slow) == 3)
        Path(gate).touch()
        await asyncio.gather(*tasks)
        assert not pool._bytes.held

    with_workers(body, seconds=300.0)


def test_callers_share_a_job(tmp_path: Path) -> None:
    """It goes on as long as one of them waits, and all get what it returns or raises."""
    gate, log = str(tmp_path / "go"), tmp_path / "log"

    async def body(pool: Workers) -> None:
        def ask(*job: Any) -> "asyncio.Task[Any]":
            return asyncio.create_task(pool.run(*job, slow=True, share=True))

        callers = [ask(count_runs, str(log), gate) for _ in range(4)]
        await until(log.exists)
        callers.append(ask(count_runs, str(log), gate))
        for one in (0, 3):
            callers[one].cancel()
        await asyncio.wait((callers[0], callers[3]))
        others = [ask(refuse, "api") for _ in range(3)]
        await until(lambda: len(pool._slow) == 1)
        Path(gate).touch()
        assert await asyncio.gather(*(callers[one] for one in (1, 2, 4))) == [1, 1, 1]
        for one in others:
            with pytest.raises(ApiError, match="no"):
                await one
        assert not pool._shared and await ask(count_runs, str(log), gate) == 2

    with_workers(body, seconds=300.0)


def test_each_caller_of_a_shared_job_has_its_own_patience(tmp_path: Path) -> None:
    async def body(pool: Workers) -> None:
        blocker = asyncio.create_task(pool.run(until_there, str(tmp_path / "go"), slow=True))
        await until(lambda: 1 in pool.pids and not pool._slow)
        hasty, patient = (asyncio.create_task(pool.run(limited, slow=True, share=True, wait_seconds=s)) for s in (0.1, None))
        with pytest.raises(ApiError, match="waited longer"):
            await hasty
        (tmp_path / "go").touch()
        await asyncio.gather(blocker, patient)

    with_workers(body, seconds=300.0)


async def shared_job(pool: Workers, ended: list[str], name: str, *work: Any) -> None:
    """Run an equal job with other callers, for the client of the name's first letter. Notes the name when it ends, and why it failed."""
    current_client.set(name[0])
    try:
        await pool.run(*work, slow=True, share=True)
        ended.append(name)
    except ApiError as e:
        ended.append(f"{name} {e.code}")


def test_a_shared_job_is_of_all_its_clients(tmp_path: Path) -> None:
    """It begins in the turn of any of them, and goes on for the others if one of them has to leave a full queue."""
    ended: list[str] = []

    async def body(pool: Workers) -> None:
        job = partial(shared_job, pool, ended)
        go = str(tmp_path / "go")
        tasks = [asyncio.create_task(job("a0", until_there, go))]
        await until(lambda: 1 in pool.pids and not pool._slow)
        for asked, name in enumerate(("a1", "a2", "a3", "b3", "b4", "c5"), 1):
            tasks.append(asyncio.create_task(job(name, encode, name[1])))
            await until(lambda asked=asked: sum(len(one.callers) for one in pool._slow) + len(ended) == asked)
        (tmp_path / "go").touch()
        await asyncio.gather(*tasks)

    with_workers(body, seconds=300.0, max_queue=4)
    assert ended == ["a3 queue_full", "a2 queue_full", "a0", "a1", "b3", "c5", "b4"]


def test_as_many_callers_wait_for_one_job_as_for_many(tmp_path: Path) -> None:
    """And two clients with equal jobs leave room for a third one."""
    ended: list[str] = []

    async def body(pool: Workers) -> None:
        job = partial(shared_job, pool, ended)
        go = str(tmp_path / "go")
        tasks = [asyncio.create_task(job("a", until_there, go))]
        await until(lambda: 1 in pool.pids and not pool._slow)
        tasks += [asyncio.create_task(job(client, until_there, go)) for client in "ab" * 20]
        await until(lambda: len(ended) == 32)
        assert sorted(ended) == ["a queue_full"] * 16 + ["b queue_full"] * 16
        tasks.append(asyncio.create_task(job("c", encode, "c")))
        await until(lambda: len(ended) == 33)
        (tmp_path / "go").touch()
        await asyncio.gather(*tasks)

    with_workers(body, seconds=300.0, max_queue=8)
    assert ended.count("c") == 1 and len([one for one in ended if one in ("a", "b")]) == 8


def test_patience_begins_when_a_worker_has_started() -> None:
    """Also a worker that replaces another one: the start takes longer than the patience."""

    async def body(pool: Workers) -> None:
        for _ in range(2):
            assert await pool.run(encode, "Once")
            os.kill(pool.pids[0], signal.SIGKILL)
            await until(lambda: not Path(f"/proc/{pool.pids[0]}").exists())  # nor a zombie

    with_workers(body, count=1, patience=0.05)


def test_a_job_after_the_end_is_refused() -> None:
    async def body(pool: Workers) -> None:
        await pool.close()
        with pytest.raises(ApiError, match="shutting down"):
            await pool.run(limited)

    with_workers(body)


def test_a_job_whose_worker_still_starts_fails_with_the_pool() -> None:
    async def body(pool: Workers) -> None:
        pool.start()
        await until(lambda: 1 in pool._idle)
        job = asyncio.create_task(pool.run(time.sleep, 600, slow=True))  # does not end before its worker has started
        await until(lambda: 1 not in pool._idle)  # the job has been taken, but its worker still starts
        await pool.close()
        with pytest.raises(ApiError, match="shutting down"):
            await asyncio.wait_for(job, 60)

    with_workers(body)


def test_a_worker_that_cannot_be_talked_to_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process and its socket do not remain."""
    started: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        assert int(command[5]) == 1 + LAST_RESORT_SECONDS, "it ends itself only after the frontend should have ended it"
        started.append(subprocess.Popen(["sleep", "600"]))
        return started[-1]

    async def fail(**options: Any) -> None:
        raise OSError("no more descriptors")

    async def body() -> None:
        with pytest.raises(OSError, match="no more"):
            await workers._Process.start(MODEL, (), 1, 0)

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(workers, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))
    monkeypatch.setattr(asyncio, "open_unix_connection", fail)
    asyncio.run(body())
    assert [one.poll() for one in started] == [-signal.SIGKILL]
    # at most: meanwhile the garbage collector may close what earlier tests have left
    assert set(os.listdir("/proc/self/fd")) <= set(before)


def test_workers_die_with_the_frontend() -> None:
    program = f"""
import asyncio, time
from server.workers import LAST_RESORT_SECONDS, Workers, _Caller, _Job
async def main():
    pool = Workers({MODEL!r})
    await pool.run(len, "")
    await pool.run(len, "", slow=True)
    print(*pool.pids.values(), flush=True)
    await pool.run(time.sleep, 600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as frontend:
        assert frontend.stdout is not None
        pids = [int(word) for word in frontend.stdout.readline().split()]
        assert len(pids) == 2 and all(map(runs, pids))
        frontend.kill()
    wait_until(lambda: not any(map(runs, pids)), 120, "the end of the workers")
