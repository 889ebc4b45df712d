"""Real replicas on a local Ray: `make cluster-test`, which takes minutes. One cluster for all tests, in their order."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from scripts.lib.process_tree import kill, process_tree
from server.settings import load_settings
from tests import MODELS, ROOT
from tests.support.ports import free_port
from tests.support.server_process import command_line, runs, wait_until

PYTHON = ROOT / ".venv-ray" / "bin" / "python"
MODEL = MODELS / "tiny-hybrid"
START_SECONDS = 300.0
CLIENTS = 16
ACTOR = "ray::ServeReplica:rung:replicas"
GPUS, EACH = 4, 2  # logical ones: Ray hands out their numbers, and the servers run on CPU
KINDS = ("whole", "stream", "stream broken", "whole lost", "stream lost", "stream cut")  # what becomes of a request
COUNTS = "RUNG_RAY_COUNTS"  # environment variable: a file for the counts of each load, as JSON lines

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-ray, which make cluster-test makes"),
]


class Cluster:
    """`python -m deploy.ray_serve` with a local Ray, and the processes of its replicas."""

    def __init__(self) -> None:
        self.port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        self.process = self.deploy("--port", self.port, "--replicas", 2)
        wait_until(self._is_ready, START_SECONDS, "the cluster is ready")

    def deploy(self, *flags: object, model_name: str = "first") -> "subprocess.Popen[str]":
        server = (
            "--device",
            "cpu",
            "--model",
            MODEL,
            "--kv-memory",
            "256M",
            "--served-model-name",
            model_name,
            "--max-num-seqs",
            8,
        )
        command = [PYTHON, "-m", "deploy.ray_serve", "--drain-timeout", 60, "--gpus", EACH, *flags, "--", *server]
        frequent = {f"RAY_SERVE_{who}_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1" for who in ("HANDLE", "REPLICA")}
        own = {
            "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": GPUS}),
            "RAY_raylet_start_wait_time_s": "240",
            "OMP_NUM_THREADS": "1",
        }
        environ = {**own, **os.environ, **frequent}
        return subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)

    def _is_ready(self) -> bool:
        assert self.process.stderr
        line = self.process.stderr.readline()
        assert line, f"the cluster ended with exit code {self.process.wait()}"
        return line.startswith("ready")

    def update(self, *flags: object, **more: str) -> None:
        """Deploy again with other flags, and wait until all replicas are new."""
        update = self.deploy("--address", "auto", *flags, **more)
        _, log = update.communicate(timeout=START_SECONDS)
        assert not update.returncode, log

    def actors(self) -> list[int]:
        """The processes of the replicas, of those that start or drain, too."""
        return [pid for pid in process_tree(self.process.pid) if command_line(pid).startswith(ACTOR)]

    def gpus(self) -> list[list[str]]:
        """The GPUs that each replica's server sees."""
        servers = [process_tree(actor)[1] for actor in self.actors()]
        variables = [Path(f"/proc/{server}/environ").read_text().split("\0") for server in servers]
        name = "CUDA_VISIBLE_DEVICES="
        return [next(one for one in some if one.startswith(name)).removeprefix(name).split(",") for some in variables]

    def serving(self) -> set[str]:
        """The names of the replicas that answer."""
        return set(re.findall(r'num_requests_running\{replica="(\w+)"', self.http.get("/metrics").text))

    def running(self) -> float:
        """The sequences in all replicas' batches."""
        return sum(map(float, re.findall(r"num_requests_running{.*} (\S+)", self.http.get("/metrics").text)))

    def kill_replica(self, actor: int, rng: random.Random) -> list[int]:
        """Kill Ray's actor of a replica, its server, or all of it. Returns the processes that have to end."""
        everything = process_tree(actor)
        kill(rng.choice([[actor], everything[1:2], everything]))
        return everything

    def wait_for(self, replicas: int) -> None:
        wait_until(lambda: len(self.serving()) == replicas, START_SECONDS, f"{replicas} replicas serve")

    def close(self) -> None:
        everything = process_tree(self.process.pid)
        self.process.send_signal(signal.SIGINT)
        try:
            assert self.process.wait(120) == 0
        finally:
            kill(pid for pid in everything if runs(pid))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def body(prompt: str, tokens: int = 40, **more: object) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


