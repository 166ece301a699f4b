"""kill -9 of standalone under load: nothing acknowledged is lost, nothing moves, nothing comes twice that may not."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest
from support.checker import Checker
from support.load import GROUPS, Answer, Http, Load
from support.processes import Process

STARTING_SECONDS = 1.0  # about what a start takes


async def kill_cycles(service: Process, cycles: int, messages: int) -> tuple[Checker, list[float]]:
    """Kill and restart `cycles` times with `messages` acknowledged in between; the checker, and seconds to ready."""
    await service.start()
    checker, ready = Checker(), []
    async with Load(service.url, checker) as load:
        load.start()
        for cycle in range(cycles):
            await load.acknowledged(messages)
            assert service.kill() == -signal.SIGKILL
            checker.fault(f"kill -9 number {cycle}")
            if cycle % 3 == 1:  # and again while it starts: somewhere between its first import and being ready
                service.launch()
                await asyncio.sleep(STARTING_SECONDS * (cycle % 10) / 10)
                service.kill()
            await service.start()
            ready.append(service.ready_seconds)
        await load.acknowledged(messages)
        await load.finish()
    checker.check(GROUPS, least=messages, faults=cycles)
    assert checker.statuses["ok"] > messages
    assert not {"void", "unknown"} & checker.statuses.keys(), checker.statuses
    return checker, ready


async def test_killed_under_load(start: Callable[..., Process]) -> None:
    """Three kills: all that was acknowledged is there once, at its offset, and every group drains."""
    checker, ready = await kill_cycles(start(), cycles=3, messages=1000)
    print(f"\n{checker.acknowledged} acknowledged, {checker.unknown} unknown, ready after {ready}")


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_killed_thirty_times_under_load(start: Callable[..., Process]) -> None:
    """The same, thirty kills on one data directory, with checkpoints and full segments in between."""
    checker, ready = await kill_cycles(start("--segment-bytes", "1048576", "--checkpoint-frames", "500"), 30, 1000)
    print(f"\n{checker.acknowledged} acknowledged, {checker.unknown} unknown, ready after {ready}")


async def test_a_topic_deleted_under_load(start: Callable[..., Process], client: Callable[[Process], Http]) -> None:
    """Messages that were on their way are refused, and the next start is as any other: they have opened no queue anew,
    at an offset of which the tier has another message."""
    service = await start().start()
    http = client(service)
    for path in (paths := [f"/v1/topics/{name}" for name in ("one", "two", "three")]):
        await http.ok("PUT", path, {"queues": 2})
        await http.ok("POST", f"{path}/messages", {"messages": [{"body": "x", "key": str(key)} for key in range(100)]})
        await http.ok("POST", f"{path}/flush")
        assert await refusals(http, path) == {"topic_not_found"}
    service.kill()
    await service.start()
    for path in paths:
        await http.ok("PUT", path, {"queues": 2})
        assert [one["end_offset"] for one in await http.queues(path.rpartition("/")[2])] == [0, 0]


async def refusals(http: Http, path: str) -> set[str]:
    """The codes with which 32 producers of a topic end that is deleted meanwhile."""
    taken = asyncio.Event()

    async def produce() -> Answer:
        while (answer := await http.call("POST", f"{path}/messages", {"messages": [{"body": "x"}]})).outcome == "ok":
            taken.set()
        return answer

    async with asyncio.timeout(30):
        producers = [asyncio.create_task(produce()) for _ in range(32)]
        await taken.wait()
        await http.ok("DELETE", path)
        return {answer.code for answer in await asyncio.gather(*producers)}


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_ready_again_with_a_million_messages(
    start: Callable[..., Process], client: Callable[[Process], Http]
) -> None:
    """A million messages, some leased and some settled, killed: ready again with all of them. Prints in what time."""
    service = await start("--segment-bytes", str(256 << 20)).start()
    http = client(service)
    await http.ok("PUT", "/v1/topics/kept", {"queues": 8})
    await http.ok("PUT", "/v1/topics/kept/groups/readers", {"start": "earliest"})
    at = "/v1/topics/kept/groups/readers/messages"
    first = service.ready_seconds
    for _ in range(250):
        body = {"messages": [{"body": "x" * 200, "key": f"key {number % 5000}"} for number in range(4000)]}
        await http.ok("POST", "/v1/topics/kept/messages", body, headers={"Prefer": "return=minimal"})
        got = await http.ok("POST", f"{at}/receive", {"max_messages": 1000, "lease_ms": 3_600_000})
        acks = [{"receipt": one["receipt"], "rows": one["rows"]} for one in got["receipts"][::2]]
        await http.ok("POST", f"{at}/ack", {"acks": acks})
    ready = []
    for _ in range(5):
        service.kill()
        await service.start()
        ready.append(service.ready_seconds)
        assert sum(one["end_offset"] for one in await http.queues("kept")) == 1_000_000
    print(f"\nready after {first:.2f} s when empty, with 1,000,000 messages after {[f'{one:.2f}' for one in ready]} s")
