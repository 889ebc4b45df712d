"""Replicas of the server on a Ray cluster, behind one address: python -m deploy.ray_serve --replicas 2 -- --model DIR

Two deployments of Ray Serve. A `Replica` runs `python -m server --tp N`, a process for each rank, on GPUs that Ray has reserved,
and passes requests to it over loopback. A `Gateway` reads a request, lets `PrefixRouter` choose a replica, and passes the answer
on. It sends a request again if its replica ends before the client got a byte.

Without --address it starts Ray on this machine, and ends it with Ctrl-C. With --address it deploys to that cluster and returns;
the same command with other flags replaces the replicas one by one. `serve deploy` takes `deploy.ray_serve:build` as import path
and the fields of `Options` as args.
"""

import argparse
import asyncio
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import ray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from yarl import URL

from cli import Parser, leave, note, run
from deploy.drain import Signals, drain
from deploy.gateway import Gateway, ServerLost, kept
from deploy.routing import Call
from deploy.server_log import ServerLog
from errors import UserError
from options import whole_number
from ranks.ports import check_port
from ranks.processes import PR_SET_PDEATHSIG

ROOT = Path(__file__).resolve().parent.parent
OWN_PYTHON = ROOT / ".venv" / "bin" / "python"
OWN = ("--tp", "--host", "--port", "--drain-timeout")  # flags of the server that this program sets
# Starts the server so that the kernel kills it with the replica, however that ends.
LEASH = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, 9, 0, 0, 0); os.execv(sys.executable, sys.argv[1:])"
)
ANSWER_SECONDS = 2.0  # for the gateways to say how many requests they have
END_SECONDS = 15.0  # for a server's processes to end after its drain
SHORT = aiohttp.ClientTimeout(total=10.0)  # for what a server answers without its ranks
RAY_SETS = {"date", "server", "x-request-id"}  # headers of answers
FIXED = "rung_fixed_size"  # a resource of the clusters that this program starts, which never get further nodes
QUIET = {"log_level": "WARNING"}  # of Ray Serve: an access log for each replica and gateway would repeat the server's


class Options(BaseModel):
    """What `build` needs. Each field but `server` is a flag, see `--help`."""

    model_config = ConfigDict(allow_inf_nan=False)

    server: list[str] = Field(default=[], description="flags of python -m server")
    python: str = Field(default=str(OWN_PYTHON if OWN_PYTHON.exists() else sys.executable), description="runs the server")
    tp: int = Field(default=1, ge=1, description="tensor-parallel ranks of a replica, all on one host")
    gpus: int = Field(
        default=-1, ge=-1, description="GPUs of a replica, all of one host; -1: as many as ranks if the cluster has GPUs"
    )
    cpus: float = Field(default=0.0, ge=0, description="CPUs of a replica; 0: as many as ranks")
    replicas: int = Field(default=2, ge=1, description="with --max-replicas, the fewest")
    max_replicas: int = Field(default=0, ge=0, description="start up to so many, by the queue; 0: --replicas")
    target: float = Field(default=32.0, gt=0, description="with --max-replicas, requests of each, running and waiting")
    upscale_delay: float = Field(default=10.0, ge=0, description="seconds above the target before a replica is started")
    downscale_delay: float = Field(default=300.0, ge=0, description="seconds below it before one is ended")
    max_requests: int = Field(
        default=100_000,
        ge=1,
        description="most requests of a replica, more than its server's --max-num-seqs and --max-queue together; others, of health "
        "too, wait in the gateways in the order of their arrival, whoever sent them",
    )
    max_queue: int = Field(
        default=4096, ge=1, description="most that wait in a gateway, as while no replica runs; further clients get a 429"
    )
    gateways: int = Field(default=1, ge=1, description="processes that take requests, each with its own memory of prefixes")
    surge: int = Field(
        default=0, ge=0, le=100, description="percent of the replicas that an update may start before it ends old ones"
    )
    drain_timeout: float = Field(
        default=30.0, ge=0, description="seconds for requests in flight, when their replica or all are to end"
    )
    request_timeout: float = Field(
        default=600.0, gt=0, description="seconds for a whole answer, or for the first event of a stream, with all tries"
    )
    max_body_mb: int = Field(default=16, ge=1, description="largest body of a request, in MiB")
    idle_timeout: float = Field(default=30.0, gt=0, description="seconds that a request's body may stop arriving")
    max_bodies_mb: int = Field(
        default=512,
        ge=1,
        description="MiB of bodies that a gateway holds, a quarter of them for one client; further ones get a 503",
    )


