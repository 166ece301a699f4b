"""The coalescer: who goes together, what a client is told, and what a client that leaves changes (nothing)."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from millpond.core import limits
from millpond.core.clock import SystemRandom
from millpond.core.errors import Conflict, DiskFull, ErrorInfo, MillpondError, Unavailable
from millpond.core.frame import ProducerPart
from millpond.core.hashing import dedup_hash
from millpond.metadata.client import QueueInfo, TopicInfo
from millpond.proxy import coalesce
from millpond.proxy.coalesce import SINGLE_BYTES, Coalescer
from millpond.proxy.encode import Rows, split
from millpond.proxy.frame_plan import Placed, PlacedRun, PlacedSingle
from millpond.proxy.incoming import Single, gather
from millpond.store.client import AppendOutcome, AppendRequest, AppendResult, Duplicate, QueueAppend, StoreClient

from .conftest import ScriptedStore, topic_of

TOPIC = topic_of()
QUEUE = TOPIC.queues[0]
WIDE = topic_of(limits.COALESCE_QUEUES + 1, durability="memory")


@pytest.fixture
async def coalescer(store: ScriptedStore) -> AsyncIterator[Coalescer]:
    coalescer = Coalescer(lambda queue: store)
    yield coalescer
    store.gate.set()
    await coalescer.close()
    assert coalescer.pending_bytes == 0


def one(coalescer: Coalescer, body: str, dedup_id: str | None = None) -> asyncio.Future[PlacedSingle | MillpondError]:
    hashed = None if dedup_id is None else dedup_hash(dedup_id)
    return coalescer.send_single(TOPIC, QUEUE, Single(body, dedup_id=dedup_id), len(body), 0, 0, hashed)


def to(
    coalescer: Coalescer, number: int, body: str, topic: TopicInfo = WIDE
) -> asyncio.Future[PlacedSingle | MillpondError]:
    return coalescer.send_single(topic, topic.queues[number], Single(body), len(body), 0, 0, None)


def queues_of(store: ScriptedStore) -> list[list[int]]:
    """The queues of each request."""
    return [[append.queue.queue for append in request.appends] for request in store.requests]


def rows(*bodies: str, dedup_ids: list[str | None] | None = None) -> Rows:
    nulls = [None] * len(bodies)
    incoming = gather(bodies, nulls, nulls, nulls, nulls, dedup_ids or nulls, nulls)
    ((_, _, found),) = split(incoming, 1, 1 << 20, 0, SystemRandom())
    return found


def duplicates_once(*found: Duplicate) -> object:
    left = [AppendOutcome(duplicates=list(found))]
    return lambda append: left.pop() if left else None


async def test_the_first_goes_at_once_and_the_others_gather(store: ScriptedStore, coalescer: Coalescer) -> None:
    """While an append is in flight everything waits, and then goes in one frame, in order."""
    store.gate.clear()
    first = one(coalescer, "a")
    await store.arrived.wait()
    others = [one(coalescer, body) for body in "bcd"]
    store.gate.set()
    placed = await asyncio.gather(first, *others)
    assert [frame.bodies for frame in store.frames] == [[b"a"], [b"b", b"c", b"d"]]
    assert [each.offset for each in placed] == [0, 1, 2, 3]


async def test_small_batches_share_the_frame_of_singles(store: ScriptedStore, coalescer: Coalescer) -> None:
    """Batches with other columns join; what each lacks is null."""
    store.gate.clear()
    first = one(coalescer, "a")
    await store.arrived.wait()
    keyed = gather(["b"], [b"k"], [None], [None], [None], [None], [None])
    ((_, _, with_key),) = split(keyed, 1, 1 << 20, 0, SystemRandom())
    answers = coalescer.send_batch(TOPIC, QUEUE, with_key), coalescer.send_batch(TOPIC, QUEUE, rows("c", "d"))
    last = one(coalescer, "e")
    store.gate.set()
    await asyncio.gather(first, last, *answers)
    assert store.frames[1].batch.to_pydict() == {"key": [None, b"k", None, None], "body": [b"e", b"b", b"c", b"d"]}
    assert store.frames[1].sidecar.key_hash.astype(bool).tolist() == [False, True, False, False]
    assert [answer.result() for answer in answers] == [PlacedRun(2, 1_000, 1), PlacedRun(3, 1_000, 2)]


async def test_large_batches_and_parts_stand_alone_in_one_request(store: ScriptedStore, coalescer: Coalescer) -> None:
    """A session part is never coalesced; it and a large batch travel with the others as frames of their own."""
    store.gate.clear()
    first = one(coalescer, "a")
    await store.arrived.wait()
    large = coalescer.send_batch(TOPIC, QUEUE, rows("x" * (limits.COALESCE_BYTES + 1)))
    part = coalescer.send_batch(TOPIC, QUEUE, rows("p"), ProducerPart("s", -1, 0, 0, 0, 1))
    small = one(coalescer, "b")
    store.gate.set()
    await asyncio.gather(first, large, part, small)
    assert [len(request.appends) for request in store.requests] == [1, 3]
    assert [append.parts for append in store.requests[1].appends] == [[], [ProducerPart("s", -1, 0, 0, 0, 1)], []]


async def test_queues_that_leave_in_one_turn_share_a_call(store: ScriptedStore, coalescer: Coalescer) -> None:
    """Each with a frame of its own; those that come while it is under way share the next one."""
    store.gate.clear()
    early = [to(coalescer, number, "a") for number in range(3)]
    await store.arrived.wait()
    late = []
    for number in (2, 3, 4):
        late.append(to(coalescer, number, "b"))
        await asyncio.sleep(0)
    assert queues_of(store) == [[0, 1, 2]]
    store.gate.set()
    await asyncio.gather(*early, *late)
    assert sorted(map(sorted, queues_of(store))) == [[0, 1, 2], [2, 3, 4]]
    assert [frame.bodies for frame in store.frames] == [[b"a"]] * 3 + [[b"b"]] * 3


async def test_a_call_that_takes_long_keeps_no_other_queues(store: ScriptedStore, coalescer: Coalescer) -> None:
    """What has come leaves without it, and what comes then waits for that call, too."""
    store.gate.clear()
    sent = [to(coalescer, 0, "a")]
    for numbers in ([1, 2], [3, 4]):
        await store.arrived.wait()
        store.arrived.clear()
        sent += [to(coalescer, number, "a") for number in numbers]
    await store.arrived.wait()
    assert queues_of(store) == [[0], [1, 2], [3, 4]]
    store.gate.set()
    await asyncio.gather(*sent)
    assert len(store.requests) == 3


async def test_nobody_waits_for_large_calls_and_flushes_of_other_queues(
    store: ScriptedStore, coalescer: Coalescer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store itself lets appends share a flush."""
    monkeypatch.setattr(coalesce, "COALESCE_MS", 1_000_000)
    flushed = topic_of(3, durability="flush")
    store.gate.clear()
    sent = []
    for number, body, topic in (
        (0, "x" * limits.COALESCE_BYTES, WIDE),
        (1, "a", flushed),
        (2, "a", flushed),
        (3, "a", WIDE),
    ):
        sent.append(to(coalescer, number, body, topic))
        async with asyncio.timeout(10):
            await store.arrived.wait()
        store.arrived.clear()
    assert queues_of(store) == [[0], [1], [2], [3]]
    store.gate.set()
    await asyncio.gather(*sent)


