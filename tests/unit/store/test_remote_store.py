from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import google_crc32c
import msgspec
import numpy as np
import pyarrow as pa
import pytest

from millpond.core.clock import SystemRandom
from millpond.core.errors import BadRequest, Conflict, OffsetExpired, Unavailable
from millpond.core.http.routing import Router
from millpond.core.http.secret import SecretGate
from millpond.core.http.server import HttpServer
from millpond.store import remote
from millpond.store.client import (
    AppendOutcome,
    AppendRequest,
    AppendResult,
    Grant,
    GroupRef,
    QueueAppend,
    QueueEnds,
    QueueRef,
    ReadRequest,
    ReadResult,
    ReceiveRequest,
    ReceiveResult,
    SettleRequest,
    SettleResult,
)
from millpond.store.remote import RemoteStore
from millpond.store.server import routes

SECRET = "s" * 40
GROUP = GroupRef(1, 2, 3)
QUEUE = QueueRef(1, 2, 11, 0)


def i64(*values: int) -> pa.Buffer:
    return pa.py_buffer(np.array(values, np.int64).tobytes())


GRANT = Grant(11, 1, 9, i64(4, 5), pa.py_buffer(b"\1\0\0\0\1\0\0\0"), 0, 0, [])


def receive(wait_ms: int = 5_000, attempt_id: str | None = None) -> ReceiveRequest:
    return ReceiveRequest(GROUP, [QUEUE], "latest", 10, 1_000, 30_000, wait_ms, None, attempt_id)


class FakeStore:
    """Receives wait until `grant`; everything that is settled is kept."""

    def __init__(self) -> None:
        self.waiting = 0
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.give = asyncio.Event()
        self.stubborn = False
        self.settled: asyncio.Queue[SettleRequest] = asyncio.Queue()
        self.appended: list[AppendRequest] = []

    async def append(self, request: AppendRequest) -> AppendResult:
        self.appended.append(request)
        return AppendResult([AppendOutcome(7, 8)], 1)

    async def receive(self, request: ReceiveRequest) -> ReceiveResult:
        self.waiting += 1
        self.began.set()
        try:
            await self.give.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            if not self.stubborn:
                raise
        finally:
            self.waiting -= 1
        if request.attempt_id == "fail":
            raise Conflict("filter_differs", "other", version=3)
        return ReceiveResult([GRANT])

    async def read(self, request: ReadRequest) -> ReadResult:
        if request.offset < 0:
            raise OffsetExpired("offset_expired", "gone", start_offset=5)
        return ReadResult([], request.offset, QueueEnds(request.queue_id, 0, 0, 9, request.wait_ms))

    async def settle(self, request: SettleRequest) -> SettleResult:
        self.settled.put_nowait(request)
        return SettleResult([])

    def __getattr__(self, name: str) -> Any:
        async def unused(*_: Any) -> None:
            raise AssertionError(name)

        return unused


class World:
    def __init__(self, store: FakeStore, server: HttpServer, remote: RemoteStore) -> None:
        self.store = store
        self.server = server
        self.remote = remote


@pytest.fixture
async def world() -> AsyncIterator[World]:
    store = FakeStore()
    server = HttpServer(Router(routes(store)), SecretGate(SECRET), None, SystemRandom())  # type: ignore[arg-type]
    await server.start("127.0.0.1:0")
    remote = RemoteStore(server.address, SECRET)
    yield World(store, server, remote)
    await remote.close()
    await server.stop(1)


async def test_an_append_arrives_with_its_buffers(world: World) -> None:
    """Sidecar and payload come as they were sent."""
    sidecar, payload = pa.py_buffer(b"sidecar"), pa.py_buffer(b"p" * 200_000)
    append = QueueAppend(QUEUE, 1, 0, 0, sidecar, payload, google_crc32c.value(payload), 200_000, "flush")
    assert (await world.remote.append(AppendRequest([append], 1_000))).outcomes == [AppendOutcome(7, 8)]
    [arrived] = world.store.appended[0].appends
    assert (arrived.sidecar.equals(sidecar), arrived.payload.equals(payload)) == (True, True)


async def test_a_payload_damaged_on_its_way_is_refused(world: World) -> None:
    """What does not match its checksum does not reach the store, nor does anything that came with it."""
    payload = pa.py_buffer(b"p")
    good = QueueAppend(QUEUE, 1, 0, 0, pa.py_buffer(b""), payload, google_crc32c.value(payload), 1, "flush")
    bad = msgspec.structs.replace(good, payload_crc=good.payload_crc ^ 1)
    with pytest.raises(BadRequest) as caught:
        await world.remote.append(AppendRequest([good, bad], 1_000))
    assert (caught.value.code, world.store.appended) == ("malformed_body", [])


