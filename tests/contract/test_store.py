"""One suite over every way to a store: direct calls, the same through the codec, and real HTTP with its WebSocket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from support.disks import MemoryDisk
from support.stores import StoreMetadata, bodies_of, messages, open_store, queue

from millpond.core.clock import SystemRandom
from millpond.core.errors import Conflict, MillpondError, OffsetOutOfRange, Unavailable
from millpond.core.frame import ProducerPart
from millpond.core.hashing import hash_bytes, hash_text
from millpond.core.http import rpc
from millpond.core.http.routing import Router
from millpond.core.http.secret import SecretGate
from millpond.core.http.server import HttpServer
from millpond.store.client import (
    SETTLE_STATUSES,
    AppendOutcome,
    AppendRequest,
    FindRequest,
    Grant,
    GroupRef,
    LagRequest,
    LeaseRequest,
    QueueAppend,
    ReadRequest,
    ReceiveRequest,
    ReceiveResult,
    SeekRequest,
    Settle,
    SettleRequest,
    StoreClient,
    TimeRequest,
)
from millpond.store.local import LocalStore
from millpond.store.remote import RemoteStore
from millpond.store.server import routes

SECRET = "s" * 40
GROUP = GroupRef(1, 1, 5)
SOON_SECONDS = 20.0


@dataclass
class Way:
    """`client` leads to `local`; over HTTP there are also `server`, and `connect` for one more proxy."""

    kind: str
    client: StoreClient
    local: LocalStore
    server: HttpServer | None = None
    connect: Callable[[], RemoteStore] | None = None


async def served(local: Any) -> HttpServer:
    server = HttpServer(Router(routes(local)), SecretGate(SECRET), None, SystemRandom())
    await server.start("127.0.0.1:0")
    return server


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path, segment_bytes=4 << 20)
    yield store
    await store.close()


@pytest.fixture(params=["direct", "codec", "http"])
async def way(request: pytest.FixtureRequest, local: LocalStore) -> AsyncIterator[Way]:
    if request.param == "direct":
        yield Way("direct", local, local)
        return
    if request.param == "codec":
        through = rpc.through_codec(StoreClient, local)  # type: ignore[type-abstract]  # the interface itself is meant
        yield Way("codec", through, local)
        return
    server = await served(local)
    remote = RemoteStore(server.address, SECRET)
    yield Way("http", remote, local, server)
    await remote.close()
    await server.stop(1)


@pytest.fixture
async def http(local: LocalStore) -> AsyncIterator[Way]:
    """Real HTTP alone: what only a socket can do."""
    server = await served(local)
    opened: list[RemoteStore] = []

    def connect() -> RemoteStore:
        opened.append(RemoteStore(server.address, SECRET))
        return opened[-1]

    yield Way("http", connect(), local, server, connect)
    for remote in opened:
        await remote.close()
    await server.stop(1)


async def append(client: StoreClient, *appends: QueueAppend) -> list[AppendOutcome]:
    return (await client.append(AppendRequest(list(appends), 5_000))).outcomes


def receive(
    count: int = 100, *, wait_ms: int = 0, group: GroupRef = GROUP, queues: int = 1, attempt_id: str | None = None,
    tag: str | None = None, lease_ms: int = 60_000,
) -> ReceiveRequest:  # fmt: skip
    hashes = None if tag is None else [hash_text(tag)]
    refs = [queue(number) for number in range(queues)]
    return ReceiveRequest(group, refs, "earliest", count, 1 << 20, lease_ms, wait_ms, hashes, attempt_id)


def i64(*values: int) -> pa.Buffer:
    return pa.py_buffer(np.array(values, np.int64).tobytes())


def offsets_of(grant: Grant) -> list[int]:
    found: list[int] = np.frombuffer(grant.offsets, np.int64).tolist()
    return found


def attempts_of(grant: Grant) -> list[int]:
    found: list[int] = np.frombuffer(grant.attempts, np.uint32).tolist()
    return found


def handed_out(result: ReceiveResult) -> list[tuple[int, int, int]]:
    """(queue id, offset, attempt) of all that was granted."""
    return [
        (grant.queue_id, *pair)
        for grant in result.grants
        for pair in zip(offsets_of(grant), attempts_of(grant), strict=True)
    ]


async def settle(client: StoreClient, grant: Grant, action: Any, *offsets: int, delay_ms: int = 0) -> list[str]:
    one = Settle(grant.queue_id, grant.generation, grant.lease, action, offsets=i64(*offsets), delay_ms=delay_ms)
    [outcome] = (await client.settle(SettleRequest(GROUP, [one], "flush", 5_000))).outcomes
    return [SETTLE_STATUSES[status] for status in np.frombuffer(outcome.statuses, np.uint8)]


async def waiting(local: LocalStore, count: int) -> None:
    """Until so many receives wait in the store."""

    async def claim() -> bool:
        return local.engine.delivery._waiting.count == count

    await until(claim)


async def until(claim: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SOON_SECONDS):
        while not await claim():  # noqa: ASYNC110 - states that nothing tells of
            await asyncio.sleep(0.002)


# -- every way ----------------------------------------------------------------------------------------------------


async def test_what_is_appended_is_read(way: Way) -> None:
    """Bytes of several queues and columns come back as they were, with times and ends."""
    first, second = await append(
        way.client,
        messages([b"a", b"", b"\xff" * 200_000], keys=[b"k", b"l", b"k"], tags=["t", "u", "t"]),
        messages([b"z"], number=1),
    )
    assert (first.first_offset, second.first_offset) == (0, 0)
    result = await way.client.read(ReadRequest(1, 0, 100, 1 << 20))
    [frame] = result.frames
    assert bodies_of(frame) == [b"a", b"", b"\xff" * 200_000]
    assert (frame.first_offset, frame.count, frame.store_ts) == (0, 3, first.store_ts)
    assert (result.next_offset, result.ends.end_offset) == (3, 3)
    ends = await way.client.queues([1, 2, 99])
    assert [(one.queue_id, one.start_offset, one.end_offset) for one in ends] == [(1, 0, 3), (2, 0, 1), (99, 0, 0)]


async def test_errors_keep_class_code_and_numbers(way: Way) -> None:
    """By a call and by a waiting one."""
    await append(way.client, messages([b"a"]))
    for wait_ms in (0, 1_000):
        with pytest.raises(OffsetOutOfRange) as caught:
            await way.client.read(ReadRequest(1, 5, 1, 1, wait_ms))
        assert caught.value.code == "offset_out_of_range"
        assert (caught.value.extra["start_offset"], caught.value.extra["end_offset"]) == (0, 1)
    with pytest.raises(Conflict):
        await way.client.lease(LeaseRequest(GROUP, 1, 1, 77, i64(0), 1, 1_000))


async def test_duplicates_are_all_named(way: Way) -> None:
    """Nothing of an append with duplicates is written; each is named, also with another body."""
    await append(way.client, messages([b"a", b"b"], dedup_ids=["1", "2"]))
    [outcome] = await append(way.client, messages([b"c", b"a", b"x"], dedup_ids=["3", "1", "2"]))
    assert [(one.row, one.offset, one.mismatch) for one in outcome.duplicates] == [(1, 0, False), (2, 1, True)]
    assert (await way.client.queues([1]))[0].end_offset == 2


async def test_producer_sessions(way: Way) -> None:
    """A part out of turn is that append's error; where a session stands is known until it is closed."""
    opened, skipped = ProducerPart("p", -1, 0, 1, 0, 2), ProducerPart("p", 7, 8, 8, 0, 1)
    assert (await append(way.client, messages([b"a", b"b"], part=opened)))[0].error is None
    [outcome] = await append(way.client, messages([b"c"], part=skipped))
    assert outcome.error is not None
    assert outcome.error.code == "out_of_order"
    [state] = await way.client.producers([1, 2], "p")
    assert (state.queue_id, state.last) == (1, 1)
    await way.client.close_producer([1, 2], "p")
    assert await way.client.producers([1, 2], "p") == []


