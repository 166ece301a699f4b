"""What delivery does with leases, over a log in memory and a clock that stands still until told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from support.deliveries import GROUP, Bench, Q, attempts, got, offsets, turns

from millpond.core.errors import BadRequest, Conflict, MillpondError, NotFound
from millpond.store.client import (
    LeaseRequest,
    QueueEnds,
    QueueRef,
    Settle,
    SettleRequest,
)
from millpond.store.delivery import Delivery
from millpond.store.fold.cursors import Cursors


async def test_receive_ack_moves_the_cursor(bench: Bench) -> None:
    """What is received and acknowledged is committed; answers wait for the write and the flush."""
    bench.put(5)
    grant = await bench.take()
    assert (offsets(grant), attempts(grant)) == ([0, 1, 2, 3, 4], [1] * 5)
    assert bench.log.calls == ["changed", "written"]
    assert (await bench.lag()).in_flight == 5
    bench.log.calls.clear()
    assert await bench.settle(grant) == ["ok"] * 5
    assert bench.log.calls == ["changed", "flushed"]
    lag = await bench.lag()
    assert (lag.committed, lag.head, lag.in_flight, lag.oldest_ts) == (5, 5, 0, -1)


async def test_memory_durability_waits_for_the_write_only(bench: Bench) -> None:
    """An ack of a `memory` topic is answered when written."""
    bench.put(1)
    grant = await bench.take()
    one = Settle(grant.queue_id, grant.generation, grant.lease, "ack", grant.offsets)
    bench.log.calls.clear()
    await bench.delivery.settle(SettleRequest(GROUP, [one], "memory", 1000))
    assert bench.log.calls == ["changed", "written"]


async def test_progress_is_told_once_it_is_confirmed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ack that is not answered yet moves the cursor, and a power cut may take it back: nobody has seen it then."""
    bench.put(1)
    await bench.settle(await bench.take())
    on_the_disk = asyncio.Event()
    monkeypatch.setattr(bench.log, "confirmed", on_the_disk.wait)
    asked = asyncio.ensure_future(bench.lag())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not asked.done()
    on_the_disk.set()
    assert (await asked).committed == 1


async def test_double_ack(bench: Bench) -> None:
    """A second ack answers `already`, once the first is confirmed; offsets never granted are unknown."""
    bench.put(2)
    grant = await bench.take()
    await bench.settle(grant)
    bench.log.calls.clear()
    assert await bench.settle(grant, offsets=[0, 1, 9]) == ["already", "already", "unknown"]
    assert bench.log.calls == ["confirmed"]


async def test_void_is_told_once_it_is_confirmed(bench: Bench) -> None:
    """A lease that a seek took away is `void` only when the seek cannot be forgotten."""
    bench.put(1)
    grant = await bench.take()
    await bench.seek(0)
    bench.log.calls.clear()
    assert await bench.settle(grant) == ["void"]
    assert bench.log.calls == ["confirmed"]


async def test_ranges_settle_the_rows_of_the_lease(bench: Bench) -> None:
    """A receipt's ranges settle the lease's own rows, and say how many."""
    bench.put(20)
    first, second = await bench.take(10), await bench.take(10)
    ranges = pa.py_buffer(np.array([0, 3, 5, 15], np.int64))
    one = Settle(first.queue_id, 1, first.lease, "ack", None, ranges)
    result = await bench.delivery.settle(SettleRequest(GROUP, [one], "flush", 1000))
    assert result.outcomes[0].rows == 8
    assert (await bench.lag()).in_flight == 12
    assert await bench.settle(second) == ["ok"] * 10


async def test_lease_end_hands_out_again_with_one_attempt_more(bench: Bench) -> None:
    """After the lease has ended a message comes again; the late ack of the first lease is `redelivered` then."""
    bench.put(1)
    first = await bench.take()
    assert (await bench.receive()).grants == []
    bench.pass_time(30_000)
    second = await bench.take()
    assert (offsets(second), attempts(second)) == ([0], [2])
    assert await bench.settle(first) == ["redelivered"]
    assert await bench.settle(second) == ["ok"]