async def test_what_gathered_for_several_queues_leaves_in_one_call(store: ScriptedStore, coalescer: Coalescer) -> None:
    """Once the calls that they waited for are back."""
    store.gate.clear()
    sent = [to(coalescer, number, "a") for number in range(3)]
    body = "x" * (limits.COALESCE_BYTES + 1)
    large = coalescer.send_batch(WIDE, WIDE.queues[3], rows(body)), to(coalescer, 4, body)
    await store.arrived.wait()
    sent += [to(coalescer, number, "b") for number in (3, 4, 2, 0)]
    store.gate.set()
    await asyncio.gather(*large, *sent)
    assert sorted(sorted(each) for each in queues_of(store)) == [[0, 1, 2], [0, 2], [3], [3, 4], [4]]


async def test_large_ones_go_in_calls_of_their_own(store: ScriptedStore, coalescer: Coalescer) -> None:
    """Small ones go together up to COALESCE_CALL_BYTES."""
    small = "x" * (limits.COALESCE_BYTES - SINGLE_BYTES)
    fitting = limits.COALESCE_CALL_BYTES // limits.COALESCE_BYTES - 1  # beside the first
    bodies = ["a", "x" * limits.COALESCE_BYTES, *[small] * (fitting + 1)]
    await asyncio.gather(*(to(coalescer, number, body) for number, body in enumerate(bodies)))
    assert sorted(queues_of(store)) == [[0, *range(2, fitting + 2)], [1], [fitting + 2]]


