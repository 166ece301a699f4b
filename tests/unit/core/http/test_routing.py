from __future__ import annotations

from typing import Any

import pytest

from millpond.core.errors import BadRequest, MethodNotAllowed, NotFound
from millpond.core.http.routing import Route, Router


async def handler(call: Any) -> Any:
    raise AssertionError("not called here")


def route(method: str, path: str) -> Route:
    return Route(method=method, path=path, handler=handler)


ROUTER = Router(
    [
        route("GET", "/v1/topics"),
        route("PUT", "/v1/topics/{topic}"),
        route("GET", "/v1/topics/{topic}"),
        route("POST", "/v1/topics/{topic}/groups/{group}/messages/receive"),
        route("GET", "/v1/topics/{topic}/messages/{id}"),
    ]
)


def test_parameters_are_decoded() -> None:
    """A parameter arrives percent-decoded, the query string apart."""
    found, params = ROUTER.find("POST", "/v1/topics/a%20b/groups/g%2B/messages/receive?x=1")
    assert found.path == "/v1/topics/{topic}/groups/{group}/messages/receive"
    assert params == {"topic": "a b", "group": "g+"}


@pytest.mark.parametrize(("segment", "value"), [("a%2Fb", "a/b"), ("%00", "\0"), ("..", ".."), ("%2e%2E", "..")])
def test_hostile_segments_stay_inside_their_parameter(segment: str, value: str) -> None:
    """An encoded slash, NUL or dots never change which route is found: the name check sees them."""
    assert ROUTER.find("GET", f"/v1/topics/{segment}")[1] == {"topic": value}


def test_broken_encoding_is_refused() -> None:
    """Bytes that are not UTF-8 are a bad request, not a lookup."""
    with pytest.raises(BadRequest):
        ROUTER.find("GET", "/v1/topics/%FF")


@pytest.mark.parametrize("path", ["/", "", "/v1", "/v1/topics/", "/v1/topics/a/b", "/v1/topics//messages/1", "*"])
def test_unknown_paths_are_not_found(path: str) -> None:
    """What no route describes is route_not_found, also an empty parameter."""
    with pytest.raises(NotFound) as caught:
        ROUTER.find("GET", path)
    assert caught.value.code == "route_not_found"


def test_wrong_method_names_the_right_ones() -> None:
    """405 carries what is allowed there; HEAD comes with GET."""
    with pytest.raises(MethodNotAllowed) as caught:
        ROUTER.find("DELETE", "/v1/topics/a")
    assert sorted(caught.value.extra["allow"]) == ["GET", "HEAD", "PUT"]
    assert ROUTER.find("HEAD", "/v1/topics")[0].method == "GET"


def test_absolute_form_is_a_path() -> None:
    """RFC 9112 3.2.2: a server must accept the absolute form of a target."""
    assert ROUTER.find("GET", "http://host:80/v1/topics/a")[1] == {"topic": "a"}


def test_two_routes_of_one_kind_are_a_bug() -> None:
    """The router refuses the same method and path twice."""
    with pytest.raises(AssertionError, match="twice"):
        Router([route("GET", "/a/{b}"), route("GET", "/a/{b}")])
