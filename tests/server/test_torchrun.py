"""Rank 0's handle of the frontend under torchrun, with processes that stand for the frontend. The real server: test_chaos.py."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli import USER_ERROR
from ranks import processes as processes_module
from ranks.processes import PREFIX, remove_abandoned
from server import process, torchrun
from server.process import Restarts
from server.torchrun import PID, TorchrunFrontend, folder_of, leave_after_wrong_input, restarting_agent_pid
from tests.support.server_thread import wait_for

RUNS, FAILS = "import time; time.sleep(60)", f"raise SystemExit({USER_ERROR})"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torchrun, "SHUTDOWN_SECONDS", 0.0)
    monkeypatch.setattr(torchrun.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[subprocess.Popen[bytes]]]]:
    """Replaces the frontend by a program. Returns the list of the processes that were started since."""
    found: list[subprocess.Popen[bytes]] = []

    def use(program: str) -> list[subprocess.Popen[bytes]]:
        def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            found.append(subprocess.Popen([sys.executable, "-c", program, *command[3:]], **options))
            return found[-1]

        monkeypatch.setattr(torchrun, "subprocess", SimpleNamespace(Popen=start))
        return found

    yield use
    for one in found:
        one.kill()
        one.wait()


def test_a_frontend_that_ends_by_itself_is_not_started_again(started: Any) -> None:
    """Nor are the next ranks, if it has said what is wrong with the input."""
    processes = started(FAILS)
    frontend = TorchrunFrontend(os.getpid(), 5)
    leave_after_wrong_input(os.getpid())  # not known yet
    wait_for(lambda: not frontend.is_alive())
    assert len(processes) == 1 and frontend.close() == USER_ERROR
    with pytest.raises(SystemExit) as left:
        leave_after_wrong_input(os.getpid())
    assert left.value.code == USER_ERROR


def test_a_frontend_that_is_killed_is_started_again(
    started: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = started(RUNS)
    frontend = TorchrunFrontend(os.getpid(), 2)
    for count in (2, 3):
        processes[-1].kill()
        wait_for(lambda count=count: frontend.is_alive() and len(processes) == count)
    assert frontend.is_alive() and "error" not in capfd.readouterr().err
    processes[-1].kill()
    wait_for(lambda: not frontend.is_alive())
    assert "--max-restarts 2" in capfd.readouterr().err and len(processes) == 3
    assert frontend.close() == -signal.SIGKILL and not frontend.folder.exists()


def test_a_frontend_is_started_again_on_a_full_disk(
    started: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    processes = started(RUNS)
    frontend = TorchrunFrontend(os.getpid(), 5)
    monkeypatch.setattr(Path, "write_text", full)
    processes[-1].kill()
    wait_for(lambda: frontend.is_alive() and len(processes) == 2)
    assert "No space left on device" in capfd.readouterr().err


def test_restarts_count_for_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now))
    restarts = Restarts(2)
    assert [restarts.take("x", "it") for _ in range(3)] == [True, True, False]
    now += process.WINDOW + 1
    assert restarts.take("x", "it")


def test_a_signal_ends_a_frontend_that_starts(started: Any) -> None:
    """It does not handle signals yet."""
    processes = started(RUNS)
    frontend = TorchrunFrontend(os.getpid(), 5)
    frontend.forward()
    wait_for(lambda: not frontend.is_alive())
    frontend.forward()
    assert len(processes) == 1 and frontend.close() == 0


def test_the_next_rank_0_finds_the_frontend_and_no_other_process(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = started(RUNS)
    TorchrunFrontend(os.getpid(), 5)
    wait_for(lambda: Path(f"/proc/{processes[0].pid}/cmdline").read_bytes())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = TorchrunFrontend(os.getpid(), 5)
    assert len(processes) == 1 and second.is_alive()
    with subprocess.Popen(["sleep", "10"]) as other:
        (second.folder / PID).write_text(str(other.pid))
        third = TorchrunFrontend(os.getpid(), 5)
        assert len(processes) == 2 and third.is_alive()
        assert [one.args[5] for one in processes] == ["", "0.0 0"], "the ranks may have requests of the one before"  # type: ignore[index]
        third.forward()
        assert processes[1].wait(60) == -signal.SIGTERM and other.poll() is None
        other.kill()


def test_each_agent_has_a_folder_of_its_own(started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one with the process id of another, which runs in another container or has ended."""
    started(RUNS)
    live = TorchrunFrontend(os.getpid(), 5)
    (live.folder / "socket").touch()
    abandoned = tmp_path / f"{PREFIX}00000001"
    abandoned.mkdir(mode=0o700)
    monkeypatch.setattr(torchrun, "start_ticks", lambda pid: 1)
    other = TorchrunFrontend(os.getpid(), 5)
    assert other.folder != live.folder and (live.folder / "socket").exists() and not abandoned.exists()
    assert len({folder_of(os.getpid()), folder_of(os.getppid()), live.folder}) == 3


@pytest.mark.parametrize("waits", [False, True])
def test_a_folder_that_another_start_removes_is_made_again(waits: bool, started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks abandoned until it is locked. waits: the other process has begun to remove it and has the lock."""
    started(RUNS)
    hold, removed = processes_module.hold, list[Path]()

    def late(folder: Path) -> int:
        if removed:
            return hold(folder)
        removed.append(folder)
        lock = hold(folder) if waits else -1
        remove = folder.rmdir if waits else remove_abandoned
        remove()
        return lock if waits else hold(folder)

    monkeypatch.setattr(processes_module, "hold", late)
    frontend = TorchrunFrontend(os.getpid(), 5)
    assert removed == [frontend.folder] and (frontend.folder / PID).exists() and frontend.is_alive()


@pytest.mark.parametrize(("platform", "found"), [("linux", True), ("darwin", False)])
def test_other_systems_start_ranks_without_a_frontend_that_outlives_them(
    platform: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    environ = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_MAX_RESTARTS": "3", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    assert (restarting_agent_pid(environ) is not None) == found
