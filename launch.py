"""Start the ranks of one host, as torchrun does, but reachable from this host only.

    python launch.py --ranks 8 -m training.train --model ladder-1b …
    python launch.py --ranks 2 -m scripts.bench.comm.auto_table
    python launch.py --hosts 2 --meet HOST0:29500 --meet-secret-file FILE --ranks 8 -m server --model DIR   # on each of two hosts

`python -m server --tp N` and `generate.py --tp N` also use it to start their ranks.

torch's elastic agent starts and monitors the ranks. torchrun gives it a rendezvous for several hosts: two stores that
listen on all interfaces without a password, one of which unpickles the data that it receives. Ranks of one host meet over a
file in a folder that only this user can enter. Ranks of several hosts meet at the host that --meet names: it has rank 0,
and its store listens on that address only and admits nobody without a secret (`ranks/meeting.py`). Signals are forwarded to the ranks, which then end by themselves.
The exit code is that of the rank that failed first.
"""

import argparse
import errno
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from cli import Parser, leave, note, run
from errors import UserError
from options import whole_number
from ranks.meeting import MeetingServer, MeetingStore, connect, read_secret
from ranks.processes import LAUNCHER, LOST_RANK, MEETING, listen_on_loopback, run_folder, signal_child

LOOPBACK = "127.0.0.1"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MONITOR_SECONDS = 0.1  # between the agent's checks of the ranks
STOP_SECONDS = 2  # time for the ranks beside a failed one to end, before they are killed and all are started again
AGENT_SECONDS = 30  # the agent's own time for them, once it has seen that one has failed
NO_LIMIT = 1_000_000_000  # of restarts for the agent, because a keeper has its own
MEET_SECONDS = float(os.environ.get("RUNG_MEET_SECONDS") or 120)  # time for all hosts to come
PRESENT_SECONDS = 30.0  # time for all hosts to say that they are still there, once all have come
NOTICE_SECONDS = 5.0  # after which a host says that it waits for others
EXIT_SECONDS = 5.0  # time for the launchers of other hosts to end after this one's ranks
MOST_RANKS = 1024  # more on one host are taken for a typing error


class OneHost(RendezvousHandler):
    """The agent's rendezvous for one host. The ranks meet elsewhere (`tp.init_world`), so the agent's store is its own, and the
    address that it hands to the ranks leads nowhere."""

    use_agent_store = False

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, 0))

    def get_backend(self) -> str:
        return "one-host"

    def get_run_id(self) -> str:
        return "rung"

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


class SeveralHosts(OneHost):
    """The agent's rendezvous for several hosts, each of which runs this launcher: the host with the address `meet` has the store."""

    use_agent_store = True  # the ranks connect to the agent's store and open none themselves

    def __init__(self, hosts: int, meet: str, secret: str) -> None:
        """meet: HOST:PORT. secret: see `ranks/meeting.py`. Raises UserError."""
        host, _, port = meet.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(
                f"--meet is {meet!r}; give the address of the host with rank 0 and a free port there, as in 10.0.0.1:29500"
            )
        try:
            self._host: str = socket.gethostbyname(host)
        except OSError as e:
            raise UserError(f"--meet names host {host}, which is unknown here ({e.strerror}); give its address") from None
        self._hosts, self._port, self._secret = hosts, int(port), secret

    def meet(self) -> None:
        """Wait for the other hosts. To be called once, before the ranks start. Raises UserError if they do not come."""
        start = time.monotonic()
        own = self._serve()
        store = self._connect(start)
        number = 0 if own else store.add("others", 1)
        if number >= self._hosts:
            raise UserError(f"{self._hosts} hosts have come to {self._host}:{self._port} already; end what runs there first")
        try:
            store.set(f"host {number}", socket.gethostname())
            self._wait(store, start)
            self._check_presence(store, number)
        except RuntimeError:  # the store's host has left
            raise UserError(
                f"the host with {self._host}:{self._port} left while others came; see what its terminal says, and start all again"
            ) from None
        self._met = RendezvousInfo(store, number, self._hosts, RendezvousStoreInfo(self._host, self._port))

    def next_rendezvous(self) -> RendezvousInfo:
        return self._met

    def _wait(self, store: MeetingStore, start: float) -> None:
        """Return when all hosts have added themselves to the store."""
        said = 0
        while (came := min(1 + store.add("others", 0), self._hosts)) < self._hosts:
            passed = time.monotonic() - start
            if passed > MEET_SECONDS:
                raise UserError(
                    f"{came} of {self._hosts} hosts came to {self._host}:{self._port} within {MEET_SECONDS:g} s "
                    f"({_names(store, range(came))}); start the same command on the others, and "
                    "check that they reach this address and that their --hosts and --meet are the same"
                )
            if passed > NOTICE_SECONDS and came != said:
                said = came
                note(
                    f"{came} of {self._hosts} hosts have come ({_names(store, range(came))}), "
                    f"waiting for the others at {self._host}:{self._port} …"
                )
            time.sleep(MONITOR_SECONDS)

    def _check_presence(self, store: MeetingStore, number: int) -> None:
        """Return when all hosts have seen that all have come. One that left before counts among those that came."""
        store.set(f"present {number}", "")
        end = time.monotonic() + PRESENT_SECONDS
        while missing := [i for i in range(self._hosts) if not store.check([f"present {i}"])]:
            if time.monotonic() > end:
                raise UserError(
                    f"{len(missing)} of {self._hosts} hosts left while others came ({_names(store, missing)}); "
                    "start the same command again on all"
                )
            time.sleep(MONITOR_SECONDS)

    def _serve(self) -> MeetingServer | None:
        """The store's server, if the address is this host's."""
        try:
            return MeetingServer(socket.create_server((self._host, self._port), backlog=MOST_RANKS), self._secret)
        except OSError as e:
            if e.errno == errno.EADDRNOTAVAIL:
                return None
            raise UserError(
                f"this host cannot listen on {self._host}:{self._port} ({os.strerror(e.errno or 0)}); choose another port in --meet"
            ) from None

    def _connect(self, start: float) -> MeetingStore:
        said = False
        while True:
            try:
                return connect(self._host, self._port, self._secret, MEET_SECONDS)
            except OSError as e:
                passed = time.monotonic() - start
                if passed > MEET_SECONDS:
                    raise UserError(
                        f"1 of {self._hosts} hosts came: nothing answers at {self._host}:{self._port} ({e.strerror or e}) "
                        f"since {MEET_SECONDS:g} s; start the same command there, and check its firewall and the address in --meet"
                    ) from None
                if passed > NOTICE_SECONDS and not said:
                    said = True
                    note(f"1 of {self._hosts} hosts have come, waiting for the one with {self._host}:{self._port} …")
                time.sleep(MONITOR_SECONDS)


