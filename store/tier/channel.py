"""What a store and its sealing process say to each other: `Channel`.

Over a pair of connected sockets, inherited when the process starts. Each message is its length, u32 little endian, and
msgpack of an `Envelope`. Both sides ask (an odd or even number of their own) and answer (the same number):

    store      begin    first of all: where the log and the tier are              -> done
               make     a run                                                     -> begun; done when there is nothing
               finish   a run that has begun                                      -> made
               put      under a name, and compare                                 -> done
               drop     a run                                                     -> done
               pace     not answered: how many bytes a second are enough just now, and whether anything is appended
    process    where    frames of a queue                                         -> spots
               look     the store itself reads frames that could not be read here -> done
               alive    not answered: every few seconds

An answer may be an error instead. The stream's end is the other's death, however it died. Nothing secret goes over it:
credentials come from where boto3 looks for them, for both the same.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec

from millpond.core.config import TierConfig
from millpond.core.errors import ErrorInfo, MillpondError, Unavailable, from_info
from millpond.core.limits import SEAL_MESSAGE_BYTES
from millpond.store.tier.work import Begun, Job, Made


class Place(msgspec.Struct, frozen=True):
    """Where the log is: `data` holds its folder; `seed` proves its frames."""

    data: str
    segment_bytes: int
    seed: int


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """`tier.url` names the tier in full."""

    place: Place
    tier: TierConfig


class Make(msgspec.Struct, frozen=True, tag="make"):
    job: Job


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    number: int


class Put(msgspec.Struct, frozen=True, tag="put"):
    made: Made
    path: str


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    number: int


class Pace(msgspec.Struct, frozen=True, tag="pace"):
    """0: as fast as it can, nobody else is at work. `still`: nothing is appended."""

    bytes_per_second: int
    still: bool


class Where(msgspec.Struct, frozen=True, tag="where"):
    """Frames of consecutive offsets from `offset` on, below `end`: `max_bytes` of them, and of `most` offsets, about;
    at least one."""

    queue_id: int
    offset: int
    end: int
    max_bytes: int
    most: int


class Look(msgspec.Struct, frozen=True, tag="look"):
    queue_id: int
    offset: int
    end: int
    max_bytes: int


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    pass


class Done(msgspec.Struct, frozen=True, tag="done"):
    pass


class HasBegun(msgspec.Struct, frozen=True, tag="begun"):
    begun: Begun


class MadeIt(msgspec.Struct, frozen=True, tag="made"):
    made: Made


class Spots(msgspec.Struct, frozen=True, tag="spots"):
    """As of `directory.FrameSpot`: position, length, first, end of each; from position `open_from` on, segments are
    still written to."""

    spots: list[tuple[int, int, int, int]]
    open_from: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    error: ErrorInfo


Message: TypeAlias = (
    Begin | Make | Finish | Put | Drop | Pace | Where | Look | Alive | Done | HasBegun | MadeIt | Spots | Failed
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    number: int
    is_answer: bool
    message: Message


Handle = Callable[[Message], Awaitable[Message]]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


class Channel:
    """One end of it. `listen` must run for answers to come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: int) -> None:
        self._reader = reader
        self._writer = writer
        self._next = first
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._ended = ""

    @classmethod
    async def open(cls, connected: socket.socket, first: int) -> Channel:
        """Takes the socket over. `first`: 0 on one side, 1 on the other."""
        connected.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=connected), first)

    async def ask(self, message: Message) -> Message:
        """The answer. Raises what the other side raised, or Unavailable(tier_unavailable) when it has gone."""
        if self._ended:
            raise Unavailable("tier_unavailable", self._ended)
        number, self._next = self._next, self._next + 2
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Envelope(number, False, message))
            found: Message = await answer
        finally:
            self._asked.pop(number, None)
        if isinstance(found, Failed):
            raise from_info(found.error)
        return found

    def tell(self, message: Message) -> None:
        """Not answered."""
        self._send(Envelope(-1, False, message))

    async def listen(self, handle: Handle, heard: Callable[[], None] = lambda: None) -> None:
        """Until the other side has gone; `heard` is called for each message. Raises ValueError for what is none.

        Each question is handled in a task of its own; an error of `handle` that is no MillpondError ends this call.
        """
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            while True:
                reading = asyncio.ensure_future(self._read())
                either: list[asyncio.Future[Any]] = [reading, failed]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    reading.cancel()
                    await failed
                envelope = await reading
                if envelope is None:
                    return
                heard()
                self._take(envelope, handle, failed)
        finally:
            for task in self._answering:
                task.cancel()

    def _take(self, envelope: Envelope, handle: Handle, failed: asyncio.Future[None]) -> None:
        if envelope.is_answer:
            asked = self._asked.get(envelope.number)
            if asked is not None and not asked.done():
                asked.set_result(envelope.message)
            return
        task = asyncio.ensure_future(self._answer(envelope, handle))
        self._answering.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._answering.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None and not failed.done():
                failed.set_exception(error)

        task.add_done_callback(ended)

    async def _answer(self, envelope: Envelope, handle: Handle) -> None:
        try:
            answer = await handle(envelope.message)
        except MillpondError as error:
            answer = Failed(error.info())
        if envelope.number >= 0:
            self._send(Envelope(envelope.number, True, answer))

    async def _read(self) -> Envelope | None:
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            if size > SEAL_MESSAGE_BYTES:
                raise ValueError(f"a message of {size} bytes")
            data = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        found: Envelope = _decoder.decode(data)
        return found

    def _send(self, envelope: Envelope) -> None:
        """Does not wait: messages are few, and their number at once is bounded by what is asked for."""
        if not self._writer.is_closing():
            data = _encoder.encode(envelope)
            self._writer.write(len(data).to_bytes(4, "little") + data)

    def close(self, why: str) -> None:
        """Whoever waits for an answer, and whoever asks from now on, is told `why`."""
        self._ended = self._ended or why
        self._writer.close()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(Failed(Unavailable("tier_unavailable", self._ended).info()))


def expect(kind: type[Any], message: Message) -> Any:
    """`message`, which must be a `kind`. Raises ValueError."""
    if not isinstance(message, kind):
        raise ValueError(f"{type(message).__name__} in place of {kind.__name__}")
    return message
