"""Processes: ranks, children that end with their parent, temporary folders that are removed even after a crash.

A process that is killed cannot clean up. So each of our processes watches its parent, and each start removes folders whose
owners have ended. Imports only the standard library and `errors`, so that it loads fast.
"""

import atexit
import contextlib
import ctypes
import fcntl
import hashlib
import multiprocessing
import os
import re
import select
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from errors import UserError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAUNCHER = "RUNG_LAUNCHER_PID"  # environment variable of ranks that launch.py starts: its process id
MEETING = "RUNG_MEETING"  # environment variable of ranks that launch.py starts on one host: their launcher's private folder
RANK_NAME = "rung-rank-"  # and its number: the name of a rank's process
ORPHANED = 1  # exit code of a process whose parent has ended
LOST_RANK = 1  # exit code of a rank that has lost another one
PREFIX = "rung-run-"
RUN_FOLDER = re.compile(PREFIX + "[a-z0-9_]{8}")  # names that tempfile makes; a user's own folder hardly has such a name
FOLDER_ATTEMPTS = 100  # to lock a new run folder before another process that starts removes it
POLL_SECONDS = 0.5  # between checks of the parent, where there is no pidfd


def is_rank() -> bool:
    """Whether a launcher, ours or torchrun, started this process as one of its ranks."""
    return "RANK" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """This rank's number on its host."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def several_hosts() -> bool:
    """Whether a launcher has started this rank as one of several hosts' ranks."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    return local is not None and local != os.environ.get("WORLD_SIZE")


def join_launcher() -> None:
    """Call this first in a rank: it names the process and makes it end with its launcher.

    A rank without a launcher is not bound to its parent: whoever started it by hand may end before it.
    """
    if is_rank():
        name_process(RANK_NAME + os.environ["RANK"])
    if LAUNCHER in os.environ:
        die_with_parent(int(os.environ[LAUNCHER]))
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun
        die_with_parent()


def lost_connection(message: str) -> bool:
    """Whether the message of an error says that another rank has ended: in a collective, or while the ranks join their group."""
    signs = (
        "Connection closed",
        "Connection reset",
        "Connection was likely closed",
        "Broken pipe",
        "ncclRemoteError",
        "connectFullMesh failed",  # gloo: the other rank had sent its address, and no longer listens there
    )
    return any(sign in message for sign in signs)


def name_process(name: str) -> None:
    """Set the name of this process in `ps -e` and `top`, at most 15 bytes. Linux only."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def listen_on_loopback() -> None:
    """Make gloo and NCCL listen on the loopback interface only, unless the environment names another. For one host."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")


def on_ranks(count: int) -> list[str]:
    """The first words of a command line that runs `count` ranks on this host. The program and its arguments follow."""
    return [sys.executable, str(Path(__file__).resolve().parent.with_name("launch.py")), "--ranks", str(count)]


def parent_pid() -> int:
    """The id of the process that started this one. If `multiprocessing` started it, that process may have ended since."""
    parent = multiprocessing.parent_process()
    return parent.pid if parent and parent.pid else os.getppid()


def die_with_parent(parent: int | None = None) -> None:
    """Kill this process when `parent` (default: the process that started it) ends for any reason; at once if it has ended.

    Call it first in the new process. It uses two mechanisms, because each one misses a case. The kernel's signal also
    reaches a process whose interpreter is stuck. But it exists only on Linux, and it is sent when the *thread* that
    started the process ends, so start such processes from a thread that stays alive. The second mechanism is a thread
    that waits for the parent; it also notices a parent that ended before this call.
    """
    watched = parent or parent_pid()
    _ask_kernel(signal.SIGKILL)
    when_ended(watched, lambda: os._exit(ORPHANED))
    if os.getppid() != watched:
        os._exit(ORPHANED)


def when_ended(pid: int, act: Callable[[], None]) -> None:
    """Call `act` in a thread once the process `pid`, this one's parent, has ended."""

    def watch() -> None:
        wait_for_end(pid)
        act()

    threading.Thread(target=watch, daemon=True, name=f"watch {pid}").start()


def wait_for_end(pid: int) -> None:
    """Wait until this process's parent `pid` has ended."""
    if hasattr(os, "pidfd_open"):  # Linux
        with contextlib.suppress(OSError):  # it has ended, or the kernel is older than 5.3: the loop below handles both
            descriptor = os.pidfd_open(pid)
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if os.getppid() == pid:  # otherwise it has ended, and another process may have its id
                poll.poll()
            os.close(descriptor)
    while os.getppid() == pid:
        time.sleep(POLL_SECONDS)


