"""Fills a service with messages at full speed: ready Arrow batches over the SDK's HTTP, a few requests at once.

A general HTTP client (aiohttp) takes about as much of a core for a small request as the service does, and more of it
for each other path it has to parse.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator

import pyarrow as pa

from millpond.client.connection import ARROW, Connection, path_of
from millpond.client.topics import Durability, Topics
from millpond.core.schema import message_schema

LANES = 8
REQUEST_SECONDS = 120.0
MINIMAL = {"Prefer": "return=minimal"}


def bodies(count: int, size: int) -> list[bytes]:
    """Random hex digits: they compress to about half, as text does."""
    digits = os.urandom(count * size // 2 + size).hex().encode()
    return [digits[at * size : (at + 1) * size] for at in range(count)]


def batch(count: int, size: int) -> pa.RecordBatch:
    """`count` messages of `size` bytes in the log's own schema."""
    schema = message_schema(0)
    return pa.record_batch([pa.array(bodies(count, size), pa.binary())], schema=schema)


def stream(rows: pa.RecordBatch) -> bytes:
    """The body of a request that produces `rows`."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return bytes(sink.getvalue())


async def create(connection: Connection, names: Iterable[str], queues: int, durability: Durability) -> None:
    """Topics, a few at once."""
    left = iter(names)

    async def lane() -> None:
        for name in left:
            await Topics(connection).create(name, queues=queues, durability=durability)

    await asyncio.gather(*(lane() for _ in range(LANES)))


async def post(connection: Connection, topic: str, body: bytes, queue: int | None = None) -> None:
    """One batch, sent once. Raises MillpondError."""
    await connection.call(
        "POST", path_of("topics", topic, "messages"), body, content_type=ARROW, timeout_seconds=REQUEST_SECONDS,
        headers=MINIMAL if queue is None else {**MINIMAL, "Millpond-Queue": str(queue)}, retry_seconds=0,
    )  # fmt: skip


async def fill(connection: Connection, work: Iterator[tuple[str, int | None]], body: bytes) -> int:
    """`body` to each (topic, queue) of `work` in turn, `LANES` at once; how many requests that were."""
    sent = 0

    async def lane() -> None:
        nonlocal sent
        for topic, queue in work:
            await post(connection, topic, body, queue)
            sent += 1

    await asyncio.gather(*(lane() for _ in range(LANES)))
    return sent


async def fill_topic(url: str, topic: str, messages: int, size: int, queues: int = 4) -> int:
    """A topic with `messages` of `size` bytes (whole batches of about 1 MB) over its queues; how many there are."""
    per_batch = max(1, min(10_000, messages, 1_000_000 // size))
    body = stream(batch(per_batch, size))
    work = ((topic, number % queues) for number in range(max(1, messages // per_batch)))
    async with Connection(url) as connection:
        return per_batch * await fill(connection, work, body)
