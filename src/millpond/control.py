"""What a proxy's parent (`workers.py`) and its workers (`worker.py`) say to each other.

JSON lines over a pair of connected sockets, one pair for each worker, inherited when it starts:

    parent    begin       first of all: the worker's number and its settings
              count       say your counters
              counts      those of all workers, in answer to `ask`
              stop        drain, and end
    worker    ready       it serves
              refused     it cannot start: what is wrong, and the remedy
              counters    in answer to `count`
              ask         somebody asked this worker for /metrics: what do all of them count?

The stream's end is the other's death, however it died: a worker without its parent drains and ends. Nothing is
numbered: each side has one question open at most, and an answer that comes too late is no worse for the next one.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TypeAlias

import msgspec

from millpond.core.config import Config

LINE_BYTES = 4 << 20  # counters of all workers: 64 with some hundred names each take a tenth of it

Numbers: TypeAlias = dict[str, float]


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    number: int
    config: Config


class Count(msgspec.Struct, frozen=True, tag="count"):
    pass


class Counts(msgspec.Struct, frozen=True, tag="counts"):
    """By the worker's number; the parent's own under an empty name."""

    workers: dict[str, Numbers]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    pass


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    address: str
    facts: dict[str, str]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    detail: str
    remedy: str


class Counters(msgspec.Struct, frozen=True, tag="counters"):
    numbers: Numbers


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    pass


Message: TypeAlias = Begin | Count | Counts | Stop | Ready | Refused | Counters | Ask
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Message)


class Channel:
    """One end of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, connected: socket.socket) -> Channel:
        """Takes the socket over."""
        connected.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=connected, limit=LINE_BYTES))

    def send(self, message: Message) -> None:
        """Does not wait: messages are small, few, and answered one at a time. One to a dead peer goes nowhere."""
        if not self._writer.is_closing():
            self._writer.write(_encoder.encode(message) + b"\n")

    async def receive(self) -> Message | None:
        """None at the end. Raises ValueError for what is no message."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        if not line.endswith(b"\n"):
            return None
        message: Message = _decoder.decode(line)
        return message

    def close(self) -> None:
        self._writer.close()
