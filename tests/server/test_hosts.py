"""A server on two hosts, which are network namespaces of this machine: its answers, and how it ends when a host leaves, is late or
disagrees. The parts of `ranks/hosts.py` and `launch.py` that need no network follow."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

import launch
from comms import Local
from engine.llm import LLM
from engine.protocol import SamplingParams
from errors import UserError
from launch import MEET_SECONDS, PRESENT_SECONDS, SeveralHosts
from ranks import hosts
from ranks.hosts import MOST_STRANGERS, accept_ranks, greeting
from ranks.meeting import BYTES, MeetingServer, MeetingStore, connect, read_secret
from scripts.lib.process_tree import process_tree
from server.launch import shared_facts
from server.settings import Settings
from tests import MODELS
from tests.support.command_line import HYBRID
from tests.support.hub import Hub
from tests.support.namespaces import SECRET, TwoHosts
from tests.support.ports import free_port
from tests.support.quick_start import Popen
from tests.support.server_process import rank_pids, runs, wait_until
from tp import World

PROMPT = "Once upon a time"
SERVER = ("-m", "server", "--device", "cpu", "--model", HYBRID)
LONG = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "n": 8}
END_SECONDS = SECONDS = 280  # for what takes a few on an idle machine; less than gloo's and the store's ten minutes


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


class Server:
    """A server on both hosts, which has become healthy. A context manager that kills what is left of it."""

    def __init__(self, two_hosts: TwoHosts, kind: str, *flags: object) -> None:
        port, http = free_port(), free_port()
        self._hosts, self.url = two_hosts, f"http://127.0.0.1:{http}"
        self.processes = [
            two_hosts.start(i, *launcher(kind, two_hosts, i, port), *SERVER, "--port", http, *flags) for i in range(2)
        ]

    def __enter__(self) -> "Server":
        self._hosts.on(0, lambda: wait_until(self._healthy, 300, "a healthy server"))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()

    def _healthy(self) -> bool:
        assert all(process.poll() is None for process in self.processes), ended(self.processes)
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def metric(self, name: str) -> float:
        page = self._hosts.on(0, lambda: httpx.get(f"{self.url}/metrics", timeout=END_SECONDS).text)
        return float(re.search(rf"^rung:{name}{{.*}} (\S+)$", page, re.MULTILINE)[1])

    def complete(self, **body: Any) -> dict[str, Any]:
        """The answer to a completion that a client on the first host asks for."""

        def post() -> httpx.Response:
            return httpx.post(
                f"{self.url}/v1/completions", json={"prompt": PROMPT, "temperature": 0, **body}, timeout=END_SECONDS
            )

        return dict(self._hosts.on(0, post).json())


@pytest.mark.parametrize("place", [0])
def test_two_hosts_answer_as_one_and_end_when_the_cable_is_cut(
    place: int, two_hosts: TwoHosts, in_turn: Callable[..., str]
) -> None:
    def cut() -> str:
        """The events of a stream during which the cable is cut."""
        events = ""
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=END_SECONDS
        ) as response:
            for text in response.iter_text():
                if not events:
                    two_hosts.plug("down")
                events += text
        return events

    with Server(two_hosts, in_turn(["launch.py", "torchrun"], place)) as server:
        one_host = LLM(HYBRID, world=World(0, 1, torch.device("cpu"), Local()))
        (expected,) = one_host.generate([PROMPT], SamplingParams(max_tokens=30, temperature=0))
        assert server.complete(max_tokens=30)["choices"][0]["text"] == expected.text
        try:
            assert '"error"' in two_hosts.on(0, cut)
            for (code, err), other in zip(ended(server.processes), reversed(two_hosts.addresses), strict=True):
                assert (
                    code != 0 and len(re.findall(rf"error: host \S+ \({other}\) has left: nothing has come from it", err)) == 1
                ), err
        finally:
            two_hosts.plug("up")


@pytest.mark.parametrize(("victim", "place"), [("rank", 0), ("launcher", 1)])
def test_two_hosts_end_within_seconds_when_one_is_killed(
    victim: str, place: int, two_hosts: TwoHosts, in_turn: Callable[..., str]
) -> None:
    """The second host's rank or launcher is killed while it computes; the first one says so, and nothing is left of either."""
    with Server(two_hosts, in_turn(["launch.py", "torchrun"], place)) as server, ThreadPoolExecutor(1) as pool:
        everything = [pid for process in server.processes for pid in process_tree(process.pid)]
        answer = pool.submit(server.complete, **LONG)
        wait_until(lambda: server.metric("num_requests_running"), END_SECONDS, "the request runs")
        second = server.processes[1].pid
        os.kill(rank_pids(second)[0] if victim == "rank" else second, signal.SIGKILL)
        (first_code, said), (code, _) = ended(server.processes)
        assert first_code == 1 and code != 0
        assert len(re.findall(r"error: host \S+ \(10\.77\.0\.2\) has left: a rank there ended or was killed", said)) == 1, said
        assert answer.result()["error"]["code"] == "engine_failed"
        wait_until(lambda: not any(map(runs, everything)), SECONDS, "no process is left")


