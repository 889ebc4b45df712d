"""What reads the output of a replica's server."""

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest

from deploy.server_log import ServerLog
from tests.support.server_process import wait_until

END_SECONDS = 60.0


def printing(program: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def full_disk() -> Iterator[TextIO]:
    file = open("/dev/full", "w", buffering=1)  # noqa: SIM115  # its close fails, too
    yield file
    with contextlib.suppress(OSError):
        file.close()


def test_a_full_disk_does_not_block_the_server(full_disk: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", full_disk)
    with printing("for i in range(100_000): print('line', i)") as server:  # 1 MB, of which a pipe holds 64 KiB
        log = ServerLog(server.stdout or ())
        assert server.wait(END_SECONDS) == 0
        wait_until(lambda: log.last == "line 99999", END_SECONDS, "all lines are read")


def test_lines_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    with printing("print('first'); print('last'); print()") as server:
        log = ServerLog(server.stdout or ())
        wait_until(lambda: written.getvalue() == "first\nlast\n\n", END_SECONDS, "all lines are passed on")
    assert log.last == "last"
