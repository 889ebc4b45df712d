"""scripts/bench/serving/soak.py: its progress bar and its verdict."""

import argparse
import asyncio
import random
import threading
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from scripts.bench.serving.soak import load, soak, verdict
from scripts.lib.servers import Server
from tests.support.ports import free_port

pytestmark = pytest.mark.usefixtures("forked_commands")

EVENTS = 'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\ndata: [DONE]\n\n'
GOOD: dict[str, Any] = {
    "before": {"file_descriptors": 90, "memory_mb": 1400},
    "after": {"file_descriptors": 94, "memory_mb": 1500},
    "load": {"outcomes": {"complete": 12}},
    "dropped": {"dropped by us": 9, "complete": 1},
    "idle": {"running": 0, "waiting": 0, "kv_blocks_used": 0, "preemptions": 3},
}


def test_the_load_shows_a_bar(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The load phase counts its requests on stderr."""

    async def some() -> int:
        server = httpx.MockTransport(lambda request: httpx.Response(200, text=EVENTS))
        async with httpx.AsyncClient(transport=server, base_url="http://test") as client:
            tally = await load(client, "tiny", 3, 0.2, random.Random(seed))
        assert set(tally.outcomes) == {"complete"} and tally.tokens == 7 * tally.outcomes["complete"]
        return tally.outcomes["complete"]

    count = asyncio.run(some())
    assert f"3 clients for 0.2 s: {count}request" in capsys.readouterr().err


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoModels(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": []}')

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with ThreadingHTTPServer(("127.0.0.1", 0), NoModels) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        with pytest.raises(IndexError):  # the answer arrived
            asyncio.run(soak(argparse.Namespace(seed=0), Server(f"http://127.0.0.1:{site.server_port}", 0)))
        site.shutdown()


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
