"""Lease and ack: every message is leased, received and acked. By receipt with Arrow, through the SDK; by lease ids in
JSON, over plain HTTP. All of it is counted from the first receive to the answer of the last ack."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import aiohttp
import msgspec

from benchmarks import harness
from benchmarks.harness import Line, Setup, interleaved
from millpond.client.connection import Connection, path_of
from millpond.client.groups import Groups
from millpond.client.load import batched
from millpond.client.topics import Topics
from millpond.core.clock import SystemClock
from millpond.core.limits import MIB, RECEIVE_BYTES_MOST, RECEIVE_MESSAGES

BY_RECEIPT = 150_000  # messages that are there to be consumed, for each second of the setup
BY_LEASE_ID = 50_000
TOPIC = "bench.settle"
_groups = count()


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    async with harness.service(setup.folder) as service, Connection(service.url) as connection:
        await Topics(connection).create(TOPIC, queues=setup.queues, durability="flush")
        total, size = int(BY_RECEIPT * setup.seconds), setup.message_bytes
        tell(f"{total:,} messages to lease and ack")
        await batched.produce(connection, TOPIC, setup.message_bytes, count=total)
        runs = {
            "lease and ack, by receipt, Arrow": lambda: by_receipt(connection, total, size, as_messages=False),
            "lease and ack, by receipt, messages": lambda: by_receipt(connection, total, size, as_messages=True),
            "lease and ack, by lease id, JSON": lambda: by_lease_id(
                service.url, min(total, int(BY_LEASE_ID * setup.seconds))
            ),
        }
        found = await interleaved(setup.rounds, runs, tell)
    return [Line(name, "messages/s", values) for name, values in found.items()]


async def by_receipt(connection: Connection, total: int, message_bytes: int, *, as_messages: bool) -> float:
    """Messages per second through the SDK's consumer; each is acked by itself, or with its batch."""
    group = f"g{next(_groups)}"
    clock = connection.clock
    begin = clock.monotonic()
    rate = await batched.consume(connection, TOPIC, group, total, message_bytes, as_messages=as_messages)
    took = clock.monotonic() - begin  # the last acks are answered when the consumer is closed
    lag = await Groups(connection, TOPIC).lag(group)
    assert rate.count == total and lag.total == 0, f"{rate.count} of {total} messages came, {lag.total} are not acked"
    return total / took


class _Message(msgspec.Struct):
    lease_id: str


class _Received(msgspec.Struct):
    messages: list[_Message]


async def by_lease_id(url: str, total: int) -> float:
    """Messages per second by a client that knows JSON and no more: one receive, one ack, in turn."""
    group = f"g{next(_groups)}"
    receive, ack = (path_of("topics", TOPIC, "groups", group, "messages", what) for what in ("receive", "ack"))
    asked = {"max_messages": RECEIVE_MESSAGES, "max_bytes": RECEIVE_BYTES_MOST, "start": "earliest", "lease_ms": 60_000}
    decode = msgspec.json.Decoder(_Received).decode
    clock = SystemClock()
    taken = 0
    async with aiohttp.ClientSession(url, read_bufsize=4 * MIB) as session:
        begin = clock.monotonic()
        while taken < total:
            async with session.post(receive, json=asked) as answer:
                answer.raise_for_status()
                ids = [message.lease_id for message in decode(await answer.read()).messages]
            assert ids, f"{taken} of {total} messages came"
            async with session.post(ack, data=msgspec.json.encode({"acks": ids}), headers=_JSON) as answer:
                answer.raise_for_status()
                results = (await answer.read()).count(b'"status":"ok"')
            assert results == len(ids), f"{results} of {len(ids)} acks are ok"
            taken += len(ids)
        return taken / (clock.monotonic() - begin)


_JSON = {"Content-Type": "application/json"}
