"""Two network namespaces as two hosts, for tests: skipped where there are none."""

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from errors import UserError
from tests import ROOT
from tests.support import network, quick_start
from tests.support.command_line import environment

SECRET = "a secret of the tests"


class TwoHosts(network.TwoHosts):
    def __init__(self) -> None:
        try:
            super().__init__()
        except UserError as e:
            pytest.skip(str(e))

    def slow_down(self, shaping: str) -> None:
        try:
            super().slow_down(shaping)
        except UserError as e:
            pytest.skip(str(e))

    def plug(self, state: str) -> None:
        """Set the cable `up` or `down` at the second host."""
        assert not network.ip("-n", self.names[1], "link", "set", network.DEVICE, state).returncode

    def on(self, host: int, function: Callable[[], Any]) -> Any:
        """`function()` in a thread of this process that is in a host's namespace."""
        with ThreadPoolExecutor(1, initializer=lambda: network.enter(self.names[host])) as thread:
            return thread.submit(function).result()

    def start(self, host: int, *program: object, **environ: object) -> quick_start.Popen:
        """Start a Python program on a host."""
        own = {"NCCL_HOSTID": f"host-{host}", "RUNG_MEET_SECRET": SECRET}
        env = environment(GLOO_SOCKET_IFNAME="", OMP_NUM_THREADS=1, **own | environ)
        return quick_start.Popen(
            self.command(host, *program), cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
