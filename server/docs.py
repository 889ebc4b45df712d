"""/docs as one plain page made from the OpenAPI description: the usual viewers load their scripts from other hosts."""

from html import escape
from typing import Any

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2024;background:#fff}
table{border-collapse:collapse;width:100%;margin:.5rem 0 1rem}td,th{border-bottom:1px solid #ddd;padding:.3rem .5rem;text-align:left;vertical-align:top}
code{font:13px ui-monospace,monospace}h2{margin-top:2.5rem}
@media(prefers-color-scheme:dark){body{color:#e6e8ea;background:#16181a}td,th{border-color:#3a3f44}a{color:#8ab4f8}}"""


def render_docs(api: dict[str, Any]) -> str:
    sections = [
        _operation(method, path, operation, api)
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    ]
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'><title>{title}: API</title>"
        f"<style>{STYLE}</style><h1>{title}</h1><p>The same for programs: <a href=/openapi.json>/openapi.json</a>.</p>{''.join(sections)}"
    )


def _operation(method: str, path: str, operation: dict[str, Any], api: dict[str, Any]) -> str:
    text = f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation.get('summary', ''))}</p>"
    if body := operation.get("requestBody"):
        text += _fields(_resolve(body["content"]["application/json"]["schema"], api))
    rows = "".join(
        f"<tr><td>{status}<td>{escape(response.get('description', ''))}" for status, response in operation["responses"].items()
    )
    return f"{text}<table><tr><th>Status<th>Meaning{rows}</table>"


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = ""
    for name, field in schema.get("properties", {}).items():
        mark = " (required)" if name in required else ""
        rows += f"<tr><td><code>{escape(name)}</code>{mark}<td>{escape(_type(field))}<td>{escape(field.get('description', ''))}"
    return f"<table><tr><th>Parameter<th>Type<th>Meaning{rows}</table>"


def _resolve(schema: dict[str, Any], api: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = api["components"]["schemas"][name] if name else schema
    return found


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field or "oneOf" in field:
        return " or ".join(
            dict.fromkeys(_type(one) for one in (field.get("anyOf") or field["oneOf"]) if one.get("type") != "null")
        )
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "enum" in field or "const" in field:
        return ", ".join(str(one) for one in field.get("enum", [field.get("const")]))
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    shown = [f"from {low}"] if low is not None and abs(low) < 2**31 else []
    shown += [f"to {high}"] if high is not None and abs(high) < 2**30 else []
    return " ".join([kind, *shown])
