"""The server's address before the frontend has it: whether it can be had, and answers while the files of the model are being
fetched: 503, with how much of them is here."""

import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from checkpoints import hub
from errors import UserError
from ranks.ports import check_port, check_socket
from server.settings import Settings

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


def check_address(settings: Settings) -> None:
    """Raises UserError if the server cannot listen there, or has no certificate for it."""
    if settings.uds:
        check_socket(settings.uds)
    else:
        check_port(settings.host, settings.port)
    tls_context(settings)


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """What encrypts connections, None for HTTP. Raises UserError."""
    if not settings.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")  # one is never asked for
    except (OSError, ValueError) as e:
        raise UserError(
            f"--ssl-certfile and --ssl-keyfile give no certificate with its key ({e}); name PEM files without a password"
        ) from None
    return context


@contextmanager
def answering(settings: Settings) -> Iterator[None]:
    """Answer while the body runs. Raises OSError if the address is taken."""
    _Server.address_family = socket.AF_UNIX if settings.uds else socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with _Server(settings.uds or (settings.host, settings.port), _Handler) as server:  # type: ignore[arg-type]  # of a Unix socket
        if settings.uds:
            os.chmod(settings.uds, 0o666)  # as uvicorn does
        if context := tls_context(settings):  # a handshake comes with the first read, whose time is bounded
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