def test_sigterm_at_the_second_host_drains(two_hosts: TwoHosts) -> None:
    short = LONG | {"max_tokens": 50, "n": 2}
    with Server(two_hosts, "launch.py", "--drain-timeout", 2 * END_SECONDS) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, **short)
        wait_until(lambda: server.metric("num_requests_running"), END_SECONDS, "the request runs")
        server.processes[1].send_signal(signal.SIGTERM)
        assert answer.result()["usage"]["completion_tokens"] == 100
        assert [code for code, _ in ended(server.processes)] == [0, 0]


def test_a_host_that_waits_for_another_one_says_so_and_ends_in_time(two_hosts: TwoHosts) -> None:
    """With torchrun after its join_timeout, with launch.py by Ctrl-C; both wait for the other host longer than 5 s."""
    ports, began = [free_port() for _ in range(3)], time.monotonic()
    waiting = [two_hosts.start(i, *launcher("launch.py", two_hosts, i, ports[i]), *SERVER) for i in range(2)]
    command = [*launcher("torchrun", two_hosts, 0, ports[2]), *SERVER]
    command[command.index("--rdzv-conf=is_host=1")] = "--rdzv-conf=is_host=1,join_timeout=5"
    ((code, said),) = ended([two_hosts.start(0, *command)])
    assert code != 0 and "RendezvousTimeoutError" in said and 5 < time.monotonic() - began < SECONDS
    for i, process in enumerate(waiting):
        assert process.stderr
        line = next(line for line in process.stderr if line.startswith("1 of 2 hosts have come"))
        assert "waiting for" in line and f"10.77.0.1:{ports[i]}" in line
        process.send_signal(signal.SIGINT)
    assert [code for code, _ in ended(waiting)] == [130, 130]


def test_the_host_that_is_met_is_the_first_one(two_hosts: TwoHosts) -> None:
    """Also if another one comes first, and the others get the further numbers."""
    port, met = free_port(), list[tuple[int, SeveralHosts]]()

    class Slow(SeveralHosts):
        """Others can reach its store before it goes on."""

        def _serve(self) -> Any:
            store = super()._serve()
            time.sleep(0.5)
            return store

    def come(host: int) -> None:
        one = Slow(3, f"10.77.0.1:{port}", SECRET)
        met.append((host, one))  # the first one's store must outlive the meeting
        one.meet()

    others = [threading.Thread(target=two_hosts.on, args=(1, lambda: come(1))) for _ in range(2)]
    for other in others:
        other.start()
    time.sleep(0.5)
    two_hosts.on(0, lambda: come(0))
    for other in others:
        other.join()
    assert sorted((host, one.next_rendezvous().rank) for host, one in met) == [(0, 0), (1, 1), (1, 2)]


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


@pytest.mark.long
def test_a_host_that_fetches_its_model_is_waited_for(two_hosts: TwoHosts, tmp_path: Path) -> None:
    """The other one has it, and says that it waits. Both end with one line if the model cannot be had."""
    site = two_hosts.on(1, Hub)
    site.add("org/tiny", MODELS / "tiny-hybrid")
    site.open.clear()
    cached = tmp_path / "0" / "models--org--tiny"
    snapshot = cached / "snapshots" / site.commit("org/tiny")
    shutil.copytree(MODELS / "tiny-hybrid", snapshot)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(snapshot.name)
    port, http = free_port(), free_port()
    server = ("-m", "server", "--device", "cpu", "--model", "org/tiny", "--port", http)

    def start() -> list[Popen]:
        away = {"HF_HUB_OFFLINE": 1}, {"HF_HUB_OFFLINE": 0, "HF_ENDPOINT": site.url}
        return [
            two_hosts.start(i, *launcher("launch.py", two_hosts, i, port), *server, HF_HUB_CACHE=tmp_path / f"{i}", **more)
            for i, more in enumerate(away)
        ]

    processes = start()
    assert processes[0].stderr is not None
    lines = iter(processes[0].stderr.readline, "")
    assert any("waiting for another host, which fetches files" in line for line in lines)
    site.open.set()
    url = f"http://127.0.0.1:{http}/v1/completions"
    wait_until(lambda: any("Serving org/tiny" in line for line in lines), SECONDS, "a server")
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4}
    answer = two_hosts.on(0, lambda: httpx.post(url, json=body, timeout=END_SECONDS))
    assert answer.json()["model"] == "org/tiny"
    processes[1].terminate()
    assert [code for code, _ in ended(processes)] == [0, 0]
    shutil.rmtree(tmp_path / "1")
    site.gated.add("org/tiny")
    for code, said in ended(start()):
        assert code == 2 and "org/tiny is gated" in said
    site.close()


