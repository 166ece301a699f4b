"""Ranges read through the service: dense, clipped, and loud when something is missing."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from millpond.core.errors import Internal, OffsetExpired
from millpond.core.schema import TIER_SCHEMA
from millpond.spark.http import HttpClient
from millpond.spark.read_range import Lost, Range, read_range, select, tag_set


def read(service: Any, limit: int = 70, lost: Lost | None = None, **span: Any) -> list[int]:
    asked = Range(**{"topic": "pond", "queue": 0, "first": 0, "end": 1_000, **span})
    with HttpClient(service.url, retry_seconds=0) as client:
        batches = list(read_range(client, asked, limit, lost))
    assert all(batch.schema.equals(TIER_SCHEMA) for batch in batches)
    return [offset for batch in batches for offset in batch["offset"].to_pylist()]


def test_exactly_the_range(service: Any, pond: Any) -> None:
    """Every offset once, in order, none beyond the end."""
    assert read(service, first=13, end=707) == list(range(13, 707))


def test_a_hole_is_an_error(service: Any, pond: Any) -> None:
    """An answer that skips an offset is refused, never passed on."""
    table = pond.queues[0]
    pond.queues[0] = pa.concat_tables([table.slice(0, 100), table.slice(101)])
    with pytest.raises(Internal, match="without a gap"):
        read(service)


def test_an_end_that_is_not_there(service: Any, pond: Any) -> None:
    """A range beyond what the service has is an error that names both."""
    with pytest.raises(Internal, match="ends at 1000"):
        read(service, first=990, end=1_001)


def test_expired_offsets(service: Any, pond: Any) -> None:
    """What retention deleted is an error, or left out and told."""
    lost: list[tuple[int, int]] = []
    pond.start[0] = 40
    with pytest.raises(OffsetExpired):
        read(service, first=0, end=60)
    assert read(service, first=0, end=60, lost=lambda *some: lost.append(some)) == list(range(40, 60))
    assert lost == [(0, 40)]


def test_damaged_offsets(service: Any, pond: Any) -> None:
    """An error, or left out and told, also where they are the last ones that were asked for."""
    pond.damaged = range(20, 30)
    lost: list[tuple[int, int]] = []
    with pytest.raises(Internal, match="damaged"):
        read(service, first=0, end=60)
    assert read(service, first=0, end=60, lost=lambda *some: lost.append(some)) == [*range(20), *range(30, 60)]
    assert read(service, first=0, end=25, lost=lambda *some: lost.append(some)) == list(range(20))
    assert lost == [(20, 30), (20, 25)]


def test_nulls_never_match(service: Any, make_rows: Any) -> None:
    """A message without born_ts, tag or that property is outside every filter on it."""
    rows = make_rows(0, 0, 3, born_ts=[None, 5, 6], tag=[None, "a", "a"], properties=[None, [("p", "1")], []])
    batch = rows.to_batches()[0]
    assert select(batch, clock="born", from_ms=0)["offset"].to_pylist() == [1, 2]
    assert select(batch, tags=frozenset({"a"}))["offset"].to_pylist() == [1, 2]
    assert select(batch, properties={"p": "1"})["offset"].to_pylist() == [1]
    assert select(batch)["offset"].to_pylist() == [0, 1, 2]


@pytest.mark.parametrize(("text", "expected"), [("a || b", {"a", "b"}), ("*", None), (None, None), ("a", {"a"})])
def test_tag_expressions(text: str | None, expected: set[str] | None) -> None:
    """`a || b` are two tags; `*` and nothing are all messages."""
    assert tag_set(text) == expected
