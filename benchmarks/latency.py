"""From just before a send to the message in a consumer's hand, at a steady rate, counted from when it was due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from benchmarks import bare, handover, harness, limits
from benchmarks.harness import Aim, Line, Setup
from benchmarks.produce import fresh
from millpond.client.connection import Connection
from millpond.client.load import batched
from millpond.client.load.figures import Times
from millpond.client.topics import Durability

DISK = "fdatasync 4 KiB, p50, beside latency"
AIMS = {("flush", "p50"): Aim(at_most=0.8, of="difference")}


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    found: dict[Durability, list[Times]] = {"memory": [], "flush": []}
    synced: list[float] = []
    floors: dict[str, list[Times]] = {handover.NAME: [], bare.NAME: []}
    async with harness.service(setup.folder) as service, Connection(service.url) as connection:
        for number in range(setup.rounds):
            synced.append(await asyncio.to_thread(limits.fdatasync, setup.folder))
            for name, times in floors.items():
                tell(f"{name}, round {number + 1} of {setup.rounds}")
                await harness.settled(service.pid)
                times.append(await _floor(name, setup))
            for durability, times in found.items():
                tell(f"latency, {durability}, round {number + 1} of {setup.rounds}")
                await harness.settled(service.pid)
                topic = await fresh(connection, setup, durability)
                times.append(
                    await batched.latency(
                        connection, topic, "latency", setup.message_bytes, seconds=setup.seconds,
                        per_second=setup.per_second,
                    )
                )  # fmt: skip
    lines = [
        Line(
            f"latency {name} at {setup.per_second}/s, {durability}", "ms", [getattr(one, field) for one in times],
            DISK if durability == "flush" else "", aim=AIMS.get((durability, name)),
        )
        for durability, times in found.items()
        for name, field in (("p50", "p50_ms"), ("p99", "p99_ms"), ("p99.9", "p999_ms"))
    ]  # fmt: skip
    limit = [
        Line(
            f"{floor} at {setup.per_second}/s, {name}", "ms", [getattr(one, field) for one in times],
            DISK if name == "p50" else "",
        )
        for floor, times in floors.items()
        for name, field in (("p50", "p50_ms"), ("p99", "p99_ms"))
    ]  # fmt: skip
    return [*lines, *limit, Line(DISK, "ms", synced)]


async def _floor(name: str, setup: Setup) -> Times:
    seconds, per_second = setup.seconds, setup.per_second
    if name == handover.NAME:
        return await handover.latency(setup.folder, setup.message_bytes, seconds=seconds, per_second=per_second)
    return await bare.latency(setup.folder, setup.message_bytes, setup.queues, seconds=seconds, per_second=per_second)