def test_servers_refuse_requests_before_their_replicas_are_full():
    """Else requests would wait in a gateway, which knows no clients."""
    program = "from deploy.ray_serve import Options; print(Options().max_requests)"
    most = int(subprocess.check_output([PYTHON, "-c", program], cwd=ROOT, text=True))
    settings = load_settings(["--model", str(MODEL)], {})
    assert most > settings.max_num_seqs + settings.max_queue


def test_the_help_keeps_its_paragraphs():
    text = subprocess.check_output([PYTHON, "-m", "deploy.ray_serve", "--help"], cwd=ROOT, text=True)
    assert "-- --model DIR\n\nTwo deployments" in text and "(default: 8000)" in text


def test_a_cluster_whose_gpus_may_come_later_needs_a_number(seed):
    rng = random.Random(seed)
    tp, given = rng.randrange(2, 9), rng.randrange(9)
    cases = {  # what the cluster has now, --gpus
        ("own cluster", -1): ({"CPU": 2, "rung_fixed_size": 1}, "0"),
        ("GPUs", -1): ({"CPU": 2, "GPU": 1}, str(tp)),
        ("none yet", -1): ({"CPU": 2}, f"give --gpus {tp} if"),
        ("none yet", given): ({"CPU": 2}, str(given)),
    }
    program = "import sys, json; from deploy.ray_serve import *\nfor tp, gpus, has in json.loads(sys.argv[1]):\n"
    program += "    try: print(gpus_of(Options(tp=tp, gpus=gpus), has))\n    except UserError as e: print(e)"
    asked = [(tp, gpus, has) for (_, gpus), (has, _) in cases.items()]
    lines = subprocess.check_output([PYTHON, "-c", program, json.dumps(asked)], cwd=ROOT, text=True).splitlines()
    for line, (case, (_, expected)) in zip(lines, cases.items(), strict=True):
        assert line == expected or (" " in expected and expected in line), (case, line)


def test_a_cluster_that_is_too_small_for_the_replicas_is_refused(seed):
    rng = random.Random(seed)
    tp, replicas = rng.randrange(1, 9), rng.randrange(1, 9)
    need = tp * replicas
    cases = [  # what the cluster has now, and what is said of it
        ({"CPU": need, "rung_fixed_size": 1}, "num_cpus"),
        ({"CPU": need - 1, "rung_fixed_size": 1}, f"need {need} CPUs, and the cluster has {need - 1};"),
        ({"CPU": need, "GPU": need, "rung_fixed_size": 1}, "num_gpus"),
        ({"CPU": need, "GPU": need - 0.5, "rung_fixed_size": 1}, f"need {need} GPUs"),
        ({"CPU": 1, "GPU": 1}, "num_gpus"),  # may get more nodes
    ]
    program = (
        "import sys, json; from deploy.ray_serve import *\ntp, replicas, cases = json.loads(sys.argv[1])\nfor has in cases:\n"
    )
    program += "    try: print(resources_of(Options(tp=tp, replicas=replicas), has))\n    except UserError as e: print(e)"
    asked = json.dumps([tp, replicas, [has for has, _ in cases]])
    lines = subprocess.check_output([PYTHON, "-c", program, asked], cwd=ROOT, text=True).splitlines()
    for line, (has, expected) in zip(lines, cases, strict=True):
        assert expected in line, (has, line)