@pytest.mark.parametrize("signs", [0, 1, 20])
def test_ranks_wait_as_long_as_another_one_fetches(
    signs: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The time for it to come begins again with each sign that it fetches."""
    now, whole, came_late = 0, HashStore(), random.random() < 0.5
    store = PrefixStore("rung/0/0", whole)
    store.set("rank 0", "0")

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 100
        if now <= 100 * signs:
            whole.add(hosts.AWAITED, 1)
        elif not came_late:
            store.set("rank 1", "1")

    monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    if came_late:
        with pytest.raises(UserError, match=r"^1 of 2 ranks came within 120 s; see the terminals of the other hosts$"):
            hosts._gather(store, 2, whole)
        assert now == 100 * signs + 200
    else:
        assert hosts._gather(store, 2, whole) == [0, 1]
    assert capfd.readouterr().err.count("waiting for another host, which fetches files") == (signs > 0)


def test_a_rank_asks_for_time_while_it_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the launchers' store, and not at all where nothing answers."""
    asking = lambda: any(thread.name == "awaited" for thread in threading.enumerate())  # noqa: E731
    failed = list[Any]()
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(hosts, "ASK_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        MeetingServer(listener, SECRET)
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port)), ("RUNG_MEET_SECRET", SECRET)):
            monkeypatch.setenv(name, value)
        store = connect("127.0.0.1", port, SECRET, 1)
        with hosts.awaited():
            wait_until(lambda: store.add(hosts.AWAITED, 0) > 2, SECONDS, "signs")
        wait_until(lambda: not asking(), SECONDS, "the end of signs")
    monkeypatch.setenv("MASTER_PORT", "1")
    with hosts.awaited():
        wait_until(lambda: not asking(), SECONDS, "the end of signs")
    assert not failed


def test_a_wrong_interface_or_address_is_named(monkeypatch: pytest.MonkeyPatch, two_hosts: TwoHosts) -> None:
    first, second = two_hosts.addresses
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # so that what is set here ends with the test
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")

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
        SeveralHosts(2, meet, SECRET)


class Another(SeveralHosts):
    """A host that has another address than the one that is met."""

    def _serve(self) -> None:
        return None


def clock_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the launcher's clock on by so many seconds, once it has looked again at what has happened until then."""
    skipped, looked = [0.0], threading.Semaphore(0)

    def sleep(seconds: float) -> None:
        looked.release()
        time.sleep(seconds)

    def skip(seconds: float) -> None:
        while looked.acquire(blocking=False):
            pass
        for _ in range(2):
            looked.acquire(timeout=1)  # it sleeps no more if it has ended
        skipped.append(seconds)

    monkeypatch.setattr(launch, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: time.monotonic() + sum(skipped)))
    return skip


def store_at(port: int, secret: str = SECRET) -> MeetingStore:
    wait_until(lambda: not is_free(port), SECONDS, "the store")
    return connect("127.0.0.1", port, secret, SECONDS)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_who_does_not_know_the_secret_is_refused_and_the_others_meet(capfd: pytest.CaptureFixture[str]) -> None:
    """A host with another secret ends with one sentence; whoever says nothing, or sends what a TCPStore or pickle would read, keeps
    nobody out."""
    port = free_port()
    first = SeveralHosts(2, f"127.0.0.1:{port}", SECRET)
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        meeting = pool.submit(first.meet)
        store = store_at(port)
        for said in (b"", b"\x00\xce\xf7\x85\x3c", random.randbytes(BYTES) * 2, b"\xff" * 1000, bytes(2 * BYTES)):
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(said)
        for _ in range(2):
            with pytest.raises(UserError, match="has another secret than this host"):
                Another(2, f"127.0.0.1:{port}", SECRET[::-1]).meet()
        assert not meeting.done() and store.add("others", 0) == 0
        coming = pool.submit(Another(2, f"127.0.0.1:{port}", SECRET).meet)
        for one in (meeting, coming):
            one.result(SECONDS)
    assert capfd.readouterr().err.count("127.0.0.1 was refused: its secret is another one") == 1


