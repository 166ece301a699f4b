"""OpenAPI 3.1 from the routes: nothing is described twice.

    paths          one operation per route: parameters from `Route.path` and `Route.query`, bodies and answers by
                   media type, `statuses`, and one `default` answer: the problem
    components     every struct named by a route, by `msgspec.json.schema_components`; the bearer key

`document` is plain data, in a stable order: its JSON is a golden file (tests/golden/openapi.json).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from millpond.core.errors import ERRORS
from millpond.core.http.call import JSON
from millpond.core.http.json_view import EitherOf, json_view
from millpond.core.http.problem import PROBLEM_TYPE, Problem
from millpond.core.http.routing import Route
from millpond.core.names import EXPECTED

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)\}")
_NAMES = frozenset({"topic", "group", "replay"})  # path parameters under the rule of names
_NAME_PATTERN = r"^[A-Za-z0-9](?!.*\.\.)[A-Za-z0-9._-]{0,126}$"


def document(routes: tuple[Route, ...], title: str, version: str, description: str) -> dict[str, Any]:
    """The whole document for `routes`; hidden ones are left out."""
    shown = sorted((route for route in routes if not route.hidden), key=lambda route: (route.path, route.method))
    shapes = _shapes(shown)
    schemas, components = _components([json_view(shape) for shape in shapes])
    of = dict(zip(shapes, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in shown:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, of, components)
    queries = {_name_of(of[route.query]) for route in shown if route.query is not None}
    kept = {name: _flowing(schema) for name, schema in sorted(components.items()) if name not in queries}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": description, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in sorted({tag_of(route) for route in shown})],
        "paths": paths,
        "components": {
            "schemas": kept,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "Bearer mp_<key id>_<secret>"}
            },
        },
        "x-error-codes": {code: _error_entry(code) for code in sorted(ERRORS)},
    }


def _components(shapes: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """(a schema for each shape, all components); the members of `EitherOf` become components, too."""
    members: dict[Any, None] = {}

    def either(kind: type) -> dict[str, Any]:
        assert issubclass(kind, EitherOf), f"{kind} has no JSON schema"
        members.update(dict.fromkeys(kind.members))
        return {"anyOf": [{"$ref": _REF.format(name=member.__name__)} for member in kind.members]}

    msgspec.json.schema_components(shapes, schema_hook=either)  # finds the members
    schemas, components = msgspec.json.schema_components([*shapes, *members], schema_hook=either, ref_template=_REF)
    return list(schemas[: len(shapes)]), components


def tag_of(route: Route) -> str:
    """Its tag; else the first word of its path after the version."""
    if route.tag:
        return route.tag
    words = [word for word in route.path.split("/") if word and word != "v1"]
    return words[0] if route.path.startswith("/v1/") else "operations"


def _error_entry(code: str) -> dict[str, Any]:
    cls = ERRORS[code]
    return {"status": cls.status, "title": cls.title, "retryable": cls.retryable}


def media_of(shape: Any) -> Mapping[str, Any]:
    """`Route.body` or `Route.answer` by media type."""
    if shape is None:
        return {}
    return shape if isinstance(shape, Mapping) else {JSON: shape}


def _shapes(routes: list[Route]) -> list[Any]:
    """Every struct type that the routes name, once, in the order of first use."""
    found: dict[Any, None] = {Problem: None}
    for route in routes:
        if route.query is not None:
            found[route.query] = None
        for media in (media_of(route.body), media_of(route.answer)):
            found.update(dict.fromkeys(shape for shape in media.values() if shape is not None))
    return list(found)


def _operation(route: Route, of: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "tags": [tag_of(route)],
        "summary": route.summary,
    }
    if route.description:
        operation["description"] = route.description
    parameters = [_path_parameter(name) for name in _PARAMETER.findall(route.path)]
    if route.query is not None:
        parameters += _query_parameters(components[_name_of(of[route.query])])
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        media = media_of(route.body)
        operation["requestBody"] = {"content": _content(media, of), "required": _needs_body(media)}
    operation["responses"] = _responses(route, of)
    operation["security"] = [{"key": []}] if route.scope else []
    if route.scope:
        operation["x-scope"] = route.scope
    return operation


def _needs_body(media: Mapping[str, Any]) -> bool:
    """An empty body is `{}`: fine where every field has a default."""
    return any(
        shape is None or any(field.required for field in msgspec.structs.fields(shape)) for shape in media.values()
    )


def _responses(route: Route, of: dict[Any, Any]) -> dict[str, Any]:
    content = _content(media_of(route.answer), of)
    answers: dict[str, Any] = {}
    for status in route.statuses:
        answers[str(status)] = {"description": HTTPStatus(status).phrase} | ({"content": content} if content else {})
    problem = {"content": _content({PROBLEM_TYPE: Problem}, of)}
    answers["default"] = {"description": "A problem; `code` says which (x-error-codes)."} | problem
    return answers


def _content(media: Mapping[str, Any], of: dict[Any, Any]) -> dict[str, Any]:
    return {name: {} if shape is None else {"schema": of[shape]} for name, shape in media.items()}


def _flowing(schema: dict[str, Any]) -> dict[str, Any]:
    """Docstrings are broken into lines for the source; a description is not."""
    if "description" not in schema:
        return schema
    return {**schema, "description": " ".join(schema["description"].split())}


def _name_of(reference: dict[str, str]) -> str:
    return reference["$ref"].rpartition("/")[2]


def _path_parameter(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    parameter = {"name": name, "in": "path", "required": True, "schema": schema}
    if name in _NAMES:
        schema["pattern"] = _NAME_PATTERN
        parameter["description"] = EXPECTED
    elif name == "queue":
        schema.update(type="integer", minimum=0)
    return parameter


def _query_parameters(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Each property of a query struct as a parameter; the struct's docstring belongs to all of them."""
    required = set(schema.get("required", ()))
    parameters = []
    for name, of_name in schema["properties"].items():
        parameters.append({"name": name, "in": "query", "required": name in required, "schema": _without_null(of_name)})
    return parameters


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter that may be left out is not null: it is not there."""
    choices = [choice for choice in schema.get("anyOf", ()) if choice != {"type": "null"}]
    others = {name: value for name, value in schema.items() if name != "anyOf" and value is not None}
    if not choices:
        return others
    return {**others, **choices[0]} if len(choices) == 1 else {**others, "anyOf": choices}
