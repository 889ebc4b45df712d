"""The launcher: listening sockets, the end of all processes after one has ended, signals, exit codes and standard input."""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import launch as launcher
from errors import UserError
from ranks import processes
from ranks.ports import check_port
from ranks.processes import folder_name, on_ranks, shared_folder
from tests import ROOT
from tests.support import quick_start
from tests.support.command_line import HYBRID, command, environment, launch
from tests.support.gpus import torchrun
from tests.support.server_process import START_SECONDS, ServerProcess, children, command_line, runs, wait_until
from tp import init_world

GONE_SECONDS = 300.0  # timeout for the end of all processes after one was killed; a few seconds on an idle machine
LISTENING = "0A"
LOOPBACK = ("127.", "::1", "::ffff:127.")
STORY = ("--model", HYBRID, "--prompt", "Once upon a time", "--ignore-eos")


def tree(pid: int) -> list[int]:
    """The ids of a process and all its descendants."""
    return [pid, *(below for child in children(pid) for below in tree(child))]


def address(word: str) -> str:
    """Decode an address of /proc/net/tcp or tcp6: hexadecimal 32-bit words in this machine's byte order."""
    raw = b"".join(bytes.fromhex(word[i : i + 8])[::-1] for i in range(0, len(word), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Address and port of each TCP socket on which these processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # it was closed
                    target = os.readlink(link)
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                host, _, port = fields[1].partition(":")
                found.add((address(host), int(port, 16)))
    return found


def foreign(sockets: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """The sockets that another machine can reach."""
    return {(host, port) for host, port in sockets if not host.startswith(LOOPBACK)}


def left_of(pids: dict[int, str]) -> list[str]:
    """The command lines of the processes that still run. `pids`: command lines by process id."""
    return [line for pid, line in pids.items() if line and runs(pid) and command_line(pid) == line]


class Generating:
    """`generate.py --tp 2` while it generates text."""

    def __init__(self, *args: object, text: int = 100) -> None:
        self.process = quick_start.Popen(
            command([*STORY, *args], ranks=2), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdout
        self.process.stdout.read(text)
        self.pids = {pid: command_line(pid) for pid in tree(self.process.pid)}

    def close(self) -> None:
        for pid in self.pids:
            if left_of({pid: self.pids[pid]}):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def generating() -> Iterator[Callable[..., Generating]]:
    started: list[Generating] = []

    def start(*args: object) -> Generating:
        started.append(Generating("--max-new-tokens", 900, "--num-samples", 10_000, *args))
        return started[-1]

    yield start
    for one in started:
        one.close()


# --- killed processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(2))
def test_a_killed_process_leaves_nothing_behind(place: int, in_turn: Callable[..., str], tmp_path: Path) -> None:
    """All other processes end, and the next start removes the run's folder. While they run, other machines can reach none of
    their sockets, except with torchrun."""
    victim, own_folder = in_turn(("launcher", "rank 0", "rank 1", "frontend", "torchrun"), place), {"TMPDIR": tmp_path}
    with ServerProcess(
        "--model",
        HYBRID,
        "--drain-timeout",
        45,
        "--max-restarts",
        0,
        ranks=2,
        torchrun=victim == "torchrun",
        environ=own_folder,
        forked=victim != "launcher",
    ) as server:
        server.ready()
        pids = {pid: command_line(pid) for pid in tree(server.process.pid)}
        ranks, (frontend,) = server.rank_pids(), server.frontend_pids()
        assert {server.process.pid, *ranks, frontend} <= set(pids)
        sockets = listening(list(pids))
        assert ("127.0.0.1", server.port) in sockets and len(sockets) > 2, "HTTP, the store and gloo"
        if victim == "torchrun":
            assert foreign(sockets), "or the warning is wrong by now"
            assert "start with python -m server --tp 2 instead" in server.log
            assert "kills its ranks 30 s after a signal, before --drain-timeout 45 is over" in server.log
        else:
            assert foreign(sockets) == set()
        which = {"rank 0": ranks[0], "rank 1": ranks[1], "frontend": frontend}
        os.kill(which.get(victim, server.process.pid), signal.SIGKILL)
        wait_until(lambda: not left_of(pids), GONE_SECONDS, f"the end of {pids}")
        assert server.wait(GONE_SECONDS) != 0
        log = server.log
    if victim == "rank 1":
        assert "ZMQError" not in log and "Traceback" not in log
        assert "error: rank 1 was killed by SIGKILL" in log
    quick_start.run(
        [sys.executable, "-c", "from ranks import processes; processes.remove_abandoned()"],
        cwd=ROOT,
        env=environment(**own_folder),
        check=True,
    )
    assert list(tmp_path.glob("rung-*")) == []


FROZEN = """
import pathlib, tempfile, time
import server.frontend
from server.process import Frontend
from server.settings import Settings

def freeze(*_):
    pathlib.Path(tempfile.gettempdir(), "frozen").touch()
    time.sleep(600)

server.frontend.run_frontend = freeze
if __name__ == "__main__":
    print(Frontend(Settings(model="x"), pathlib.Path(tempfile.gettempdir())).process.pid, flush=True)
    time.sleep(600)
"""


def test_a_frozen_frontend_ends_with_its_engine(tmp_path: Path) -> None:
    """The frontend must end when rank 0 dies, also if its event loop is blocked."""
    script = tmp_path / "program.py"  # a file, because the spawned process imports it, too
    script.write_text(FROZEN)
    env = environment(PYTHONPATH=ROOT, TMPDIR=tmp_path)
    with subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        frontend = int(parent.stdout.readline())
        wait_until((tmp_path / "frozen").exists, START_SECONDS, "the frontend")
        parent.kill()
    wait_until(lambda: not runs(frontend), GONE_SECONDS, "the frontend's end")


# --- signals -------------------------------------------------------------------------------------------------------------


def test_a_drain_ends_in_silence_and_in_its_own_time() -> None:
    """TORCH_ELASTIC_SHUTDOWN_TIMEOUT has no effect. At 0, torch's launcher would kill ranks at once; its default is 30 s."""
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": 0}
    with ServerProcess("--model", HYBRID, "--drain-timeout", 200, ranks=2, environ=environ) as server:
        server.ready()
        body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True, "n": 2}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]" and '"error"' not in events[-2]
        assert server.wait(GONE_SECONDS) == 0
        _, _, after = server.log.partition("a second signal ends at once\n")
        assert [line for line in after.splitlines() if "/v1/completions" not in line] == []


def test_generate_listens_on_loopback_and_ends_in_silence(generating: Callable[..., Generating]) -> None:
    """Nobody can connect to its ranks once they run."""
    one = generating()
    sockets = listening(list(one.pids))
    assert len(sockets) > 1 and foreign(sockets) == set()
    for address in sockets:
        with pytest.raises(TimeoutError):
            socket.create_connection(address, 0.5)
    one.process.send_signal(signal.SIGINT)
    assert one.process.wait(GONE_SECONDS) == 130
    assert one.process.stderr
    said = one.process.stderr.read().decode()
    assert "Traceback" not in said and "error" not in said, said


# --- strangers -----------------------------------------------------------------------------------------------------------


NOBODY = 65534
STORE = b"\x00" + struct.pack("<I", 0x3C85F7CE)  # TCPStore: validate
JOIN = [struct.pack("<q", number) + struct.pack("<6Q", 48, 2, 0, 0, 0, 0) for number in range(4)]  # gloo: a rank's first words


class Attack:
    """A process of another user. It connects again and again to each port that it was told last, and sends what TCPStore, gloo and unpickling
    servers take."""

    def __init__(self, proof: Path) -> None:
        """proof: a file that exists if code of the other user has run as this one."""

        class Evil:
            def __reduce__(self) -> tuple[Any, ...]:
                return os.open, (str(proof), os.O_CREAT)

        evil = pickle.dumps(Evil())
        as_value = struct.pack("<Q", len(evil)) + evil
        words = [
            STORE,
            STORE + b"\x01" + struct.pack("<Q", 1) + b"0" + as_value,
            evil,
            struct.pack(">I", len(evil)) + evil,
            *JOIN,
        ]
        context = multiprocessing.get_context("fork")
        self._ports, theirs = context.Pipe()
        self._process = context.Process(target=self._run, args=(theirs, words), daemon=True)
        self._process.start()

    def _run(self, ports: Any, words: list[bytes]) -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        told, held = set[int](), deque[socket.socket](maxlen=200)
        with contextlib.suppress(EOFError):
            while True:
                while ports.poll(0.001):
                    told = ports.recv()
                for port, word in itertools.product(told, words):
                    held.append(socket.socket())
                    held[-1].setblocking(False)
                    with contextlib.suppress(OSError):
                        held[-1].connect_ex(("127.0.0.1", port))
                        select.select([], [held[-1]], [], 0.001)
                        held[-1].send(word)

    def tell(self, ports: set[int]) -> None:
        self._ports.send(ports)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_user_of_the_host_gets_nowhere(tmp_path: Path) -> None:
    """Ranks start, compute what one process computes, and end, while a process of another user attacks each of their ports. Once they
    are connected, nobody can connect."""
    args = ["--model", HYBRID, "--prompt", "Once upon a time", "--temperature", 0, "--max-new-tokens", 12]
    alone = quick_start.run(command(args), cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    attack, ports, now = Attack(tmp_path / "proof"), set[int](), set[int]()
    try:
        with quick_start.Popen(
            command(args, ranks=2), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            while process.poll() is None:
                before, now = now, {port for _, port in listening(tree(process.pid))}
                if now != before:  # ranks of another test may have the others next
                    attack.tell(now)
                ports |= now
            out, err = process.communicate()
    finally:
        attack.close()
    assert ports, "gloo's"
    assert (process.returncode, out) == (0, alone.stdout), err
    assert not (tmp_path / "proof").exists()


def reached(folder: Path, ports: set[int]) -> list[str]:
    """What a process of another user can open, connect to or make below the folder, which it can enter, and at the ports."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def attack() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        found = list[str]()
        for path in [Path(at, name) for at, folders, files in os.walk(folder) for name in folders + files]:
            for flags in (os.O_RDONLY, os.O_WRONLY):
                with contextlib.suppress(OSError):
                    os.close(os.open(path, flags))
                    found.append(f"{path} {flags}")
            with contextlib.suppress(OSError):
                (path / "new").touch()
                found.append(f"{path}/new")
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as unix:
                unix.connect(str(path))
                found.append(f"connected to {path}")
        for port in ports:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 0.5).close()
                found.append(f"connected to port {port}")
        theirs.send(found)

    process = context.Process(target=attack)
    process.start()
    try:
        return list(ours.recv())
    finally:
        process.join()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_user_reaches_nothing_of_a_server_but_its_port() -> None:
    """The folder of temporary files is open to all users, as /tmp is."""
    with tempfile.TemporaryDirectory() as name, ServerProcess("--model", HYBRID, ranks=2, environ={"TMPDIR": name}) as server:
        folder = Path(name)
        folder.chmod(0o1777)
        server.ready()
        made = [path for path in folder.rglob("*") if not path.is_dir()]
        assert any(path.is_socket() for path in made) and any(path.is_file() for path in made)
        ports = {port for _, port in listening(tree(server.process.pid))}
        assert len(ports) > 2, "HTTP and gloo"
        assert reached(folder, ports) == [f"connected to port {server.port}"]
        (folder / "ours").touch()  # a file that is open to them is found
        assert reached(folder, set()) == [f"{folder}/ours {os.O_RDONLY}"]


# --- any program ---------------------------------------------------------------------------------------------------------


def test_a_program_on_ranks(tmp_path: Path) -> None:
    """The ranks get the arguments unchanged, and the terminal. The first nonzero exit code ends all ranks and is the launcher's
    exit code."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    given = ["a$b", "$$", "${local_rank}", "", "two words", "--ranks", "-m"]
    ours, theirs = pty.openpty()
    said = b""
    with quick_start.Popen(
        [*on_ranks(2), str(script), *given], cwd=ROOT, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        while b"> " not in said:
            said += os.read(ours, 1000)
        os.write(ours, "Grüße\n".encode())
        with contextlib.suppress(OSError):  # the other end is closed
            while more := os.read(ours, 1000):
                said += more
        assert process.wait(GONE_SECONDS) == 2
    assert said.decode().replace("\r", "").endswith(f"> Grüße\nTrue Grüße\n{given}\n")
    os.close(ours)


PROGRAM = """
import os, sys, time
if os.environ["RANK"] == "0":
    print(sys.stdin.isatty(), input("> "))
    print(sys.argv[1:], flush=True)
    sys.exit(2)
time.sleep(600)
"""


RETRY = """
import os, torch
from errors import UserError
from tp import init_world
for name in ("hierarchical", "hierarchical", "gloo"):
    try:
        world = init_world("cpu", name)
    except UserError:
        continue
    assert name == "gloo" and world.comm.all_reduce(torch.tensor([1.0 + world.rank])).tolist() == [3.0]
    print("connected", os.environ["NCCL_RAS_ENABLE"] + "\\n", end="", flush=True)
"""


def test_ranks_connect_after_a_communicator_that_they_cannot_have(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(RETRY)
    env = environment(PYTHONPATH=ROOT)
    done = quick_start.run([*on_ranks(2), str(script)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=GONE_SECONDS)
    assert (done.returncode, done.stdout) == (0, "connected 0\n" * 2), done.stderr


LATE = """
import pathlib, sys, time
from cli import run
from ranks.processes import rank
from errors import UserError
def main():
    ready = pathlib.Path(sys.argv[1])
    if rank() == 0:
        ready.touch()
        time.sleep(0.3)  # three times as long as the agent waits between its checks
    while not ready.exists():
        time.sleep(0.01)
    raise UserError("a reason")
run(main)
"""


def test_an_error_that_all_ranks_know_is_printed_though_another_ends_first(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(LATE)
    args, env = [str(script), str(tmp_path / "ready")], environment(PYTHONPATH=ROOT)
    done = quick_start.run([*on_ranks(2), *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=GONE_SECONDS)
    assert (done.returncode, done.stderr) == (2, "error: a reason\n")


def test_ranks_of_a_test_show_their_own_errors(tmp_path: Path) -> None:
    """Without C++ frames, and without what torchrun reports after them."""
    program = tmp_path / "rank.py"
    program.write_text(
        "import sys\nsys.stderr.write('frame #0: c10\\n[rank0]: frame #1: c10\\n')\nraise RuntimeError('a reason')"
    )
    with pytest.raises(AssertionError) as found:
        torchrun(2, str(program), timeout=200)
    assert "RuntimeError: a reason" in str(found.value)
    assert not any(words in str(found.value) for words in ("frame #", "exitcode", "ChildFailedError"))


@pytest.mark.parametrize(
    ("exits", "passed_on", "code", "said"),
    [
        ([], None, 0, ""),
        ([], signal.SIGTERM, 0, ""),
        ([2, 2], None, 2, ""),
        ([130, -15], signal.SIGINT, 130, ""),
        ([-15, -15], signal.SIGTERM, 143, ""),
        ([-2], signal.SIGINT, 130, ""),
        ([-15, -15], signal.SIGINT, 130, ""),
        ([-9, 1], None, 1, "error: rank 0 was killed by SIGKILL (as the kernel does when memory runs out)"),
        ([1, -9], None, 1, "error: rank 1 was killed by SIGKILL (as the kernel does when memory runs out)"),
        ([-11, -15], None, 1, "error: rank 0 was killed by SIGSEGV"),
        ([1, -15], None, 1, ""),
    ],
)
def test_exit_codes(exits: list[int], passed_on: int | None, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    failures = [ProcessFailure(rank, 1, exitcode, "") for rank, exitcode in enumerate(exits)]
    assert launcher.exit_code(failures, passed_on) == code
    assert capsys.readouterr().err == (f"{said}, and all others ended\n" if said else "")


def test_a_rank_that_the_agent_had_to_kill_lacked_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 was stopped when the server ended, so that rank 0 alone obeyed SIGTERM."""
    failures = [ProcessFailure(rank, 1, exitcode, "") for rank, exitcode in enumerate([-15, -9])]
    failures[1].timestamp += launcher.AGENT_SECONDS
    assert launcher.exit_code(failures, signal.SIGTERM) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "error: rank 1 did not end within 30 s after another and was killed\n"


def test_signals_that_are_ignored_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with nohup."""
    monkeypatch.setattr(launcher.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    before = {number: signal.getsignal(number) for number in launcher.SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        launcher.Forwarder(lambda number: None, None)
        after = {number: signal.getsignal(number) for number in launcher.SIGNALS}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert after.pop(signal.SIGHUP) is signal.SIG_IGN and after and all(callable(handler) for handler in after.values())


def test_ranks_that_ignore_a_signal_are_killed_in_time(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    # one write a rank: two ranks' `print`s, which write a line and its end apart, may mix
    script.write_text("import signal, sys, time; signal.signal(15, signal.SIG_IGN); sys.stdout.write('up\\n'); time.sleep(600)")
    start = f"import launch, sys; sys.exit(launch.start_ranks(2, [{str(script)!r}], patience=1.0))"
    with subprocess.Popen(
        [sys.executable, "-c", start], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stderr
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        pids = {pid: command_line(pid) for pid in tree(process.pid)}
        process.terminate()
        assert process.wait(GONE_SECONDS) == 128 + signal.SIGKILL
        assert left_of(pids) == []
        assert process.stderr.read() == "error: the ranks did not end in time and are killed\n"


def test_interactive_prompts_from_a_pipe() -> None:
    done = launch("--model", HYBRID, "--interactive", "--max-new-tokens", 5, "--temperature", 0, ranks=2, stdin="Once\nOnce\n")
    assert done.code == 0, done.err
    first, second = done.out.splitlines()[-2:]
    assert first == second and first


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--ranks", "2"], "nothing to start"),
        (["--ranks", "0", "x.py"], "from 1 to 1024"),
        (["--ranks", "many", "x.py"], "invalid int value"),
        (["x.py"], "--ranks"),
        (["--ranks", "1", "--hosts", "0", "--meet", "127.0.0.1:1", "x.py"], "argument --hosts: 0 is not at least 1"),
        (["--ranks", "1", "--hosts", "-3", "--meet", "127.0.0.1:1", "x.py"], "argument --hosts: -3 is not at least 1"),
    ],
)
def test_bad_use_is_told(args: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launch.py", *args])
    with pytest.raises(UserError, match=words):
        launcher.main()


def test_tp_beside_another_number_of_ranks() -> None:
    env = environment(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
    command = [sys.executable, "-m", "server", "--model", HYBRID, "--tp", "2", "--port", "0"]
    done = quick_start.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 2, done.stderr
    assert "error: --tp 2, but torchrun started 1 ranks; leave --tp out, or start without torchrun" in done.stderr


def test_ranks_whose_hosts_are_unknown_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They could meet only where anybody can."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="LOCAL_WORLD_SIZE"):
        init_world("cpu")


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / folder_name("here")).mkdir(mode=0o755)
    with pytest.raises(UserError, match="not a private folder"):
        shared_folder("here")


@pytest.mark.parametrize("waits", [False, True])
def test_a_folder_that_another_start_removes_is_made_again(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks abandoned until it is locked. waits: the other process has begun to remove it and has the lock."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hold, removed = processes.hold, list[Path]()

    def late(folder: Path) -> int:
        if removed:
            return hold(folder)
        removed.append(folder)
        lock = hold(folder) if waits else -1
        (folder.rmdir if waits else processes.remove_abandoned)()
        return lock if waits else hold(folder)

    monkeypatch.setattr(processes, "hold", late)
    assert removed == [shared_folder(f"there {waits}")] and removed[0].is_dir()


def test_a_busy_port_is_noticed_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        command = [sys.executable, "-m", "server", "--model", HYBRID, "--tp", "2", "--port", port]
        done = quick_start.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=START_SECONDS)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"error: port {port} of 127.0.0.1 is taken by another program; end that, or choose another one with --port\n"
    )


@pytest.mark.parametrize(("host", "words"), [("no.such.host.invalid", "is no address"), ("203.0.113.1", "cannot listen on")])
def test_a_host_that_is_not_this_machine(host: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_port(host, 8000)
