"""The page that shows an OpenAPI document: one HTML file without any other asset, readable without JavaScript.

`page(document)` is the text, `CONTENT_SECURITY_POLICY` what a browser may do with it: run this file's own script and
call this server, nothing else. The script only adds the forms that try a call; the key typed there stays in the tab.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
STYLE = (_FOLDER / "docs_page.css").read_text()
SCRIPT = (_FOLDER / "docs_page.js").read_text()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(document: dict[str, Any]) -> str:
    info = document["info"]
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {tag["name"]: [] for tag in document["tags"]}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag[operation["tags"][0]].append((method, path, operation))
    sections = "".join(_section(tag, operations) for tag, operations in by_tag.items())
    contents = "".join(f'<a href="#tag-{escape(tag)}">{escape(tag)}</a>' for tag in by_tag)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(info["title"])}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(info["title"])} <small>{escape(info["version"])}</small></h1>
<p>{escape(info["description"])} The same as data: <a href="/openapi.json">/openapi.json</a>.</p>
<label id="key-field" hidden>API key <input id="key" type="password" autocomplete="off" placeholder="mp_…"></label>
</header>
<nav aria-label="Contents">{contents}<a href="#shapes">shapes</a><a href="#errors">errors</a></nav>
<main>
{sections}
<section id="shapes"><h2>Shapes</h2>{_shapes(document["components"]["schemas"])}</section>
<section id="errors"><h2>Errors</h2>{_errors(document["x-error-codes"])}</section>
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


# -- calls ----------------------------------------------------------------------------------------------------


def _section(tag: str, operations: list[tuple[str, str, dict[str, Any]]]) -> str:
    calls = "".join(_call(method, path, operation) for method, path, operation in operations)
    return f'<section id="tag-{escape(tag)}"><h2>{escape(tag)}</h2>{calls}</section>\n'


def _call(method: str, path: str, operation: dict[str, Any]) -> str:
    scope = operation.get("x-scope")
    needs = "open to all" if scope is None else "any key" if scope == "any" else f"key with scope {scope}"
    parts = [
        f"<p>{_text(operation['description'])}</p>" if "description" in operation else "",
        f'<p class="needs">{escape(needs)}</p>',
        _parameters(operation.get("parameters", [])),
        _media("Takes", operation.get("requestBody", {}).get("content", {})),
        _answers(operation["responses"]),
    ]
    data = escape(json.dumps(_trial(method, path, operation)))
    return (
        f'<details class="call" id="{escape(operation["operationId"])}" data-call="{data}">'
        f'<summary><b class="{method}">{method.upper()}</b> <code>{escape(path)}</code>'
        f" <span>{escape(operation['summary'])}</span></summary>{''.join(parts)}</details>\n"
    )


def _trial(method: str, path: str, operation: dict[str, Any]) -> dict[str, Any]:
    """What the script needs to make a form."""
    parameters = operation.get("parameters", [])
    return {
        "method": method.upper(),
        "path": path,
        "inPath": [parameter["name"] for parameter in parameters if parameter["in"] == "path"],
        "inQuery": [parameter["name"] for parameter in parameters if parameter["in"] == "query"],
        "media": list(operation.get("requestBody", {}).get("content", {})),
    }


def _parameters(parameters: list[dict[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(p['name'])}</code></td><td>{escape(p['in'])}</td><td>{_type(p['schema'])}</td>"
        f"<td>{_default(p['schema'], p['required'])}</td></tr>"
        for p in parameters
    )
    return f"<h3>Parameters</h3><table>{rows}</table>" if rows else ""


def _media(title: str, content: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{_type(entry['schema']) if entry else 'bytes'}</td></tr>"
        for name, entry in content.items()
    )
    return f"<h3>{title}</h3><table>{rows}</table>" if rows else ""


def _answers(responses: dict[str, Any]) -> str:
    rows = ""
    for status, response in responses.items():
        media = response.get("content", {}) or {"": None}
        for name, entry in media.items():
            shape = _type(entry["schema"]) if entry else ("bytes" if name else escape(response["description"]))
            rows += f"<tr><td>{escape(status)}</td><td><code>{escape(name)}</code></td><td>{shape}</td></tr>"
    return f"<h3>Answers</h3><table>{rows}</table>"


# -- shapes ---------------------------------------------------------------------------------------------------


def _shapes(schemas: dict[str, Any]) -> str:
    return "".join(_shape(name, schema) for name, schema in schemas.items())


def _shape(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code></td><td>{_type(of)}</td><td>{_default(of, field in required)}</td></tr>"
        for field, of in schema.get("properties", {}).items()
    )
    about = f"<p>{_text(schema['description'])}</p>" if "description" in schema else ""
    return f'<article id="shape-{escape(name)}"><h3>{escape(name)}</h3>{about}<table>{rows}</table></article>'


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema as a short type: `[Message]`, `integer | null`, `"flush" | "memory"`."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#shape-{name}">{name}</a>'
    if "anyOf" in schema:
        return " | ".join(_type(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"[{_type(schema.get('items', {}))}]"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"{{string: {_type(schema['additionalProperties'])}}}"
    return escape(str(kind))


def _default(schema: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    if schema.get("default") is not None:
        return f"default <code>{escape(json.dumps(schema['default']))}</code>"
    return "optional"


def _errors(codes: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr id="{escape(code)}"><td><code>{escape(code)}</code></td><td>{entry["status"]}</td>'
        f"<td>{escape(entry['title'])}</td><td>{'try again' if entry['retryable'] else ''}</td></tr>"
        for code, entry in codes.items()
    )
    return f"<table>{rows}</table>"


def _text(text: str) -> str:
    """Escaped, with `code` between backticks."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
