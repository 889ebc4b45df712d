"""Children end with their parent, run folders of killed owners are removed, and signals reach only children."""

import errno
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import pytest

from errors import UserError
from ranks import processes
from tests import ROOT
from tests.support.server_process import runs, wait_until

CHILD = "import time; from ranks import processes; processes.die_with_parent(); print('up', flush=True); {then}"
PARENT = """
import multiprocessing, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def start(code: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *args], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("then", ["time.sleep(600)", "7 ** (10 ** 8)"], ids=["asleep", "stuck in one C call"])
def test_a_child_ends_with_its_killed_parent(then: str) -> None:
    with start(PARENT, CHILD.format(then=then)) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        assert runs(child)
        parent.kill()
    wait_until(lambda: not runs(child), 120, "the child's end")


def test_a_child_whose_parent_had_ended_before(tmp_path: Path) -> None:
    code = """
import pathlib, sys, time
from ranks import processes
folder, parent = pathlib.Path(sys.argv[1]), int(sys.argv[2])
while pathlib.Path(f"/proc/{parent}").exists():
    time.sleep(0.05)
(folder / "before").touch()
processes.die_with_parent(parent)
(folder / "after").touch()
"""
    start_late = "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:], str(os.getpid())])"
    start(start_late, code, str(tmp_path)).wait(120)
    wait_until((tmp_path / "before").exists, 120, "the orphan")
    time.sleep(0.5)
    assert not (tmp_path / "after").exists()


HOLD = "import time\nfrom ranks import processes\nwith processes.run_folder() as path:\n    print(path, flush=True)\n    time.sleep(600)"


def test_a_killed_owners_folder_is_removed_by_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    own = [tmp_path / name for name in ("rung-training", "rung-run-results", "rung-run-", "rung-run-a_folder/models")]
    for folder in own:  # the user's own folders, with names similar to those of run folders
        folder.mkdir(parents=True)
    with start(HOLD) as dead, start(HOLD) as alive:
        assert dead.stdout and alive.stdout
        left, kept = Path(dead.stdout.readline().strip()), Path(alive.stdout.readline().strip())
        (left / "socket").write_text("x")
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert left.is_dir() and kept.is_dir()
        monkeypatch.setattr(processes.tempfile, "tempdir", None)
        with processes.run_folder() as mine:
            assert not left.exists() and kept.is_dir() and mine.parent == tmp_path
            assert mine.stat().st_mode & 0o777 == 0o700 and os.listdir(mine) == []
        assert not mine.exists() and kept.is_dir() and all(folder.is_dir() for folder in own)
        alive.kill()
    monkeypatch.setattr(processes.tempfile, "tempdir", None)


@pytest.mark.parametrize(
    ("module", "name", "number"), [(fcntl, "flock", errno.ENOLCK), (fcntl, "flock", errno.EAGAIN), (os, "open", errno.EMFILE)]
)
def test_a_folder_that_cannot_be_locked_is_an_error_and_leaves_nothing(
    module: ModuleType, name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    def refuse(*_: object) -> None:
        assert next(calls) < 1000, "it goes on without an end"
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path))
    opened = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(module, name, refuse)
        with pytest.raises(UserError, match=r"TMPDIR.*ulimit"), processes.run_folder():
            pass
    assert os.listdir(tmp_path) == [] and len(os.listdir("/proc/self/fd")) == opened


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that starts takes it for abandoned."""
    monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path))
    make, lock, made = tempfile.mkdtemp, fcntl.flock, list[str]()

    def make_and_lose(prefix: str) -> str:
        made.append(make(prefix=prefix))
        if len(made) == 1:
            os.rmdir(made[-1])
        return made[-1]

    def lock_late(descriptor: int, operation: int) -> None:
        if len(made) in (2, 3):
            os.rmdir(made[-1])
        if len(made) == 2:
            raise BlockingIOError(errno.EAGAIN, "the other process holds the lock")
        lock(descriptor, operation)

    monkeypatch.setattr(processes.tempfile, "mkdtemp", make_and_lose)
    monkeypatch.setattr(fcntl, "flock", lock_late)
    with processes.run_folder() as path:
        assert str(path) == made[3] and os.listdir(tmp_path) == [path.name]
    assert os.listdir(tmp_path) == []


def test_a_signal_reaches_a_child_and_no_other_process() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        processes.signal_child(child.pid, signal.SIGTERM)
        assert child.wait(60) == -signal.SIGTERM
        processes.signal_child(child.pid, signal.SIGTERM)  # the child has already ended: no effect
    program = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        processes.signal_child(pid, signal.SIGKILL)  # not a child, as if a child's PID had been reused: no effect
        with pytest.raises(subprocess.TimeoutExpired):
            parent.wait(0.2)
        assert runs(pid)
        os.kill(pid, signal.SIGKILL)