def test_strangers_at_the_watch_keep_no_rank_waiting() -> None:
    """Silent ones, more than are kept, and such as say something else: each rank is found, once."""
    token = "a" * 32

    def read(connection: socket.socket) -> bytes:
        connection.settimeout(SECONDS)
        with contextlib.suppress(ConnectionResetError):
            return connection.recv(10)
        return b""

    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server, contextlib.ExitStack() as stack:

        def say(words: bytes) -> socket.socket:
            connection = stack.enter_context(socket.create_connection(server.getsockname()))
            connection.sendall(words)
            return connection

        silent = [say(b"") for _ in range(2 * MOST_STRANGERS)]
        wrong = [say(words) for words in (b"GET / HTTP/1.1\r\n\r\n", greeting("b" * 32, 1), greeting(token, 3), b"\xff" * 500)]
        twice, once = [say(greeting(token, 2)) for _ in range(2)], say(greeting(token, 1))
        found = accept_ranks(server, token, 3, 60.0)
        for connection in found.values():
            connection.sendall(b"found")
            connection.close()
        heard = [read(other) for other in (*silent, *wrong)]
        assert found.keys() == {1, 2} and set(heard) == {b""}
        assert read(once) == b"found" and sorted(map(read, twice)) == [b"", b"found"]
        assert accept_ranks(server, token, 2, 0.05) == {}


def test_a_store_that_does_not_know_the_secret_is_refused() -> None:
    """It has the host's address, and answers as the store would whatever it is told."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(random.randbytes(BYTES))
                connection.recv(2 * BYTES, socket.MSG_WAITALL)
                connection.sendall(random.randbytes(BYTES))

        pretending = pool.submit(pretend)
        with pytest.raises(UserError, match="has another secret than this host"):
            connect(*listener.getsockname(), SECRET, SECONDS)
        pretending.result(SECONDS)


def test_a_secret_that_others_know_or_guess_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNG_MEET_SECRET", "")
    file = tmp_path / "secret"
    with pytest.raises(UserError, match="cannot be read"):
        read_secret(str(file))
    for path, text, mode, words in (
        (None, "", 0o600, "several hosts need a secret"),
        (str(file), "x" * 15 + "\n", 0o600, "at least 16 characters"),
        (str(file), "x" * 16, 0o640, "other users may read"),
    ):
        file.write_text(text)
        file.chmod(mode)
        with pytest.raises(UserError, match=words):
            read_secret(path)
    file.chmod(0o600)
    assert read_secret(str(file)) == os.environ["RUNG_MEET_SECRET"] == read_secret(None) == "x" * 16


def test_the_store_does_what_others_of_torch_do(seed: int) -> None:
    """Also behind a PrefixStore, as C++ uses it: compared with a store in memory, by two clients in turns."""
    rng, listener = random.Random(seed), socket.create_server(("127.0.0.1", 0))
    server = MeetingServer(listener, SECRET)
    clients = [connect(*listener.getsockname(), SECRET, 0.01) for _ in range(2)]
    here, words = HashStore(), ["", "1", "22", "ü"]
    here.set_timeout(timedelta(seconds=0.01))

    def said(store: Any, call: str, *args: Any) -> Any:
        try:
            return getattr(store, call)(*args)
        except torch.distributed.DistError as e:
            return torch.distributed.DistError in type(e).__mro__

    for _ in range(300):
        key, other = rng.choices("abcdef", k=2)
        calls: list[tuple[Any, ...]] = [
            ("set", key, rng.choice(words)),
            ("get", key),
            ("check", [key, other]),
            ("wait", [key, other], timedelta(seconds=0.01)),
            ("add", f"number {key}", rng.randrange(-3, 9)),
            ("compare_set", key, rng.choice(words), rng.choice(words)),
            ("delete_key", key),
            ("num_keys",),
            ("multi_get", [key, other]),
            ("multi_set", [key, other], rng.choices(words, k=2)),
        ]
        call, args = (picked := rng.choice(calls))[0], picked[1:]
        ours, theirs = rng.choice(clients), here
        if rng.random() < 0.5 and not call.startswith("multi"):
            ours, theirs = PrefixStore("p", ours), PrefixStore("p", here)
        assert said(ours, call, *args) == said(theirs, call, *args), (picked, seed)
    assert server


def leave_at_once(port: int, name: str | None) -> None:
    """Be a host that is killed while it waits. name: None if it does not get as far as telling it."""
    store = store_at(port)
    number = store.add("others", 1)
    if name:
        store.set(f"host {number}", name)


def test_a_host_that_left_while_others_came_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new start of it counts as another host, so that the number of hosts is reached without all of them."""
    port, skip = free_port(), clock_of(monkeypatch)
    first, again = (kind(3, f"127.0.0.1:{port}", SECRET) for kind in (SeveralHosts, Another))
    with ThreadPoolExecutor(2) as pool:
        meeting = pool.submit(first.meet)
        leave_at_once(port, "oslo")
        coming = pool.submit(again.meet)
        store_at(port).wait(["present 0", "present 2"])
        skip(PRESENT_SECONDS)
        with pytest.raises(UserError, match=r"1 of 3 hosts left while others came \(oslo\)"):
            meeting.result(SECONDS)
        with pytest.raises(UserError):
            coming.result(SECONDS)


