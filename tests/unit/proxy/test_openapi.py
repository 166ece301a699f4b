from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec

from millpond.core.http.docs_page import CONTENT_SECURITY_POLICY, page
from millpond.core.http.routing import Router
from millpond.proxy.app import all_routes
from millpond.proxy.routes.docs import describe

GOLDEN = Path(__file__).parents[2] / "golden" / "openapi.json"


def current() -> bytes:
    document = describe(all_routes())
    document["info"]["version"] = "golden"
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def test_the_interface_is_as_published() -> None:
    """The OpenAPI document equals its golden file: a change of the public interface is seen in review."""
    assert current().decode() == GOLDEN.read_text(), (
        "the interface changed; when that is meant, `python tests/unit/proxy/test_openapi.py` writes it anew"
    )


def test_every_reference_leads_somewhere() -> None:
    """Each $ref names a component, and each component is referred to."""
    text = current().decode()
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert named == set(msgspec.json.decode(text)["components"]["schemas"])


def test_operation_ids_are_distinct() -> None:
    """Generated clients have one function per operation id."""
    document = describe(all_routes())
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


def test_all_routes_fit_one_router() -> None:
    """No two calls share method and path."""
    assert len(Router(all_routes()).routes) == len(all_routes())


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.assets: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name == "href" and value:
                self.links.append(value)
            if name == "src" and value:
                self.assets.append(value)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_shows_every_call_without_help() -> None:
    """/docs needs nothing from elsewhere, names every path, and its links lead somewhere."""
    document = describe(all_routes())
    parser = _Page()
    parser.feed(page(document))
    text = " ".join(parser.text)
    assert not parser.assets
    assert all(path in text for path in document["paths"])
    inside = [link[1:] for link in parser.links if link.startswith("#")]
    assert set(inside) <= set(parser.ids)
    assert len(parser.ids) == len(set(parser.ids))
    assert "unsafe" not in CONTENT_SECURITY_POLICY


if __name__ == "__main__":
    GOLDEN.write_bytes(current())