async def test_leases_over_their_life(way: Way) -> None:
    """Granted, acked, nacked, released, extended: each with its status, attempts counted by the store."""
    await append(way.client, messages([b"%d" % n for n in range(6)]))
    first = await way.client.receive(receive(4))
    assert first.created
    [grant] = first.grants
    assert (offsets_of(grant), attempts_of(grant)) == ([0, 1, 2, 3], [1] * 4)
    assert [body for frame in grant.frames for body in bodies_of(frame)][:4] == [b"0", b"1", b"2", b"3"]
    assert await settle(way.client, grant, "ack", 0) == ["ok"]
    assert await settle(way.client, grant, "ack", 0, 5) == ["already", "unknown"]
    assert await settle(way.client, grant, "nack", 1) == ["ok"]
    assert await settle(way.client, grant, "release", 2) == ["ok"]
    assert await settle(way.client, grant, "extend", 3, delay_ms=90_000) == ["ok"]
    again = await way.client.receive(receive(100))
    assert sorted(handed_out(again)) == [(1, 1, 2), (1, 2, 1), (1, 4, 1), (1, 5, 1)]
    assert await settle(way.client, grant, "ack", 1) == ["redelivered"]
    lag = (await way.client.lag(LagRequest(GROUP, [queue()]))).queues[0]
    assert (lag.committed, lag.head, lag.in_flight, lag.exists) == (1, 6, 5, True)


