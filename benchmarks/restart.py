"""How long a killed service takes to be ready again, and what it holds in memory then.

Fills a fresh directory over HTTP (10,000 queues, 10 M messages of 1 KiB by default: 11 GB), kills the service under
load with SIGKILL, and starts it again on the same directory: from the start of the process to `ready`. Its bytecode is
there by then, as it is wherever Python may keep it (PYTHONDONTWRITEBYTECODE adds 0.3 to 0.7 s).
"""

from __future__ import annotations

import asyncio
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator

from benchmarks import children, filling
from benchmarks.harness import Aim, Line, Setup, address_of, standalone
from benchmarks.process import anonymous_mib
from millpond.client.connection import Connection
from millpond.core.clock import SystemClock
from millpond.core.errors import MillpondError

QUEUES_PER_TOPIC = 1_000
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}  # empty is as if it were not set
KEEP_LOCAL_BYTES = 1 << 40  # nothing is recycled: the whole log is there to be opened


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    """Lines: seconds to ready after SIGKILL, once for each round; MiB of anonymous memory after each start."""
    queues, messages = setup.fill_queues, setup.fill_messages
    seconds: list[float] = []
    memory: list[float] = []
    with tempfile.TemporaryDirectory(prefix="millpond-bench-", dir=setup.folder or None) as data:
        process, url, _ = await _start(data)
        try:
            tell(f"filling {queues:,} queues with {messages:,} messages")
            await _fill(url, setup.message_bytes, queues, messages)
            for number in range(setup.rounds):
                tell(f"kill -9 under load, round {number + 1} of {setup.rounds}")
                await _kill_under_load(process, url, setup.message_bytes)
                process, url, took = await _start(data)
                seconds.append(took)
                memory.append(anonymous_mib(process.pid))
        finally:
            await children.end(process, 0.0)
    note = f"{queues:,} queues, {messages:,} messages"
    return [
        Line("ready after kill -9", "s", seconds, note=note, aim=Aim(at_most=2, of="value")),
        Line("memory at rest (RssAnon)", "MiB", memory, note=note),
    ]


async def _start(data: str) -> tuple[Process, str, float]:
    clock = SystemClock()
    began = clock.monotonic()
    options = ("--log-level", "error", "--local-bytes", str(KEEP_LOCAL_BYTES))
    process = await children.started(*standalone(f"{data}/data", *options), stdout=PIPE, env=COMPILED)
    url = await address_of(process)
    return process, url, clock.monotonic() - began


async def _fill(url: str, size: int, queues: int, messages: int) -> None:
    per_queue = max(1, messages // queues)
    body = filling.stream(filling.batch(min(per_queue, 1_000), size))
    work: Iterator[tuple[str, int | None]] = (
        (f"t{number // QUEUES_PER_TOPIC}", number % QUEUES_PER_TOPIC)
        for _ in range(max(1, per_queue // 1_000))
        for number in range(queues)
    )
    async with Connection(url) as connection:
        for topic in range(-(-queues // QUEUES_PER_TOPIC)):
            here = min(QUEUES_PER_TOPIC, queues - topic * QUEUES_PER_TOPIC)
            await filling.create(connection, [f"t{topic}"], here, "memory")
        await filling.fill(connection, work, body)


async def _kill_under_load(process: Process, url: str, size: int) -> None:
    body = filling.stream(filling.batch(100, size))
    async with Connection(url) as connection:

        async def load(number: int) -> None:
            try:
                while True:
                    await filling.post(connection, "t0", body, number)
            except MillpondError:
                return

        loads = asyncio.gather(*(load(number) for number in range(filling.LANES)))
        await asyncio.sleep(1.0)
        await children.end(process, 0.0)  # kill -9
        await loads
