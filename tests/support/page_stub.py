"""A stub of the server's API for the page: it answers in the server's format."""

import json
import math
import mimetypes
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from scripts.corpus.train_tiny import EXAMPLES
from tests import ROOT

STATIC = ROOT / "server" / "static"
KEY = "sesame"

STATS: dict[str, Any] = {
    "model": "tiny-hybrid",
    "variant": "hybrid ladder (last 4 of 8 layers)",
    "communicator": "gloo",
    "world_size": 2,
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 1024,
    "running": 3,
    "waiting": 1,
    "kv_blocks_used": 128,
    "kv_blocks_total": 512,
    "generation_tokens_per_second": 231.4,
    "prompt_tokens_per_second": 1840.0,
    "ttft_seconds": {"p50": 0.0421, "p95": 0.0874},
    "inter_token_seconds": {"p50": 0.0062, "p95": None},
    "prefix_hit_rate": 0.615,
    "preemptions": 7,
    "step_seconds": 0.00571,
    "uptime_seconds": 4000,
    "status": "ready",
    "drafts": {"ngram": {"drafts": 0, "tokens": 0, "accepted": 0}, "head": {"drafts": 400, "tokens": 1600, "accepted": 1236}},
}

CARDS: list[dict[str, Any]] = [
    {
        "id": "tiny-hybrid",
        "object": "model",
        "root": "models/tiny-hybrid",
        "max_model_len": 1024,
        "variant": "hybrid ladder (layers 4-7 of 8)",
        "examples": EXAMPLES,
    },
    {"id": "other", "object": "model"},
]

STORY = "Once upon a time, there was a little dog named Max. He found a red ball and they played all day.\nThe end."
STORY_TOKENS = [w for word in STORY.split(" ") for w in ([f" {word}"] if word != "Once" else [word])]


def token_probability(i: int) -> float:
    return (0.97, 0.42, 0.88, 0.08, 0.65)[i % 5]


def is_drafted(i: int) -> bool:
    return i % 4 in (1, 2)


class Stub(BaseHTTPRequestHandler):
    """Serves the files of `server/static` at the server's paths, and enough of the API for the page."""

    protocol_version = "HTTP/1.1"
    server: "StubServer"

    def log_message(self, *args: Any) -> None:
        pass

    def send(self, status: int, content_type: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def send_json(self, status: int, value: Any, **headers: str) -> None:
        self.send(status, "application/json", json.dumps(value).encode(), **headers)

    def refuse(self, status: int, message: str, param: str | None = None, **headers: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
        self.send_json(status, {"error": error}, **headers)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/stats":
            self.send_json(200, self.server.stats)
        elif path == "/v1/models":
            if self.server.needs_key and self.headers.get("Authorization") != f"Bearer {KEY}":
                self.refuse(401, "Incorrect API key provided.")
            else:
                self.send_json(200, {"object": "list", "data": CARDS})
        else:
            file = STATIC / ("index.html" if path == "/" else path.removeprefix("/static/"))
            if file.parent == STATIC and file.is_file():
                self.send(200, mimetypes.guess_type(file.name)[0] or "application/octet-stream", file.read_bytes())
            else:
                self.refuse(404, f"no {path}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        chat = self.path == "/v1/chat/completions"
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        if prompt == "too long":
            return self.refuse(400, "This prompt has 5000 tokens; the context holds 1024.", "messages")
        if prompt == "busy":
            return self.refuse(429, "The queue is full.", Retry_After="3")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            if chat:
                self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
            if prompt == "break":
                self.chunk(chat, "Half an", [(" Half", 0.5), (" an", 0.5)])
                self.event({"error": {"message": "A rank died.", "type": "server_error", "param": None, "code": None}})
            elif prompt == "think":
                for text in ("Hm", ", so."):
                    self.event({"choices": [{"index": 0, "delta": {"reasoning_content": text}, "finish_reason": None}]})
                self.chunk(chat, "75", [("75", 0.9)])
                self.last(chat, 4)
            elif prompt == "bytes":  # text is held back: an incomplete character, or a possible stop string
                self.chunk(chat, "Caf", [("Caf", 0.9)])
                self.chunk(chat, "", [("\ufffd", 0.5)])
                self.chunk(chat, "é", [("\ufffd", 0.25)])
                self.chunk(chat, " a", [(" au", 0.75)])
                self.chunk(chat, "u l", [(" l", 0.5), ("ait", 0.1)])
                self.chunk(chat, "ait", [])
                self.last(chat, 6)
            else:
                n = 100_000 if prompt == "for ever" else len(STORY_TOKENS)
                for i in range(n):
                    text = STORY_TOKENS[i % len(STORY_TOKENS)]
                    self.chunk(
                        chat, text, [(text, token_probability(i))], [is_drafted(i)] if body.get("return_drafted") else None
                    )
                    time.sleep(0.005)
                self.last(chat, n)
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            self.server.gone.set()
        return None

    def event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def chunk(self, chat: bool, text: str, tokens: list[tuple[str, float]], drafted: list[bool] | None = None) -> None:
        more = {} if drafted is None else {"drafted": drafted}

        def alternatives(token: str, p: float) -> dict[str, float]:
            return {token: p, " cat": (1 - p) / 2, "\n": (1 - p) / 4, " <b>": (1 - p) / 8, " the": 1e-6}

        if chat:
            content = [
                {
                    "token": t,
                    "logprob": math.log(p),
                    "bytes": None,
                    "top_logprobs": [
                        {"token": a, "logprob": math.log(q), "bytes": None} for a, q in alternatives(t, p).items()
                    ],
                }
                for t, p in tokens
            ]
            self.event({"choices": [{"index": 0, "delta": {"content": text}, "logprobs": {"content": content}, **more}]})
            return
        logprobs = {
            "tokens": [t for t, _ in tokens],
            "token_logprobs": [math.log(p) for _, p in tokens],
            "top_logprobs": [{a: math.log(q) for a, q in alternatives(t, p).items()} for t, p in tokens],
            "text_offset": [0 for _ in tokens],
        }
        self.event({"choices": [{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None, **more}]})

    def last(self, chat: bool, n: int) -> None:
        end: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        self.event({"choices": [{"index": 0, **end, "logprobs": None, "finish_reason": "stop"}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": n, "total_tokens": n + 11}})


class StubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Stub)
        self.stats = dict(STATS)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.gone = threading.Event()  # set when a client disconnects during an answer
        self.needs_key = False
        self.url = f"http://127.0.0.1:{self.server_port}/"
