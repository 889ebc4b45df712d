"""/openapi.json: FastAPI's description, corrected where it is wrong or not valid OpenAPI 3.1. /docs: the same as a page."""

import re
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.replies import EVENTS, ChatChunk, CompletionChunk, ErrorReply

Schema = dict[str, Any]

TEMPLATE = "#/components/schemas/{model}"


def event_stream(event: Schema, *data: Schema, **more: Any) -> Schema:
    """The content of a response with `stream`: server-sent events. `schema` describes one event. event, data: schemas of its
    fields, one of several for the data. more: other keywords.

    OpenAPI 3.1 has no keyword for this; its readers take `schema` to describe one event. OpenAPI 3.2 has `itemSchema`, which
    3.1 does not allow.
    """
    fields = {"event": event, "data": {"anyOf": data}}
    schema = {"type": "object", "properties": fields, "required": ["data"], "additionalProperties": False}
    return {"text/event-stream": {"schema": schema | more}}


def json_text(schema: Schema) -> Schema:
    """A text that is JSON which fits the schema."""
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}


def one_of(*models: type[BaseModel]) -> Schema:
    return {"anyOf": [{"$ref": TEMPLATE.format(model=model.__name__)} for model in models]}


def stream_of(chunk: type[BaseModel]) -> Schema:
    """The content of a stream of chunks. Its events have no type. Clients then use the default, "message"."""
    text = "The data is a chunk, or an error; the last event's is [DONE]."
    return event_stream({"const": "message"}, json_text(one_of(chunk, ErrorReply)), {"const": "[DONE]"}, description=text)


def generating(reply: Any, chunk: Any, summary: str) -> dict[str, Any]:
    """The description of a route whose answer is whole, or a stream of chunks."""
    responses = {200: {"content": stream_of(chunk)}, **errors_of()}
    return {"response_model": reply, "responses": responses, "tags": ["generation"], "summary": summary}


def errors_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The descriptions of error responses, for a route: of all statuses if none is given."""
    texts = {
        400: "A parameter is wrong or unsupported, or the prompt is too long",
        401: "The API key is missing or wrong",
        404: "No such model",
        413: "The body is too large",
        429: "The queue is full; see Retry-After",
        500: "Internal error",
        503: "Loading, draining, timed out or broken",
    }
    return {status: {"model": ErrorReply, "description": texts[status]} for status in statuses or texts}


def describe(app: FastAPI) -> None:
    """Install the corrected description in `app`.

    FastAPI documents a 422 for every wrong body, where this server sends a 400.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            for operation in (one for path in schema["paths"].values() for one in path.values()):
                operation["responses"].pop("422", None)
            components = schema.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            events: list[type[BaseModel]] = [CompletionChunk, ChatChunk, *EVENTS.values()]
            _, chunks = models_json_schema([(one, "serialization") for one in events], ref_template=TEMPLATE)
            components["schemas"] = dict(sorted({**chunks["$defs"], **schemas}.items()))
            components["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer", "description": "If the server has keys"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same keys"},
            }
            schema |= {"security": [{"key": []}, {"x-api-key": []}, {}]} | ({"servers": app.servers} if app.servers else {})
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def render_docs(api: Schema) -> str:
    """The description as one page without scripts. The usual viewers load scripts from other hosts, which could read the
    page's key."""
    pages = Environment(autoescape=True, loader=FileSystemLoader(Path(__file__).parent))
    pages.filters["code"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    return pages.get_template("docs.html").render(api=api)
