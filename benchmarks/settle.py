"""Lease and ack: every message is leased, received and acked. By receipt with Arrow, through the SDK; by lease ids in
JSON, over plain HTTP, with a handler beside it that does the least for the same requests (`json_least`); and by workers
that take one message a call, beside a handler that does nothing for as many calls. All of it is counted from the first
receive to the answer of the last ack."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

import msgspec

from benchmarks import harness, json_api, limits
from benchmarks.harness import Aim, Line, Setup, interleaved
from millpond.client.connection import Connection, path_of
from millpond.client.groups import Groups
from millpond.client.load import batched
from millpond.client.topics import Topics

BY_RECEIPT = 150_000  # messages that are there to be consumed, for each second of the setup
BY_LEASE_ID = 50_000
JSON, LEAST = "lease and ack, by lease id, JSON", "handler that settles nothing, JSON"
ONE, IDLE = "lease and ack, one message a call", "handler that does nothing, two calls"
WORKERS = 16
TOPIC = "bench.settle"
_groups = count()


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    async with harness.service(setup.folder) as service, Connection(service.url) as connection:
        await Topics(connection).create(TOPIC, queues=setup.queues, durability="flush")
        total, size = int(BY_RECEIPT * setup.seconds), setup.message_bytes
        tell(f"{total:,} messages to lease and ack")
        await batched.produce(connection, TOPIC, setup.message_bytes, count=total)
        fewer = min(total, int(BY_LEASE_ID * setup.seconds))
        async with (
            json_api.least(connection, TOPIC) as handler,
            limits.nothing() as nothing,
            Connection(nothing.url) as idle,
        ):
            runs = {
                "lease and ack, by receipt, Arrow": lambda: by_receipt(connection, total, size, as_messages=False),
                "lease and ack, by receipt, messages": lambda: by_receipt(connection, total, size, as_messages=True),
                JSON: lambda: by_lease_id(connection, fewer),
                LEAST: lambda: by_lease_id(handler, fewer),
                ONE: lambda: one_by_one(connection, setup.seconds),
                IDLE: lambda: two_calls(idle, setup.seconds),
            }
            found = await interleaved(setup.rounds, runs, tell)
    aim, beside = Aim(at_least=100_000, of="value"), {JSON: LEAST, ONE: IDLE}
    return [
        Line(name, "messages/s", values, beside.get(name, ""), aim=aim if name == JSON else None)
        for name, values in found.items()
    ]


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


async def by_lease_id(connection: Connection, total: int) -> float:
    """Messages per second by two clients of one group that know JSON and no more: one receive, one ack, in turn."""
    group = f"g{next(_groups)}"
    receive, ack = (path_of("topics", TOPIC, "groups", group, "messages", what) for what in ("receive", "ack"))
    decode = msgspec.json.Decoder(_Received).decode
    taken = 0

    async def client() -> None:
        nonlocal taken
        while taken < total:
            came = await connection.call("POST", receive, json_api.ASKED, accept="application/json")
            ids = [message.lease_id for message in decode(came.body).messages]
            if not ids:
                return  # the other one has been given the last of them
            answer = await connection.call("POST", ack, msgspec.json.encode({"acks": ids}))
            results = bytes(answer.body).count(b'"status":"ok"')
            assert results == len(ids), f"{results} of {len(ids)} acks are ok"
            taken += len(ids)

    begin = connection.clock.monotonic()
    await asyncio.gather(client(), client())
    assert taken >= total, f"{taken} of {total} messages came"
    return taken / (connection.clock.monotonic() - begin)


async def one_by_one(connection: Connection, seconds: float) -> float:
    """Messages per second by workers of one group, each of which takes a message, acks it, and takes the next one."""
    group = f"g{next(_groups)}"
    receive, ack = (path_of("topics", TOPIC, "groups", group, "messages", what) for what in ("receive", "ack"))
    decode = msgspec.json.Decoder(_Received).decode
    asked = msgspec.json.encode({"max_messages": 1, "start": "earliest"})

    async def take() -> None:
        came = await connection.call("POST", receive, asked, accept="application/json")
        [message] = decode(came.body).messages
        answer = await connection.call("POST", ack, msgspec.json.encode({"acks": [message.lease_id]}))
        assert b'"status":"ok"' in bytes(answer.body), "an ack is not ok"

    return await _at_once(take, connection, seconds)


async def two_calls(idle: Connection, seconds: float) -> float:
    """As many calls, of a byte each, of a handler that does nothing."""

    async def take() -> None:
        for _ in range(2):
            await idle.call("POST", "/", b"x")

    return await _at_once(take, idle, seconds)


async def _at_once(take: Callable[[], Awaitable[None]], connection: Connection, seconds: float) -> float:
    """How often per second, by WORKERS at once."""
    clock = connection.clock
    begin = clock.monotonic()
    taken = 0

    async def work() -> None:
        nonlocal taken
        while clock.monotonic() - begin < seconds:
            await take()
            taken += 1

    await asyncio.gather(*(work() for _ in range(WORKERS)))
    return taken / (clock.monotonic() - begin)
