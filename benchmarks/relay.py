"""A socket into a file: what no service that takes bytes by TCP and keeps them can pass on this machine.

One process sends blocks of about 1 MB over loopback as fast as it can; another receives them in one thread and writes
them in a second one, as the log is written. Nothing is parsed, checked, indexed or answered. The blocks are ready, or
made of messages that a Python program hands over one by one, each by a call.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from itertools import cycle, islice, repeat
from pathlib import Path

from benchmarks import children
from millpond.client.load.batched import bodies
from millpond.core.clock import SystemClock
from millpond.core.gathered import Buffer
from millpond.store.disk import SystemFile

NAME = "socket into a file"
BY_CALLS = "socket into a file, a call a message"
SENT_BYTES = 1024 * 1024
BLOCK_BYTES = 4 * SENT_BYTES
BLOCKS = 16  # received and not yet written
FILE_BYTES = 512 * 1024 * 1024
SLICE = 100  # messages between two looks at how many bytes there are
VECTOR = 1024  # buffers in one call of the kernel: IOV_MAX
CONNECT_SECONDS = 30.0


async def relay(folder: str, seconds: float, message_bytes: int = 0) -> float:
    """MB/s (10**6) of a socket into a file; `message_bytes`: of messages that are handed over one by one."""
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryDirectory(dir=folder or None) as place:
        listener.settimeout(CONNECT_SECONDS)
        sender = [str(listener.getsockname()[1]), str(seconds), str(message_bytes)]
        async with children.running(sys.executable, "-m", "benchmarks.relay", *sender):
            return await asyncio.to_thread(_receive, listener, SystemFile(Path(place, "relay"), create=True))


def _receive(listener: socket.socket, file: SystemFile) -> float:
    free: queue.Queue[bytearray] = queue.Queue()
    full: queue.Queue[bytearray | None] = queue.Queue()
    for _ in range(BLOCKS):
        free.put(bytearray(BLOCK_BYTES))
    file.allocate(FILE_BYTES, written=False)

    def write() -> None:
        at = 0
        while (block := full.get()) is not None:
            file.write(at, [block])
            at = (at + len(block)) % FILE_BYTES
            free.put(block)

    writer = threading.Thread(target=write, name="relay")
    writer.start()
    clock = SystemClock()
    try:
        sock, _ = listener.accept()
        with sock:
            begin, received = clock.monotonic(), 0
            while _fill(sock, block := free.get()):
                received += len(block)
                full.put(block)
    finally:
        full.put(None)
        writer.join()
        file.close()
    return received / 1e6 / (clock.monotonic() - begin)


def _fill(sock: socket.socket, block: bytearray) -> bool:
    """Whether all of it came before the end."""
    view = memoryview(block)
    while view:
        got = sock.recv_into(view)
        if not got:
            return False
        view = view[got:]
    return True


class _Taker:
    """What any producer with a call for each message does at least."""

    __slots__ = ("bytes", "held")

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self.bytes = 0

    def take(self, body: bytes) -> None:
        self.held.append(body)
        self.bytes += len(body)


def _by_calls(message_bytes: int) -> Iterator[list[bytes]]:
    """About SENT_BYTES each, of messages taken one by one."""
    source = cycle(bodies(message_bytes))
    while True:
        taker = _Taker()
        while taker.bytes < SENT_BYTES:
            for body in islice(source, SLICE):
                taker.take(body)
        yield taker.held


def _send(port: int, seconds: float, message_bytes: int) -> None:
    blocks: Iterator[list[bytes]] = _by_calls(message_bytes) if message_bytes else repeat([os.urandom(SENT_BYTES)])
    clock = SystemClock()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        begin = clock.monotonic()
        while clock.monotonic() - begin < seconds:
            _send_all(sock, next(blocks))


def _send_all(sock: socket.socket, buffers: Sequence[Buffer]) -> None:
    """`sendall` of several buffers."""
    left = list(buffers)
    at = 0
    while at < len(left):
        sent = sock.sendmsg(left[at : at + VECTOR])
        while at < len(left) and sent >= len(left[at]):
            sent -= len(left[at])
            at += 1
        if sent:
            left[at] = memoryview(left[at])[sent:]


if __name__ == "__main__":
    _send(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