class Replica:
    """A server with its ranks. It ends with this actor, and this actor with it, so that Ray starts another one."""

    async def __init__(self, options: Options) -> None:  # type: ignore[misc]  # Ray awaits it
        with socket.socket() as reserved:  # bound until the server listens, so that nobody else gets the port
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
            self._start(options, reserved.getsockname()[1])
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
            while await self._status() != "ready":
                if self._process.poll() is not None:
                    raise RuntimeError(f"the server ended with exit code {self._process.returncode}: {self._log.last}")
                await asyncio.sleep(0.1)
        threading.Thread(target=self._end_with_server, daemon=True).start()

    def _start(self, options: Options, port: int) -> None:
        here = ("--host", "127.0.0.1", "--port", port, "--trusted-proxy", "127.0.0.1")
        own = ("--tp", options.tp, *here, "--drain-timeout", options.drain_timeout)
        command = [options.python, "-c", LEASH, options.python, "-m", "server", *options.server, *map(str, own)]
        threads = {"OMP_NUM_THREADS": str(max(1, int(options.cpus) // options.tp))}  # Ray's value counts all ranks as one
        self._ending = False
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | threads,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._log = ServerLog(self._process.stdout or ())  # its stderr is Ray's log of this actor

    def _end_with_server(self) -> None:
        self._process.wait()
        if not self._ending:
            os._exit(1)

    async def _status(self) -> str:
        try:
            async with self._http.get(f"{self._url}/health") as reply:
                return str((await reply.json())["status"])
        except aiohttp.ClientError:
            return "unreachable"

    async def check_health(self) -> None:
        """Called by Ray. A server that recovers from a fault keeps its requests, so it counts as healthy."""
        if (status := await self._status()) not in ("ready", "recovering"):
            raise RuntimeError(f"the server is {status}")

    async def forward(self, call: Call) -> AsyncIterator[Any]:
        """Yield the status, headers and this replica's name, then the body in pieces as they come.

        Raises ServerLost. If the caller is cancelled, so is the request.
        """
        name = serve.get_replica_context().replica_id.unique_id
        url = URL(self._url + call.target, encoded=True)
        try:
            async with self._http.request(
                call.method, url, headers=call.headers, data=call.body or None, allow_redirects=False
            ) as reply:
                yield reply.status, kept(reply.headers.items(), RAY_SETS) | {"x-rung-replica": name}, name
                async for piece in reply.content.iter_any():
                    yield piece
        except aiohttp.ClientError as e:
            raise ServerLost(str(e)) from None

    async def get(self, path: str, headers: list[tuple[str, str]]) -> tuple[str, int, str]:
        """This replica's name, and the status and text of its server's answer. Raises TimeoutError."""
        async with self._http.get(self._url + path, headers=headers, timeout=SHORT) as reply:
            return serve.get_replica_context().replica_id.unique_id, reply.status, await reply.text()

    async def __del__(self) -> None:
        """Called by Ray when no request is left: end the server. Ray kills this actor if that takes too long."""
        self._ending = True
        self._process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self._process.wait)


def gpus_of(options: Options, resources: Mapping[str, float]) -> int:
    """The GPUs of a replica in a cluster that has `resources` now. Raises UserError if they cannot be known from these: nodes with
    GPUs may start only when something asks for GPUs."""
    if options.gpus >= 0:
        return options.gpus
    if not resources.get("GPU") and FIXED not in resources:
        raise UserError(
            f"the cluster has no GPUs now; give --gpus {options.tp} if its nodes with GPUs start when they are needed, or --gpus 0 "
            "to serve on CPUs"
        )
    return options.tp if resources.get("GPU") else 0


def resources_of(options: Options, resources: Mapping[str, float]) -> dict[str, float]:
    """The CPUs and GPUs of a replica, as Ray takes them, in a cluster that has `resources` now. Raises UserError, see `gpus_of`, and if
    a cluster that gets no further nodes is too small for the replicas: Ray would wait without an end."""
    cpus, gpus = options.cpus or options.tp, gpus_of(options, resources)
    for kind, each, advice in (
        ("CPU", cpus, "end it and start it with these flags"),  # then it has as many as they need
        ("GPU", gpus, "take a smaller --tp"),
    ):
        if FIXED in resources and options.replicas * each > resources.get(kind, 0):
            raise UserError(
                f"{options.replicas} replicas need {options.replicas * each:g} {kind}s, and the cluster has "
                f"{resources.get(kind, 0):g}; give fewer --replicas, or {advice}"
            )
    return {"num_cpus": cpus, "num_gpus": gpus}


def build(options: Options) -> Any:
    """The application for `serve.run` and `serve deploy`. Raises UserError, see `resources_of`."""
    # Ray takes an actor's resources from one node: its ranks share a host, as in a placement group with one bundle (STRICT_PACK).
    resources = resources_of(options, ray.cluster_resources())
    scaling = AutoscalingConfig(
        min_replicas=options.replicas,
        max_replicas=max(options.replicas, options.max_replicas),
        target_ongoing_requests=options.target,
        upscale_delay_s=options.upscale_delay,
        downscale_delay_s=options.downscale_delay,
    )
    ending = options.drain_timeout + END_SECONDS
    replicas = serve.deployment(Replica).options(
        name="replicas",
        autoscaling_config=scaling,
        ray_actor_options=resources,
        max_ongoing_requests=options.max_requests,
        max_queued_requests=options.max_queue,
        max_surge_percent=options.surge,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=ending,
        health_check_period_s=2,
        health_check_timeout_s=10,
        request_router_config=RequestRouterConfig(request_router_class="deploy.ray_router.PrefixRouter"),
    )
    gateway = serve.deployment(Gateway).options(
        name="gateway",
        num_replicas=options.gateways,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100_000,
        max_surge_percent=100,  # the new one starts before the old one drains
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=ending + END_SECONDS,
    )
    bounds = options.request_timeout, options.max_body_mb, options.idle_timeout, options.max_bodies_mb
    return gateway.bind(replicas.bind(options), *bounds)


class RunningGateways:
    """All gateways, by Ray's handle of their deployment."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._known = handle, 0

    def drain(self) -> int:
        """Have them refuse new requests. Returns how many they have, or had when they last answered in time."""
        counts = self._call("drain")
        if counts is not None:
            self._known = sum(count for count in counts if isinstance(count, int))  # others are errors: that one has ended
        return self._known

    def end(self) -> None:
        self._call("end")

    def _call(self, method: str) -> list[Any] | None:
        """The results of all, exceptions among them. None if they did not come in time."""
        try:
            return self._handle.broadcast(method).results(timeout_s=ANSWER_SECONDS, return_exceptions=True)
        except TimeoutError:
            return None
        except RayServeException:  # no gateway is left
            return []


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The defaults, and the description as it is."""


def parse() -> tuple[argparse.Namespace, Options]:
    parser = Parser(description=__doc__, formatter_class=Help)
    parser.add_argument("--address", help="a running cluster's, such as auto; without it Ray starts on this machine")
    parser.add_argument("--host", default="127.0.0.1", help="of the HTTP port")
    parser.add_argument("--port", type=whole_number(1, 65535), default=8000, help="HTTP port")
    for name, field in Options.model_fields.items():
        if name != "server":
            flag = "--" + name.replace("_", "-")
            parser.add_argument(flag, type=type(field.default), default=field.default, help=field.description)
    parser.add_argument("server", nargs="*", metavar="-- FLAGS", help="flags of python -m server")
    args = parser.parse_args()
    if taken := sorted({flag.partition("=")[0] for flag in args.server} & set(OWN)):
        raise UserError(f"{', '.join(taken)} after --: give it before, or leave it out")
    try:
        return args, Options(**{name: getattr(args, name) for name in Options.model_fields})
    except ValidationError as e:
        first = e.errors()[0]
        flag = str(first["loc"][0]).replace("_", "-")
        raise UserError(f"--{flag} {first['input']}: {first['msg']}; see {parser.prog} --help") from None


def connect(address: str | None, options: Options) -> None:
    """Connect to the cluster, or start one on this machine with as many CPUs as its replicas need."""
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"):  # Ray's default of 15 would slow the servers down
        os.environ.setdefault(name, "0")
    cpus = max(options.replicas, options.max_replicas) * (options.cpus or options.tp)
    here = {"num_cpus": math.ceil(max(os.cpu_count() or 1, cpus)), "resources": {FIXED: 1}}
    here |= {"object_store_memory": 100 << 20, "include_dashboard": False}
    where: dict[str, Any] = {"address": address} if address else {"address": "local", **here}
    try:
        ray.init(**where, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
    except Exception as e:  # Ray raises many kinds
        raise UserError(f"no Ray here: {e}") from None


def end_of_server() -> str:
    """Why the server of a replica ended at its start, as its last line says. Empty if it did not end, or Ray does not know."""
    with suppress(Exception):  # Ray raises many kinds
        log = serve.status().applications["rung"].deployments["replicas"].message
        return re.findall(r"RuntimeError: (the server ended with .*)", log)[-1] + "."
    return ""


def main() -> None:
    args, options = parse()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if not args.address:  # in a running cluster it may be the port of the replicas that this command updates
        check_port(args.host, args.port)
    connect(args.address, options)
    try:
        serve.start(proxy_location="EveryNode", http_options={"host": args.host, "port": args.port}, logging_config=QUIET)
    except RuntimeError as e:
        raise UserError(f"Ray's HTTP proxy did not start: {str(e).splitlines()[-1]}") from None  # above are tracebacks
    note(f"starting {options.replicas} replicas with {options.tp} rank{'s' * (options.tp > 1)} each …")
    try:
        gateways = serve.run(build(options), name="rung", route_prefix="/", logging_config=QUIET)
    except RuntimeError as e:
        raise UserError(
            f"the replicas did not start: {end_of_server() or e} Ray's logs have more: /tmp/ray/session_latest/logs/serve"
        ) from None
    if args.address:
        note("ready")
        return
    note(
        f"ready: http://{args.host}:{args.port}   Ctrl-C ends it; the same command with --address auto and other flags updates it"
    )
    signals = Signals()
    signals.wait()
    code = drain(RunningGateways(gateways), options.drain_timeout, signals)
    signals.restore()  # a further one ends this program, and Ray with it
    serve.shutdown()
    leave(code)


if __name__ == "__main__":
    from deploy import ray_serve  # Ray's processes import this module by its name

    run(ray_serve.main)
