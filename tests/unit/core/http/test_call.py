from __future__ import annotations

import msgspec
import pytest

from millpond.core.errors import BadRequest, NotAcceptable
from millpond.core.http.call import Input, decode_json, decode_query, negotiate

JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"


class Inner(Input, frozen=True):
    name: str


class Shape(Input, frozen=True):
    count: int
    inner: tuple[Inner, ...] = ()
    flag: bool = False
    marks: dict[int, int] = msgspec.field(default_factory=dict)


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (b'{"count": 1, "extra": 2}', "unknown_field", "extra"),
        (b'{"count": 1, "inner": [{"name": "a"}, {"name": "b", "nmae": 1}]}', "unknown_field", "inner[1].nmae"),
        (b'{"count": "1"}', "invalid_request", "count"),
        (b'{"count": 1.5}', "invalid_request", "count"),
        (b'{"inner": []}', "invalid_request", "count"),
        (b'{"count": 1, "inner": [{}]}', "invalid_request", "inner[0].name"),
        (b'{"count": 1, "marks": {"x": 1}}', "invalid_request", "marks"),
        (b"[]", "invalid_request", "body"),
        (b"null", "invalid_request", "body"),
    ],
)
def test_json_errors_name_the_field(body: bytes, code: str, field: str) -> None:
    """Whatever is wrong inside a JSON body, the problem says where."""
    with pytest.raises(BadRequest) as caught:
        decode_json(body, Shape)
    assert (caught.value.code, caught.value.fields[0].field) == (code, field)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"{'a': 1}", b'{"count": 1} x', b"\xff\xfe", b'{"count": NaN}', b"[" * 5000]
)
def test_what_is_not_json_is_malformed(body: bytes) -> None:
    """Broken JSON is malformed_body, never a failure of ours; absurd nesting too."""
    with pytest.raises(BadRequest):
        decode_json(body, Shape)


class Query(Input, frozen=True, rename={"from_ms": "from"}):
    from_ms: int | None = None
    clock: str = "store"
    deep: bool = False


def test_query_is_typed() -> None:
    """Text of a query becomes what the struct says, under the public name of the parameter."""
    assert decode_query("from=5&deep=true", Query) == Query(from_ms=5, deep=True)
    assert decode_query("", Query) == Query()


@pytest.mark.parametrize(
    ("text", "field"), [("form=5", "form"), ("from=x", "from"), ("from=1&from=2", "from"), ("deep=maybe", "deep"),
                        ("from=null", "from"),
                        ("from_ms=1", "from_ms")]
)  # fmt: skip
def test_query_errors_name_the_parameter(text: str, field: str) -> None:
    """An unknown, repeated or ill-typed parameter is refused by name."""
    with pytest.raises(BadRequest) as caught:
        decode_query(text, Query)
    assert caught.value.fields[0].field == field


@pytest.mark.parametrize("text", ["clock=%FF", "&".join(f"a{i}=1" for i in range(100))])
def test_hostile_queries_are_refused(text: str) -> None:
    """Not UTF-8, and more parameters than any call has."""
    with pytest.raises(BadRequest):
        decode_query(text, Query)


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        ("*/*", JSON),
        (ARROW, ARROW),
        (f"{ARROW};q=0.5, {JSON};q=0.9", JSON),
        ("application/*", JSON),
        (f"{JSON};q=0, */*", ARROW),
        ("text/html, */*;q=0.1", JSON),
        (f"{ARROW.upper()}", ARROW),
    ],
)
def test_the_best_accepted_type_is_chosen(header: str, chosen: str) -> None:
    """RFC 9110: the most specific range decides, then quality, then our order."""
    assert negotiate(header, (JSON, ARROW)) == chosen


def test_nothing_acceptable_is_406() -> None:
    """The problem says what there would be."""
    with pytest.raises(NotAcceptable, match="json"):
        negotiate("text/html", (JSON, ARROW))