def ranks_of(launcher: int) -> list[int]:
    """The ranks that the process `launcher` has started and not yet seen end. Linux only."""
    found = list[int]()
    for thread in Path(f"/proc/{launcher}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for pid in map(int, thread.read_text().split()):
                with contextlib.suppress(OSError):  # the rank has ended
                    if Path(f"/proc/{pid}/comm").read_text().startswith(RANK_NAME):
                        found.append(pid)
    return found


def is_running(pid: int) -> bool:
    """Whether this user has a process with this id; 0 is none."""
    with contextlib.suppress(OSError):
        if pid > 0:
            os.kill(pid, 0)
            return True
    return False


def start_ticks(pid: int) -> int:
    """When a process started, in the kernel's ticks since the boot. Linux only; raises OSError if it has ended."""
    return int(_stat(pid)[19])  # field 22


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the process's name, from the third one on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def kill_ranks(launcher: int) -> None:
    """Kill the ranks that the process `launcher` has started. Linux only."""
    for pid in ranks_of(launcher):
        signal_child(pid, signal.SIGKILL, launcher)


def signal_child(pid: int, number: int, parent: int | None = None) -> None:
    """Send a signal to `pid`, a child of `parent` (default: this process), unless it has ended: then another process may have its
    id."""
    with contextlib.suppress(OSError):
        if not hasattr(os, "pidfd_open"):  # not Linux
            os.kill(pid, number)
            return
        descriptor = os.pidfd_open(pid)
        try:
            if int(_stat(pid)[1]) == (parent or os.getpid()):  # its parent; else it is another process
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _ask_kernel(number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A private temporary folder `rung-run-…` that exists during the `with` block.

    If this process is killed, the same user's next `run_folder` removes the folder. A lock on the folder, which the kernel
    releases when its owner ends, shows whether it is in use. Raises UserError if no folder can be made and locked.
    """
    try:
        remove_abandoned()
        path, lock = _locked_folder()
    except OSError as e:
        raise UserError(
            f"no temporary folder can be made and locked ({e}); set TMPDIR to a folder on a local disk, or allow more open files "
            "(ulimit -n)"
        ) from None
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked_folder() -> tuple[Path, int]:
    for _ in range(FOLDER_ATTEMPTS):
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # these errors: another process removes it as abandoned before it is locked
        with contextlib.suppress(FileNotFoundError, BlockingIOError), contextlib.ExitStack() as undo:
            undo.callback(path.rmdir)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                undo.pop_all()
                return path, lock
    raise OSError("other processes remove each one at once")


def remove_abandoned() -> None:
    """Remove this user's run folders whose owners have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if not (RUN_FOLDER.fullmatch(path.name) and found.st_uid == os.getuid() and found.st_mode == stat.S_IFDIR | 0o700):
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner is running
                if os.path.samestat(os.fstat(lock), path.lstat()):  # else another process has removed it and made a new one
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


@cache
def shared_folder(identity: str) -> Path:
    """The private temporary folder of all of this user's processes that call this with the same text, which it leaves to them alone.
    The last one removes it. Raises UserError if it is not private."""
    remove_abandoned()
    path = Path(tempfile.gettempdir(), folder_name(identity))
    lock = make_and_hold(path)

    def leave() -> None:
        os.close(lock)
        remove_abandoned()

    atexit.register(leave)
    return path


def folder_name(identity: str) -> str:
    """The name of a run folder, another one in another container or after a restart of the host."""
    namespace = ""
    with contextlib.suppress(OSError):  # not Linux
        namespace = os.readlink("/proc/self/ns/pid")
    return PREFIX + hashlib.sha256(f"{boot_id()} {namespace} {identity}".encode()).hexdigest()[:8]


def boot_id() -> str:
    """Distinguishes hosts, and the starts of each. Empty if it is not available."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def make_and_hold(folder: Path) -> int:
    """Make the folder, unless it exists, and `hold` it. Raises UserError if another user can write there."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process removed it as abandoned before it was locked
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise UserError(f"{folder} is not a private folder of this user; remove it, or set TMPDIR to another folder")
            lock = hold(folder)
            if folder.exists():
                return lock
            os.close(lock)


def hold(folder: Path) -> int:
    """Keep other processes from removing the folder as long as this one runs. See `remove_abandoned`."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock
