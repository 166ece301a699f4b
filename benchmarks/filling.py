"""Fills a service with messages at full speed: ready Arrow batches over plain HTTP, a few requests at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator

import aiohttp
import pyarrow as pa

from millpond.core.schema import message_schema

LANES = 8
REQUEST_SECONDS = 120.0
HEADERS = {"Content-Type": "application/vnd.apache.arrow.stream", "Prefer": "return=minimal"}


def session(url: str) -> aiohttp.ClientSession:
    """For many requests at once."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    return aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


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


async def create(service: aiohttp.ClientSession, names: Iterable[str], queues: int, durability: str) -> None:
    """Topics, a few at once."""
    left = iter(names)

    async def lane() -> None:
        for name in left:
            settings = {"queues": queues, "durability": durability}
            async with service.put(f"/v1/topics/{name}", json=settings) as answer:
                answer.raise_for_status()

    await asyncio.gather(*(lane() for _ in range(LANES)))


async def post(service: aiohttp.ClientSession, topic: str, body: bytes, queue: int | None = None) -> None:
    """One batch. Raises aiohttp.ClientError."""
    headers = HEADERS if queue is None else {**HEADERS, "Millpond-Queue": str(queue)}
    async with service.post(f"/v1/topics/{topic}/messages", data=body, headers=headers) as answer:
        answer.raise_for_status()
        await answer.read()


async def fill(service: aiohttp.ClientSession, work: Iterator[tuple[str, int | None]], body: bytes) -> int:
    """`body` to each (topic, queue) of `work` in turn, `LANES` at once; how many requests that were."""
    sent = 0

    async def lane() -> None:
        nonlocal sent
        for topic, queue in work:
            await post(service, topic, body, queue)
            sent += 1

    await asyncio.gather(*(lane() for _ in range(LANES)))
    return sent


async def fill_topic(url: str, topic: str, messages: int, size: int, queues: int = 4) -> int:
    """A topic with `messages` of `size` bytes (whole batches of about 1 MB) over its queues; how many there are."""
    per_batch = max(1, min(10_000, messages, 1_000_000 // size))
    body = stream(batch(per_batch, size))
    work = ((topic, number % queues) for number in range(max(1, messages // per_batch)))
    async with session(url) as service:
        return per_batch * await fill(service, work, body)
