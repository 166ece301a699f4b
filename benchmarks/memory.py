"""Anonymous memory: of a service that has just started, after traffic, and (in every run) the most under each load.

What the loads took at most is told by `harness.service` for every kind that runs; see `under`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from benchmarks import filling, harness
from benchmarks.harness import Aim, Line, Setup
from benchmarks.process import family_mib
from millpond.client.connection import Connection
from millpond.client.load import batched
from millpond.core.limits import SEAL_REST_SECONDS

MOST = "memory, most under"
REST_MIB, LOAD_MIB = 200, 600
CALM_SECONDS = 3.0
REST_SECONDS = SEAL_REST_SECONDS + 20.0  # the sealing process, which counts and may work for 10 s more, has ended


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    """MiB at rest: fresh, and after producing and consuming in turn, at once and in the end."""
    fresh: list[float] = []
    soon: list[float] = []
    after: list[float] = []
    names = count()
    for number in range(setup.rounds):
        tell(f"memory, round {number + 1} of {setup.rounds}")
        async with harness.service(setup.folder) as service:
            await asyncio.sleep(CALM_SECONDS)
            fresh.append(family_mib(service.pid))
            async with Connection(service.url) as connection:
                topic = f"memory.{next(names)}"
                await filling.create(connection, [topic], setup.queues, "memory")
                rate = await batched.produce(connection, topic, setup.message_bytes, seconds=setup.seconds)
                await batched.consume(connection, topic, "g", rate.count, setup.message_bytes)
            await asyncio.sleep(CALM_SECONDS)
            soon.append(family_mib(service.pid))
            tell("until the sealing process has ended")
            await asyncio.sleep(REST_SECONDS - CALM_SECONDS)
            after.append(family_mib(service.pid))
    aim = Aim(at_most=REST_MIB, of="value")
    return [
        Line("memory at rest, fresh (RssAnon)", "MiB", fresh, aim=aim),
        Line(f"memory {CALM_SECONDS:.0f} s after traffic (RssAnon)", "MiB", soon),
        Line("memory at rest, after traffic (RssAnon)", "MiB", after, aim=aim),
    ]


def under(kind: str) -> list[Line]:
    """The most that the services of a kind took; forgets them."""
    taken = harness.most_mib.copy()
    harness.most_mib.clear()
    aim = Aim(at_most=LOAD_MIB, of="value")
    return [Line(f"{MOST} {kind} (RssAnon)", "MiB", [max(taken)], aim=aim)] if taken else []
