"""Spans of requests, as a collector over HTTP receives them."""

import builtins
import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.datastructures import Headers

from errors import UserError
from server.tracing import RequestSpans, Tracing
from tests.support.server_thread import CHAT, Site, raw_request, wait_for

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"  # the example of W3C Trace Context, section 3.2
STAGES = ("queue", "prefill", "decode")


class Collector(http.server.ThreadingHTTPServer):
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[Any] = []
        self.stuck = threading.Event()  # a collector that does not answer waits for it
        self.stuck.set()
        super().__init__(("127.0.0.1", 0), Receiver)

    def of(self, trace: str) -> list[Any]:
        return [span for span in self.spans if span.trace_id.hex() == trace]


class Receiver(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.stuck.wait(60)
        message = ExportTraceServiceRequest.FromString(body)
        for group in message.resource_spans:
            self.server.resources.append(group.resource)
            self.server.spans += [span for scope in group.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.stuck.set()
        server.shutdown()
        thread.join(60)


@pytest.fixture
def site(tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms between two batches
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-model")
    site = Site(tmp_path, otlp_traces_endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces").start()
    yield site
    collector.stuck.set()  # a server's process does not wait for it, but this thread would
    site.close()


def fields(span: Any) -> dict[str, Any]:
    values = {one.key: one.value for one in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


def test_the_spans_of_requests(site: Site, collector: Collector) -> None:
    trace, parent = PARENT.split("-")[1:3]
    with site.http.stream(
        "POST", "/v1/chat/completions", json=CHAT | {"n": 3, "stream": True}, headers={"traceparent": PARENT}
    ) as r:
        request_id = r.headers["x-request-id"]
        events = [*r.iter_lines()]
    wait_for(lambda: len(collector.of(trace)) == 11)
    spans = collector.of(trace)
    (request,) = [span for span in spans if span.name == "POST /v1/chat/completions"]
    assert request.parent_span_id.hex() == parent and request.kind == request.SPAN_KIND_SERVER
    known = fields(request)
    assert known["rung.request_id"] == request_id and known["http.response.status_code"] == 200
    assert known["gen_ai.usage.output_tokens"] > 3 and known["gen_ai.usage.input_tokens"] > 0 and events
    inner = [span for span in spans if span is not request]
    assert sorted(span.name for span in inner) == sorted(["frontend", *STAGES * 3])
    (frontend,) = [span for span in inner if span.name == "frontend"]
    for span in inner:
        assert span.parent_span_id == request.span_id
        assert (
            request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano <= request.end_time_unix_nano
        )
    ends = {name: sorted(s.end_time_unix_nano for s in inner if s.name == name) for name in STAGES}
    starts = {name: sorted(s.start_time_unix_nano for s in inner if s.name == name) for name in STAGES}
    assert starts["queue"][0] == frontend.end_time_unix_nano
    assert starts["prefill"] == ends["queue"] and starts["decode"] == ends["prefill"]
    assert sum(fields(span)["rung.tokens"] for span in inner if span.name == "decode") == known["gen_ai.usage.output_tokens"]
    service = [one.value.string_value for one in collector.resources[0].attributes if one.key == "service.name"]
    assert service == ["my-model"]

    # one that the caller does not sample, a refused one, paths that are polled, and a header that is nonsense
    site.http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": PARENT[:-1] + "0"})
    site.http.get("/metrics")
    assert site.http.post("/v1/chat/completions", json={}, headers={"traceparent": "nonsense" * 100}).status_code == 400
    wait_for(lambda: len(collector.spans) == 12)
    (refused,) = [span for span in collector.spans if span.trace_id.hex() != trace]
    assert not refused.parent_span_id and fields(refused)["http.response.status_code"] == 400 and len(collector.of(trace)) == 11


def test_the_spans_of_embeddings(site: Site, collector: Collector) -> None:
    assert site.http.post("/v1/embeddings", json={"input": ["One", "two"]}).status_code == 200
    wait_for(lambda: len(collector.spans) == 6)
    (request,) = [span for span in collector.spans if span.name == "POST /v1/embeddings"]
    known = fields(request)
    assert known["gen_ai.usage.input_tokens"] > 1 and known["gen_ai.usage.output_tokens"] == 0
    inner = [span.name for span in collector.spans if span.parent_span_id == request.span_id]
    assert sorted(inner) == sorted(["frontend", *STAGES[:2] * 2])


def test_clients_and_collectors_that_leave(site: Site, collector: Collector) -> None:
    site.engine.hold = True
    with socket.create_connection(("127.0.0.1", site.port)) as raw:
        raw.sendall(raw_request({"prompt": "Hi", "stream": True}))
        wait_for(lambda: site.engine.submits)
    wait_for(lambda: len(collector.spans) == 3)
    queue = next(span for span in collector.spans if span.name == "queue")
    assert fields(queue)["rung.tokens"] == 0
    site.engine.hold = False
    collector.stuck.clear()  # answers come without it
    for _ in range(3):
        assert site.complete()["choices"][0]["text"]


def test_a_queue_that_is_longer_than_the_answer_took(collector: Collector) -> None:
    """The engine's times and the frontend's come from two processes. A span never ends before it starts."""
    tracing = Tracing(f"http://127.0.0.1:{collector.server_port}/v1/traces", "m")
    spans = RequestSpans(tracing, Headers())
    for first in (5.5, None):
        spans.on_sequence(started=5.0, queue_seconds=2.0, first=first, end=6.0, attributes={})
    tracing.provider.shutdown()
    assert sorted(span.name for span in collector.spans) == sorted([*STAGES, *STAGES[:2]])
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in collector.spans)


def test_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("localhost:4317", "http://", "http://[::1", "http://localhost:99999/v1/traces"):
        with pytest.raises(UserError, match="is no http URL; give the collector's URL"):
            Tracing(wrong, "m")
    plain = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(f"No module named {name!r}")
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="pip install opentelemetry-sdk"):
        Tracing("http://localhost:4318/v1/traces", "m")