def _names(store: MeetingStore, numbers: Iterable[int]) -> str:
    """The names of hosts. One that left at once has none, and its name must not be waited for."""
    return ", ".join(store.get(key).decode() if store.check([key := f"host {i}"]) else "one without a name" for i in numbers)


class Keeper(Protocol):
    """Who decides whether ranks are started again, and gets the signals that the ranks would get otherwise."""

    def begin(self, ranks: "Ranks") -> None:
        """Called before the ranks start."""

    def may_restart(self, failures: Sequence[ProcessFailure]) -> bool:
        """Called when ranks have failed; the others end before they are started again."""

    def pass_on(self, number: int) -> None:
        """Called for each signal; for SIGKILL when `patience` is over."""


class Ranks(LocalElasticAgent):
    """The agent, except that a keeper decides about restarts."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, keeper: Keeper | None) -> None:
        super().__init__(spec, logs, exit_barrier_timeout=EXIT_SECONDS)
        self._keeper = keeper

    def signal(self, number: int) -> None:
        """Send a signal to all ranks. Waits until they are started."""
        group = self.get_worker_group()
        while any(worker.id is None for worker in group.workers):
            time.sleep(MONITOR_SECONDS)
        for worker in group.workers:
            signal_child(worker.id, number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if self._keeper and result.is_failed() and not self._keeper.may_restart(list(result.failures.values())):
            self._remaining_restarts = 0
        return result

    def _stop_workers(self, worker_group: WorkerGroup, *rest: Any) -> None:
        if self._keeper and self._pcontext:  # the agent itself would wait for AGENT_SECONDS
            self._pcontext.close(signal.SIGTERM, STOP_SECONDS)
        super()._stop_workers(worker_group, *rest)


def start_ranks(
    count: int,
    program: Sequence[str],
    patience: float | None = None,
    keeper: Keeper | None = None,
    hosts: SeveralHosts | None = None,
) -> int:
    """Run `python program…` as ranks 0 to count - 1 of this host. Returns the exit code for this process, see `exit_code`.

    A signal to this process is forwarded to all ranks, or to the keeper. Ranks that still run `patience` seconds after the first
    signal are killed (default: never). Without a keeper, no rank is started again. hosts: where the launchers of several hosts meet;
    None: only this one has ranks. Raises UserError if count is not between 1 and MOST_RANKS, or if hosts do not come.
    """
    if not 1 <= count <= MOST_RANKS:
        raise UserError(f"{count} ranks cannot be started; give a number from 1 to {MOST_RANKS}")
    logging.disable(logging.CRITICAL)  # because the agent logs each rank's exit as an error of the agent
    os.environ |= {LAUNCHER: str(os.getpid()), "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}  # Forwarder handles them
    if count > 1 or keeper is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the host's cores; a server of one rank has them all
    if hosts is None:
        listen_on_loopback()
    else:
        hosts.meet()  # while signals still end this process at once
    spec = WorkerSpec(
        role="rank",
        local_world_size=count,
        entrypoint=sys.executable,
        args=("-u", *(part.replace("$", "$$") for part in program)),  # the agent replaces $names
        rdzv_handler=hosts or OneHost(),
        max_restarts=NO_LIMIT if keeper else 0,
        monitor_interval=MONITOR_SECONDS,
        local_addr=None if hosts else LOOPBACK,
    )
    with run_folder() as folder:
        os.environ[MEETING] = str(folder)
        ranks = Ranks(spec, DefaultLogsSpecs(log_dir=str(folder)), keeper)
        forwarder = Forwarder(keeper.pass_on if keeper else ranks.signal, patience)
        if keeper:
            keeper.begin(ranks)
        result = ranks.run()
    passed_on = forwarder.last or (signal.SIGTERM if keeper else None)  # a keeper sends it, too
    return exit_code(list(result.failures.values()), passed_on)


class Forwarder:
    """Passes this process's signals on, in a thread, so that it can wait until the ranks are started."""

    def __init__(self, pass_on: Callable[[int], None], patience: float | None) -> None:
        self.last: int | None = None  # the last signal received
        self._forward, self._patience = pass_on, patience
        self._caught: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored signals, as by nohup, stay ignored
                signal.signal(number, lambda caught, frame: self._caught.put(caught))
        threading.Thread(target=self._run, daemon=True, name="signals").start()

    def _run(self) -> None:
        self._pass_on(self._caught.get())
        end = None if self._patience is None else time.monotonic() + self._patience
        while True:
            try:
                self._pass_on(self._caught.get(timeout=None if end is None else max(0.0, end - time.monotonic())))
            except queue.Empty:
                print("error: the ranks did not end in time and are killed", file=sys.stderr, flush=True)
                self._pass_on(signal.SIGKILL)
                return

    def _pass_on(self, number: int) -> None:
        self.last = number
        self._forward(number)


