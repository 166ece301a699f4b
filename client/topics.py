"""`Topics`: make, see, change and delete topics; where their queues stand; find messages; bring them to the tier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from millpond.client.connection import Connection, path_of
from millpond.core import limits
from millpond.core.errors import Unavailable

FLUSH_SECONDS = 1_800.0  # sealing everything there is may take long: 10 GB a minute or two
FLUSH_PAUSE_SECONDS = 0.1  # the service answers after a part of that time, and goes on
Durability = Literal["flush", "memory"]


class Retention(msgspec.Struct, frozen=True):
    """None: forever."""

    ms: int | None = None
    bytes: int | None = None


class Topic(msgspec.Struct, frozen=True):
    topic: str
    topic_id: int
    queues: int
    durability: Durability
    retention: Retention
    max_message_bytes: int
    dedup_window_ms: int
    created_ms: int
    version: int


class QueueState(msgspec.Struct, frozen=True):
    """Offsets: the first kept, the end of what is in the tier, and the confirmed end. `id_prefix` and an offset
    make a message id."""

    queue: int
    start_offset: int
    tiered_to: int
    end_offset: int
    id_prefix: str = ""


QueueStates = list[QueueState]


class _Queues(msgspec.Struct):
    queues: list[QueueState]


class _Page(msgspec.Struct):
    topics: list[Topic]
    next_page_token: str = ""


class Topics:
    """Administration of topics.

    >>> async with Connection() as connection:
    ...     await Topics(connection).create("orders", queues=8)
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def create(
        self,
        topic: str,
        *,
        queues: int = limits.QUEUES_DEFAULT,
        durability: Durability = "flush",
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
        max_message_bytes: int = limits.MESSAGE_BYTES,
        dedup_window_ms: int = limits.DEDUP_WINDOW_MS,
    ) -> Topic:
        """Make a topic, or find it with the same settings; raises Conflict(topic_differs) for others."""
        body = {
            "queues": queues,
            "durability": durability,
            "retention": {"ms": retention_ms, "bytes": retention_bytes},
            "max_message_bytes": max_message_bytes,
            "dedup_window_ms": dedup_window_ms,
        }
        made: Topic = await self._connection.json("PUT", path_of("topics", topic), body, shape=Topic)
        return made

    async def get(self, topic: str) -> Topic:
        found: Topic = await self._connection.get(path_of("topics", topic), shape=Topic)
        return found

    async def list(self) -> AsyncIterator[Topic]:
        """All topics by name, page by page."""
        token = ""
        while True:
            page: _Page = await self._connection.get(path_of("topics"), {"page_token": token or None}, _Page)
            for topic in page.topics:
                yield topic
            token = page.next_page_token
            if not token:
                return

    async def change(self, topic: str, **settings: object) -> Topic:
        """Change settings, named as in the API (`queues`, `durability`, `retention`, ..); the others stay."""
        changed: Topic = await self._connection.json("PATCH", path_of("topics", topic), settings, shape=Topic)
        return changed

    async def delete(self, topic: str) -> None:
        """Delete the topic and all its messages."""
        await self._connection.json("DELETE", path_of("topics", topic))

    async def queues(self, topic: str) -> QueueStates:
        answer: _Queues = await self._connection.get(path_of("topics", topic, "queues"), shape=_Queues)
        return answer.queues

    async def flush(self, topic: str) -> dict[str, Any]:
        """Seal all confirmed messages to the tier now; waits until it is done. Raises Unavailable(deadline_exceeded)
        when that takes longer than FLUSH_SECONDS: it goes on all the same."""
        clock, path = self._connection.clock, path_of("topics", topic, "flush")
        until = clock.monotonic() + FLUSH_SECONDS
        while True:
            try:
                left = max(1.0, until - clock.monotonic())
                return _map(await self._connection.json("POST", path, {}, repeatable=True, timeout_seconds=left))
            except Unavailable as error:
                if error.code != "deadline_exceeded" or clock.monotonic() >= until:
                    raise
            await asyncio.sleep(FLUSH_PAUSE_SECONDS)

    async def history(
        self, topic: str, from_ms: int | None = None, to_ms: int | None = None, clock: str | None = None
    ) -> dict[str, Any]:
        """The plan of a range of history: objects of the tier, and where each queue ends."""
        params = {"from": from_ms, "to": to_ms, "clock": clock}
        return _map(await self._connection.get(path_of("topics", topic, "history"), params))

    async def message(self, topic: str, message_id: str) -> dict[str, Any]:
        """One message by its id. Raises NotFound(message_not_found)."""
        return _map(await self._connection.get(path_of("topics", topic, "messages", message_id)))

    async def find(self, topic: str, key: str, from_ms: int | None = None, to_ms: int | None = None) -> dict[str, Any]:
        """Messages with this key: `{messages: [..]}`."""
        params = {"key": key, "from": from_ms, "to": to_ms}
        return _map(await self._connection.get(path_of("topics", topic, "messages"), params))


def _map(answer: object) -> dict[str, Any]:
    return answer if isinstance(answer, dict) else {}
