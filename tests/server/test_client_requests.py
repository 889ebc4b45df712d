"""The requests that real clients and coding agents send, as `make clients ARGS=--record` has noted them, with shortened texts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import server_thread
from tests.support.server_thread import Site

FIXTURES = Path(__file__).parent / "fixtures" / "clients"


@pytest.fixture(scope="module")
def large_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A frontend whose model has a context for an agent's tools."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_thread, "CONTEXT", 1 << 17)
        site = Site(tmp_path_factory.mktemp("clients")).start()
    yield site
    site.close()


@pytest.mark.parametrize("client", sorted(path.stem for path in FIXTURES.glob("*.json")))
def test_what_clients_send_is_served(large_site: Site, client: str) -> None:
    last = ""  # id of the last answer
    for sent in json.loads((FIXTURES / f"{client}.json").read_text()):
        text = json.dumps(sent["body"]).replace("{id}", last)
        body = json.loads(text.replace("tiny-long", "tiny-hybrid").replace("tiny-adapter", "tiny-hybrid"))
        content = None if body is None else json.dumps(body)
        headers = {"content-type": "application/json", **sent["headers"]}
        answer = large_site.http.request(sent["method"], sent["path"].replace("{id}", last), content=content, headers=headers)
        assert answer.status_code == sent["status"], (sent["path"], json.dumps(body)[:2000], answer.text)
        last = checked(answer.text, bool(body and body.get("stream"))) or last


def checked(text: str, streamed: bool) -> str:
    """Assert that an answer has no error. Returns its id, if it has one."""
    if not streamed:
        answer: dict[str, Any] = json.loads(text)
        return str(answer.get("id", ""))
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in data if line != "[DONE]"]
    assert events and not any("error" in event and event["error"] for event in events), text[-1000:]
    first = events[0]
    return str((first.get("response") or first.get("message") or first).get("id", ""))
