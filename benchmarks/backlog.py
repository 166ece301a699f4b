"""What a large backlog costs who produces and who reads the end, and how fast it drains.

Two services: one is empty, the other has `Setup.backlog` messages of 100 bytes in the topic that is measured. Both get
the same 1,000 messages a second from a probe in a process of its own, in turn. Then a group consumes the backlog, and
one reader reads it without a group: the limit of the drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import count

from benchmarks import filling, harness, probe
from benchmarks.harness import Aim, Line, Setup
from benchmarks.probe import Probe
from millpond.client.connection import Connection
from millpond.client.load import batched
from millpond.client.reader import Reader
from millpond.client.topics import Topics
from millpond.core.clock import SystemClock
from millpond.core.limits import READ_MESSAGES

BODY_BYTES = 100
QUEUES = 4
TOPIC = "backlog"
DRAINED = 4_000_000  # of a large backlog, so many are drained in each round


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    """Quantiles with the backlog beside those without; messages/s of the drain beside a direct read."""
    async with harness.service(setup.folder) as empty, harness.service(setup.folder) as loaded:
        for service in (empty, loaded):
            async with Connection(service.url) as connection:
                await filling.create(connection, [TOPIC], QUEUES, "flush")
        tell(f"filling {setup.backlog:,} messages of {BODY_BYTES} bytes")
        clock = SystemClock()
        begin = clock.monotonic()
        filled = await filling.fill_topic(loaded.url, TOPIC, setup.backlog, BODY_BYTES, QUEUES)
        tell(f"filled in {clock.monotonic() - begin:.1f} s")
        async with Connection(loaded.url) as connection:
            await Topics(connection).flush(TOPIC)

        async def settle() -> bool:
            return await harness.settled(empty.pid, loaded.pid)

        urls = {f"empty, beside {filled:,}": empty.url, f"{filled:,} behind": loaded.url}
        lines = await _probes(setup, tell, urls, settle)
        return lines + await _drains(loaded.url, setup, tell, filled, settle)


async def _probes(
    setup: Setup, tell: Callable[[str], None], urls: Mapping[str, str], settle: Callable[[], Awaitable[bool]]
) -> list[Line]:
    found: dict[str, list[Probe]] = {name: [] for name in urls}
    for number in range(setup.rounds):
        for name, url in urls.items():
            tell(f"probe, {name}, round {number + 1} of {setup.rounds}")
            await settle()
            found[name].append(await probe.steady(url, TOPIC, setup.seconds, setup.per_second, BODY_BYTES, "tail"))
    first = next(iter(urls))
    return [
        Line(
            f"{what} {field[:3]}, {name}", "ms", [getattr(getattr(one, what), field) for one in probes],
            f"{what} {field[:3]}, {first}" if name != first else "",
            aim=Aim(at_most=1.2) if name != first and field == "p99_ms" else None,
        )
        for what in ("produce", "consume")
        for field in ("p50_ms", "p99_ms")
        for name, probes in found.items()
    ]  # fmt: skip


async def _drains(
    url: str, setup: Setup, tell: Callable[[str], None], behind: int, settle: Callable[[], Awaitable[bool]]
) -> list[Line]:
    groups, messages = count(), min(behind, DRAINED)
    drained, read = (f"{name}, {behind:,} behind" for name in ("drain by a group", "direct read"))

    async def drain() -> float:
        async with Connection(url) as connection:
            group = f"drain{next(groups)}"
            return (await batched.consume(connection, TOPIC, group, messages, BODY_BYTES)).per_second

    runs = {drained: drain, read: lambda: _read(url, messages)}
    found = await harness.interleaved(setup.rounds, runs, tell, settle)
    return [
        Line(drained, "messages/s", found[drained], read, aim=Aim(at_least=1.0)),
        Line(read, "messages/s", found[read]),
    ]


async def _read(url: str, messages: int) -> float:
    """All queues at once, as the drain has them, page by page."""
    clock = SystemClock()
    taken = 0

    async def queue(number: int) -> None:
        nonlocal taken
        reader = Reader(connection, TOPIC, number)
        async for page in reader.pages(offset=0, limit=READ_MESSAGES):
            taken += page.messages.num_rows
            if taken >= messages:
                return

    async with Connection(url) as connection:
        begin = clock.monotonic()
        await asyncio.gather(*(queue(number) for number in range(QUEUES)))
        return taken / (clock.monotonic() - begin)
