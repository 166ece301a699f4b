"""A socket into a file: what no service that takes bytes by TCP and keeps them can pass on this machine.

One process sends 1 MiB blocks over loopback as fast as it can; another receives them in one thread and writes them in
a second one, as the log is written. Nothing is parsed, checked, indexed or answered.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import sys
import tempfile
import threading
from pathlib import Path

from millpond.core.clock import SystemClock
from millpond.store.disk import SystemFile

NAME = "socket into a file"
SENT_BYTES = 1024 * 1024
BLOCK_BYTES = 4 * SENT_BYTES
BLOCKS = 16  # received and not yet written
FILE_BYTES = 512 * 1024 * 1024
CONNECT_SECONDS = 30.0


async def relay(folder: str, seconds: float) -> float:
    """MB/s (10**6) of a socket into a file."""
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryDirectory(dir=folder or None) as place:
        listener.settimeout(CONNECT_SECONDS)
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.relay", str(listener.getsockname()[1]), str(seconds)
        )
        try:
            return await asyncio.to_thread(_receive, listener, SystemFile(Path(place, "relay"), create=True))
        finally:
            if sender.returncode is None:
                sender.kill()
            await sender.wait()


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


def _send(port: int, seconds: float) -> None:
    block = os.urandom(SENT_BYTES)
    clock = SystemClock()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        begin = clock.monotonic()
        while clock.monotonic() - begin < seconds:
            sock.sendall(block)


if __name__ == "__main__":
    _send(int(sys.argv[1]), float(sys.argv[2]))