async def test_late_ack_is_good_until_redelivered(bench: Bench) -> None:
    """A lease that has ended and was not handed out again may still be acknowledged."""
    bench.put(1)
    grant = await bench.take()
    bench.pass_time(40_000)
    assert await bench.settle(grant) == ["ok"]
    assert (await bench.receive()).grants == []


async def test_nack_waits_for_its_delay(bench: Bench) -> None:
    """A nacked message comes again after its delay, not before, and counts an attempt."""
    bench.put(2)
    grant = await bench.take()
    assert await bench.settle(grant, "nack", [1], delay_ms=5_000) == ["ok"]
    bench.pass_time(4_999)
    assert (await bench.receive()).grants == []
    bench.pass_time(1)
    again = await bench.take()
    assert (offsets(again), attempts(again)) == ([1], [2])


async def test_extend_moves_the_lease_end(bench: Bench) -> None:
    """An extended lease ends `delay_ms` after the extension."""
    bench.put(1)
    grant = await bench.take()
    bench.pass_time(20_000)
    assert await bench.settle(grant, "extend", delay_ms=30_000) == ["ok"]
    bench.pass_time(29_999)
    assert (await bench.receive()).grants == []
    bench.pass_time(1)
    assert attempts(await bench.take()) == [2]


async def test_release_is_uncounted(bench: Bench) -> None:
    """A released row is handed out again with the same attempt."""
    bench.put(1)
    await bench.settle(await bench.take(), "release")
    assert attempts(await bench.take()) == [1]


async def test_retries_take_half_of_a_receive(bench: Bench) -> None:
    """With new messages there, repeats take at most half; without, all of it."""
    bench.put(10)
    await bench.settle(await bench.take(10), "nack")
    bench.put(100)
    result = await bench.receive(8)
    assert sorted(got(result)) == [0, 1, 2, 3, 10, 11, 12, 13]
    bench.put(0)
    rest = await bench.receive(1000)
    assert sorted(got(rest)) == [4, 5, 6, 7, 8, 9, *range(14, 110)]


async def test_retries_and_new_take_turns_in_single_receives(bench: Bench) -> None:
    """A message that fails at once does not stop the others when each receive takes one."""
    bench.put(4)
    seen: list[int] = []
    for _ in range(8):
        grant = await bench.take(1)
        seen += offsets(grant)
        await bench.settle(grant, "nack" if offsets(grant) == [0] else "ack")
    assert {1, 2, 3} <= set(seen)


async def test_queues_are_served_in_turn(bench: Bench) -> None:
    """Each receive begins with another queue."""
    for queue in Q:
        bench.put(10, queue)
    seen = [(await bench.receive(2, Q)).grants[0].queue_id for _ in range(6)]
    assert seen == [40, 41, 42, 40, 41, 42]


async def test_no_double_grant_under_concurrency(bench: Bench) -> None:
    """Receives that decide at the same time, while the index must be read, never get the same message."""
    bench.log.tags[40] = [1, 2] * 500
    bench.log.gate = asyncio.Event()
    tasks = [bench.spawn(bench.receive(7, tag_hashes=[1])) for _ in range(40)]
    await bench.log.reached.wait()
    await turns()
    bench.log.gate.set()
    seen = [offset for result in await asyncio.gather(*tasks) for offset in got(result)]
    assert sorted(seen) == list(range(0, 560, 2))


async def test_seek_while_a_receive_decides(bench: Bench) -> None:
    """A seek between a receive's look at the index and its grant is not undone by it."""
    bench.put(100)
    await bench.take(10)
    bench.log.gate = asyncio.Event()
    task = bench.waiting(10)
    await bench.log.reached.wait()
    await bench.seek(50)
    bench.log.gate.set()
    assert got(await task) == list(range(50, 60))


async def test_settle_while_a_receive_decides(bench: Bench) -> None:
    """A row acknowledged while a receive was about to repeat it is not repeated."""
    bench.put(3)
    grant = await bench.take()
    bench.pass_time(30_000)
    bench.log.gate = asyncio.Event()
    task = bench.spawn(bench.receive(10))
    await bench.log.reached.wait()
    await bench.settle(grant, offsets=[1])
    bench.log.gate.set()
    assert got(await task) == [0, 2]


