"""A server on two hosts, which are network namespaces of this machine: its answers, and how it ends when a host leaves, is late or
disagrees. The parts of `hosts.py` and `launch.py` that need no network follow."""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

import hosts
from comm import Local
from engine.llm import LLM
from engine.protocol import SamplingParams
from errors import UserError
from launch import SeveralHosts
from tests.support.command_line import HYBRID
from tests.support.namespaces import TwoHosts
from tests.support.ports import free_port
from tests.support.quick_start import Popen
from tests.support.server_process import wait_until
from tp import World

PROMPT = "Once upon a time"
SERVER = ("-m", "server", "--device", "cpu", "--model", HYBRID)
END_SECONDS = 120


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as namespaces:
        yield namespaces


def launcher(kind: str, two_hosts: TwoHosts, host: int, port: int, ranks: int = 1) -> tuple[object, ...]:
    meet = f"{two_hosts.addresses[0]}:{port}"
    if kind == "launch.py":
        return "launch.py", "--hosts", 2, "--meet", meet, "--ranks", ranks
    way = ("--rdzv-backend=c10d", f"--rdzv-endpoint={meet}", f"--rdzv-conf=is_host={int(host == 0)}")
    here = ("--nnodes=2", f"--nproc_per_node={ranks}", f"--local-addr={two_hosts.addresses[host]}")
    return "-m", "torch.distributed.run", *here, *way


def ended(processes: list[Popen]) -> list[tuple[int, str]]:
    """The exit codes of the processes, and what they wrote to stderr."""
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda process: process.communicate(timeout=END_SECONDS)[1], processes))
    return [(process.returncode, err) for process, err in zip(processes, errors, strict=True)]


@pytest.mark.parametrize("place", [0])
def test_two_hosts_answer_as_one_and_end_when_the_cable_is_cut(
    place: int, two_hosts: TwoHosts, in_turn: Callable[..., str]
) -> None:
    kind, port = in_turn(["launch.py", "torchrun"], place), free_port()
    url = f"http://127.0.0.1:{(http := free_port())}"
    processes = [two_hosts.start(i, *launcher(kind, two_hosts, i, port), *SERVER, "--port", http) for i in range(2)]

    def healthy() -> bool:
        assert all(process.poll() is None for process in processes), ended(processes)
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def ask() -> dict[str, Any]:
        body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
        return dict(httpx.post(f"{url}/v1/completions", json=body, timeout=END_SECONDS).json()["choices"][0])

    def cut() -> str:
        """The events of a stream during which the cable is cut."""
        events = ""
        body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "n": 16, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=END_SECONDS) as response:
            for text in response.iter_text():
                if not events:
                    two_hosts.plug("down")
                events += text
        return events

    try:
        two_hosts.on(0, lambda: wait_until(healthy, 300, "a healthy server"))
        one_host = LLM(HYBRID, world=World(0, 1, torch.device("cpu"), Local()))
        (expected,) = one_host.generate([PROMPT], SamplingParams(max_tokens=30, temperature=0))
        assert two_hosts.on(0, ask)["text"] == expected.text
        assert '"error"' in two_hosts.on(0, cut)
        for (code, err), other in zip(ended(processes), reversed(two_hosts.addresses), strict=True):
            assert (
                code != 0 and len(re.findall(rf"error: host \S+ \({other}\) has left: nothing has come from it", err)) == 1
            ), err
    finally:
        two_hosts.plug("up")
        for process in processes:
            process.kill()


def test_hosts_that_disagree_or_do_not_come_say_so(two_hosts: TwoHosts) -> None:
    port, alone = free_port(), [free_port(), free_port()]
    both = [
        two_hosts.start(i, *launcher("launch.py", two_hosts, i, port), *SERVER, "--max-num-seqs", 64 >> i) for i in range(2)
    ]
    late = [
        two_hosts.start(i, *launcher("launch.py", two_hosts, i, alone[i]), *SERVER, RUNG_MEET_SECONDS=0.5) for i in range(2)
    ]
    for code, err in ended(both):
        assert (code, err.count("error: ")) == (2, 1), err
        assert re.search(r"--max-num-seqs is 64 on \S+ \(10\.77\.0\.1\) and 32 on \S+ \(10\.77\.0\.2\)", err)
    for code, err in ended(late):
        assert code == 2 and "1 of 2 hosts came" in err, err


def test_a_wrong_interface_or_address_is_named(monkeypatch: pytest.MonkeyPatch, two_hosts: TwoHosts) -> None:
    first, second = two_hosts.addresses
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)

    def interface(given: str, master: str = first) -> str:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
        try:
            return two_hosts.on(1, lambda: attempt(master))
        finally:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)

    def attempt(master: str) -> str:
        try:
            return f"{hosts.choose_interface(master)} {os.environ['GLOO_SOCKET_IFNAME']} {os.environ['NCCL_SOCKET_IFNAME']}"
        except UserError as e:
            return str(e)

    assert interface("") == f"{second} cable0 =cable0"
    assert "no such interface" in interface("eth7") and "cable0" in interface("eth7")
    assert "no other host can reach" in interface("lo")
    assert "has no way to 192.0.2.1" in interface("", "192.0.2.1")


@pytest.mark.parametrize("meet", ["10.0.0.1", ":29500", "10.0.0.1:0", "10.0.0.1:x", "10.0.0.1:65536"])
def test_a_wrong_meeting_place_is_refused(meet: str) -> None:
    with pytest.raises(UserError, match=r"--meet is '.*'; give the address"):
        SeveralHosts(2, meet)


def test_a_loopback_address_of_one_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "host-a")
    records = [{"host": name, "address": a, "facts": {}, "error": None} for name, a in (("a", "127.0.1.1"), ("b", "10.0.0.2"))]
    with pytest.raises(UserError, match="on a the name host-a is a loopback address"):
        hosts.check(records)
