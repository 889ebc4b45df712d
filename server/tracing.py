"""OpenTelemetry spans: one for each request, and in it `frontend`, and for each of its sequences `queue`, `prefill`, `decode`.

The request's parent comes from its W3C headers `traceparent` and `tracestate`. The spans are made when a request or sequence
ends, from times that the metrics measure anyway, and a thread sends them. What a slow collector cannot take is dropped.

The packages are optional; without --otlp-traces-endpoint nothing is imported and no span is made.
"""

import asyncio
import contextlib
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from errors import UserError
from server.settings import VERSION

if TYPE_CHECKING:
    from opentelemetry.context import Context

CLOSE_SECONDS = 2.0  # time to send the last spans at the end of the server
current_spans: ContextVar["RequestSpans | None"] = ContextVar("request_spans", default=None)  # None without tracing


class Tracing:
    """Makes spans and sends them to an OTLP collector over HTTP. The environment variables OTEL_SERVICE_NAME,
    OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and OTEL_BSP_* hold, as in other programs."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        """Raises UserError for an endpoint that is no URL, and if packages are missing."""
        if not _is_http(endpoint):
            advice = "give the collector's URL, such as http://localhost:4318/v1/traces"
            raise UserError(f"--otlp-traces-endpoint {endpoint} is no http URL; {advice}")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as e:
            packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
            raise UserError(f"--otlp-traces-endpoint needs packages ({e}); run: pip install {packages}") from e
        resource = Resource.create({"service.name": "rung"}).merge(OTELResourceDetector().detect())
        self.provider: TracerProvider = TracerProvider(resource=resource)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self.tracer = self.provider.get_tracer("rung", VERSION)
        self.model_name, self._propagator = model_name, TraceContextTextMapPropagator()

    def parent(self, headers: Headers) -> "Context":
        """The caller's span, or an empty context if the headers name none."""
        from opentelemetry.context import Context

        return self._propagator.extract(headers, context=Context())

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self.provider.shutdown), CLOSE_SECONDS)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        return False


class Spans:
    """ASGI middleware: the spans of POST requests. It must lie outside of `RequestScope`, whose `state` it reads."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app, self.tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        spans, status = RequestSpans(self.tracing, Headers(scope=scope)), 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = current_spans.set(spans)
        try:
            await self.app(scope, receive, send_and_note)
        finally:
            current_spans.reset(token)
            spans.end(scope, status)


class RequestSpans:
    """The spans of one request."""

    def __init__(self, tracing: Tracing, headers: Headers) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        self._tracer, self._model_name = tracing.tracer, tracing.model_name
        self._submitted = False
        # Times of spans are Unix times in ns. All of a request's are taken from one clock that only goes forward.
        self._offset = time.time_ns() - time.monotonic_ns()
        self._started = time.monotonic()
        parent = tracing.parent(headers)
        self._span = self._tracer.start_span("POST", parent, kind=SpanKind.SERVER, start_time=self._ns(self._started))
        self._inner = set_span_in_context(self._span)

    def end(self, scope: Scope, status: int) -> None:
        """End the request's span. `status`: the response's; 0 if the client left before it had one."""
        from opentelemetry.trace import StatusCode

        span, fields = self._span, scope["state"]["log_fields"]
        if route := getattr(scope.get("route"), "path", None):
            span.update_name(f"POST {route}")
            span.set_attribute("http.route", route)
        span.set_attribute("http.request.method", "POST")
        span.set_attribute("rung.request_id", scope["state"]["request_id"])
        if status:
            span.set_attribute("http.response.status_code", status)
        if "prompt_tokens" in fields:
            span.set_attribute("gen_ai.request.model", self._model_name)
            span.set_attribute("gen_ai.usage.input_tokens", fields["prompt_tokens"])
            span.set_attribute("gen_ai.usage.output_tokens", fields.get("completion_tokens", 0))
        if not status or status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(self._ns(time.monotonic()))

    def on_submit(self, now: float) -> None:
        """The request is parsed and its sequences go to the engine. All times here: time.monotonic()."""
        if not self._submitted:
            self._submitted = True
            self._add("frontend", self._started, now, {})

    def on_sequence(
        self, started: float, queue_seconds: float | None, first: float | None, end: float, attributes: dict[str, Any]
    ) -> None:
        """A sequence has ended. `queue_seconds`: from its arrival in the engine to its first step; None if it had none.
        `first`: when its first token came, None if none did."""
        # `queue_seconds` is measured in another process, so a sum with it may lie behind times that are measured here.
        answered = end if first is None else first
        begun = end if queue_seconds is None else min(started + queue_seconds, answered)
        self._add("queue", started, begun, attributes)
        if queue_seconds is not None:
            self._add("prefill", begun, answered, attributes)
        if first is not None:
            self._add("decode", first, end, attributes)

    def _add(self, name: str, start: float, end: float, attributes: dict[str, Any]) -> None:
        self._tracer.start_span(name, self._inner, attributes=attributes, start_time=self._ns(start)).end(self._ns(end))

    def _ns(self, monotonic: float) -> int:
        return int(monotonic * 1e9) + self._offset