async def test_a_call_has_a_bounded_number_of_queues(store: ScriptedStore, coalescer: Coalescer) -> None:
    await asyncio.gather(*(to(coalescer, number, "a") for number in range(limits.COALESCE_QUEUES + 1)))
    assert [len(request.appends) for request in store.requests] == [limits.COALESCE_QUEUES, 1]


async def test_nobody_waits_for_another_topics_flush(store: ScriptedStore, coalescer: Coalescer) -> None:
    """A call is answered when all of it holds, so topics of another durability have their own."""
    flushed = topic_of(2, durability="flush")
    await asyncio.gather(to(coalescer, 0, "a", flushed), to(coalescer, 1, "a"))
    assert queues_of(store) == [[0], [1]]


async def test_a_queues_error_is_its_own(store: ScriptedStore, coalescer: Coalescer) -> None:
    """Also when its rows have to go once more: the others stand where they stood."""

    def script(append: QueueAppend) -> AppendOutcome | None:
        return AppendOutcome(error=ErrorInfo("disk_full", "full")) if append.queue.queue == 1 else None

    store.script = script
    fine, failed = await asyncio.gather(to(coalescer, 0, "a"), to(coalescer, 1, "a"))
    assert isinstance(fine, PlacedSingle) and fine.offset == 0
    assert isinstance(failed, MillpondError) and failed.code == "disk_full"
    assert len(store.requests) == 1


async def test_a_queue_without_a_store_is_refused_alone(store: ScriptedStore) -> None:
    """Nothing of it is taken, and it is as new once there is one; what waits behind an append when its store goes is
    refused, too."""
    known = {0: store, 1: store}

    def store_of(queue: QueueInfo) -> StoreClient:
        if queue.queue not in known:
            raise Unavailable("store_unavailable", "no such store")
        return known[queue.queue]

    coalescer = Coalescer(store_of)
    with pytest.raises(Unavailable):
        to(coalescer, 2, "a")
    known[2] = store
    assert isinstance(await to(coalescer, 2, "a"), PlacedSingle)
    store.gate.clear()
    store.arrived.clear()
    first = to(coalescer, 0, "a"), to(coalescer, 1, "a")
    await store.arrived.wait()
    then = to(coalescer, 0, "b"), to(coalescer, 1, "b")
    del known[0]
    store.gate.set()
    assert [isinstance(each, PlacedSingle) for each in await asyncio.gather(*first, *then)] == [True, True, False, True]
    assert (await then[0]).code == "store_unavailable"
    await coalescer.close()
    assert coalescer.pending_bytes == 0