def exit_code(failures: Sequence[ProcessFailure], passed_on: int | None) -> int:
    """0 if no rank failed, else the exit code of the first failed rank.

    If a signal killed that rank: 128 + `passed_on` if it was this signal or the agent's SIGTERM, else LOST_RANK, after a
    message that names the rank. failures: in the order in which the agent saw them. passed_on: the last forwarded signal.
    """
    if not failures:
        return 0
    # After a failure the agent ends the other ranks with SIGTERM, and those that it does not end with SIGKILL.
    first = min(f.timestamp for f in failures)
    stopped = [f for f in failures if f.exitcode == -signal.SIGKILL and f.timestamp - first >= AGENT_SECONDS - 1]
    for failure in stopped:
        print(
            f"error: rank {failure.local_rank} did not end within {AGENT_SECONDS} s after another and was killed",
            file=sys.stderr,
            flush=True,
        )
    failures = [f for f in failures if f not in stopped]
    # If a rank was killed by others, the agent may see the end of another rank first.
    cause = next((f for f in failures if f.exitcode < 0 and f.exitcode != -signal.SIGTERM), failures[0])
    if cause.exitcode > 0:
        return cause.exitcode
    number = signal.Signals(-cause.exitcode)
    if passed_on is not None and number in (passed_on, signal.SIGTERM):
        return 128 + passed_on
    hint = " (as the kernel does when memory runs out)" if number == signal.SIGKILL else ""
    print(
        f"error: rank {cause.local_rank} was killed by {number.name}{hint}, and all others ended", file=sys.stderr, flush=True
    )
    return LOST_RANK


def parse_args() -> argparse.Namespace:
    parser = Parser(prog="launch.py", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="processes to start on this host")
    parser.add_argument(
        "--hosts",
        type=whole_number(1),
        metavar="N",
        help="hosts on which this command is started, all within RUNG_MEET_SECONDS (default: 120; without --hosts, only this one)",
    )
    parser.add_argument(
        "--meet",
        metavar="HOST:PORT",
        help="with --hosts: the address of one of them, which gets rank 0, in a network that only they reach, and a free port there",
    )
    parser.add_argument(
        "--meet-secret-file",
        metavar="FILE",
        help="with --hosts: a file of mode 600 with a secret of at least 16 characters, the same on all hosts (default: "
        "RUNG_MEET_SECRET); who does not know it cannot join",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as for python")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script or module, and its arguments")
    args = parser.parse_args()
    if not args.program:
        raise UserError("nothing to start; name a script, or -m and a module")
    if (args.hosts is None) != (args.meet is None):
        raise UserError("--hosts and --meet belong together; give both, or none for one host")
    return args


def main() -> None:
    args = parse_args()
    hosts = SeveralHosts(args.hosts, args.meet, read_secret(args.meet_secret_file)) if args.hosts is not None else None
    leave(start_ranks(args.ranks, ["-m"] * args.module + args.program, hosts=hosts))


if __name__ == "__main__":
    run(main)
