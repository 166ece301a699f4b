"""Seek moves a group anywhere; lag says how far behind it is."""

from __future__ import annotations

import asyncio
from typing import Any

from integration.behaviour.world import Http, bodies, leases


def moves(answer: Any) -> list[tuple[int, int, int]]:
    return [(one["queue"], one["from"], one["to"]) for one in answer["queues"]]


async def test_to_the_ends(http: Http, wide: str) -> None:
    """`earliest` gives everything again, `latest` nothing that is there, each queue by itself."""
    await http.sent(wide, *({"body": f"{n}", "queue": n % 2} for n in range(6)))
    first = await http.leased(wide, "g")
    await http.settled(wide, "g", acks=leases(first))
    back = (await http.seek(wide, "g", "earliest")).ok()
    assert moves(back) == [(0, 3, 0), (1, 3, 0), (2, 0, 0), (3, 0, 0)]
    again = await http.leased(wide, "g")
    assert sorted(bodies(again)) == sorted(bodies(first))
    assert {one["delivery_attempt"] for one in again} == {1}
    await http.seek(wide, "g", "earliest")
    assert moves((await http.seek(wide, "g", "latest")).ok())[:2] == [(0, 0, 3), (1, 0, 3)]
    assert await http.leased(wide, "g") == []


async def test_a_dry_run_moves_nothing(http: Http, topic: str) -> None:
    """Its answer is that of the seek itself, and leases stay what they are."""
    await http.sent(topic, "a", "b")
    held = await http.leased(topic, "g")
    dry = (await http.seek(topic, "g", {"offsets": {"0": 1}}, dry_run=True)).ok()
    assert (dry["dry_run"], moves(dry)) == (True, [(0, 0, 1)])
    assert await http.leased(topic, "g") == []
    assert await http.settled(topic, "g", acks=leases(held)) == ["ok", "ok"]
    assert (await http.lag(topic, "g"))["queues"][0]["committed"] == 2


async def test_leases_of_the_old_position_are_void(http: Http, topic: str) -> None:
    """Acks, nacks and extensions of what was handed out before a seek: `void`, and nothing moves."""
    await http.sent(topic, "a", "b", "c")
    one, two, three = leases(await http.leased(topic, "g"))
    (await http.seek(topic, "g", "earliest")).ok()
    statuses = await http.settled(
        topic, "g", acks=[one], nacks=[{"lease_id": two}], extends=[{"lease_id": three, "lease_ms": 5_000}]
    )
    assert statuses == ["void"] * 3
    assert bodies(await http.leased(topic, "g")) == ["a", "b", "c"]


async def test_to_a_time(http: Http, topic: str) -> None:
    """By the store's clock and by the producer's."""
    times = []
    for number in range(4):
        [result] = await http.sent(topic, {"body": f"{number}", "born_ts": 1_000 * (number + 1)})
        times.append(result["store_ts"])
        await asyncio.sleep(0.003)
    await http.leased(topic, "g")
    for number in range(4):
        await http.seek(topic, "g", {"time": times[number]})
        assert bodies(await http.leased(topic, "g")) == [f"{n}" for n in range(number, 4)]
        await http.seek(topic, "g", {"time": 1_000 * number + 1, "clock": "born"})
        assert bodies(await http.leased(topic, "g")) == [f"{n}" for n in range(number, 4)]
    assert moves((await http.seek(topic, "g", {"time": 253_402_300_799_999})).ok())[0][2] == 4
    assert moves((await http.seek(topic, "g", {"time": 0})).ok())[0][2] == 0


async def test_to_offsets_and_to_another_group(http: Http, wide: str) -> None:
    """Queues that are not named stay; another group's committed position is where this one goes on."""
    await http.sent(wide, *({"body": f"{n}", "queue": n % 4} for n in range(12)))
    first = await http.leased(wide, "a")
    await http.settled(wide, "a", acks=[one["lease_id"] for one in first if one["offset"] < 2])
    await http.leased(wide, "b")
    assert moves((await http.seek(wide, "b", {"offsets": {"1": 3, "2": 1}})).ok()) == [(1, 0, 3), (2, 0, 1)]
    assert [(one["queue"], one["offset"]) for one in await http.leased(wide, "b")] == [(2, 1), (2, 2)]
    (await http.seek(wide, "b", {"group": "a"})).ok()
    got = await http.leased(wide, "b")
    assert sorted((one["queue"], one["offset"]) for one in got) == [(queue, 2) for queue in range(4)]


