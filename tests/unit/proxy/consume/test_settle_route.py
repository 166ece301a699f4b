"""POST .../messages/ack: any number of leases of any grants, in one call a store, answered in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millpond.core.limits import SETTLE_ITEMS
from millpond.proxy import settling
from millpond.proxy.receipts import Lease
from millpond.store.client import SETTLE_STATUSES

ONE = Lease(1, 7, 31, 11, 2, 5, 1000)
TWO = Lease(1, 7, 31, 12, 2, 6, 0)


@pytest.fixture(autouse=True, params=["one by one", "by columns"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few lease ids are taken one by one, many are not: what is settled is the same."""
    if request.param == "by columns":
        monkeypatch.setattr(settling, "FEW_IDS", 0)


async def ack(world: Any, **body: Any) -> tuple[int, Any]:
    found: tuple[int, Any] = await world.call("POST", "/groups/g/messages/ack", json=body)
    return found


def shown(request: Any) -> list[tuple[Any, ...]]:
    return [
        (one.queue_id, one.lease, one.action, one.delay_ms,
         np.frombuffer(one.offsets if one.offsets is not None else one.ranges, np.int64).tolist())
        for one in request.settles
    ]  # fmt: skip


async def test_leases_of_one_grant_are_one_settle(world: Any) -> None:
    """Grouped by token, action and delay whatever the order; results stand in the order of the request."""
    one, two = await world.tokens.sign(ONE), await world.tokens.sign(TWO)
    status, body = await ack(
        world,
        acks=[f"{one}.3", f"{two}.0", f"{one}.1", {"receipt": two, "rows": "4-6,9"}],
        nacks=[
            {"lease_id": f"{one}.7", "delay_ms": 50},
            {"lease_id": f"{one}.8"},
            {"lease_id": f"{one}.9", "delay_ms": 50},
        ],
        extends=[{"lease_id": f"{two}.2", "lease_ms": 60_000}, {"receipt": one, "rows": "20", "lease_ms": 1000}],
    )
    assert status == 200
    [request] = world.store.settled
    assert (request.durability, request.group.group_id) == ("memory", 31)
    assert shown(request) == [
        (11, 5, "ack", 0, [1001, 1003]), (12, 6, "ack", 0, [0]), (11, 5, "nack", 50, [1007, 1009]),
        (11, 5, "nack", 0, [1008]), (12, 6, "extend", 60_000, [2]), (12, 6, "ack", 0, [4, 7, 9, 10]),
        (11, 5, "extend", 1000, [1020, 1021]),
    ]  # fmt: skip
    results = body["results"]
    assert [one.get("lease_id") for one in results[:3]] == [f"{one}.3", f"{two}.0", f"{one}.1"]
    assert results[3] == {"status": "ok", "receipt": two, "rows": "4-6,9", "settled": 4}
    assert {result["status"] for result in results} == {"ok"}
    assert len(results) == 9


async def test_every_status_finds_its_item(world: Any) -> None:
    """The store's status of each offset comes back at the item that named it."""
    token = await world.tokens.sign(ONE)

    def statuses(one: Any) -> tuple[list[int], int]:
        return [offset % 5 for offset in np.frombuffer(one.offsets, np.int64).tolist()], 0

    world.store.statuses = statuses
    rows = [4, 2, 0, 3, 1, 9]
    _, body = await ack(world, acks=[f"{token}.{row}" for row in rows])
    assert [one["status"] for one in body["results"]] == [SETTLE_STATUSES[row % 5] for row in rows]


async def test_ids_of_two_grants_in_turn(world: Any) -> None:
    """Each id has its own grant's row and status, whichever stands beside it."""
    one, two = await world.tokens.sign(ONE), await world.tokens.sign(TWO)
    world.store.statuses = lambda settle: ([settle.queue_id % 5] * len(np.frombuffer(settle.offsets, np.int64)), 0)
    ids = [f"{(one, two)[row % 2]}.{row}" for row in range(10)]
    _, body = await ack(world, acks=ids)
    assert body["results"] == [
        {"status": SETTLE_STATUSES[(11, 12)[row % 2] % 5], "lease_id": ids[row]} for row in range(10)
    ]
    assert sorted(shown(world.store.settled[0])) == [
        (11, 5, "ack", 0, [1000, 1002, 1004, 1006, 1008]), (12, 6, "ack", 0, [1, 3, 5, 7, 9]),
    ]  # fmt: skip


async def test_a_lease_said_twice_is_already_acked(world: Any) -> None:
    """A double ack in one call is `ok` once and `already` after; the store sees it once."""
    token = await world.tokens.sign(ONE)
    _, body = await ack(world, acks=[f"{token}.1", f"{token}.2", f"{token}.1", f"{token}.1"])
    assert [one["status"] for one in body["results"]] == ["ok", "ok", "already", "already"]
    assert shown(world.store.settled[0])[0][4] == [1001, 1002]


