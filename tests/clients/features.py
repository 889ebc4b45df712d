"""What a client's script tries: features of APIs, one JSON line each. Runs in the client's own environment, so it imports nothing.

A script is called with BASE_URL (http://host:port), MODEL and ADAPTER, another model's name, in the environment. The server at
THINKING_URL answers HELLO with the reasoning THOUGHT and the text ANSWER, and a conversation that has this reasoning with SEEN.
"""

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

URL, MODEL = os.environ.get("BASE_URL", ""), os.environ.get("MODEL", "")
THINKING, ADAPTER = os.environ.get("THINKING_URL", ""), os.environ.get("ADAPTER", "")
THOUGHT, ANSWER, SEEN = "17 and 25 are 42.", "It is 42.", "I thought of it."
HELLO = "What is 17 plus 25?"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
_tried: list[tuple[str, str, Callable[[], Any]]] = []


def feature(api: str, name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function that raises unless the feature works. It may be a coroutine function, and return a detail to show."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        _tried.append((api, name, function))
        return function

    return register


def report(api: str, name: str, ok: bool, detail: str) -> None:
    print(json.dumps({"api": api, "feature": name, "ok": ok, "detail": detail}), flush=True)


def run() -> None:
    """Try every registered feature, and end the process, whatever threads a library may have left."""
    for api, name, function in _tried:
        try:
            result = asyncio.run(function()) if inspect.iscoroutinefunction(function) else function()
            report(api, name, True, str(result or "")[:80])
        except (Exception, SystemExit) as e:
            report(api, name, False, f"{type(e).__name__}: {' '.join(str(e).split())}"[:400])
    sys.stdout.flush()
    os._exit(0)
