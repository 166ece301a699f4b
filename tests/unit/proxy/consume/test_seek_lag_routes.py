"""Moving a group, and how far behind it is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millpond.metadata.client import GroupInfo
from millpond.store.client import QueueLag


def fill(world: Any, frame: Any) -> None:
    """Queue 0: offsets 0..100 in tens, 1,000 ms a frame; the first 40 only in the tier, start 20. Queue 1: 5 rows."""
    for number in range(10):
        world.store.add(frame(10 * number, [b"x"] * 10, store_ts=1000 * (number + 1)))
    world.seal("o", 40)
    world.store.local[11], world.store.start[11] = 40, 20
    world.store.add(frame(0, [b"x"] * 5, queue_id=12, store_ts=2500))


async def seek(world: Any, to: Any, **more: Any) -> tuple[int, Any]:
    found: tuple[int, Any] = await world.call("POST", "/groups/g/seek", json={"to": to, **more})
    return found


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        ("earliest", {0: 20, 1: 0}), ("latest", {0: 100, 1: 5}), ({"time": 0}, {0: 20, 1: 0}),
        ({"time": 3500}, {0: 30, 1: 5}), ({"time": 5500}, {0: 50, 1: 5}), ({"time": 10**12}, {0: 100, 1: 5}),
        ({"offsets": {"0": 20}}, {0: 20}), ({"offsets": {"0": 100, "1": 3}}, {0: 100, 1: 3}),
    ],
)  # fmt: skip
async def test_targets(world: Any, frame: Any, to: Any, expected: dict[int, int]) -> None:
    """Times within the tier too; earliest, latest and times lie within what is there; other queues stay."""
    fill(world, frame)
    status, body = await seek(world, to)
    assert status == 200
    assert {one["queue"]: one["to"] for one in body["queues"]} == expected
    [request] = world.store.seeks
    assert dict(zip([queue.queue for queue in request.queues], request.offsets, strict=True)) == expected


async def test_dry_run_and_seek_id_reach_the_store(world: Any, frame: Any) -> None:
    """A dry run says so; without an id of the client's every seek has its own."""
    fill(world, frame)
    _, body = await seek(world, "latest", dry_run=True, seek_id="mine", keep_retries=True)
    assert body["dry_run"] is True
    await seek(world, "latest")
    await seek(world, "latest")
    first, second, third = world.store.seeks
    assert (first.dry_run, first.seek_id, first.keep_retries) == (True, "mine", True)
    assert (second.dry_run, second.keep_retries) == (False, False)
    assert second.seek_id != third.seek_id


@pytest.mark.parametrize(
    ("offsets", "status", "code"),
    [
        ({"0": 19}, 410, "offset_expired"),
        ({"0": 101}, 416, "offset_out_of_range"),
        ({"0": -1}, 410, "offset_expired"),
        ({"0": 50, "1": 6}, 416, "offset_out_of_range"),
        ({"7": 1}, 400, "invalid_request"),
        ({"0": 10**30}, 416, "offset_out_of_range"),
        ({"x": 1}, 400, "invalid_request"),
        ({}, 400, "invalid_request"),
    ],
)
async def test_explicit_offsets_beyond_both_ends(world: Any, frame: Any, offsets: Any, status: int, code: str) -> None:
    """A clear error with the ends, before any queue is moved."""
    fill(world, frame)
    found, body = await seek(world, {"offsets": offsets})
    assert (found, body["code"]) == (status, code)
    if status in {410, 416}:
        assert {"start_offset", "end_offset", "queue"} <= set(body)
    assert not world.store.seeks


async def test_to_another_groups_position(world: Any, frame: Any) -> None:
    """Its committed offsets; a group that is not there is 404."""
    fill(world, frame)
    world.groups["other"] = GroupInfo(44, 7, "other", "latest", None, 1, 1000, 0)
    world.store.positions = {
        11: QueueLag(11, 20, 33, 60, 100, 2, -1, 0, True), 12: QueueLag(12, 0, 4, 4, 5, 0, -1, 0, True),
    }  # fmt: skip
    _, body = await seek(world, {"group": "other"})
    assert {one["queue"]: one["to"] for one in body["queues"]} == {0: 33, 1: 4}
    status, body = await seek(world, {"group": "nobody"})
    assert (status, body["code"]) == (404, "group_not_found")


@pytest.mark.parametrize(
    ("to", "field"),
    [
        ("middle", "to"),
        ({}, "to"),
        ({"time": 1, "group": "g"}, "to"),
        ({"time": -1}, "to.time"),
        (None, "to"),
        (3, "to"),
        ({"time": 10**18}, "to.time"),
        ({"group": "g", "clock": "born"}, "to.clock"),
        ({"when": 1}, "to.when"),
        ({"group": "../x"}, "to.group"),
    ],
)
async def test_bad_targets_name_their_field(world: Any, frame: Any, to: Any, field: str) -> None:
    """400 that names the field; nothing moves."""
    fill(world, frame)
    status, body = await seek(world, to)
    assert status == 400
    assert body["errors"][0]["field"] == field
    assert not world.store.seeks


async def test_lag_counts_what_is_not_settled(world: Any, frame: Any) -> None:
    """One old lease is one message behind, not all that came after it."""
    fill(world, frame)
    world.store.positions = {
        11: QueueLag(11, 20, 33, 90, 100, 1, 4000, 7, True), 12: QueueLag(12, 0, 5, 5, 5, 0, -1, 0, True),
    }  # fmt: skip
    status, body = await world.call("GET", "/groups/g/lag")
    assert status == 200
    assert body["total"] == 11
    assert body["queues"][0] == {
        "queue": 0, "start_offset": 20, "committed": 33, "end_offset": 100, "lag": 11, "in_flight": 1,
        "oldest_age_ms": 6000, "skipped": 7,
    }  # fmt: skip
    assert (body["queues"][1]["lag"], body["queues"][1]["oldest_age_ms"]) == (0, None)


async def test_the_age_of_a_cold_message_comes_from_the_tier(world: Any, frame: Any) -> None:
    """The store no longer knows it; if the tier cannot say either, the other figures still come."""
    fill(world, frame)
    world.store.positions = {
        11: QueueLag(11, 20, 33, 90, 100, 1, -1, 0, True), 12: QueueLag(12, 0, 5, 5, 5, 0, -1, 0, True),
    }  # fmt: skip
    _, body = await world.call("GET", "/groups/g/lag")
    assert body["queues"][0]["oldest_age_ms"] == 6000
    world.tier.objects.clear()
    _, body = await world.call("GET", "/groups/g/lag")
    assert (body["queues"][0]["oldest_age_ms"], body["total"]) == (None, 11)


async def test_unknown_groups(world: Any) -> None:
    """404 for both, and none is made."""
    for method, path, body in (("GET", "lag", None), ("POST", "seek", {"to": "latest"})):
        status, problem = await world.call(method, f"/groups/nobody/{path}", json=body)
        assert (status, problem["code"]) == (404, "group_not_found")
    assert msgspec.structs.asdict(world.groups["g"])["name"] == "g"
    assert list(world.groups) == ["g"]