async def test_forged_foreign_and_broken_ids_are_unknown(world: Any) -> None:
    """Another tenant's, topic's, group's, a queue's that is not there, forged, cut: all the same `unknown`."""
    good = await world.tokens.sign(ONE)
    foreign = [
        await world.tokens.sign(ONE._replace(**change))
        for change in ({"tenant_id": 2}, {"topic_id": 8}, {"group_id": 32}, {"queue_id": 99})
    ]
    flipped = good[:-3] + ("AAA" if good[-3:] != "AAA" else "BBB")
    ids = [
        *(f"{token}.0" for token in [*foreign, flipped]), good, f"{good}.", f"{good}.-1", f"{good}.x", f"{good}.1.1",
        f"{good}.1 ", "", ".", ".1", "\x00", "ü.1", "x" * 5000, f"{good}.9999999999", f"{good}.1e3",
        f"{good}.\u0661", f"{good}.\u00b2",
    ]  # fmt: skip
    status, body = await ack(world, acks=[*ids, f"{good}.1", *({"receipt": one, "rows": "0"} for one in foreign)])
    assert status == 200
    statuses = [one["status"] for one in body["results"]]
    assert statuses == ["unknown"] * len(ids) + ["ok"] + ["unknown"] * len(foreign)
    assert [shown(request) for request in world.store.settled] == [[(11, 5, "ack", 0, [1001])]]


@pytest.mark.parametrize(
    "broken",
    [*(f"T.{row}" for row in ("", "9999999999", "\u0661", "\u00b2", "-1", "1 ", "+1", "1_0", "1.1")),
     "2", ".2", "T2", "TT.2", "T.T.2"],
)  # fmt: skip
async def test_a_broken_id_beside_a_good_one_of_its_grant(world: Any, broken: str) -> None:
    """It is unknown, and goes to no store; the other is settled."""
    good = await world.tokens.sign(ONE)
    _, body = await ack(world, acks=[f"{good}.1", broken.replace("T", good)])
    assert [one["status"] for one in body["results"]] == ["ok", "unknown"]
    assert [shown(request) for request in world.store.settled] == [[(11, 5, "ack", 0, [1001])]]


async def test_nothing_known_asks_no_store(world: Any) -> None:
    """An empty call, and one of forged ids only, are answered here."""
    assert await ack(world) == (200, {"results": []})
    for ids in (["x.1"], ["7", "8"], ["x.1", "y.2"], ["x.1", "x"]):
        _, body = await ack(world, acks=ids)
        assert body["results"] == [{"status": "unknown", "lease_id": one} for one in ids]
    assert not world.store.settled


async def test_each_store_gets_its_own(split_world: Any) -> None:
    """Grants of two stores in one call: one settle each."""
    one, two = await split_world.tokens.sign(ONE), await split_world.tokens.sign(TWO)
    _, body = await ack(split_world, acks=[f"{two}.1", f"{one}.1", f"{two}.2"])
    assert [result["status"] for result in body["results"]] == ["ok"] * 3
    assert shown(split_world.store.settled[0]) == [(11, 5, "ack", 0, [1001])]
    assert shown(split_world.other.settled[0]) == [(12, 6, "ack", 0, [1, 2])]


async def test_ten_thousand_leases_are_one_settle(world: Any) -> None:
    """The most that one call takes."""
    token = await world.tokens.sign(ONE)
    _, body = await ack(world, acks=[f"{token}.{row}" for row in range(SETTLE_ITEMS)])
    assert len(body["results"]) == SETTLE_ITEMS
    assert len(shown(world.store.settled[0])) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"acks": ["x"] * (SETTLE_ITEMS + 1)}, "acks"), ({"acks": [{"receipt": "x", "rows": "3-1"}]}, "item 0: rows"),
        ({"nacks": [{"lease_id": "x.1", "delay_ms": -1}]}, "nacks[0].delay_ms"), ({"nacks": [{}]}, "nacks[0]"),
        ({"nacks": [{"lease_id": "x.1", "delay_ms": 10**15}]}, "nacks[0].delay_ms"), ({"acks": [1]}, "acks[0]"),
        ({"nacks": [{"lease_id": "x.1", "rows": "1"}]}, "nacks[0]"), ({"nacks": [{"receipt": "x"}]}, "nacks[0]"),
        ({"extends": [{"lease_id": "x.1"}]}, "extends[0].lease_ms"), ({"more": []}, "more"),
        ({"extends": [{"lease_id": "x.1", "lease_ms": 5}]}, "extends[0].lease_ms"), ({"acks": "x"}, "acks"),
        ({"acks": [{"receipt": "x", "rows": "0", "row": 1}]}, "acks[0].row"), ({"acks": None}, "acks"),
    ],
)  # fmt: skip
async def test_bad_input_names_its_field(world: Any, body: dict[str, Any], field: str) -> None:
    """400 that names the field, and nothing at all was settled."""
    status, problem = await ack(world, **body)
    assert status == 400
    assert problem["errors"][0]["field"] == field
    assert not world.store.settled


async def test_an_unknown_group_is_not_made(world: Any) -> None:
    """Settling never creates a group."""
    status, body = await world.call("POST", "/groups/nobody/messages/ack", json={})
    assert (status, body["code"]) == (404, "group_not_found")