async def test_ranges_settle_what_the_lease_has(way: Way) -> None:
    """Pairs of offsets: one status, and how many rows were settled now."""
    await append(way.client, messages([b"x"] * 100))
    [grant] = (await way.client.receive(receive(100))).grants
    one = Settle(1, grant.generation, grant.lease, "ack", ranges=i64(0, 10, 50, 60))
    for rows in (20, 0):
        [outcome] = (await way.client.settle(SettleRequest(GROUP, [one], "memory", 5_000))).outcomes
        assert outcome.rows == rows
    assert (await way.client.lag(LagRequest(GROUP, [queue()]))).queues[0].in_flight == 80


async def test_an_attempt_id_repeats(way: Way) -> None:
    """The same leases again, though nobody says that the first answer was lost."""
    await append(way.client, messages([b"a", b"b"]))
    first = await way.client.receive(receive(1, attempt_id="x"))
    again = await way.client.receive(receive(1, attempt_id="x"))
    assert handed_out(first) == handed_out(again) == [(1, 0, 1)]
    assert handed_out(await way.client.receive(receive(5, attempt_id="y"))) == [(1, 1, 1)]


async def test_waiting_calls_wake(way: Way) -> None:
    """A receive and a read at the end get what comes, over any queue they named."""
    polls = [asyncio.ensure_future(way.client.receive(receive(wait_ms=30_000, queues=2)))]
    await waiting(way.local, 1)
    reading = asyncio.ensure_future(way.client.read(ReadRequest(2, 0, 1, 1, 30_000)))
    await append(way.client, messages([b"a"], number=1))
    async with asyncio.timeout(SOON_SECONDS):
        assert handed_out(await polls[0]) == [(2, 0, 1)]
        assert [bodies_of(frame) for frame in (await reading).frames] == [[b"a"]]


async def test_waiting_calls_end_empty(way: Way) -> None:
    """When their time is up, without an error."""
    result = await way.client.receive(receive(wait_ms=30))
    assert (result.grants, result.reason) == ([], None)
    assert (await way.client.read(ReadRequest(1, 0, 1, 1, 30))).frames == []


async def test_a_cancelled_receive_holds_nothing(way: Way) -> None:
    """Its caller has gone: the store forgets it, and the next message is somebody else's first attempt."""
    gone = asyncio.ensure_future(way.client.receive(receive(wait_ms=30_000)))
    await waiting(way.local, 1)
    gone.cancel()
    await waiting(way.local, 0)
    await append(way.client, messages([b"a"]))
    assert handed_out(await way.client.receive(receive())) == [(1, 0, 1)]


