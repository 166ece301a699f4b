"""A damaged range of the log, as clients see it: it is named, and everything around it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.load import Http
from support.processes import Process

from millpond.core.errors import Internal
from millpond.spark.http import HttpClient
from millpond.spark.read_range import Range, read_range

DAMAGED = 2  # of five messages, each a frame of its own
RECEIVE = "/v1/topics/kept/groups/readers/messages/receive"
ACK = "/v1/topics/kept/groups/readers/messages/ack"


def damage(data: Path, body: bytes) -> None:
    """Flip a bit in the stored body."""
    for path in sorted((data / "store" / "log").glob("*.seg")):
        content = path.read_bytes()
        at = content.find(body)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([content[at] ^ 1]))
            return
    raise AssertionError(f"{body!r} is not in the log")


@pytest.mark.parametrize("found_by", ["reader", "recovery"])
async def test_a_damaged_range_is_named_and_passed(
    start: Callable[..., Process], client: Callable[[Process], Http], tmp_path: Path, found_by: str
) -> None:
    """A read of it is 500 corrupt_range and says where to go on; a group gets all other messages; metrics count it."""
    service = await start(data=tmp_path / "data").start()
    http = client(service)
    await http.ok("PUT", "/v1/topics/kept", {"queues": 1})
    await http.ok("PUT", "/v1/topics/kept/groups/readers", {"start": "earliest"})
    for number in range(5):
        await http.ok("POST", "/v1/topics/kept/messages", {"messages": [{"body": f"message {number} " + "x" * 50}]})
    if found_by == "reader":
        assert await service.stop() == 0  # with a checkpoint: recovery does not look below it
    else:
        service.kill()
    damage(tmp_path / "data", b"message 2 ")
    await service.start()
    await check_reads(http)
    await asyncio.to_thread(check_ranges, http.url)
    seen, reasons = [], set()
    for _ in range(5):
        got = await http.ok("POST", RECEIVE, {"max_messages": 2, "lease_ms": 600_000})
        reasons.add(got.get("reason"))
        seen += [one["offset"] for one in got["messages"]]
        await http.ok("POST", ACK, {"acks": [one["lease_id"] for one in got["messages"]]})
    assert sorted(seen) == [0, 1, 3, 4]
    assert "corrupt_range" in reasons
    await http.ok("POST", "/v1/topics/kept/messages", {"messages": [{"body": "after"}]})
    got = await http.ok("POST", RECEIVE, {"max_messages": 10})
    assert [one["body"] for one in got["messages"]] == ["after"]
    async with http.session.get(http.url + "/metrics") as response:
        assert 'millpond_store_quarantined_ranges{group="a"} 1' in (await response.text())


async def check_reads(http: Http) -> None:
    at = "/v1/topics/kept/queues/0/messages?offset="
    page = await http.ok("GET", f"{at}0&limit=100")
    assert ([one["offset"] for one in page["messages"]], page["next_offset"]) == ([0, 1], DAMAGED)
    answer = await http.call("GET", f"{at}{DAMAGED}&limit=100")
    assert (answer.status, answer.code) == (500, "corrupt_range"), answer
    assert answer.body["next_offset"] == DAMAGED + 1
    page = await http.ok("GET", f"{at}{DAMAGED + 1}&limit=100")
    assert [one["offset"] for one in page["messages"]] == [3, 4]


def check_ranges(url: str) -> None:
    """What Spark reads by: an error, or what is left, and which messages are not."""
    lost: list[tuple[int, int]] = []
    with HttpClient(url, retry_seconds=0) as spark:
        with pytest.raises(Internal, match="damaged"):
            list(read_range(spark, Range("kept", 0, 0, 5)))
        batches = list(read_range(spark, Range("kept", 0, 0, 5), lost=lambda *some: lost.append(some)))
    assert [offset for batch in batches for offset in batch["offset"].to_pylist()] == [0, 1, 3, 4]
    assert lost == [(DAMAGED, DAMAGED + 1)]
