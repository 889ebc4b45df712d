"""What processes that were killed must not leave behind: other processes, listening ports, files in /dev/shm, folders in the
temporary one, and GPU memory."""

import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ranks.processes import PREFIX, RANK_NAME
from scripts.lib.process_tree import process_tree

SHARED = Path("/dev/shm")
OURS = ("rung-", "torch_", "nccl-", "cuda.shm.")  # how the files of our processes begin; other programs have theirs beside them
LISTENING = "0A"  # a state in /proc/net/tcp
SECOND_LOOK = 0.5  # seconds; any program may have made a file a moment ago that it will open, or remove
SPARE = 256  # MiB of a GPU by which two looks at it may differ


@dataclass
class Watch:
    """Compares a server's processes, after some were killed, with what there was before. root: its first process, or that of the
    next server if all were killed. idle: see `gpu_memory`, before the server started."""

    root: int
    idle: list[int] = field(default_factory=list)
    least: list[int] = field(default_factory=list)  # MiB by GPU since `begin`, at the time with the least

    def begin(self) -> None:
        """Call before a kill."""
        self.least = []
        self._processes, self._files = set(process_tree(self.root)), files()
        self._ports, self._folders = ports(self._processes), folders(self._processes)

    def look(self) -> None:
        """Call again and again while there are no ranks."""
        now = gpu_memory(self.root)
        self.least = list(map(min, self.least, now)) if self.least else now

    def left(self) -> list[str]:
        """What is left of the dead. Call after new processes have taken their place."""
        now = set(process_tree(self.root))
        found = [f"process {pid} ({name_of(pid)}) still runs" for pid in self._processes - now if name_of(pid)]
        if (more := ports(now)) > self._ports:
            found.append(f"{more} ports are open instead of {self._ports}")
        if new := files() - self._files:
            time.sleep(SECOND_LOOK)
        if new := new & files():
            found.append(f"files of nobody in {SHARED}: {', '.join(sorted(new))}")
        if old := [path for path in sorted(self._folders - folders(now)) if Path(path).exists()]:
            found.append(f"folders of nobody: {', '.join(old)}")
        ranks_ended = not any(name_of(pid).startswith(RANK_NAME) for pid in self._processes & now)
        for gpu, (before, least) in enumerate(zip(self.idle, self.least, strict=False)):
            if ranks_ended and least > before + SPARE:
                found.append(f"without ranks, GPU {gpu} had {least} MiB in use instead of {before}")
        return found


def name_of(pid: int) -> str:
    """A process's name as ps shows it; empty if it has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text()
        if fields.rpartition(")")[2].split()[0] not in "ZX":
            return fields.partition("(")[2].rpartition(")")[0]
    return ""


def ports(pids: set[int]) -> int:
    """The number of TCP sockets on which these processes listen."""
    listening = set[str]()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            listening |= {f"socket:[{row[9]}]" for row in rows if row[3] == LISTENING}
    return len(listening & {link for pid in pids for link in _open_by(pid)})


def files() -> set[str]:
    """The files of /dev/shm that no process has open or mapped, as far as this user may see."""
    found = {str(path) for path in SHARED.glob("*") if path.name.startswith(OURS)}
    for pid in filter(str.isdecimal, os.listdir("/proc")) if found else ():
        found -= set(_open_by(int(pid)))
        with suppress(OSError):
            found -= {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return found


def folders(pids: set[int]) -> set[str]:
    """The folders in the temporary one that these processes hold a lock on, as `processes.run_folder` does."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
    held = {int(fields[5].rpartition(":")[2]) for fields in locks if int(fields[4]) in pids}
    found = set[str]()
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it was just removed
            if path.stat().st_ino in held:
                found.add(str(path))
    return found


def _open_by(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            found.append(os.readlink(link))
    return found


def gpu_memory(root: int | None = None) -> list[int]:
    """MiB in use by GPU, apart from what living processes outside the tree of `root` use; empty without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    tree = set(process_tree(root)) if root else set[int]()
    others = [
        (gpu, int(used)) for gpu, pid, used in _nvidia_smi("compute-apps=gpu_uuid,pid,used_memory") if int(pid) not in tree
    ]
    whole = [(gpu, int(used)) for gpu, used in _nvidia_smi("gpu=uuid,memory.used")]
    return [used - sum(other for at, other in others if at == gpu) for gpu, used in whole]


def _nvidia_smi(query: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split(", ") for line in lines]
