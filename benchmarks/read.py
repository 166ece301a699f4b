"""Direct reads: one queue from its first message to its last, without a group; as Arrow batches, and one by one.

The limit beside it is the same bytes sent over one loopback socket by a process that does nothing else.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable

from benchmarks import harness
from benchmarks.harness import Line, Setup, interleaved
from millpond.client.connection import Connection
from millpond.client.load import batched
from millpond.client.reader import Reader
from millpond.client.topics import Topics
from millpond.core.clock import SystemClock
from millpond.core.limits import MIB

MESSAGES_PER_SECOND = 400_000  # how many are read in a round, for each second of the setup
STORED_BYTES = 4096 * MIB  # .. but no more than stay in memory: the disk is not what is measured here
LIMIT = "bytes over one loopback socket"


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    total = min(int(MESSAGES_PER_SECOND * setup.seconds), STORED_BYTES // setup.message_bytes)
    async with harness.service(setup.folder) as service, Connection(service.url) as connection:
        topic = "bench.read"
        await Topics(connection).create(topic, queues=1, durability="flush")
        tell(f"{total:,} messages to read")
        await batched.produce(connection, topic, setup.message_bytes, count=total)
        await Topics(connection).flush(topic)  # sealing is measured by itself; what is read is local all the same
        clock = connection.clock

        async def by_batch() -> float:
            """Messages per second as Arrow."""
            begin, count = clock.monotonic(), 0
            async for page in Reader(connection, topic, 0).pages(offset=0):
                count += page.messages.num_rows
            return _rate(count, clock.monotonic() - begin)

        async def by_message() -> float:
            """Messages per second, each of them touched."""
            begin, count, size = clock.monotonic(), 0, 0
            async for message in Reader(connection, topic, 0).messages(offset=0):
                count += 1
                size += len(message.body)
            assert size == count * setup.message_bytes, "every body came"
            return _rate(count, clock.monotonic() - begin)

        def _rate(count: int, seconds: float) -> float:
            assert count == total, f"{count} of {total} messages came"
            return count / seconds

        async def limit() -> float:
            return await asyncio.to_thread(loopback, total * setup.message_bytes) / setup.message_bytes

        runs = {LIMIT: limit, "direct read, Arrow batches": by_batch, "direct read, messages": by_message}
        found = await interleaved(setup.rounds, runs, tell)
    against = {name: "" if name == LIMIT else LIMIT for name in found}
    return [Line(name, "messages/s", values, against[name]) for name, values in found.items()]


def loopback(total_bytes: int) -> float:
    """Bytes per second that another process can send to this one."""
    clock = SystemClock()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with subprocess.Popen([sys.executable, "-m", "benchmarks.read", str(port), str(total_bytes)]) as sender:  # noqa: S603
            taken, _ = listener.accept()
            into = memoryview(bytearray(4 * MIB))
            begin, got = clock.monotonic(), 0
            with taken:
                while size := taken.recv_into(into):
                    got += size
            took = clock.monotonic() - begin
            assert sender.wait() == 0 and got == total_bytes, "all of it came"
    return total_bytes / took


def _send(port: int, total_bytes: int) -> None:
    block = memoryview(bytes(4 * MIB))
    with socket.create_connection(("127.0.0.1", port)) as sender:
        while total_bytes:
            total_bytes -= sender.send(block[: min(len(block), total_bytes)])


if __name__ == "__main__":
    _send(int(sys.argv[1]), int(sys.argv[2]))
