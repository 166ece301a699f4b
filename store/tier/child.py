"""`python -m millpond.store.tier.child FD idle|eager`: the process that seals for a store, started by `WorkApart`.

FD is its end of the channel (`channel`): what to do comes through it, and its end is the store's, whatever killed that:
then this process removes what it has staged, and ends. `idle`: the store lets it run when nobody else wants the core,
so it need not let others go first. It reads the segments by itself, as a store does (`reader.FrameReader`). Where that
fails the store looks too: it knows whether a frame is damaged, or gone with reason.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import traceback

import uvloop

from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.errors import BelowLocal, Internal, Unavailable
from millpond.core.lean import do_without_pandas
from millpond.core.limits import (
    SEAL_ALIVE_SECONDS,
    SEAL_END_SECONDS,
    SEAL_GENTLE_BYTES_PER_SECOND,
    SEAL_READ_BYTES,
    SEAL_SPOT_BYTES,
    SEAL_SPOTS,
)
from millpond.core.priority import Cores
from millpond.core.tier.gentle import Steps
from millpond.core.tier.open import open_objects
from millpond.store.client import StoredFrame
from millpond.store.directory import FrameSpot
from millpond.store.flushes import Flushes
from millpond.store.reader import FrameReader
from millpond.store.recent import Recent
from millpond.store.tier.ahead import ReadAhead, Reading
from millpond.store.tier.channel import (
    Alive,
    Begin,
    Channel,
    Done,
    Drop,
    Finish,
    HasBegun,
    Look,
    MadeIt,
    Make,
    Message,
    Pace,
    Place,
    Put,
    Spots,
    Where,
    expect,
)
from millpond.store.tier.making import LocalWork
from millpond.store.tier.segments import SegmentFiles


class FarLog:
    """Frames of the store's log: it says where they are, this reads them; ahead while `steps` are long."""

    def __init__(self, channel: Channel, place: Place, steps: Steps) -> None:
        self._channel = channel
        self._steps = steps
        self.segments = SegmentFiles(place, steps)
        self._reader = FrameReader(self.segments, Recent(0), lambda _position, _end: None, Flushes())
        self._queue_id = 0
        self._spots: list[FrameSpot] = []  # of that queue, from the last ones asked for on
        self._ahead = ReadAhead(self._begin)
        self._most = SEAL_SPOTS  # offsets to ask for: those of about SEAL_SPOTS frames, or SEAL_SPOT_BYTES

    async def frames(self, queue_id: int, offset: int, end: int, max_bytes: int) -> list[StoredFrame]:
        """As of `SealSource`, or more than `max_bytes`."""
        ahead = SEAL_READ_BYTES if self._steps.long else 0
        return await self._ahead.frames(queue_id, offset, end, max_bytes, ahead=ahead)

    async def _begin(self, queue_id: int, offset: int, end: int, max_bytes: int) -> Reading:
        self.segments.trim()
        chosen: list[FrameSpot] = []
        size, behind = 0, end
        for spot in await self._spots_from(queue_id, offset, end):
            if chosen and size + spot.length > max_bytes:
                break
            chosen.append(spot._replace(first=spot.end))  # the reader keeps none for later
            size, behind = size + spot.length, spot.end
        return Reading(asyncio.create_task(self._read(chosen, Look(queue_id, offset, end, max_bytes))), behind)

    async def _read(self, chosen: list[FrameSpot], look: Look) -> list[StoredFrame]:
        """The frames at `chosen`, those that `look` is for."""
        try:
            return await self._reader.frames(chosen, background=True)
        except (Internal, BelowLocal, OSError):
            self.segments.trim(0)  # what is open may be something else by now
            self._spots = []
        expect(Done, await self._channel.ask(look))
        try:
            return await self._reader.frames(chosen, background=True)
        except (Internal, BelowLocal, OSError) as error:
            raise Unavailable("tier_unavailable", f"the log cannot be read for sealing: {error}") from error

    async def _spots_from(self, queue_id: int, offset: int, end: int) -> list[FrameSpot]:
        """Those of frames that hold offsets from `offset` on, some of them. Each ends where its frame does, at `end`,
        or where that is not known."""
        known = self._spots if queue_id == self._queue_id else []
        known = [spot for spot in known if spot.first <= offset < spot.end or spot.first > offset]
        if not known or known[0].first > offset:
            answer = await self._channel.ask(Where(queue_id, offset, end, SEAL_SPOT_BYTES, self._most))
            found = expect(Spots, answer)
            known = [FrameSpot(*spot) for spot in found.spots]
            self.segments.open_from = found.open_from
            if known:
                offsets, size = known[-1].end - known[0].first, sum(spot.length for spot in known)
                self._most = 1 + min(SEAL_SPOTS * offsets // len(known), SEAL_SPOT_BYTES * offsets // size)
                if (last := known[-1]).end < end:  # of its frame there may be more
                    del known[-1]
                    if not known:
                        self._spots = []
                        return [last._replace(end=end)]
        self._queue_id, self._spots = queue_id, known
        return [spot for spot in known if spot.first < end]


class Sealing:
    """This process's side of the channel."""

    def __init__(self, channel: Channel, *, eager: bool) -> None:
        """`eager`: it works beside others, whom it need not let go first."""
        self._channel = channel
        self._eager = eager
        self._steps = Steps()
        self._log: FarLog | None = None
        self._work: LocalWork | None = None
        self._cores = Cores()
        self._bytes_per_second = 0
        self._breathes_at = 0.0

    async def handle(self, message: Message) -> Message:
        """The answer to a question of the store."""
        if isinstance(message, Begin):
            self._begin(message)
            return Done()
        assert self._work is not None and self._log is not None, "the first message is begin"
        if isinstance(message, Pace):
            self._bytes_per_second = message.bytes_per_second
            self._cores.use_half(0 < message.bytes_per_second <= SEAL_GENTLE_BYTES_PER_SECOND)  # more takes them all
            alone = message.still and not message.bytes_per_second and not self._eager
            self._steps.take(message.bytes_per_second, long=alone)
            self._log.segments.still = message.still
            return Done()
        if isinstance(message, Make):
            begun = await self._work.begin(message.job)
            return Done() if begun is None else HasBegun(begun)
        if isinstance(message, Finish):
            return MadeIt(await self._work.finish(message.number))
        if isinstance(message, Put):
            await self._work.put(message.made, message.path)
        else:
            await self._work.drop(expect(Drop, message).number)
        return Done()

    def _begin(self, begin: Begin) -> None:
        objects = open_objects(begin.tier, "", SystemClock(), SystemRandom(), self._steps)
        self._log = FarLog(self._channel, begin.place, self._steps)
        self._work = LocalWork(self._log, objects, self._breathe)

    async def _breathe(self, size: int) -> None:
        """Wait for as long as `size` bytes may take just now."""
        loop = asyncio.get_running_loop()
        if not self._bytes_per_second:
            return
        self._breathes_at = max(self._breathes_at, loop.time()) + size / self._bytes_per_second
        await asyncio.sleep(self._breathes_at - loop.time())

    async def live(self) -> None:
        while True:
            await asyncio.sleep(SEAL_ALIVE_SECONDS)
            self._channel.tell(Alive())

    async def end(self) -> None:
        """What is staged goes."""
        if self._work is not None:
            await self._work.close()


async def _main(handle: int, *, eager: bool) -> None:
    channel = await Channel.open(socket.socket(fileno=handle), 1)
    sealing = Sealing(channel, eager=eager)
    living = asyncio.create_task(sealing.live())
    try:
        await channel.listen(sealing.handle)
    finally:
        living.cancel()
        async with asyncio.timeout(SEAL_END_SECONDS):
            await sealing.end()


def main() -> None:
    """Ends with the store, not by the signals that end it: also a second Ctrl-C in a terminal. One that lets nobody
    write from the background (`stty tostop`) does not stop it at its first complaint."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    eager = sys.argv[2] == "eager"
    do_without_pandas()
    try:
        uvloop.run(_main(int(sys.argv[1]), eager=eager))
    finally:
        error = sys.exc_info()[1]
        if error is not None:
            traceback.print_exception(error)
        os._exit(0 if error is None else 1)  # a thread that a disk holds up cannot be waited for


if __name__ == "__main__":
    main()
