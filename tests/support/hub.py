"""A server on this host that answers what `huggingface_hub` asks the Hugging Face Hub, with large files on a second host as there."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LARGE = (".safetensors", ".bin", ".model")  # what the hub keeps on another host


class Hub:
    """Its models can be changed while it runs."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, bytes]] = {}  # files by name
        self.gated: set[str] = set()  # models
        self.breaks: dict[str, int] = {}  # after how many bytes the next transfer of a file breaks
        self.open = threading.Event()  # while it is not set, large files are not sent
        self.open.set()
        self.damaged: set[str] = set()  # files that arrive with another first byte
        self.contents: list[tuple[str, str]] = []  # the files that were sent, and the ranges asked for
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler()) for _ in range(2)]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self.url, self.second = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def add(self, name: str, folder: Path, **more: bytes) -> None:
        paths = [path for path in folder.rglob("*") if path.is_file()]
        self.models[name] = {str(path.relative_to(folder)): path.read_bytes() for path in paths} | more

    def commit(self, name: str) -> str:
        files = sorted(self.models[name].items())
        return hashlib.sha1(repr([(file, hashlib.sha1(data).hexdigest()) for file, data in files]).encode()).hexdigest()

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _info(self, name: str) -> dict[str, Any]:
        siblings = []
        for file, data in self.models[name].items():
            one: dict[str, Any] = {"rfilename": file, "size": len(data), "blobId": blob_id(data)}
            if file.endswith(LARGE):
                one["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
            siblings.append(one)
        return {"id": name, "sha": self.commit(name), "siblings": siblings}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *given: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                parts = self.path.partition("?")[0].strip("/").split("/")
                name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
                if name not in hub.models:
                    return self.answer(404, {"X-Error-Code": "RepoNotFound"})
                known = ("main", hub.commit(name))
                if parts[0] == "api":
                    if parts[4:5] == ["revision"] and parts[5] not in known:
                        return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
                    return self.answer(200, {"Content-Type": "application/json"}, json.dumps(hub._info(name)).encode())
                if name in hub.gated and self.server is hub._servers[0] and self.headers.get("authorization") != "Bearer right":
                    return self.answer(403, {"X-Error-Code": "GatedRepo"})
                file = "/".join(parts[4:])
                data, large = hub.models[name][file], file.endswith(LARGE)
                etag = hashlib.sha256(data).hexdigest() if large else blob_id(data)
                headers = {"X-Repo-Commit": hub.commit(name), "ETag": f'"{etag}"'}
                if large and self.server is hub._servers[0]:
                    moved = {"Location": hub.second + self.path, "X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(len(data))}
                    return self.answer(302, headers | moved)
                return self.content(file, data, headers)

            def content(self, file: str, data: bytes, headers: dict[str, str]) -> None:
                asked = self.headers.get("range", "")
                first = int(asked.removeprefix("bytes=").rstrip("-") or 0)
                if self.command == "GET":
                    hub.contents.append((file, asked))
                if file.endswith(LARGE):
                    hub.open.wait()
                if file in hub.damaged:
                    data = bytes([data[0] ^ 1]) + data[1:]
                if first:
                    headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
                self.answer(206 if first else 200, headers, data[first:], hub.breaks.pop(file, None) if asked == "" else None)

            def answer(self, status: int, headers: dict[str, str], data: bytes = b"", most: int | None = None) -> None:
                self.send_response(status)
                for key, value in (headers | {"Content-Length": str(len(data))}).items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data[:most])
                self.close_connection = most is not None

        return Handler


def blob_id(data: bytes) -> str:
    """The name of a file in git."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