async def test_a_receive_cancelled_while_it_is_answered(way: Way) -> None:
    """Whenever the caller goes, the message comes to the next one, with its attempt kept."""
    for number in range(20):
        gone = asyncio.ensure_future(way.client.receive(receive(1, wait_ms=30_000)))
        await waiting(way.local, 1)
        appended = asyncio.ensure_future(append(way.client, messages([b"%d" % number])))
        for _ in range(number):
            await asyncio.sleep(0)
        gone.cancel()
        await appended
        if not gone.done():
            await asyncio.wait([gone])
        result = await way.client.receive(receive(1, wait_ms=5_000)) if gone.cancelled() else gone.result()
        assert handed_out(result) == [(1, number, 1)]
        assert await settle(way.client, result.grants[0], "ack", number) == ["ok"]


async def test_an_append_outlives_its_caller(way: Way) -> None:
    """An accepted call is carried out although nobody waits for it."""
    before = (await way.local.status()).end_position
    gone = asyncio.ensure_future(append(way.client, messages([b"a"])))

    async def accepted() -> bool:
        return (await way.local.status()).end_position > before

    await until(accepted)
    gone.cancel()

    async def there() -> bool:
        return (await way.local.queues([1]))[0].end_offset == 1

    await until(there)


async def test_a_filter_is_judged_by_the_index(way: Way) -> None:
    """Only rows of the tag are granted; the others are behind the group afterwards."""
    await append(way.client, messages([b"%d" % n for n in range(8)], tags=["a", "b"] * 4))
    [grant] = (await way.client.receive(receive(tag="b"))).grants
    assert offsets_of(grant) == [1, 3, 5, 7]
    await settle(way.client, grant, "ack", 1, 3, 5, 7)
    assert (await way.client.lag(LagRequest(GROUP, [queue()]))).queues[0].committed == 8
    read = await way.client.read(ReadRequest(1, 0, 100, 1 << 20, 0, [hash_text("nobody")]))
    assert (read.frames, read.next_offset) == ([], 8)


async def test_a_seek_voids_leases(way: Way) -> None:
    """A dry run says the same and moves nothing; a repeat of the same seek is harmless."""
    await append(way.client, messages([b"a", b"b", b"c"]))
    [grant] = (await way.client.receive(receive())).grants
    dry = SeekRequest(GROUP, [queue()], [1], "s", True)
    assert [(one.from_offset, one.to_offset) for one in (await way.client.seek(dry)).queues] == [(0, 1)]
    assert await settle(way.client, grant, "ack", 0) == ["ok"]
    moved = msgspec.structs.replace(dry, dry_run=False)
    assert [one.to_offset for one in (await way.client.seek(moved)).queues] == [1]
    assert await settle(way.client, grant, "ack", 1, 2) == ["void", "void"]
    [again] = (await way.client.receive(receive())).grants
    await way.client.seek(moved)
    assert (offsets_of(again), await settle(way.client, again, "ack", 1, 2)) == ([1, 2], ["ok", "ok"])


async def test_by_time_and_by_key(way: Way) -> None:
    """Offsets of a time, frames of a key."""
    await append(way.client, messages([b"a", b"b"], keys=[b"k", b"l"]))
    last = (await way.client.queues([1]))[0].last_ts
    found = await way.client.offsets_at(TimeRequest([1, 2], last))
    assert found.offsets == [0, 0]
    assert (await way.client.offsets_at(TimeRequest([1], last + 1))).offsets == [2]
    [frame] = await way.client.find(FindRequest([1, 2], hash_bytes(b"l"), 0, last + 1, 10))
    assert bodies_of(frame) == [b"a", b"b"]
    assert await way.client.find(FindRequest([1, 2], hash_bytes(b"m"), 0, last + 1, 10)) == []


async def test_groups_and_topics_are_forgotten(way: Way) -> None:
    """A deleted group begins anew; a deleted topic's messages are expired."""
    await append(way.client, messages([b"a"]))
    [grant] = (await way.client.receive(receive())).grants
    await way.client.delete_group(GROUP)
    assert await settle(way.client, grant, "ack", 0) == ["unknown"]
    lag = (await way.client.lag(LagRequest(GROUP, [queue()], "earliest"))).queues[0]
    assert (lag.exists, lag.committed) == (False, 0)
    await way.client.delete_topic(1)
    ends = (await way.client.queues([1]))[0]
    assert ends.start_offset == ends.end_offset


