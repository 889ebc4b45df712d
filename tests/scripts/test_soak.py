"""scripts/bench/serving/soak.py: what its clients count, and its verdict."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from scripts.bench.serving.soak import drop, load, outcomes, verdict

pytestmark = pytest.mark.usefixtures("forked_commands")

GOOD: dict[str, Any] = {
    "before": {"file_descriptors": 90, "memory_mb": 1400},
    "after": {"file_descriptors": 94, "memory_mb": 1500},
    "load": {"outcomes": {"complete": 12}},
    "dropped": {"cut off": 9, "complete": 1},
    "idle": {"running": 0, "waiting": 0, "kv_blocks_used": 0, "preemptions": 3},
}


@contextmanager
def site(answer: Callable[[BaseHTTPRequestHandler], bytes]) -> Iterator[str]:
    """The URL of a server whose answers have this body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            body = answer(self)
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_load_shows_a_bar(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The load phase counts its requests on stderr. An answer that ends too early is not complete."""
    events = b'data: {"choices": [{"token_ids": [1, 2, 3]}]}\n\ndata: [DONE]\n\n'
    with site(lambda _: events) as url:
        answers = asyncio.run(load(url, 3, 0.2, random.Random(seed)))
    assert {answer.tokens for answer in answers} == {3} and outcomes(answers) == {"too few tokens": len(answers)}
    assert f"3 clients for 0.2 s: {len(answers)}request" in capsys.readouterr().err


def test_connections_are_dropped(seed: int) -> None:
    never = threading.Event()
    with site(lambda _: b"" if never.wait(2) else b"data: [DONE]\n\n") as url:
        answers = asyncio.run(drop(url, 5, random.Random(seed)))
    assert outcomes(answers) == {"cut off": 5}


def test_the_verdict() -> None:
    assert verdict(GOOD, 100) == []
    for path, bad, named in (
        (("idle", "kv_blocks_used"), 1, "idle"),
        (("load", "outcomes"), {"complete": 5, "cut off": 1}, "cut off"),
        (("dropped", "ReadError"), 1, "ReadError"),
        (("after", "file_descriptors"), 95, "from 90 to 95"),
        (("after", "memory_mb"), 1501, "from 1400 to 1501 MB"),
    ):
        result = deepcopy(GOOD)
        result[path[0]][path[1]] = bad
        (wrong,) = verdict(result, 100)
        assert named in wrong
