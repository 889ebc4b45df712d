"""Answers HTTP while the files of the model are being fetched: 503, with how much of them is here."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from checkpoints import hub

READ_SECONDS = 2.0  # for a request; the next one waits
POLL_SECONDS = 0.1


class _Handler(BaseHTTPRequestHandler):
    timeout = READ_SECONDS

    def do_GET(self) -> None:
        state = f"downloading{f', {hub.gigabytes(hub.bar.n, hub.bar.total)}' if hub.bar else ''}"
        error = {"message": f"the model is not here yet: {state}", "type": "server_error", "param": None, "code": "loading"}
        body = json.dumps({"status": state, "error": error}).encode()
        self.send_response(503)
        for key, value in (("content-type", "application/json"), ("content-length", str(len(body))), ("retry-after", "5")):
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *given: Any) -> None:
        pass


class _Server(TCPServer):
    allow_reuse_address = True

    def handle_error(self, *given: Any) -> None:  # of a client that left
        pass


@contextmanager
def answering(host: str, port: int) -> Iterator[None]:
    """Answer while the body runs. Raises OSError if the address is taken."""
    _Server.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with _Server((host, port), _Handler) as server:
        threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