async def test_many_receives_share_one_socket(world: World) -> None:
    """A hundred long polls wait over one connection, and each gets its answer."""
    polls = [asyncio.ensure_future(world.remote.receive(receive())) for _ in range(100)]
    while world.store.waiting < 100:  # noqa: ASYNC110 - the fake has no event for "all of them"
        await asyncio.sleep(0.001)
    assert world.server.connections == 1
    world.store.give.set()
    answers = await asyncio.gather(*polls)
    assert all(answer.grants[0].offsets.equals(GRANT.offsets) for answer in answers)


async def test_errors_of_waiting_calls_come_back(world: World) -> None:
    """Class and extra of an error cross the socket."""
    world.store.give.set()
    with pytest.raises(Conflict) as caught:
        await world.remote.receive(receive(attempt_id="fail"))
    assert (caught.value.code, caught.value.extra) == ("filter_differs", {"version": 3})


@pytest.mark.parametrize("wait_ms", [0, 500])
async def test_reads_come_either_way(world: World, wait_ms: int) -> None:
    """A read that waits uses the socket, one that does not is a plain call: same answers, same errors."""
    assert (await world.remote.read(ReadRequest(11, 3, 1, 1, wait_ms))).ends.last_ts == wait_ms
    with pytest.raises(OffsetExpired) as caught:
        await world.remote.read(ReadRequest(11, -1, 1, 1, wait_ms))
    assert caught.value.extra == {"start_offset": 5}


async def test_a_cancelled_receive_ends_in_the_store(world: World) -> None:
    """When its caller goes away the store stops waiting for it; others on the socket go on."""
    gone = asyncio.ensure_future(world.remote.receive(receive()))
    await world.store.began.wait()
    other = asyncio.ensure_future(world.remote.receive(receive()))
    gone.cancel()
    await asyncio.wait_for(world.store.cancelled.wait(), 5)
    world.store.give.set()
    assert (await other).grants[0].lease == 9


async def test_leases_of_a_cancelled_receive_are_given_back(world: World) -> None:
    """A grant that crossed the cancellation on its way is released, its attempt uncounted."""
    world.store.stubborn = True
    gone = asyncio.ensure_future(world.remote.receive(receive()))
    await world.store.began.wait()
    gone.cancel()
    released = await asyncio.wait_for(world.store.settled.get(), 5)
    [settle] = released.settles
    assert (released.group, settle.lease, settle.action, settle.delay_ms) == (GROUP, 9, "release", 0)
    assert settle.offsets is not None
    assert settle.offsets.equals(GRANT.offsets)


async def test_a_closed_socket_cancels_what_waits(world: World) -> None:
    """A proxy that disappears leaves nothing waiting in the store."""
    poll = asyncio.ensure_future(world.remote.receive(receive()))
    await world.store.began.wait()
    await world.remote.close()
    await asyncio.wait_for(world.store.cancelled.wait(), 5)
    with pytest.raises(Unavailable):
        await poll


async def test_a_grant_for_a_closed_socket_is_given_back(world: World) -> None:
    """A receive that ends with leases although its proxy is gone releases them at once."""
    world.store.stubborn = True
    poll = asyncio.ensure_future(world.remote.receive(receive()))
    await world.store.began.wait()
    await world.remote.close()
    released = await asyncio.wait_for(world.store.settled.get(), 5)
    assert released.settles[0].lease == 9
    with pytest.raises(Unavailable):
        await poll


async def test_a_stopped_store_is_unavailable_and_found_again(world: World) -> None:
    """What waits fails at once when the store stops; a new one at the same address is used without help."""
    poll = asyncio.ensure_future(world.remote.receive(receive()))
    await world.store.began.wait()
    await world.server.stop(1)
    with pytest.raises(Unavailable):
        await poll
    with pytest.raises(Unavailable) as caught:
        await world.remote.receive(receive())
    assert caught.value.code == "store_unavailable"
    store = FakeStore()
    store.give.set()
    again = HttpServer(Router(routes(store)), SecretGate(SECRET), None, SystemRandom())  # type: ignore[arg-type]
    await again.start(world.server.address.removeprefix("http://"))
    assert (await world.remote.receive(receive())).grants[0].lease == 9
    await world.remote.close()
    await again.stop(1)


async def test_a_wrong_secret_opens_no_socket(world: World) -> None:
    """Waiting calls need the cluster secret, too."""
    stranger = RemoteStore(world.server.address, "t" * 40)
    with pytest.raises(Unavailable):
        await stranger.receive(receive())
    await stranger.close()


async def test_a_store_that_never_answers_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receives that all want the one socket end together, not one after another."""
    monkeypatch.setattr(remote, "OPEN_SECONDS", 0.3)
    asked = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        store = RemoteStore(f"http://{host}:{port}", SECRET)
        outcomes = await asyncio.gather(*(store.receive(receive()) for _ in range(5)), return_exceptions=True)
        await store.close()
    assert [one.code for one in outcomes if isinstance(one, Unavailable)] == ["store_unavailable"] * 5
    assert asked <= 2  # a slow machine may not get to ask, or once more when the time is just over