async def test_status_says_how_it_is(way: Way) -> None:
    """Positions, readiness and counters, the same by every way."""
    await append(way.client, messages([b"a"]))
    status = await way.client.status()
    assert (status.group, status.ready, status.disk_full) == ("a", True, False)
    assert status.first_position <= status.confirmed_position <= status.end_position
    assert status.counters["messages_appended_total"] == 1


# -- the socket ---------------------------------------------------------------------------------------------------


async def test_a_thousand_receives_on_one_socket(http: Way) -> None:
    """All wait over one connection; a thousand messages wake each of them exactly once."""
    polls = [asyncio.ensure_future(http.client.receive(receive(1, wait_ms=30_000))) for _ in range(1_000)]
    await waiting(http.local, 1_000)
    assert http.server is not None
    assert http.server.connections == 1
    for start in range(0, 1_000, 250):
        await append(http.client, messages([b"%d" % n for n in range(start, start + 250)]))
    async with asyncio.timeout(SOON_SECONDS):
        results = await asyncio.gather(*polls)
    granted = [one for result in results for one in handed_out(result)]
    assert sorted(granted) == [(1, offset, 1) for offset in range(1_000)]


async def test_a_closed_socket_ends_what_waits(http: Way) -> None:
    """The proxy's calls fail as unavailable, nothing waits in the store, and another proxy gets the next message."""
    assert http.connect is not None
    other = http.connect()
    polls = [asyncio.ensure_future(http.client.receive(receive(wait_ms=30_000))) for _ in range(50)]
    await waiting(http.local, 50)
    await http.client.close()  # type: ignore[attr-defined]  # of RemoteStore
    ended = await asyncio.gather(*polls, return_exceptions=True)
    assert {type(one) for one in ended} == {Unavailable}
    await waiting(http.local, 0)
    await append(other, messages([b"a"]))
    assert handed_out(await other.receive(receive(wait_ms=5_000))) == [(1, 0, 1)]


class _Late:
    """A store whose receive has its leases but is slow to answer, and does not give them up when it is cancelled."""

    def __init__(self, local: LocalStore) -> None:
        self._local = local
        self.granted = asyncio.Event()

    async def receive(self, request: ReceiveRequest) -> ReceiveResult:
        result = await self._local.receive(request)
        self.granted.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return result
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)


@pytest.mark.parametrize("leave", ["cancel", "close"])
async def test_grants_that_reached_nobody_are_released(local: LocalStore, leave: str) -> None:
    """Cancelled or closed when the leases were given already: they are given back with their attempt, at once."""
    late = _Late(local)
    server = await served(late)
    remote = RemoteStore(server.address, SECRET)
    await append(local, messages([b"a", b"b"]))
    poll = asyncio.ensure_future(remote.receive(receive(wait_ms=30_000)))
    await late.granted.wait()
    if leave == "cancel":
        poll.cancel()
        with pytest.raises(asyncio.CancelledError):
            await poll
    else:
        await remote.close()
        with pytest.raises(Unavailable):
            await poll
    async with asyncio.timeout(SOON_SECONDS):
        assert handed_out(await local.receive(receive(wait_ms=15_000))) == [(1, 0, 1), (1, 1, 1)]
    await remote.close()
    await server.stop(1)


async def test_a_stranger_gets_nothing(http: Way) -> None:
    """Every call and the socket need the cluster secret."""
    assert http.server is not None
    stranger = RemoteStore(http.server.address, "t" * 40)
    for ask in (stranger.status(), stranger.queues([1]), stranger.receive(receive(wait_ms=50))):
        with pytest.raises(MillpondError) as caught:
            await ask
        assert caught.value.code in {"unauthenticated", "store_unavailable"}
    await stranger.close()


def test_ways_are_complete() -> None:
    """Each implementation has every method of the interface."""
    wanted = {name for name in vars(StoreClient) if not name.startswith("_")}
    for kind in (LocalStore, RemoteStore):
        assert wanted <= set(dir(kind))
