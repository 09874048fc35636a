"""The page at /docs: the API's OpenAPI document as plain HTML. It needs no script and nothing from another host."""

from __future__ import annotations

import json
from html import escape
from typing import Any

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>testtime: the API</title>
<link rel="stylesheet" href="assets/reference.css">
</head>
<body>
<main>
"""


def reference(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document."""
    about = document["info"]
    parts = [f"<h1>{escape(about['title'])} {escape(about['version'])}</h1>", *_paragraphs(about["description"])]
    parts.append('<p>As data: <a href="openapi.json">openapi.json</a>. <a href=".">The page of the service</a>.</p>')
    calls = [(method, path, call) for path, methods in document["paths"].items() for method, call in methods.items()]
    parts.append("<nav><h2>Calls</h2><ul>")
    for method, path, call in calls:
        words = f"<code>{method.upper()} {escape(path)}</code> {escape(call['summary'])}"
        parts.append(f'<li><a href="#{_anchor(method, path)}">{words}</a></li>')
    parts.append("</ul></nav>")
    for method, path, call in calls:
        parts += _call(method, path, call)
    parts.append("<h2>Schemas</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts += _schema(name, schema)
    return HEAD + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"


def _paragraphs(text: str) -> list[str]:
    return [f"<p>{escape(part)}</p>" for part in text.split("\n\n") if part]


def _anchor(method: str, path: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in f"{method}{path}")


def _call(method: str, path: str, call: dict[str, Any]) -> list[str]:
    parts = [f'<section id="{_anchor(method, path)}">']
    parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(call['summary'])}.")
    parts.append(f" Scope: {escape(call['x-scope'])}.</p>" if call.get("x-scope") else "</p>")
    rows = [
        (
            f"<code>{escape(each['name'])}</code>",
            each["in"],
            _kind(each["schema"]),
            escape(each.get("description", "")),
        )
        for each in call.get("parameters", [])
    ]
    if rows:
        parts += ["<h3>Parameters</h3>", _table(rows)]
    if "requestBody" in call:
        parts += ["<h3>Body</h3>", _table(_contents(call["requestBody"]["content"]))]
    parts.append("<h3>Answers</h3>")
    answers = []
    for status, answer in sorted(call["responses"].items()):
        kinds = "; ".join(kind for _, kind in _contents(answer.get("content", {})))
        answers.append((f"<code>{status}</code>", escape(answer.get("description", "")), kinds))
    return [*parts, _table(answers), "</section>"]


def _contents(content: dict[str, Any]) -> list[tuple[str, str]]:
    return [(f"<code>{escape(media)}</code>", _kind(each.get("schema", {}))) for media, each in content.items()]


def _schema(name: str, schema: dict[str, Any]) -> list[str]:
    required = set(schema.get("required", ()))
    rows = []
    for field, each in schema.get("properties", {}).items():
        words = [escape(each.get("description", ""))]
        if "default" in each:
            words.append(f"Default: <code>{escape(json.dumps(each['default']))}</code>.")
        if "examples" in each:
            words.append(f"Example: <code>{escape(json.dumps(each['examples'][0]))}</code>.")
        needed = "required" if field in required else ""
        rows.append((f"<code>{escape(field)}</code>", _kind(each), needed, " ".join(filter(None, words))))
    return [f'<section id="schema-{escape(name)}"><h3>{escape(name)}</h3>', *_paragraphs(schema.get("description", "")),
            _table(rows), "</section>"]  # fmt: skip


def _kind(schema: dict[str, Any]) -> str:
    """The type of a value in words, with links to the schemas."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [f"{word} {schema[key]:,}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    if "maxLength" in schema:
        bounds.append(f"at most {schema['maxLength']:,}")
    values = [", ".join(json.dumps(value) for value in schema["enum"])] if "enum" in schema else []
    return escape(" ".join([schema.get("type", "any"), *bounds, *values]))


def _table(rows: list[Any]) -> str:
    lines = ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table>" + "".join(lines) + "</table>"
