"""Logs on stderr: one line for each request, as text or JSON. They never contain keys, prompts, answers or query strings."""

import json
import logging
import sys
import time
from typing import Any

HEALTH_PATHS = ("/health", "/health_generate", "/ping")  # polled by probes and routers
METRIC_PATHS = ("/metrics", "/stats", "/load", "/get_load")  # polled by Prometheus and routers
PAGE_PATHS = ("/", "/favicon.ico")  # asked for by browsers, beside the files below STATIC
STATIC = "/static/"

log = logging.getLogger("rung")
access = logging.getLogger("rung.access")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": _stamp(record.created), "level": record.levelname.lower()}
        fields = getattr(record, "fields", None)
        line |= fields if fields is not None else {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        text = record.getMessage() if fields is None else " ".join(f"{k}={_word(v)}" for k, v in fields.items())
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return f"{_stamp(record.created)} {record.levelname.lower()} {text}"


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def _word(value: Any) -> str:
    """`value` as text. Text with special characters is quoted, so that a client's strings cannot break the line."""
    text = str(value)
    plain = text.isascii() and text.isprintable() and not set(text) & set(' "=')
    return text if plain and text else json.dumps(text)


def configure(log_format: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for name in ("rung", "uvicorn", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel("WARNING")  # its start and stop lines only repeat ours
    logging.getLogger("opentelemetry").setLevel("ERROR")  # it warns of headers that clients send


def access_line(fields: dict[str, Any]) -> None:
    """Log one request: at level debug if it is a poll or for a file of the page, unless it failed. The 503 of a health poll
    is an answer."""
    path, status = fields["path"], fields["status"]
    health = path in HEALTH_PATHS and status == 503
    frequent = path in HEALTH_PATHS + METRIC_PATHS + PAGE_PATHS or path.startswith(STATIC)
    quiet = frequent and (status < 400 or health or path == "/favicon.ico")
    access.log(logging.DEBUG if quiet else logging.INFO, "", extra={"fields": fields})
