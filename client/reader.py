"""`Reader`: messages of one queue by offset or time, without a group. Nothing is leased, acked or moved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Literal

import msgspec
import pyarrow as pa

from millpond.client.columns import Columns, Row, each
from millpond.client.connection import ARROW, Connection, path_of
from millpond.client.errors import UnknownProblem
from millpond.client.received import beside_of
from millpond.core import limits


class Page(msgspec.Struct, frozen=True):
    """Messages as columns of TIER_SCHEMA. `next_offset` is where to go on; `end_offset` the confirmed end."""

    messages: pa.Table
    start_offset: int
    next_offset: int
    end_offset: int


class ReadMessage(Row, gc=False, eq=False):
    """A message as it was read. Times are milliseconds since 1970 UTC. It keeps its page in memory."""


class Reader:
    """Reads a queue of a topic.

    >>> reader = Reader(connection, "orders", queue=0)
    >>> page = await reader.read(time_ms=1_700_000_000_000)
    >>> async for page in reader.pages(offset=page.next_offset, follow=True):
    ...     print(page.messages.num_rows)
    >>> async for message in reader.messages(offset=0):
    ...     print(message.offset, message.body)
    """

    def __init__(self, connection: Connection, topic: str, queue: int) -> None:
        self._connection = connection
        self._path = path_of("topics", topic, "queues", queue, "messages")

    async def read(
        self,
        *,
        offset: int | None = None,
        time_ms: int | None = None,
        tail: int | None = None,
        clock: Literal["store", "born"] = "store",
        limit: int = limits.RECEIVE_MESSAGES,
        max_bytes: int = limits.RECEIVE_BYTES,
        wait_ms: int = 0,
        tag: str | None = None,
        retry_seconds: float | None = None,
    ) -> Page:
        """From `offset`, from the first message at `time_ms`, or the last `tail` ones; the start when none is given. Up
        to `limit` messages and about `max_bytes`: there may be more behind a page that has less.

        At the end it waits up to `wait_ms` for a message. It is tried for `retry_seconds`, or as long as the connection
        tries any call. Raises OffsetExpired, OffsetOutOfRange.
        """
        if offset is None and time_ms is None and tail is None:
            time_ms, clock = 0, "store"  # the first that is kept, whatever its offset
        params = {
            "offset": offset,
            "time": time_ms,
            "tail": tail,
            "clock": clock if time_ms is not None else None,
            "limit": limit,
            "max_bytes": max_bytes,
            "wait_ms": wait_ms or None,
            "filter": tag,
        }
        answer = await self._connection.call(
            "GET", self._path, accept=ARROW, params=params, timeout_seconds=30 + wait_ms / 1000,
            retry_seconds=retry_seconds,
        )  # fmt: skip
        try:
            table = pa.ipc.open_stream(answer.body).read_all()
            beside = beside_of(table)
            return Page(table, beside["start_offset"], beside["next_offset"], beside["end_offset"])
        except (pa.ArrowException, msgspec.DecodeError, KeyError) as error:
            raise UnknownProblem(f"an answer that is not as expected: {error!r}") from error

    async def pages(
        self,
        *,
        offset: int | None = None,
        time_ms: int | None = None,
        tail: int | None = None,
        clock: Literal["store", "born"] = "store",
        limit: int = limits.READ_MESSAGES,
        max_bytes: int = limits.RECEIVE_BYTES,
        tag: str | None = None,
        follow: bool = False,
        retry_seconds: float | None = None,
    ) -> AsyncIterator[Page]:
        """Page after page up to the end, or for ever with `follow`. Empty pages are left out. While one is handled the
        next is on its way. `retry_seconds` is for those behind the first."""
        read = partial(self.read, limit=limit, max_bytes=max_bytes, tag=tag)
        wait_ms = limits.WAIT_MS // 2 if follow else 0
        page = await read(offset=offset, time_ms=time_ms, tail=tail, clock=clock)
        while page.next_offset < page.end_offset or follow:
            ahead = asyncio.ensure_future(read(offset=page.next_offset, wait_ms=wait_ms, retry_seconds=retry_seconds))
            try:
                await asyncio.sleep(0)  # the request goes out before a handler may keep the loop
                if page.messages.num_rows:
                    yield page
                page = await ahead
            finally:
                if not ahead.done():
                    ahead.cancel()
                elif not ahead.cancelled():
                    ahead.exception()  # should it have failed while nobody wanted it any more
        if page.messages.num_rows:
            yield page

    async def messages(
        self,
        *,
        offset: int | None = None,
        time_ms: int | None = None,
        tail: int | None = None,
        clock: Literal["store", "born"] = "store",
        tag: str | None = None,
        follow: bool = False,
    ) -> AsyncIterator[ReadMessage]:
        """Message after message; the arguments are those of `pages`."""
        pages = self.pages(offset=offset, time_ms=time_ms, tail=tail, clock=clock, tag=tag, follow=follow)
        async for page in pages:
            for batch in page.messages.to_batches():
                for message in each(ReadMessage, Columns(batch)):
                    yield message