async def test_messages_with_and_without_dedup_ids_never_share_a_frame(
    store: ScriptedStore, coalescer: Coalescer
) -> None:
    """Rows without id would need room in the window, or be taken for repeats of each other."""
    await asyncio.gather(one(coalescer, "a"), one(coalescer, "b", "id"), one(coalescer, "c"))
    assert [(frame.bodies, frame.sidecar.dedup_hash is None) for frame in store.frames] == [
        ([b"a", b"c"], True),
        ([b"b"], False),
    ]


async def test_duplicates_are_answered_and_the_others_go_once_more(store: ScriptedStore, coalescer: Coalescer) -> None:
    """The store named rows 0 and 2: nothing was appended, so rows 1 and 3 go again, in order."""
    store.script = duplicates_once(Duplicate(0, 70, 5), Duplicate(2, 71, 6, mismatch=True))
    placed: Placed = await coalescer.send_batch(TOPIC, QUEUE, rows(*"abcd", dedup_ids=list("1234")))
    assert store.frames[0].bodies == [b"b", b"d"]
    assert placed.offsets.tolist() == [70, 0, 71, 1]
    assert placed.duplicate.tolist() == [True, False, True, False]
    assert {row: error.code for row, error in placed.errors.items()} == {2: "dedup_mismatch"}


async def test_an_atomic_batch_is_not_sent_again_after_a_mismatch(store: ScriptedStore, coalescer: Coalescer) -> None:
    """Another request under the same idempotency key writes none of its messages."""
    store.script = duplicates_once(Duplicate(0, 70, 5, mismatch=True))
    placed = await coalescer.send_batch(TOPIC, QUEUE, rows("a", "b", dedup_ids=["1", "2"]), atomic=True)
    assert (store.frames, len(store.requests)) == ([], 1)
    assert {row: error.code for row, error in placed.errors.items()} == dict.fromkeys(range(2), "dedup_mismatch")


async def test_equal_ids_in_one_frame_keep_the_first(store: ScriptedStore, coalescer: Coalescer) -> None:
    """Three requests under one id, one of them with another body: one message, a duplicate and a mismatch."""
    same = [
        one(coalescer, "a", "id"),
        one(coalescer, "other", "id"),
        one(coalescer, "b", "id2"),
        one(coalescer, "a", "id"),
    ]
    first, mismatch, other, repeat = await asyncio.gather(*same)
    assert store.frames[0].bodies == [b"a", b"b"]
    assert (first, repeat) == (PlacedSingle(0, 1_000, False), PlacedSingle(0, 1_000, True))
    assert other == PlacedSingle(1, 1_000, False)
    assert isinstance(mismatch, MillpondError) and mismatch.code == "dedup_mismatch"


async def test_duplicates_without_end_are_given_up(store: ScriptedStore, coalescer: Coalescer) -> None:
    """A store that names another duplicate each time is asked three times."""
    store.script = lambda append: AppendOutcome(duplicates=[Duplicate(0, 7, 5)])
    placed = await coalescer.send_batch(TOPIC, QUEUE, rows(*"abcde", dedup_ids=list("12345")))
    assert len(store.requests) == limits.DUPLICATE_ROUNDS
    assert placed.duplicate.tolist() == [True, True, True, False, False]
    assert {row: error.code for row, error in placed.errors.items()} == {3: "store_unavailable", 4: "store_unavailable"}


async def test_a_repeated_part_is_a_duplicate_as_a_whole(store: ScriptedStore, coalescer: Coalescer) -> None:
    """Also when the store no longer knows where it stands (offset -1)."""
    store.script = duplicates_once(Duplicate(0, -1, -1), Duplicate(1, -1, -1))
    placed = await coalescer.send_batch(TOPIC, QUEUE, rows("a", "b"), ProducerPart("s", 3, 4, 5, 0, 2))
    assert (placed.offsets.tolist(), placed.duplicate.tolist(), placed.errors) == ([-1, -1], [True, True], {})