async def test_single_receives_get_a_nacked_message_every_time(bench: Bench) -> None:
    """Receives of one message, the only one nacked again and again: none of them misses it."""
    bench.put(1)
    for attempt in range(1, 6):
        grant = await bench.take(1)
        assert attempts(grant) == [attempt]
        await bench.settle(grant, "nack")


async def test_grant_of_a_cancelled_receive_is_released_uncounted(bench: Bench) -> None:
    """A receive that goes away while its grant is written gives it back: the next has it, at the same attempt."""
    bench.put(3)
    bench.log.write_gate = asyncio.Event()
    task = bench.spawn(bench.receive())
    await bench.log.reached.wait()
    waiter = bench.waiting()
    await turns()
    task.cancel()
    bench.log.write_gate.set()
    result = await waiter
    assert (got(result), attempts(result.grants[0])) == ([0, 1, 2], [1, 1, 1])


async def test_attempt_id_repeats_the_lease(bench: Bench) -> None:
    """A repeat with the same attempt id gets what is still leased of the first; after a minute, new messages."""
    bench.put(10)
    grant = await bench.take(3, attempt_id="a", lease_ms=300_000)
    await bench.settle(grant, offsets=[1])
    again = await bench.take(3, attempt_id="a")
    assert (offsets(again), attempts(again), again.lease) == ([0, 2], [1, 1], grant.lease)
    bench.pass_time(60_000)
    assert offsets(await bench.take(3, attempt_id="a")) == [3, 4, 5]


async def test_attempt_id_repeats_the_leases_of_all_queues(bench: Bench) -> None:
    for queue in Q[:2]:
        bench.put(2, queue)
    first = await bench.receive(4, Q, attempt_id="a")
    again = await bench.receive(4, Q, attempt_id="a")
    assert [grant.queue_id for grant in first.grants] == [40, 41]
    assert [grant.lease for grant in again.grants] == [grant.lease for grant in first.grants]


async def test_attempt_id_is_of_one_group(bench: Bench) -> None:
    bench.put(2)
    other = msgspec.structs.replace(GROUP, group_id=GROUP.group_id + 1)
    await bench.take(1, attempt_id="a")
    grant = await bench.take(1, attempt_id="a", group=other)
    again = await bench.take(1, attempt_id="a", group=other)
    assert (offsets(grant), offsets(again), again.lease) == ([0], [0], grant.lease)
    assert offsets(await bench.take(1, attempt_id="a")) == [0]


async def test_attempt_id_of_an_ended_lease(bench: Bench) -> None:
    """A repeat does not get a lease that has ended: it gets the message again."""
    bench.put(1)
    await bench.take(3, attempt_id="a", lease_ms=5_000)
    bench.pass_time(5_000)
    assert attempts(await bench.take(3, attempt_id="a")) == [2]


async def test_in_flight_full(bench: Bench) -> None:
    """At `max_in_flight` unsettled rows nothing new is handed out, with the reason; an ack makes room."""
    bench.put(10)
    grant = await bench.take(10, max_in_flight=4)
    assert offsets(grant) == [0, 1, 2, 3]
    result = await bench.receive(10, max_in_flight=4, wait_ms=60_000)
    assert (result.grants, result.reason) == ([], "in_flight_full")
    assert got(await bench.receive(1, max_in_flight=5)) == [4]
    await bench.settle(grant, offsets=[0, 2])
    assert got(await bench.receive(10, max_in_flight=4)) == [5]


async def test_a_queue_without_room_leaves_the_rest_to_the_next(bench: Bench) -> None:
    """`max_in_flight` is of each queue: a receive for more goes on with another one."""
    for queue in Q[:2]:
        bench.put(10, queue)
    result = await bench.receive(10, Q, max_in_flight=4)
    assert [offsets(grant) for grant in result.grants] == [[0, 1, 2, 3]] * 2


