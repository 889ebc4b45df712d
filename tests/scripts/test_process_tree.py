import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib.process_tree import end, process_tree


def test_a_thread_that_ends_meanwhile_hides_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    glob = Path.glob

    def with_ended_one(folder: Path, pattern: str) -> Iterator[Path]:
        yield folder / "0" / "children"
        yield from glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", with_ended_one)
    with subprocess.Popen(["sleep", "60"]) as child:
        tree = process_tree(os.getpid())
        child.kill()
    assert tree[0] == os.getpid() and child.pid in tree


IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
# by `os.write`, because the signal may come while `print` has not returned yet
SAYS_SO = "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(os.write(1, b'told\\n')))\n"
STAYS = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("parent", "child", "seconds", "said"),
    [("", IGNORES, 0.5, ""), (IGNORES, IGNORES, 0.5, ""), ("", SAYS_SO, 300, "told\n")],
    ids=["left behind", "both ignore it", "told to end"],
)
def test_the_end_of_a_process_is_that_of_all_it_started(parent: str, child: str, seconds: float, said: str) -> None:
    """Its output ends when no process has it open any more. The child has a session of its own, as a rank has."""
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child + STAYS!r}], start_new_session=True)"
    with subprocess.Popen([sys.executable, "-c", parent + start], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        end(process, seconds=seconds)
        assert process.returncode is not None and process.communicate(timeout=60) == (said, None)
        end(process)  # does nothing to a process that has ended
