"""A proxy that notes the requests that pass, and makes test fixtures of them."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

KEPT_HEADERS = ("anthropic-version", "anthropic-beta", "openai-beta")
LONGEST_TEXT, LONGEST_LIST = 40, 40  # in a fixture
PRIVATE = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-\S*|[0-9a-f]{24,}|(?<![\w:/])/(?:tmp|root|home|work|var)/[^\s\"']*")
HOP_BY_HOP = ("connection", "transfer-encoding", "keep-alive", "content-length")

Request = dict[str, Any]  # method, path, headers, body (parsed JSON, or None), status of the answer


@contextmanager
def recording(*urls: str) -> Iterator[tuple[list[str], list[Request]]]:
    """Yield the addresses of proxies for the servers at `urls`, and the list to which they append requests."""
    taken: list[Request] = []
    with ExitStack() as stack:
        yield [stack.enter_context(_proxy(url, taken)) for url in urls], taken


@contextmanager
def _proxy(url: str, taken: list[Request]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # the end of an answer is the end of its connection

        def log_message(self, *_: object) -> None:
            pass

        def forward(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            upstream = HTTPConnection(urlsplit(url).netloc, timeout=300)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
            try:
                upstream.request(self.command, self.path, data, headers)
                answer = upstream.getresponse()
                kept = {name: self.headers[name] for name in KEPT_HEADERS if name in self.headers}
                taken.append(_request(self.command, self.path, kept, data, answer.status))
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.end_headers()
                while part := answer.read1(1 << 16):
                    self.wfile.write(part)
            except OSError:  # the client or the server has left
                self.close_connection = True
            finally:
                upstream.close()

        do_GET = do_POST = do_DELETE = do_HEAD = do_PUT = forward

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _request(method: str, path: str, headers: dict[str, str], data: bytes, status: int) -> Request:
    try:
        body = json.loads(data) if data else None
    except ValueError:
        body = None
    return {"method": method, "path": path, "headers": headers, "body": body, "status": status}


# --- fixtures -------------------------------------------------------------------------------------------------------------


def fixture(taken: list[Request]) -> list[Request]:
    """One request of each shape that was served, without long texts and without ids and paths of the machine."""
    shapes: set[str] = set()
    kept = []
    for request in taken:
        path = re.sub(r"resp[_-][^/?]+", "{id}", request["path"])
        if request["status"] >= 400 or not path.startswith(("/v1/", "/tokenize", "/detokenize", "/tokenizer_info")):
            continue
        shape = json.dumps([request["method"], path, shape_of(request["body"])])
        if shape not in shapes:
            shapes.add(shape)
            kept.append({**request, "path": path, "body": trimmed(request["body"])})
    return kept


def shape_of(value: Any) -> Any:
    """The keys of `value` and the kinds of their values; of a list, the different kinds of its items."""
    if isinstance(value, dict):
        return {name: value[name] if name in ("type", "role") else shape_of(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return sorted({json.dumps(shape_of(item)) for item in value})
    return type(value).__name__


def trimmed(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: trimmed(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [trimmed(item) for item in value[:LONGEST_LIST]]
    if not isinstance(value, str):
        return value
    if name == "previous_response_id":
        return "{id}"
    if name in ("arguments", "pattern", "$ref", "$schema", "data") or value.startswith("data:"):
        return PRIVATE.sub("x", value)
    if name == "description" or len(value) > LONGEST_TEXT:
        return value if value.startswith("(a text of") else f"(a text of {len(value)} characters)"
    return PRIVATE.sub("x", value)
