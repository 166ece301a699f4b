"""Settle: acks, nacks and extensions by lease id and by receipt; ids that were never given say `unknown`."""

from __future__ import annotations

import asyncio
import base64

from integration.behaviour.world import Http, bodies, fresh, leases

SOON_SECONDS = 10.0


async def test_an_ack_is_done(http: Http, wide: str) -> None:
    """Acked messages never come again; a second ack of them is `already`, also within one call."""
    await http.sent(wide, *({"body": f"{n}", "key": f"{n}"} for n in range(50)))
    ids = leases(await http.leased(wide, "g"))
    assert await http.settled(wide, "g", acks=ids[:25]) == ["ok"] * 25
    assert await http.settled(wide, "g", acks=[*ids[24:], ids[-1]]) == ["already"] + ["ok"] * 25 + ["already"]
    assert (await http.lag(wide, "g"))["total"] == 0


async def test_an_ack_by_receipt(http: Http, topic: str) -> None:
    """One token settles any rows of its receive; each result counts what it settled now."""
    await http.sent(topic, *(f"{n}" for n in range(100)))
    got = await http.receive(topic, "g")
    [receipt] = got["receipts"]
    name = receipt["receipt"]
    answer = await http.settle(
        topic, "g", acks=[{"receipt": name, "rows": "0-9,20-29"}, {"receipt": name, "rows": "5-14"}]
    )
    assert [(one["status"], one["settled"]) for one in answer.ok()["results"]] == [("ok", 20), ("ok", 5)]
    repeated = (await http.settle(topic, "g", acks=[{"receipt": name, "rows": "0-9"}])).ok()["results"][0]
    assert (repeated["status"], repeated["settled"]) == ("already", 0)
    assert await http.settled(topic, "g", acks=[got["messages"][0]["lease_id"]]) == ["already"]
    assert (await http.lag(topic, "g"))["queues"][0]["in_flight"] == 75
    await http.settled(topic, "g", nacks=[{"receipt": name, "rows": receipt["rows"]}])
    again = await http.leased(topic, "g")
    assert [one["offset"] for one in again] == [*range(15, 20), *range(30, 100)]


async def test_a_nack_hands_out_again_at_once(http: Http, topic: str) -> None:
    """With the next attempt; the old lease is over."""
    await http.sent(topic, "a")
    for attempt in range(1, 5):
        [one] = await http.leased(topic, "g")
        assert (one["body"], one["delivery_attempt"]) == ("a", attempt)
        assert await http.settled(topic, "g", nacks=[{"lease_id": one["lease_id"]}]) == ["ok"]
    await http.sent(topic, "b")
    again = await http.leased(topic, "g")
    assert sorted((each["body"], each["delivery_attempt"]) for each in again) == [("a", 5), ("b", 1)]
    assert await http.settled(topic, "g", acks=[one["lease_id"]]) == ["redelivered"]


async def test_a_nack_may_name_its_delay(http: Http, topic: str) -> None:
    """Not before its time, then to whoever waits; the others come meanwhile."""
    await http.sent(topic, "a", "b")
    [one] = await http.leased(topic, "g", max_messages=1)
    loop = asyncio.get_running_loop()
    begin = loop.time()
    await http.settled(topic, "g", nacks=[{"lease_id": one["lease_id"], "delay_ms": 700}])
    assert bodies(await http.leased(topic, "g")) == ["b"]
    async with asyncio.timeout(SOON_SECONDS):
        [again] = await http.leased(topic, "g", wait_ms=30_000)
    assert loop.time() - begin >= 0.7
    assert (again["body"], again["delivery_attempt"]) == ("a", 2)


