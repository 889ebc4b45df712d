"""Two network namespaces of this machine with a cable between them, as two hosts. Needs root and the programs of iproute2.

`python -m tests.support.network NAME PROGRAM…` runs a Python program, a script or `-m MODULE`, in a namespace.
"""

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from errors import UserError

CLONE_NEWNET = 0x40000000  # linux/sched.h
DEVICE = "cable0"  # the name of the cable's end in each namespace


class TwoHosts:
    """The namespaces, with the addresses 10.77.0.1 and 10.77.0.2. A context manager that removes them."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self) -> None:
        """Raises UserError where there are no namespaces."""
        self.names = tuple(f"rung-{os.getpid()}-{host}" for host in range(2))
        if os.geteuid() or not shutil.which("ip"):
            raise UserError("network namespaces need root and the program ip (iproute2)")
        for name in self.names:
            if (done := ip("netns", "add", name)).returncode:
                raise UserError(f"no network namespaces here: {done.stderr.strip()}")
        steps = [f"-n {self.names[0]} link add {DEVICE} type veth peer name {DEVICE} netns {self.names[1]}"]
        for name, address in zip(self.names, self.addresses, strict=True):
            steps += [
                f"-n {name} addr add {address}/24 dev {DEVICE}",
                f"-n {name} link set {DEVICE} up",
                f"-n {name} link set lo up",
            ]
        for step in steps:
            if (done := ip(*step.split())).returncode:
                self.__exit__()
                raise UserError(f"no cable between network namespaces here: {done.stderr.strip()}")

    def __enter__(self) -> "TwoHosts":
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            ip("netns", "del", name)

    def slow_down(self, shaping: str) -> None:
        """Send at both ends as `tc qdisc` says, such as `tbf rate 200mbit burst 128kb latency 100ms`. Raises UserError."""
        if not shutil.which("tc"):
            raise UserError("slowing a cable down needs the program tc (iproute2), usually in /usr/sbin")
        for name in self.names:
            done = subprocess.run(
                ["tc", "-n", name, "qdisc", "replace", "dev", DEVICE, "root", *shaping.split()], capture_output=True, text=True
            )
            if done.returncode:
                raise UserError(f"this machine cannot slow a cable down by {shaping}: {done.stderr.strip()}")

    def command(self, host: int, *program: object) -> list[str]:
        """The command line that runs a Python program on a host."""
        return [sys.executable, "-m", "tests.support.network", self.names[host], *map(str, program)]


def ip(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["ip", *words], capture_output=True, text=True)


def enter(name: str) -> None:
    """Move the calling thread to a namespace."""
    with Path("/run/netns", name).open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0


if __name__ == "__main__":
    enter(sys.argv[1])
    sys.argv[:2] = []
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
