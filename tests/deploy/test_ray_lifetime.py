"""The start and the end of replicas on a local Ray, a cluster for each test: `make cluster-test`."""

import asyncio
import signal
import socket
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from scripts.lib.process_tree import kill, process_tree
from tests import ROOT
from tests.deploy.test_ray_serve import MODEL, PYTHON, Cluster, body
from tests.deploy.test_ray_serve import pytestmark as pytestmark
from tests.support.ports import free_port
from tests.support.server_process import runs

PATH = "/v1/chat/completions"
STREAM = (False, True) * 4  # of the requests in flight
END_SECONDS = 120.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster that the test ends. No process of it is left."""
    cluster = Cluster()
    everything = process_tree(cluster.process.pid)
    yield cluster
    left = [pid for pid in everything if runs(pid)]
    kill(left)
    assert not left


async def ask(http: httpx.AsyncClient, stream: bool, choices: int) -> tuple[int, str]:
    """Status and text of the answer to a long request, and an empty text if the connection breaks."""
    status, text = 0, ""
    try:
        async with http.stream("POST", PATH, json=body("Tell me a story.", 500, stream=stream, n=choices)) as reply:
            status = reply.status_code
            async for piece in reply.aiter_text():
                text += piece
    except httpx.HTTPError:
        text = ""
    return status, text


async def end(cluster: Cluster, choices: int, *signals: signal.Signals) -> tuple[httpx.Response, list[tuple[int, str]]]:
    """Send signals, 3 s apart, while requests are in flight, each for so many choices. Returns the answers to a new request and to those."""
    async with httpx.AsyncClient(base_url=cluster.http.base_url, timeout=END_SECONDS) as http:
        in_flight = [asyncio.create_task(ask(http, stream, choices)) for stream in STREAM]
        await asyncio.sleep(1)
        cluster.process.send_signal(signals[0])
        await asyncio.sleep(0.5)
        late = await http.post(PATH, json=body("Hi"))
        for number in signals[1:]:
            await asyncio.sleep(2.5)
            cluster.process.send_signal(number)
        return late, await asyncio.gather(*in_flight)


def complete(text: str, stream: bool) -> bool:
    return text.endswith("data: [DONE]\n\n") and '"error"' not in text if stream else '"completion_tokens":500' in text


def refused(*flags: object) -> str:
    """The last line of a start that is refused."""
    command = [PYTHON, "-m", "deploy.ray_serve", *flags]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=END_SECONDS)
    assert (done.returncode, done.stdout) == (2, "")
    *notes, error = done.stderr.splitlines()
    assert all(line.startswith("starting") for line in notes), done.stderr
    return error


def test_a_busy_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        error = refused("--port", port, "--", "--model", MODEL)
    assert error == f"error: port {port} of 127.0.0.1 is taken by another program; end that, or choose another one with --port"


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--port", "99999", "99999 is not from 1 to 65535"),
        ("--replicas", "0", "--replicas 0: Input should be greater than or equal to 1"),
        ("--cpus", "-0.5", "--cpus -0.5: Input should be greater than or equal to 0"),
        ("--drain-timeout", "nan", "--drain-timeout nan: Input should be a finite number"),
        ("--surge", "101", "--surge 101: Input should be less than or equal to 100"),
    ],
)
def test_a_wrong_flag_is_one_line(flag: str, value: str, says: str) -> None:
    assert says in refused(flag, value, "--", "--model", MODEL)


def test_replicas_that_cannot_start_say_what_their_server_said() -> None:
    error = refused("--port", free_port(), "--", "--model", "/none")
    assert "the server ended with exit code 2: error: /none/config.json is missing" in error


def test_requests_in_flight_finish(cluster: Cluster) -> None:
    late, answers = asyncio.run(end(cluster, 1, signal.SIGINT))
    assert (late.status_code, late.headers["retry-after"], late.json()["error"]["code"]) == (503, "1", "draining")
    for stream, (status, text) in zip(STREAM, answers, strict=True):
        assert status == 200 and complete(text, stream), text[-300:]
    assert cluster.process.wait(END_SECONDS) == 0


def test_a_second_signal_ends_requests_at_once(cluster: Cluster) -> None:
    _, answers = asyncio.run(end(cluster, 8, signal.SIGTERM, signal.SIGTERM))
    for status, text in answers:
        *_, last, done = ["", *text.removesuffix("\n\n").split("\n\n")]
        assert '"code":"draining"' in (text if status == 503 else last), answers
        assert status == 503 or done == "data: [DONE]", answers
    assert cluster.process.wait(END_SECONDS) == 128 + signal.SIGTERM