async def test_a_group_begins_when_it_is_made(http: Http, wide: str) -> None:
    """`latest`: what is sent before its first receive is for it, what was there before is not."""
    await http.sent(wide, *({"body": f"old {n}", "queue": n} for n in range(4)))
    (await http.call("PUT", f"/v1/topics/{wide}/groups/g", {"start": "latest"})).ok(201)
    await http.sent(wide, *({"body": f"new {n}", "queue": n} for n in range(4)))
    (await http.call("PUT", f"/v1/topics/{wide}/groups/g", {"start": "latest"})).ok(200)
    assert (await http.lag(wide, "g"))["total"] == 4
    assert sorted(bodies(await http.leased(wide, "g", max_messages=100))) == [f"new {n}" for n in range(4)]


async def test_a_group_that_is_moved_before_it_receives(http: Http, wide: str) -> None:
    """Moved in one queue, it begins in the others as it was made to: at their ends."""
    await http.sent(wide, *({"body": f"{n}", "queue": n % 4} for n in range(12)))
    (await http.call("PUT", f"/v1/topics/{wide}/groups/g", {"start": "latest"})).ok(201)
    assert moves((await http.seek(wide, "g", {"offsets": {"1": 2}}, dry_run=True)).ok()) == [(1, 3, 2)]
    assert moves((await http.seek(wide, "g", {"offsets": {"1": 2}})).ok()) == [(1, 3, 2)]
    assert (await http.lag(wide, "g"))["total"] == 1
    await http.sent(wide, {"body": "new", "queue": 0})
    assert sorted(bodies(await http.leased(wide, "g", max_messages=100))) == ["9", "new"]


async def test_a_repeated_seek_moves_once(http: Http, topic: str) -> None:
    """With the same `seek_id` the second does nothing: what was handed out in between stays valid."""
    await http.sent(topic, "a", "b")
    await http.leased(topic, "g")
    (await http.seek(topic, "g", "earliest", seek_id="s")).ok()
    held = await http.leased(topic, "g")
    (await http.seek(topic, "g", "earliest", seek_id="s")).ok()
    assert await http.settled(topic, "g", acks=leases(held)) == ["ok", "ok"]


async def test_a_seek_wakes_who_waits(http: Http, topic: str) -> None:
    """A long poll at the end gets what a seek put before it."""
    await http.sent(topic, "a")
    await http.settled(topic, "g", acks=leases(await http.leased(topic, "g")))
    waiting = asyncio.ensure_future(http.leased(topic, "g", wait_ms=30_000))
    (await http.seek(topic, "g", "earliest")).ok()
    async with asyncio.timeout(10):
        assert bodies(await waiting) == ["a"]


async def test_lag_counts_what_is_not_settled(http: Http, wide: str) -> None:
    """Never handed out and in flight; committed is the first unsettled; the oldest one's age grows."""
    await http.sent(wide, *({"body": f"{n}", "queue": 0} for n in range(10)), {"body": "x", "queue": 1})
    (await http.call("PUT", f"/v1/topics/{wide}/groups/g", {"start": "earliest"})).ok(201)
    before = await http.lag(wide, "g")
    assert before["total"] == 11
    held = [one for one in await http.leased(wide, "g", max_messages=1_000) if one["queue"] == 0]
    await http.settled(wide, "g", acks=[held[n]["lease_id"] for n in (0, 1, 5)])
    await http.sent(wide, {"body": "late", "queue": 0})
    lag = await http.lag(wide, "g")
    first = lag["queues"][0]
    assert (first["start_offset"], first["committed"], first["end_offset"]) == (0, 2, 11)
    assert (first["in_flight"], first["lag"], first["skipped"]) == (7, 8, 0)
    assert first["oldest_age_ms"] >= 0
    assert lag["queues"][2]["oldest_age_ms"] is None
    assert lag["total"] == sum(one["lag"] for one in lag["queues"]) == 9


async def test_seeks_beyond_the_ends(http: Http, wide: str) -> None:
    """Refused with the numbers that help, and no queue has moved."""
    await http.sent(wide, *({"body": f"{n}", "queue": 0} for n in range(3)))
    held = await http.leased(wide, "g")
    problem = (await http.seek(wide, "g", {"offsets": {"1": 0, "0": 4}})).refused(416, "offset_out_of_range")
    assert (problem["queue"], problem["end_offset"]) == (0, 3)
    (await http.seek(wide, "g", {"offsets": {"0": 2**63 - 1}})).refused(416, "offset_out_of_range")
    (await http.seek(wide, "g", {"offsets": {"0": -1}})).refused(410, "offset_expired")
    (await http.seek(wide, "g", {"offsets": {"4": 0}})).refused(400, "invalid_request", "to.offsets")
    (await http.seek(wide, "g", {"group": "nobody"})).refused(404, "group_not_found")
    (await http.seek(wide, "nobody", "earliest")).refused(404, "group_not_found")
    assert await http.settled(wide, "g", acks=leases(held)) == ["ok"] * 3
