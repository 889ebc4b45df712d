"""How many of the repository's files one streamed chat request enters, in all processes of a server: so many a reader has to open
who follows a request."""

import time
from pathlib import Path

from scripts.report.budgets import ENTERED_FILES
from tests import MODELS, ROOT
from tests.support.server_process import ServerProcess

SECONDS = 3.0  # for what a server does now and then, so that every run has it
TRACED = "import sitecustomize; from cli import run; from server.__main__ import main; run(main)"  # whose processes are forked


def ask(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    body = {"messages": messages, "max_tokens": 8, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_files_that_a_streamed_chat_request_enters(tmp_path: Path) -> None:
    """The third one, which finds caches as the second one has left them."""
    on = tmp_path / "on"
    on.write_bytes(b"\0")
    tracing = {"PYTHONPATH": ROOT / "tests" / "support" / "entered", "ENTERED": tmp_path}
    with ServerProcess("--model", MODELS / "tiny-hybrid", ranks=1, program=("-c", TRACED), environ=tracing) as server:
        server.ready()
        ask(server)
        ask(server)
        with on.open("r+b", buffering=0) as switch:  # in place: the processes have mapped it
            switch.write(b"\1")
            ask(server)
            time.sleep(SECONDS)
            switch.seek(0)
            switch.write(b"\0")
    entered = sorted({line for notes in tmp_path.glob("[0-9]*") for line in notes.read_text().splitlines()})
    print(*entered, sep="\n")
    assert len(entered) <= ENTERED_FILES, f"a streamed chat request enters {len(entered)} files"