@pytest.mark.parametrize(("hosts_wanted", "words"), [(3, "2 of 3 hosts came"), (2, "1 of 2 hosts left")])
def test_the_name_of_a_host_that_left_is_not_waited_for(hosts_wanted: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port, skip = free_port(), clock_of(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(SeveralHosts(hosts_wanted, f"127.0.0.1:{port}", SECRET).meet)
        leave_at_once(port, None)
        while not meeting.done():
            skip(MEET_SECONDS)
        with pytest.raises(UserError, match=f"{words}.*one without a name"):
            meeting.result(SECONDS)


def test_hosts_with_other_draft_heads_disagree(tmp_path: Path, seed: int) -> None:
    """Also about the head that `auto` finds on one host alone, and about weights that are pickled."""

    def said(speculate: str) -> str:
        facts = [shared_facts(Settings(model=str(folder), speculate=speculate.format(folder))) for folder in folders]
        records = [
            {"host": name, "address": "10.0.0.1", "facts": one, "error": None} for name, one in zip("ab", facts, strict=True)
        ]
        try:
            hosts.check(records)
        except UserError as e:
            return str(e)
        return "they agree"

    folders, weights = [tmp_path / "a", tmp_path / "b"], random.randbytes(100)
    for folder in folders:
        (folder / "draft").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "draft" / "pytorch_model.bin").write_bytes(weights)
    assert [said(speculate) for speculate in ("", "ngram", "auto", "{}/draft")] == ["they agree"] * 4
    (folders[1] / "draft" / "pytorch_model.bin").write_bytes(weights[::-1])
    assert [said(speculate) for speculate in ("", "ngram")] == ["they agree"] * 2
    assert all("disagree: --speculate is" in said(speculate) for speculate in ("auto", "{}/draft"))
    shutil.rmtree(folders[1] / "draft")
    assert re.search("disagree: --speculate is [0-9a-f]+ on a and ngram on b", said("auto")) and said("") == "they agree"


@pytest.mark.parametrize(
    ("model", "changed", "other"),
    [
        ("", "model.pth", "README.md"),
        ("model.pth", "model.pth", "README.md"),
        ("model.pth", "config.json", "README.md"),
        ("weights.pt", "weights.pt", "README.md"),
        ("config.json", "config.json", "model.pth"),
    ],
)
def test_a_checkpoint_is_known_by_the_files_that_are_read(
    model: str, changed: str, other: str, tmp_path: Path, seed: int
) -> None:
    """Also if --model names one of them."""
    for name in ("model.pth", "weights.pt", "config.json"):
        (tmp_path / name).write_bytes(random.randbytes(50))
    before = hosts.model_fact(str(tmp_path / model))
    (tmp_path / other).write_bytes(random.randbytes(50))
    assert hosts.model_fact(str(tmp_path / model)) == before
    (tmp_path / changed).write_bytes(random.randbytes(50))
    assert hosts.model_fact(str(tmp_path / model)) != before


def test_a_loopback_address_of_one_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "host-a")
    records = [{"host": name, "address": a, "facts": {}, "error": None} for name, a in (("a", "127.0.1.1"), ("b", "10.0.0.2"))]
    with pytest.raises(UserError, match="on a the name host-a is a loopback address"):
        hosts.check(records)