async def test_one_full_queue_does_not_end_a_long_poll(bench: Bench) -> None:
    """While another queue is not full, a receive goes on waiting for it."""
    bench.put(5)
    await bench.receive(10, Q, max_in_flight=5)
    task = bench.waiting(10, Q, max_in_flight=5)
    bench.put(1)
    await turns()
    assert not task.done()
    bench.put(1, Q[2])
    await turns()
    assert task.result().grants[0].queue_id == 42


async def test_filter_on_the_index(bench: Bench) -> None:
    """Only messages of the wanted tags are granted; the others never get an attempt and count as handed out."""
    bench.log.tags[40] = [1, 2, 3, 1, 2, 2]
    result = await bench.receive(10, tag_hashes=[1, 3])
    assert got(result) == [0, 2, 3]
    lag = await bench.lag()
    assert (lag.head, lag.in_flight) == (6, 3)


async def test_filter_over_a_long_stretch(bench: Bench) -> None:
    """A filter finds the one message among hundreds of thousands, and passes them."""
    bench.log.tags[40] = [1] * 600_000 + [5]
    assert got(await bench.receive(1, tag_hashes=[5])) == [600_000]
    assert (await bench.lag()).head == 600_001


async def test_max_bytes(bench: Bench) -> None:
    """A receive stops at `max_bytes`, but one message is always given."""
    bench.put(20)
    assert got(await bench.receive(10, max_bytes=350)) == [0, 1, 2]
    assert got(await bench.receive(10, max_bytes=1)) == [3]


async def test_max_bytes_is_of_all_queues_together(bench: Bench) -> None:
    """What one queue gave is no longer there for the next."""
    bench.log.frame_rows = 1
    for queue in Q[:2]:
        bench.put(5, queue)
    result = await bench.receive(10, Q, max_bytes=700)
    assert [offsets(grant) for grant in result.grants] == [[0, 1, 2, 3, 4], [0, 1]]


async def test_cold_rows_are_granted_without_frames(bench: Bench) -> None:
    """Without a filter, rows below the local offset are leased like others; a grant does not mix the two."""
    bench.put(10)
    bench.log.local[40] = 4
    grant = await bench.take(10)
    assert (offsets(grant), grant.local_offset) == ([0, 1, 2, 3], 4)
    assert got(await bench.receive(10)) == [4, 5, 6, 7, 8, 9]


async def test_claims(bench: Bench) -> None:
    """A filtered group gets a claim of cold rows, nobody else the same; what it takes is leased, the rest skipped."""
    bench.put(10)
    bench.log.local[40] = 6
    claim = (await bench.receive(10, tag_hashes=[1])).claims[0]
    assert (claim.first, claim.end) == (0, 6)
    assert (await bench.receive(10, tag_hashes=[1])).claims == []
    take = pa.py_buffer(np.array([1, 3], np.int64))
    request = LeaseRequest(GROUP, 40, claim.generation, claim.claim, take, 6, 30_000)
    grant = await bench.delivery.lease(request)
    assert (offsets(grant), attempts(grant)) == ([1, 3], [1, 1])
    assert (await bench.lag()).head == 6
    with pytest.raises(Conflict):
        await bench.delivery.lease(request)
    assert got(await bench.receive(10, tag_hashes=[1])) == [6, 7, 8, 9]


async def test_claims_expire(bench: Bench) -> None:
    """A claim ends after five seconds; then the next receive, also a waiting one, gets the range."""
    bench.put(10)
    bench.log.local[40] = 10
    first = (await bench.receive(10, tag_hashes=[1])).claims[0]
    task = bench.waiting(10, tag_hashes=[1])
    await turns()
    assert not task.done()
    bench.pass_time(5_000)
    await turns()
    assert task.result().claims[0].first == 0
    with pytest.raises(Conflict):
        await bench.delivery.lease(LeaseRequest(GROUP, 40, 1, first.claim, pa.py_buffer(b""), 10, 30_000))