async def test_one_frame_fails_and_the_others_of_the_request_do_not(store: ScriptedStore, coalescer: Coalescer) -> None:
    """An outcome's error is that frame's alone."""

    def script(append: QueueAppend) -> AppendOutcome | None:
        return AppendOutcome(error=ErrorInfo("out_of_order", "previous is 7")) if append.parts else None

    store.script = script
    part = coalescer.send_batch(TOPIC, QUEUE, rows("p"), ProducerPart("s", 3, 4, 4, 0, 1))
    fine = one(coalescer, "a")
    assert isinstance((await part).errors[0], Conflict)
    assert (await fine).offset == 0


@pytest.mark.parametrize("error", [Unavailable("unknown_outcome", "gone"), DiskFull("disk_full", "full")])
async def test_a_failed_append_is_told_and_never_repeated(
    store: ScriptedStore, coalescer: Coalescer, error: MillpondError
) -> None:
    """Everybody in the request hears it; the next message starts afresh."""
    store.raises = error
    single, batch = one(coalescer, "a"), coalescer.send_batch(TOPIC, QUEUE, rows("b", "c"))
    assert (await single).code == error.code
    assert [each.code for each in (await batch).errors.values()] == [error.code] * 2
    assert len(store.requests) == 1
    store.raises = None
    assert (await one(coalescer, "d")).offset == 0


async def test_a_bug_in_the_store_leaves_nobody_waiting(store: ScriptedStore, coalescer: Coalescer) -> None:
    """An error that is no MillpondError ends the lane's task: its waiters hear unknown_outcome, the next one works."""
    store.gate.clear()
    store.raises = ZeroDivisionError("a bug")
    taken = one(coalescer, "a")
    await store.arrived.wait()
    waiting = one(coalescer, "b")
    store.gate.set()
    assert [(await taken).code, (await waiting).code] == ["unknown_outcome", "shutting_down"]
    store.raises = None
    assert (await one(coalescer, "c")).offset == 0


async def test_a_client_that_leaves_changes_nothing(store: ScriptedStore, coalescer: Coalescer) -> None:
    """Its message is written, and those beside it get their own places."""
    store.gate.clear()
    leaving, staying = one(coalescer, "a"), one(coalescer, "b")
    batch = coalescer.send_batch(TOPIC, QUEUE, rows("c"))
    await store.arrived.wait()
    leaving.cancel()
    batch.cancel()
    store.gate.set()
    assert (await staying).offset == 1
    assert store.frames[0].bodies == [b"a", b"b", b"c"]


async def test_what_waits_is_bounded(store: ScriptedStore, coalescer: Coalescer) -> None:
    """Beyond the rows of one queue a produce is refused at once; after the append there is room again."""
    store.gate.clear()
    first = one(coalescer, "a")
    await store.arrived.wait()
    waiting = [one(coalescer, "b") for _ in range(limits.QUEUE_PENDING_ROWS)]
    with pytest.raises(Unavailable) as caught:
        one(coalescer, "c")
    assert caught.value.code == "flush_behind"
    refused = coalescer.send_batch(TOPIC, QUEUE, rows("c", "d"))
    assert [error.code for error in refused.result().errors.values()] == ["flush_behind"] * 2
    store.gate.set()
    await asyncio.gather(first, *waiting)
    assert max(frame.append.count for frame in store.frames) == limits.BATCH_MESSAGES
    assert (await one(coalescer, "d")).offset == limits.QUEUE_PENDING_ROWS + 1