async def test_an_extended_lease_goes_on(http: Http, topic: str) -> None:
    """Extended leases outlive those that were not, by id and by receipt."""
    await http.sent(topic, "a", "b", "c")
    got = await http.receive(topic, "g", lease_ms=1_000)
    name = got["receipts"][0]["receipt"]
    extends = [
        {"lease_id": got["messages"][0]["lease_id"], "lease_ms": 60_000},
        {"receipt": name, "rows": "1", "lease_ms": 60_000},
    ]
    assert await http.settled(topic, "g", extends=extends) == ["ok", "ok"]
    async with asyncio.timeout(SOON_SECONDS):
        assert bodies(await http.leased(topic, "g", wait_ms=30_000)) == ["c"]
    assert await http.leased(topic, "g") == []
    assert await http.settled(topic, "g", acks=leases(got["messages"][:2])) == ["ok", "ok"]


async def test_a_late_ack_counts_until_somebody_else_has_it(http: Http, topic: str) -> None:
    """The lease has ended but the message was not handed out again: `ok`."""
    await http.sent(topic, "a")
    [one] = await http.leased(topic, "g", lease_ms=1_000)
    await asyncio.sleep(1.1)  # the claim is about the clock of another process
    assert await http.settled(topic, "g", acks=[one["lease_id"]]) == ["ok"]
    assert await http.leased(topic, "g") == []


async def test_forged_ids_settle_nothing(http: Http, topic: str) -> None:
    """One flipped bit, another row, another token, no token at all: `unknown`, each, and nothing moves."""
    await http.sent(topic, "a", "b")
    first = await http.leased(topic, "g", max_messages=1)
    [lease] = leases(first)
    token, _, row = lease.partition(".")
    raw = bytearray(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    forged = []
    for at in range(len(raw)):
        flipped = bytearray(raw)
        flipped[at] ^= 1
        forged.append(base64.urlsafe_b64encode(bytes(flipped)).rstrip(b"=").decode() + "." + row)
    forged += [token, f"{token}.", f"{token}.-1", f"{token}.1", f"{token}.999999999", f"{token}.9999999999999", "", "."]
    forged += [lease[:-3] + ".0", "\u00fc.0", "\u0000", "x" * 10_000, f"{lease} ", f"{token}..0", f"{token}.0x0"]
    assert set(await http.settled(topic, "g", acks=forged)) == {"unknown"}
    assert set(await http.settled(topic, "g", nacks=[{"lease_id": one} for one in forged])) == {"unknown"}
    receipts = [{"receipt": one.rpartition(".")[0], "rows": "0-5"} for one in forged[: len(raw)]]
    assert set(await http.settled(topic, "g", acks=receipts)) == {"unknown"}
    assert (await http.lag(topic, "g"))["queues"][0]["in_flight"] == 1
    assert await http.settled(topic, "g", acks=[lease]) == ["ok"]


async def test_a_lease_belongs_to_its_group_and_topic(http: Http, topic: str) -> None:
    """Another group's, another topic's: `unknown`, and the true owner's lease stands."""
    other = fresh()
    await http.make(other)
    await http.sent(topic, "a")
    await http.sent(other, "a")
    [mine] = leases(await http.leased(topic, "g"))
    for where, group in ((topic, "h"), (other, "g")):
        await http.leased(where, group)
        assert await http.settled(where, group, acks=[mine]) == ["unknown"]
    assert await http.settled(topic, "g", acks=[mine]) == ["ok"]
    (await http.settle(topic, "nobody", acks=[mine])).refused(404, "group_not_found")


async def test_one_call_settles_all_kinds(http: Http, wide: str) -> None:
    """Acks, nacks and extensions over several queues, answered in the order asked."""
    await http.sent(wide, *({"body": f"{n}", "queue": n % 4} for n in range(12)))
    got = {one["body"]: one["lease_id"] for one in await http.leased(wide, "g")}
    statuses = await http.settled(
        wide,
        "g",
        acks=[got["0"], "nonsense", got["5"]],
        nacks=[{"lease_id": got["1"]}, {"lease_id": got["2"], "delay_ms": 60_000}],
        extends=[{"lease_id": got["3"], "lease_ms": 60_000}],
    )
    assert statuses == ["ok", "unknown", "ok", "ok", "ok", "ok"]
    assert bodies(await http.leased(wide, "g")) == ["1"]
