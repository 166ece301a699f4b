"""A TCP relay in front of a part, which can hold back an answer: so that a kill hits between commit and reply."""

from __future__ import annotations

import asyncio
from typing import Self

_CHUNK = 1 << 16


class Relay:
    """Passes bytes on to `target` (host, port), set before the first connection.

    `arm(marker)`: the first answer after a request that contains `marker` is held back for ever; `held` is set then.
    """

    def __init__(self) -> None:
        self.target = ("127.0.0.1", 0)
        self.url = ""
        self.held = asyncio.Event()
        self._marker: bytes | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def arm(self, marker: bytes) -> None:
        self.held.clear()
        self._marker = marker

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self.target)
        holding = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._forth(reader, back, holding))
                both.create_task(self._back(there, writer, holding))
        except* ConnectionError:
            pass
        finally:
            writer.close()
            back.close()

    async def _forth(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, holding: asyncio.Event) -> None:
        while data := await reader.read(_CHUNK):
            if self._marker is not None and self._marker in data:
                self._marker = None
                holding.set()
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, holding: asyncio.Event) -> None:
        while data := await reader.read(_CHUNK):
            if holding.is_set():
                self.held.set()
                continue
            writer.write(data)
            await writer.drain()
        writer.close()
