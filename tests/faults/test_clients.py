"""Clients that go away in the middle: of a produce, of a long poll. On one process and on three."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from urllib.parse import urlsplit

import pytest
from support.load import Http
from support.processes import Apart, Process, standalone

ROUNDS = 20
RECEIVE = "/v1/topics/kept/groups/readers/messages/receive"
ACK = "/v1/topics/kept/groups/readers/messages/ack"
ANSWER_SECONDS = 10


@pytest.fixture(scope="module", params=["together", "apart"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process | Apart]:
    folder = tmp_path_factory.mktemp(request.param)
    found = standalone(folder) if request.param == "together" else Apart(folder)
    try:
        asyncio.run(found.start())
        yield found
    finally:
        found.close()


@pytest.fixture
async def http(service: Process | Apart, client: Callable[[Process | Apart], Http]) -> AsyncIterator[Http]:
    """A client of a service with an empty topic and group."""
    found = client(service)
    await found.ok("PUT", "/v1/topics/kept", {"queues": 1})
    await found.ok("PUT", "/v1/topics/kept/groups/readers", {"start": "earliest"})
    yield found
    await found.ok("DELETE", "/v1/topics/kept")


async def post(http: Http, path: str, *pieces: bytes, headers: str) -> asyncio.StreamWriter:
    """A POST with these pieces of a body, sent and not answered; the caller goes away with `close` or `abort`."""
    where = urlsplit(http.url)
    _, writer = await asyncio.open_connection(where.hostname, where.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}\r\n\r\n"
    writer.write(head.encode() + b"".join(pieces))
    await writer.drain()
    return writer


async def bodies(http: Http) -> list[str]:
    _, _, found = await http.whole("kept", 0)
    return [one["body"] for one in found]


async def produced(http: Http, *sent: str) -> None:
    await http.ok("POST", "/v1/topics/kept/messages", {"messages": [{"body": one} for one in sent]})


async def test_gone_in_the_middle_of_a_body(http: Http) -> None:
    """What did not arrive whole is not appended, not even its whole first messages."""
    body = json.dumps({"messages": [{"body": f"half {row}"} for row in range(100)]}).encode()
    half = body[: len(body) // 2]
    for number in range(ROUNDS):
        chunked = number % 4 > 1
        headers = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
        piece = b"%x\r\n%b\r\n" % (len(half), half) if chunked else half
        writer = await post(http, "/v1/topics/kept/messages", piece, headers=headers)
        if number % 2:
            writer.transport.abort()
        else:
            writer.close()
            await writer.wait_closed()
    await produced(http, "after")
    assert await bodies(http) == ["after"]


async def test_gone_before_the_answer(http: Http) -> None:
    """A request that arrived whole is appended whole, once, or not at all, whoever waits for its answer."""
    for number in range(ROUNDS):
        body = json.dumps({"messages": [{"body": f"{number}.{row}"} for row in range(10)]}).encode()
        writer = await post(http, "/v1/topics/kept/messages", body, headers=f"Content-Length: {len(body)}")
        if number % 2:
            writer.transport.abort()
        else:
            writer.close()
            await writer.wait_closed()
    await produced(http, "after")
    there = [one for one in await bodies(http) if one != "after"]
    assert len(there) == len(set(there))
    for number in range(ROUNDS):
        rows = [one for one in there if one.startswith(f"{number}.")]
        assert rows in ([], [f"{number}.{row}" for row in range(10)]), rows


async def test_gone_in_the_middle_of_a_long_poll(http: Http) -> None:
    """What comes next is for somebody else, at once and as a first attempt; also when it comes in that moment."""
    body = json.dumps({"max_messages": 10, "wait_ms": 30_000, "lease_ms": 600_000}).encode()
    for number in range(ROUNDS):
        writer = await post(http, RECEIVE, body, headers=f"Content-Length: {len(body)}")
        await http.ok("GET", "/v1/topics/kept/groups/readers/lag")  # the poll has most likely begun
        if number % 2:
            writer.transport.abort()
        else:
            writer.close()
        await produced(http, f"message {number}")
        async with asyncio.timeout(ANSWER_SECONDS):
            got = await http.ok("POST", RECEIVE, {"max_messages": 10, "wait_ms": 30_000})
        seen = [(one["body"], one["delivery_attempt"]) for one in got["messages"]]
        assert seen == [(f"message {number}", 1)], f"round {number}"
        await http.ok("POST", ACK, {"acks": [one["lease_id"] for one in got["messages"]]})
