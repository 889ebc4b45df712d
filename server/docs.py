"""Render /docs from the OpenAPI description as one page without scripts. The usual viewers load scripts from other hosts."""

import re
from html import escape
from typing import Any

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2024;background:#fff}
table{border-collapse:collapse;width:100%;margin:.5rem 0 1rem}td,th{border-bottom:1px solid #ddd;padding:.3rem .5rem;text-align:left;vertical-align:top}
td{overflow-wrap:break-word}
code{font:13px ui-monospace,monospace}h2{margin-top:2.5rem}h2 code{font-size:17px}
@media(max-width:40rem){th{display:none}tr{display:block;border-bottom:1px solid #ddd;padding:.4rem 0}td{display:block;border:0;padding:0}}
@media(prefers-color-scheme:dark){body{color:#e6e8ea;background:#16181a}td,th,tr{border-color:#3a3f44}a{color:#8ab4f8}}"""
LARGE = 2**31 - 1  # bounds of at least this size come from the number's type and are not shown
NULL = {"type": "null"}
NO_EFFECT = "Accepted, without effect"  # fields whose description starts so are listed last

Schema = dict[str, Any]


def render_docs(api: Schema) -> str:
    operations = [
        _operation(method, path, operation, api)
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    ]
    objects = [_object(name, schema) for name, schema in api["components"]["schemas"].items() if not name.endswith("Body")]
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'><title>{title}: API</title>"
        f"<style>{STYLE}</style><h1>{title}</h1><p>The same for programs: <a href=/openapi.json>/openapi.json</a>.</p>"
        f"{''.join(operations)}<h1>Objects</h1>{''.join(objects)}"
    )


def _operation(method: str, path: str, operation: Schema, api: Schema) -> str:
    text = f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation.get('summary', ''))}</p>"
    if body := operation.get("requestBody"):
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        text += _fields(api["components"]["schemas"][name])
    rows = "".join(
        f"<tr><td>{status}<td>{escape(response.get('description', ''))}<td>{_content(response)}"
        for status, response in operation["responses"].items()
    )
    return f"{text}<table><tr><th>Status<th>Meaning<th>Body{rows}</table>"


def _content(response: Schema) -> str:
    kinds = []
    for media, content in response.get("content", {}).items():
        schema = content.get("schema", {})
        if media == "text/event-stream":
            payload = schema["properties"]["data"]["anyOf"][0]["contentSchema"]
            kinds.append(f"with <code>stream</code> events of {_type(payload)}")
        else:
            kinds.append(_type(schema) if "$ref" in schema else escape(media))
    return ", ".join(kinds)


def _object(name: str, schema: Schema) -> str:
    head = f"<h2 id={escape(name)}><code>{escape(name)}</code></h2><p>{_text(schema.get('description', ''))}</p>"
    return head + (_fields(schema) if schema.get("properties") else f"<p>{_type(schema)}</p>")


def _fields(schema: Schema) -> str:
    required = schema.get("required", [])
    rows = ""
    for name, field in sorted(
        schema["properties"].items(), key=lambda item: (item[0] not in required, _has_no_effect(item[1]))
    ):
        mark = " (required)" if name in required else ""
        rows += f"<tr><td><code>{escape(name)}</code>{mark}<td>{_type(field)}<td>{_text(field.get('description', ''))}"
    return f"<table><tr><th>Field<th>Type<th>Meaning{rows}</table>"


def _text(description: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(description))


def _has_no_effect(field: Schema) -> bool:
    return str(field.get("description", "")).startswith(NO_EFFECT)


def _type(field: Schema) -> str:
    """The type in words, as HTML. Objects are links. null is left out, because it means "not given" in every field."""
    if branches := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(one) for one in branches if one != NULL))
    if "$ref" in field:
        name = escape(field["$ref"].rpartition("/")[2])
        return f"<a href=#{name}>{name}</a>"
    if "enum" in field or "const" in field:
        return escape(", ".join(str(one) for one in field.get("enum", [field.get("const")])))
    kind = str(field.get("type", "any"))
    if kind == "array":
        size = _range(field.get("minItems"), field.get("maxItems"))
        return f"list {size and f'({size}) '}of {_type(field.get('items', {}))}"
    if kind == "object" and isinstance(values := field.get("additionalProperties"), dict) and values:
        return f"object of {_type(values)}"
    if kind == "string":
        size = _range(field.get("minLength"), field.get("maxLength"))
        return f"string ({size} characters)" if size else kind
    return " ".join(filter(None, (kind, _range(field.get("minimum"), field.get("maximum"), field.get("exclusiveMinimum")))))


def _range(low: float | None, high: float | None, above: float | None = None) -> str:
    """A range such as "1 to 128"; empty if there are no bounds to show."""
    high = None if high is None or abs(high) >= LARGE else high
    low = None if low is None or abs(low) >= LARGE else low
    if above is not None:
        return f"above {above:g}" + (f", to {high:g}" if high is not None else "")
    if low is None:
        return f"up to {high:g}" if high is not None else ""
    return f"{low:g} to {high:g}" if high is not None else f"at least {low:g}"
