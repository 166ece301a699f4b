"""`Reader`: pages ahead of need, and messages out of columns."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pyarrow as pa
import pytest

from millpond.client.columns import AT_ONCE
from millpond.client.connection import Answer, Connection
from millpond.client.errors import UnknownProblem
from millpond.client.reader import Reader, ReadMessage
from millpond.core.errors import Unavailable
from millpond.core.schema import TIER_SCHEMA

END = 1000
PAGE = 300


class Queue:
    """A connection to a queue of END messages that gives at most PAGE of them at once."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.retry_seconds: list[float | None] = []
        self.arrived = asyncio.Event()  # set by every request
        self.open = asyncio.Event()  # requests beyond the first wait for it
        self.open.set()
        self.fail_at: int | None = None
        self.cancelled = 0

    async def call(
        self, method: str, path: str, *, params: dict[str, Any], retry_seconds: float | None, **_: Any
    ) -> Answer:
        self.asked.append(params)
        self.retry_seconds.append(retry_seconds)
        self.arrived.set()
        if len(self.asked) > 1:
            try:
                await self.open.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        first = params["offset"] or 0
        if first == self.fail_at:
            raise Unavailable("store_unavailable", "away")
        return Answer(200, {}, page(first, min(first + PAGE, params["limit"] + first, END)))


def page(first: int, end: int) -> pa.Buffer:
    beside = {"start_offset": 0, "next_offset": end, "end_offset": END}
    schema = TIER_SCHEMA.with_metadata({b"millpond": json.dumps(beside).encode()})
    rows = [
        {
            "queue": 2, "offset": offset, "store_ts": 5000 + offset, "born_ts": offset if offset % 2 else None,
            "key": b"k%d" % offset if offset % 3 else None, "tag": "even" if offset % 2 == 0 else None,
            "properties": [("p", str(offset))] if offset % 5 == 0 else None, "body": b"%d" % offset, "origin": None,
        }
        for offset in range(first, end)
    ]  # fmt: skip
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema), max_chunksize=70)
    return sink.getvalue()


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def reader(queue: Queue) -> Reader:
    return Reader(cast(Connection, queue), "t", 2)


async def test_pages_meet_at_their_ends(queue: Queue, reader: Reader) -> None:
    """Every message once, in order, one request a page, and none beyond the end."""
    found = [page.messages.column("offset").to_pylist() async for page in reader.pages(offset=0)]
    assert found == [list(range(first, min(first + PAGE, END))) for first in range(0, END, PAGE)]
    assert len(queue.asked) == len(found)


async def test_the_next_page_is_on_its_way_while_one_is_handled(queue: Queue, reader: Reader) -> None:
    """The request goes out before the page is handed over."""
    pages = reader.pages(offset=0)
    await anext(pages)
    assert [asked["offset"] for asked in queue.asked] == [0, PAGE]
    await pages.aclose()  # type: ignore[attr-defined]  # it is a generator


async def test_pages_behind_the_first_are_tried_for_as_long_as_is_said(queue: Queue, reader: Reader) -> None:
    """The first, as any call of its connection."""
    pages = reader.pages(offset=0, retry_seconds=7.0)
    await anext(pages)
    assert queue.retry_seconds == [None, 7.0]
    await pages.aclose()  # type: ignore[attr-defined]  # it is a generator


async def test_who_leaves_leaves_no_request_behind(queue: Queue, reader: Reader) -> None:
    """The request ahead is cancelled when nobody wants its page any more."""
    queue.open.clear()
    pages = reader.pages(offset=0)
    await anext(pages)
    await pages.aclose()  # type: ignore[attr-defined]  # it is a generator
    await asyncio.sleep(0)
    assert queue.cancelled == 1


async def test_a_page_before_an_error_is_handed_over(queue: Queue, reader: Reader) -> None:
    """What is at hand comes first; the error when the next page is asked for."""
    queue.fail_at = PAGE
    found = 0
    with pytest.raises(Unavailable):
        async for one in reader.pages(offset=0):
            found += one.messages.num_rows
    assert found == PAGE


async def test_a_failure_that_nobody_waits_for_is_not_told(queue: Queue, reader: Reader) -> None:
    """Who leaves before a page that failed sees nothing of it (warnings are errors here)."""
    queue.fail_at = PAGE
    pages = reader.pages(offset=0)
    await anext(pages)
    await asyncio.sleep(0)
    await pages.aclose()  # type: ignore[attr-defined]  # it is a generator


async def test_messages_have_the_fields_of_their_rows(reader: Reader) -> None:
    """Every field, also null ones, across pages and record batches."""
    found = [message async for message in reader.messages(offset=0)]
    assert [message.offset for message in found] == list(range(END))
    for offset in (0, 1, 3, 15, PAGE, END - 1):
        message = found[offset]
        assert isinstance(message, ReadMessage)
        assert (message.queue, message.body, message.text) == (2, b"%d" % offset, str(offset))
        assert (message.store_ts, message.born_ts) == (5000 + offset, offset if offset % 2 else None)
        assert message.key == (b"k%d" % offset if offset % 3 else None)
        assert message.tag == ("even" if offset % 2 == 0 else None)
        assert message.properties == ({"p": str(offset)} if offset % 5 == 0 else {})
        assert message.origin is None
        assert repr(message) == f"ReadMessage(queue=2, offset={offset}, key={message.key!r}, {len(str(offset))} bytes)"


async def test_bodies_are_made_some_at_a_time(reader: Reader) -> None:
    """More rows than are made at once come in order, and each with its own body."""
    batch = (await reader.read(offset=0)).messages.combine_chunks()
    many = pa.concat_tables([batch] * (2 * AT_ONCE // batch.num_rows + 1)).combine_chunks()
    queue = Queue()

    async def call(*_: Any, **__: Any) -> Answer:
        sink = pa.BufferOutputStream()
        beside = {"start_offset": 0, "next_offset": END, "end_offset": END}
        schema = TIER_SCHEMA.with_metadata({b"millpond": json.dumps(beside).encode()})
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_table(many.cast(schema))
        return Answer(200, {}, sink.getvalue())

    queue.call = call  # type: ignore[method-assign]  # one page of all of them
    found = [message.body async for message in Reader(cast(Connection, queue), "t", 2).messages(offset=0)]
    assert len(found) > 2 * AT_ONCE
    assert found == many.column("body").to_pylist()


async def test_an_answer_that_is_no_arrow_is_a_problem(queue: Queue, reader: Reader) -> None:
    """A wrong answer is told as such, not as a bug in here."""

    async def call(*_: Any, **__: Any) -> Answer:
        return Answer(200, {}, b"{}")

    queue.call = call  # type: ignore[method-assign]  # what a proxy in between might say
    with pytest.raises(UnknownProblem):
        await reader.read(offset=0)