@dataclass
class Load:
    """Clients that send one request after the other, half of them streams, and what came of the requests."""

    url: str
    results: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    ended: bool = False

    async def client(self, number: int) -> None:
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as http:
            while not self.ended:
                prompt = f"{rng.random()} Tell me a story."
                result = await (self.stream(http, prompt) if number % 2 else self.whole(http, prompt))
                self.results[result] += 1

    async def whole(self, http: httpx.AsyncClient, prompt: str) -> str:
        try:
            reply = await http.post("/v1/chat/completions", json=body(prompt))
            if reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 40:
                return "whole"
            self.wrong.append(reply.text)
        except httpx.HTTPError as e:
            self.wrong.append(repr(e))
        return "whole lost"

    async def stream(self, http: httpx.AsyncClient, prompt: str) -> str:
        begun, text = False, ""
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body(prompt, stream=True)) as reply:
                async for piece in reply.aiter_text():
                    begun, text = True, text + piece
            if reply.status_code == 200 and text.endswith("data: [DONE]\n\n") and '"error":' not in text:
                return "stream"
            if reply.status_code == 200 and '"error":' in text:
                return "stream broken"
            self.wrong.append(f"{reply.status_code} {text[-300:]}")
        except httpx.HTTPError as e:
            self.wrong.append(repr(e))
        return "stream lost" if not begun else "stream cut"


def under_load(cluster: Cluster, event: str, act: object) -> Counter[str]:
    """Call `act()` in a thread while CLIENTS clients send requests, and return the results by kind. event: what it does."""

    async def main() -> Load:
        load = Load(f"http://127.0.0.1:{cluster.port}")
        clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
        await asyncio.sleep(2)
        try:
            await asyncio.to_thread(act)  # type: ignore[arg-type]
        finally:
            load.ended = True
            await asyncio.gather(*clients)
        return load

    load = asyncio.run(main())
    if path := os.environ.get(COUNTS):
        with Path(path).open("a") as file:
            file.write(json.dumps({"event": event, **{kind: load.results[kind] for kind in KINDS}}) + "\n")
    assert not load.wrong, load.wrong[:3]
    return load.results


def test_routes_and_errors_pass_through(cluster):
    http = cluster.http
    for path in ("/health", "/v1/models", "/version", "/openapi.json", "/", "/static/app.js"):
        assert http.get(path).status_code == 200, path
    chat = http.post("/v1/chat/completions", json=body("Hi"), headers={"x-request-id": "mine"})
    assert chat.json()["usage"]["completion_tokens"] == 40 and chat.headers.get_list("x-request-id") == ["mine"]
    with http.stream("POST", "/v1/completions", json={"prompt": "Once", "max_tokens": 9, "stream": True}) as stream:
        assert list(stream.iter_lines())[-2] == "data: [DONE]"
    assert http.post("/v1/messages", json={"model": "first", **body("Hi", 3)}).json()["type"] == "message"
    for _ in range(4):  # a replica keeps it, and another one may be asked for it
        answer = http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 3}).json()
        assert http.get(f"/v1/responses/{answer['id']}").json() == answer
    assert http.get("/v1/responses/resp_none").json()["error"]["code"] == "response_not_found"
    for status, path, wrong in (
        (400, "chat/completions", {"messages": 3}),
        (404, "completions", {"model": "x", "prompt": "x"}),
    ):
        reply = http.post(f"/v1/{path}", json=wrong)
        assert reply.status_code == status and reply.json()["error"]["message"]
    assert http.post("/v1/completions", content=b"x" * (17 << 20)).status_code == 413
    assert http.get("/none?a=%2F").status_code == 404


def assert_gpus_of_their_own(cluster):
    """Each of two replicas has EACH GPUs, and no other one has them."""
    first, second = cluster.gpus()
    assert len(first) == len(second) == EACH and sorted(first + second) == list(map(str, range(GPUS)))


def test_each_replica_has_gpus_of_its_own(cluster):
    assert_gpus_of_their_own(cluster)


def test_a_client_that_leaves_ends_its_request(cluster):
    """It leaves after a second, in which a stream has begun."""

    async def leave(stream: bool) -> None:
        async with httpx.AsyncClient(base_url=cluster.http.base_url) as http, asyncio.timeout(1):
            await http.post("/v1/chat/completions", json=body("Hi", 900, stream=stream, n=8), timeout=99)

    for stream in (True, False):
        with pytest.raises(TimeoutError):
            asyncio.run(leave(stream))
        wait_until(lambda: cluster.running() == 0, 20, "no sequence runs")


