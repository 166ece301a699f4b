from __future__ import annotations

from typing import Any

import pytest

from millpond.core.errors import BadRequest, MethodNotAllowed, NotFound
from millpond.core.http import routing
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


def test_a_target_asked_for_again_is_told_by_its_method() -> None:
    """What is remembered of a target answers for the same method only, and an error is not remembered."""
    router = Router([route("GET", "/v1/{name}"), route("PUT", "/v1/{name}")])
    for method in ("GET", "PUT", "GET", "PUT"):
        found, params = router.find(method, "/v1/a")
        assert (found.method, params) == (method, {"name": "a"})
    for _ in range(2):
        with pytest.raises(MethodNotAllowed):
            router.find("DELETE", "/v1/a")


def test_remembered_targets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many targets clients think of, few are kept, and neither long ones nor those with a query."""
    monkeypatch.setattr(routing, "TARGETS", 3)
    router = Router([route("GET", "/v1/{name}")])
    for number in range(20):
        assert router.find("GET", f"/v1/{number}")[1] == {"name": str(number)}
        assert len(router._found) <= 3
    before = dict(router._found)
    for target in ("/v1/a?x=1", "/v1/" + "a" * 300):
        router.find("GET", target)
    assert router._found == before


def test_two_routes_of_one_kind_are_a_bug() -> None:
    """The router refuses the same method and path twice."""
    with pytest.raises(AssertionError, match="twice"):
        Router([route("GET", "/a/{b}"), route("GET", "/a/{b}")])
