"""JSON requests of many messages: read and answered by columns, with what the way message by message would give."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.errors import BadRequest, TooLarge
from millpond.core.http import call
from millpond.core.limits import BATCH_MESSAGES
from millpond.proxy.codec import json
from millpond.proxy.codec.placed import ProduceResults, QueuePlaced, results, results_json
from millpond.proxy.frame_plan import Placed, PlacedRun

from .conftest import topic_of

SESSION = {"id": "s", "queue": 0, "previous": 3, "first": 4, "last": 9}
BODIES = ["", "hällo", 'a "quote"', "\x00", "x" * 6_000]


def request_of(messages: list[dict[str, Any]], **beside: Any) -> bytes:
    return msgspec.json.encode({"messages": messages, **beside})


@pytest.mark.parametrize("beside", [{}, {"producer": SESSION}], ids=["alone", "session"])
def test_bodies_alone_are_a_column(beside: dict[str, Any]) -> None:
    """Each as UTF-8, in order; a session that stands beside them arrives."""
    single, batch, session = json.decode(request_of([{"body": body} for body in BODIES], **beside))
    assert single is None and batch is not None
    assert batch.batch.to_pydict() == {"body": [body.encode() for body in BODIES]}
    assert session == (msgspec.convert(SESSION, json.Session) if beside else None)


@pytest.mark.parametrize("other", [{"key": "k"}, {"tag": "t"}, {"queue": 2}], ids=["key", "tag", "queue"])
@pytest.mark.parametrize("at", [0, len(BODIES)])
def test_a_field_of_one_message_is_not_lost(other: dict[str, Any], at: int) -> None:
    """Wherever among bodies alone it stands."""
    messages: list[dict[str, Any]] = [{"body": body} for body in BODIES]
    messages.insert(at, {"body": "this", **other})
    batch = json.decode(request_of(messages)).batch
    assert batch is not None
    [(name, value)] = other.items()
    column = batch.queues if name == "queue" else batch.batch.column(name)
    expected = value.encode() if name == "key" else value
    assert column.to_pylist() == [expected if row == at else None for row in range(len(messages))]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({}, ""), ({"body": 5}, "body"), ({"body": "a", "colour": 1}, ""), ({"body": "a", "body_base64": ""}, "")],
    ids=["empty", "number", "unknown", "two bodies"],
)
def test_a_wrong_message_is_named(wrong: dict[str, Any], field: str) -> None:
    """The last of many, as if it stood in a request of one."""
    with pytest.raises(BadRequest) as alone:
        json.decode(request_of([wrong]))
    with pytest.raises(BadRequest) as last:
        json.decode(request_of([*({"body": body} for body in BODIES), wrong]))
    [expected], [found] = alone.value.info().fields, last.value.info().fields
    assert found.field == expected.field.replace("[0]", f"[{len(BODIES)}]")
    assert (found.expected, last.value.code) == (expected.expected, alone.value.code)
    assert found.field.endswith(field)


@pytest.mark.parametrize("body", ["", "{" * 400], ids=["empty", "braces"])
@pytest.mark.parametrize("over", [0, 1])
def test_no_more_messages_than_one_request_may_have(body: str, over: int) -> None:
    """Neither one more, nor fewer because their bodies look like messages."""
    request = request_of([{"body": body}] * (BATCH_MESSAGES + over))
    if over:
        with pytest.raises(TooLarge) as refused:
            json.decode(request)
        assert refused.value.code == "batch_too_large"
    else:
        batch = json.decode(request).batch
        assert batch is not None and batch.batch.num_rows == BATCH_MESSAGES


def test_tiny_messages_without_number_are_not_all_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are decoded by the way that ends with the first that is too many, and by no other."""
    shapes: list[type] = []

    def decode_json(body: bytes, shape: type[Any]) -> Any:
        shapes.append(shape)
        return call.decode_json(body, shape)

    monkeypatch.setattr(json, "decode_json", decode_json)
    request = b'{"messages":[' + b'{"body":""},' * (100 * BATCH_MESSAGES) + b"]}"  # ends wrong: nobody comes so far
    with pytest.raises(TooLarge):
        json.decode(request)
    assert shapes == [json.ProduceIn]


def test_one_large_body_alone_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one message, by the shape that has nothing else."""
    monkeypatch.setattr(json, "ProduceIn", None)
    assert json.decode(request_of([{"body": "x" * 6_000}])) == (("x" * 6_000, *[None] * 6), None, None)


@settings(deadline=None)
@given(st.integers(64, 400), st.integers(0, 2**62), st.integers(0, 2**41))
def test_results_by_columns(rows: int, first: int, store_ts: int) -> None:
    """The bytes are those of the results made one by one."""
    parts = [QueuePlaced(topic_of(4).queues[3], None, PlacedRun(first, store_ts, rows))]
    assert results_json(parts) == msgspec.json.encode(ProduceResults(results(rows, {}, parts)))


ROWS = 300
RUN = PlacedRun(0, 5, ROWS)
AGAIN = Placed(np.arange(ROWS), np.full(ROWS, 5), np.zeros(ROWS, bool))


@pytest.mark.parametrize(
    "parts",
    [
        [(None, AGAIN)],
        [(None, PlacedRun(0, 5, 3))],
        [(np.arange(ROWS), RUN)],
        [(np.arange(ROWS), RUN), (ROWS + np.arange(ROWS), RUN)],
    ],
    ids=["known before", "few", "others refused", "two queues"],
)
def test_other_results_are_made_one_by_one(parts: list[tuple[Any, Placed | PlacedRun]]) -> None:
    """Whatever is not a run of new messages in one queue, or not worth it, is left to the other way."""
    queue = topic_of(1).queues[0]
    assert results_json([QueuePlaced(queue, *part) for part in parts]) is None