async def test_claim_takes_only_what_was_claimed(bench: Bench) -> None:
    """Offsets outside of the claim are refused, and the claim stands."""
    bench.put(10)
    bench.log.local[40] = 6
    claim = (await bench.receive(10, tag_hashes=[1])).claims[0]
    request = LeaseRequest(GROUP, 40, 1, claim.claim, pa.py_buffer(np.array([7], np.int64)), 6, 30_000)
    with pytest.raises(BadRequest):
        await bench.delivery.lease(request)
    with pytest.raises(BadRequest):
        await bench.delivery.lease(msgspec.structs.replace(request, end=7))


async def test_start_of_a_group(bench: Bench) -> None:
    """A new group starts where its creator says; a queue that joins later is read from its first message."""
    bench.put(3)
    assert (await bench.receive(start="latest")).created
    bench.put(1)
    bench.put(2, Q[1])
    result = await bench.receive(10, Q[:2], start="latest")
    assert not result.created
    assert {grant.queue_id: offsets(grant) for grant in result.grants} == {40: [3], 41: [0, 1]}


async def test_delete_group(bench: Bench) -> None:
    """A deleted group's waiters end with an error, its leases are unknown, and it starts anew."""
    bench.put(2)
    grant = await bench.take(1)
    await bench.settle(await bench.take(1))
    task = bench.waiting()
    await turns()
    await bench.delivery.delete_group(GROUP)
    with pytest.raises(NotFound):
        await task
    assert await bench.settle(grant) == ["unknown"]
    assert (await bench.receive()).created


async def test_leases_of_a_deleted_group_are_never_those_of_a_new_one(bench: Bench) -> None:
    """A group with the same id that starts anew does not take acks of the old one's leases."""
    bench.put(2)
    old = await bench.take(1)
    await bench.delivery.delete_group(GROUP)
    bench.pass_time(1)
    await bench.take(1)
    assert await bench.settle(old) == ["redelivered"]


async def test_a_dropped_cursor_is_forgotten(bench: Bench) -> None:
    """When the fold drops a queue's cursors, delivery does not go on with them."""
    bench.put(2)
    grant = await bench.take(1)
    bench.cursors.drop_queue(40)
    assert await bench.settle(grant) == ["unknown"]
    assert not (await bench.lag()).exists


async def test_lease_numbers_are_new_after_a_restart(bench: Bench) -> None:
    """A lease forgotten by a power cut never names another one: those of a later start are higher."""
    bench.put(2)
    forgotten = await bench.take(1)
    bench.pass_time(1000)
    bench.delivery = Delivery(bench.log, Cursors(), bench.log.now_ms)
    grant = await bench.take(1)
    assert grant.lease > forgotten.lease
    assert await bench.settle(forgotten) == ["redelivered"]


async def test_a_queue_that_cannot_be_read_stops_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a queue's index is damaged the others are served; alone, its error is told."""
    good = bench.log.tag_hashes

    async def tag_hashes(queue_id: int, first: int, end: int) -> np.ndarray:
        if queue_id == 40:
            raise from_index
        return await good(queue_id, first, end)

    from_index: MillpondError = Conflict("out_of_order", "stands for any error here")
    monkeypatch.setattr(bench.log, "tag_hashes", tag_hashes)
    bench.put(2, Q[1])
    bench.put(2, Q[0])
    assert got(await bench.receive(10, [Q[1], Q[0]], tag_hashes=[1])) == [0, 1]
    with pytest.raises(Conflict):
        await bench.receive(10, [Q[1], Q[0]], tag_hashes=[1])


async def test_an_empty_receive_looks_at_no_idle_queue(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thousand idle queues, an empty receive and a wake-up ask for the ends of no others."""
    queues = [QueueRef(1, 2, 1000 + number, number) for number in range(1000)]
    await bench.receive(10, queues)
    asked: list[int] = []
    plain: Callable[[int], QueueEnds] = bench.log.ends

    def ends(queue_id: int) -> QueueEnds:
        asked.append(queue_id)
        return plain(queue_id)

    monkeypatch.setattr(bench.log, "ends", ends)
    await bench.receive(10, queues)
    assert asked == []
    bench.put(1, queues[500])
    await bench.receive(10, queues)
    assert set(asked) == {1500}