def test_a_client_that_floods_does_not_delay_another_one(cluster):
    """All requests of one client reach the servers before many of them have ended, and the servers' fairness gives the next place to
    another client. Health checks wait for neither."""
    flood, done = 640, list[int]()
    url = str(cluster.http.base_url)

    async def send(http: httpx.AsyncClient, prompt: str) -> None:
        done.append((await http.post("/v1/chat/completions", json=body(prompt, 600))).status_code)

    def arrived() -> bool:
        counts = re.findall(
            r"^rung:num_requests_(?:running|waiting){.*} (\S+)", cluster.http.get("/metrics").text, re.MULTILINE
        )
        return len(done) + sum(map(float, counts)) == flood

    async def run() -> int:
        limits = httpx.Limits(max_connections=None)
        transports = [httpx.AsyncHTTPTransport(local_address=f"127.0.0.{host}", limits=limits) for host in (2, 3)]
        first, second = (httpx.AsyncClient(base_url=url, timeout=300, transport=transport) for transport in transports)
        async with first, second:
            tasks = [asyncio.create_task(send(first, f"{number} Tell me a story.")) for number in range(flood)]
            await asyncio.to_thread(wait_until, arrived, 120, "all requests are at the servers")
            before = len(done)
            assert before < flood // 8, "they waited for earlier ones before they reached a server"
            assert (await second.get("/health")).status_code == 200
            assert (await second.post("/v1/chat/completions", json=body("Hi", 2))).status_code == 200
            after = len(done)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return after - before

    assert asyncio.run(run()) <= 4 * 2 * 8, "more than four batches of the two replicas passed"
    assert set(done) <= {200}
    wait_until(lambda: cluster.running() == 0, 60, "no sequence runs")


def test_conversations_stay_with_their_replica(cluster, seed):
    rng, chosen = random.Random(seed), []
    for _ in range(8):
        messages, replicas = [], set()
        for _ in range(4):
            messages.append({"role": "user", "content": f"{rng.random()} " * 12})
            reply = cluster.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3})
            messages.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]})
            replicas.add(reply.headers["x-rung-replica"])
        assert len(replicas) == 1
        chosen += replicas
    assert len(set(chosen)) == 2, "all went to one replica; by chance in 1 of 128 runs"


def test_killed_replicas_lose_no_request(cluster, seed):
    rng, killed = random.Random(seed), []

    def kill_some(victims: int) -> None:
        before = cluster.serving()
        for actor in rng.sample(cluster.actors(), victims):
            killed.extend(cluster.kill_replica(actor, rng))

        def replaced() -> bool:
            now = cluster.serving()
            return len(now) == 2 and len(now - before) == victims

        wait_until(replaced, START_SECONDS, "the replicas that were killed are replaced")

    def act() -> None:
        for victims in (1, 1, 1, 2):
            kill_some(victims)
            time.sleep(2)

    results = under_load(cluster, "5 replicas killed", act)
    assert results["whole"] > CLIENTS and results["stream"] > CLIENTS
    assert results["stream broken"] <= 5 * CLIENTS / 2  # those that a killed replica had begun
    wait_until(lambda: not any(map(runs, killed)), 30, "no process of a killed replica runs")
    assert_gpus_of_their_own(cluster)


def test_an_update_drains_and_loses_nothing(cluster):
    before, old = cluster.serving(), cluster.actors()
    results = under_load(
        cluster, "an update", lambda: cluster.update("--port", cluster.port, "--replicas", 2, model_name="second")
    )
    assert results["stream broken"] == 0 and results["stream"] > CLIENTS
    assert not before & cluster.serving() and cluster.http.get("/v1/models").json()["data"][0]["id"] == "second"
    wait_until(lambda: not any(map(runs, old)), 90, "the old replicas have ended")


def test_the_queue_starts_and_ends_replicas(cluster):
    scaling = ("--replicas", 1, "--max-replicas", 2, "--target", 4, "--upscale-delay", 2, "--downscale-delay", 5)
    cluster.update("--port", cluster.port, *scaling, model_name="third")
    cluster.wait_for(1)
    results = under_load(cluster, "a second replica by the queue", lambda: cluster.wait_for(2))
    cluster.wait_for(1)
    assert results["stream broken"] == 0