@pytest.mark.parametrize("refused_by", ["the bound", "the store"])
async def test_what_is_refused_is_not_left_to_the_collector(
    store: ScriptedStore, coalescer: Coalescer, monkeypatch: pytest.MonkeyPatch, refused_by: str
) -> None:
    """Whoever has the answer lets go of it, and the messages are gone: a client that is too quick makes no garbage."""
    if refused_by == "the bound":
        monkeypatch.setattr(coalesce, "PENDING_APPEND_BYTES", 0)
    else:
        store.raises = Unavailable("store_unavailable", "away")
    gc.disable()
    try:
        waiting = [coalescer.send_batch(TOPIC, QUEUE, rows("a", "b"))]
        if refused_by == "the store":
            waiting.append(coalescer.send_batch(TOPIC, QUEUE, rows("c")))
        for answer in waiting:
            assert await answer
        await asyncio.sleep(0)
        known = [weakref.ref(one) for one in waiting]
        del answer, waiting
        assert [one() for one in known] == [None] * len(known)
    finally:
        gc.enable()


async def test_close_waits_for_what_is_in_flight(store: ScriptedStore) -> None:
    """Accepted messages are answered; new ones are refused."""
    coalescer = Coalescer(lambda queue: store)
    store.gate.clear()
    sent = one(coalescer, "a")
    await store.arrived.wait()
    closing = asyncio.create_task(coalescer.close())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        one(coalescer, "b")
    store.gate.set()
    await closing
    assert sent.result().offset == 0


async def test_close_waits_for_what_waits_behind_it(store: ScriptedStore) -> None:
    """What was accepted before the close is sent, though only the call before it was under way."""
    coalescer = Coalescer(lambda queue: store)
    store.gate.clear()
    sent = one(coalescer, "a")
    await store.arrived.wait()
    behind = one(coalescer, "b")
    closing = asyncio.create_task(coalescer.close())
    await asyncio.sleep(0)
    store.gate.set()
    await closing
    assert (sent.result().offset, behind.result().offset) == (0, 1)


@pytest.mark.parametrize("wait_ms", [1_000_000, 0])
async def test_close_leaves_nobody_waiting_behind_a_call_that_was_ended(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch, wait_ms: int
) -> None:
    """Of other queues: nothing of theirs was sent, and that is what they are told; also when their time to leave comes
    while calls are ended, and without an error of the timer's own."""
    monkeypatch.setattr(coalesce, "COALESCE_MS", wait_ms)
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    coalescer = Coalescer(lambda queue: store)
    store.gate.clear()
    sent = to(coalescer, 0, "a")
    await store.arrived.wait()
    behind = to(coalescer, 1, "a")
    await coalescer._tasks.close()
    await coalescer.close()
    assert [error.code for error in (await sent, await behind) if isinstance(error, MillpondError)] == [
        "unknown_outcome",
        "shutting_down",
    ]
    assert (coalescer.pending_bytes, failed) == (0, [])


async def test_a_call_that_is_answered_while_calls_are_ended_is_the_last(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that waited for it are told that nothing of theirs was sent, however many calls they would have been."""

    async def answers_all_the_same(request: AppendRequest) -> AppendResult:
        with suppress(asyncio.CancelledError):
            await store.gate.wait()
        return AppendResult([AppendOutcome(0, 1_000) for _ in request.appends], 1)

    monkeypatch.setattr(coalesce, "COALESCE_MS", 1_000_000)
    monkeypatch.setattr(store, "append", answers_all_the_same)
    coalescer = Coalescer(lambda queue: store)
    store.gate.clear()
    sent = to(coalescer, 0, "a")
    await asyncio.sleep(0)
    behind = [to(coalescer, 1, "a"), to(coalescer, 2, "a" * (limits.COALESCE_BYTES + 1))]
    await coalescer._tasks.close()
    await coalescer.close()
    assert sent.result().offset == 0
    assert [error.code for one in behind if isinstance(error := one.result(), MillpondError)] == ["shutting_down"] * 2
    assert coalescer.pending_bytes == 0


async def test_a_store_that_never_answers(store: ScriptedStore) -> None:
    """The call's own timeout: the outcome is unknown, and the queue is free again."""
    coalescer = Coalescer(lambda queue: store, call_ms=-4_990)
    store.gate.clear()
    assert (await one(coalescer, "a")).code == "unknown_outcome"
    await coalescer.close()
