"""The same load spread over 1, 64, 1,000 and 10,000 topics: what a topic costs that is written to now and then.

Topics have one queue. One process posts ready Arrow batches of a fixed size to the topics in turn, eight requests at
once, so the client does the same work however many topics there are; a request is 1 MB, or 16 messages. All topics are
written to once before it is measured, and each round begins when the service has nothing left to do: what is sealed
of large requests is not the bill of small ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle, takewhile

from benchmarks import filling, harness
from benchmarks.harness import Aim, Line, Setup, interleaved
from millpond.client.connection import Connection
from millpond.client.topics import Durability
from millpond.core.clock import SystemClock

COUNTS = (1, 64, 1_000, 10_000)
FEW = 16  # messages of a small request
DURABILITY: Durability = "memory"


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    """MB/s of bodies for each number of topics, beside those of one."""
    size = setup.message_bytes
    large = max(1, min(10_000, 1_000_000 // size))
    clock = SystemClock()
    async with harness.service(setup.folder) as service, Connection(service.url) as connection:
        names = [f"t{number}" for number in range(max(COUNTS))]
        tell(f"making {len(names):,} topics")
        await filling.create(connection, names, 1, DURABILITY)
        first = filling.stream(filling.batch(1, size))
        await filling.fill(connection, ((name, None) for name in names), first)

        async def spread(count: int, messages: int) -> float:
            body = filling.stream(filling.batch(messages, size))
            begin = clock.monotonic()
            work = ((name, None) for name in cycle(names[:count]))
            until = takewhile(lambda _: clock.monotonic() - begin < setup.seconds, work)
            sent = await filling.fill(connection, until, body)
            return sent * messages * size / 1e6 / (clock.monotonic() - begin)

        found = await interleaved(
            setup.rounds,
            {_name(count, messages): partial(spread, count, messages) for messages in (large, FEW) for count in COUNTS},
            tell,
            lambda: harness.settled(service.pid),
        )
    return [
        Line(
            _name(count, messages),
            "MB/s",
            found[_name(count, messages)],
            _name(1, messages) if count > 1 else "",
            aim=Aim(at_least=0.9) if count == max(COUNTS) else None,
        )
        for messages in (large, FEW)
        for count in COUNTS
    ]


def _name(topics: int, messages: int) -> str:
    return f"{topics:,} topic{'s' if topics > 1 else ''}, {messages:,} messages a request"
