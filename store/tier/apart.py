"""Sealing's work in a process of its own: `WorkApart`.

So what it does is not done between a store's own instructions, and what it holds is gone with it. The process (`child`)
starts when there is a run to make, and ends when there was none for a while:

    it dies, or does not start    whoever waits for it is told: Unavailable, and the next run starts another one
    it says nothing               for SEAL_SILENT_SECONDS: it is killed
    a run is cancelled            it is ended: nothing else tells what it has done by then
    the store closes, or dies     it sees the channel end, removes what it has staged, and ends
    sealing does not keep up      the next run is made by another process, of the usual priority, at full speed
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from functools import partial
from itertools import count
from typing import Protocol

import msgspec

from millpond.core.clock import Clock
from millpond.core.config import TierConfig
from millpond.core.errors import Unavailable
from millpond.core.limits import KEEP_FREED, SEAL_END_SECONDS, SEAL_REST_SECONDS, SEAL_SILENT_SECONDS
from millpond.core.priority import only_when_idle
from millpond.core.tasks import Tasks
from millpond.store.client import StoredFrame
from millpond.store.directory import FrameSpot
from millpond.store.tier import pace
from millpond.store.tier.channel import (
    Begin,
    Channel,
    Done,
    Drop,
    Finish,
    Handle,
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
from millpond.store.tier.work import Begun, Job, Made

log = logging.getLogger(__name__)

ENVIRONMENT = {
    # Memory is used again and never given back while the process lives: fresh pages are what others would notice.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    **KEEP_FREED,
    "OPENBLAS_NUM_THREADS": "1",  # numpy's would wait for work by turning a core
}


class Log(Protocol):
    """What the process asks of the store's log (`seal_source.EngineSealSource`)."""

    @property
    def appended_bytes(self) -> int: ...

    @property
    def stirred(self) -> asyncio.Event: ...

    @property
    def tail(self) -> int: ...

    @property
    def open_from(self) -> int: ...

    @property
    def behind(self) -> bool: ...

    async def spots(self, queue_id: int, offset: int, end: int, max_bytes: int, most: int) -> list[FrameSpot]: ...

    async def frames(self, queue_id: int, offset: int, end: int, max_bytes: int) -> list[StoredFrame]: ...


class WorkApart:
    def __init__(self, source: Log, place: Place, tier: TierConfig, clock: Clock) -> None:
        """`tier.url` names the tier in full."""
        self._source = source
        self._begin = Begin(place, tier)
        self._clock = clock
        self._process: Process | None = None
        self._starting = asyncio.Lock()
        self._runs: dict[int, tuple[Process, int]] = {}  # who has a run, and its number there
        self._numbers = count(1)
        self._under_way = 0
        self._worked_at = 0.0

    async def begin(self, job: Job) -> Begun | None:
        process = await self._started()
        answer = await self._asked(process, Make(job))
        if isinstance(answer, Done):
            return None
        begun: Begun = expect(HasBegun, answer).begun
        number = next(self._numbers)
        self._runs[number] = (process, begun.number)
        return msgspec.structs.replace(begun, number=number)

    async def finish(self, number: int) -> Made:
        process, theirs = self._runs[number]
        made: Made = expect(MadeIt, await self._asked(process, Finish(theirs))).made
        return msgspec.structs.replace(made, number=number)

    async def put(self, made: Made, path: str) -> None:
        process, number = self._runs[made.number]
        await self._asked(process, Put(msgspec.structs.replace(made, number=number), path))

    async def drop(self, number: int) -> None:
        process, theirs = self._runs.pop(number)
        try:
            await self._asked(process, Drop(theirs))
        except Unavailable as error:
            log.debug("gone with its process: %s", error.detail)
        if process is not self._process and not self._has_runs(process):
            await process.end("another one has taken over")

    async def rest(self) -> None:
        rested = self._clock.monotonic() - self._worked_at
        if not self._under_way and rested >= SEAL_REST_SECONDS:
            await self.close()

    async def close(self) -> None:
        processes = {process for process, _ in self._runs.values()}
        if self._process is not None:
            processes.add(self._process)
        self._process = None
        for process in processes:
            await process.end("sealing ends")

    async def _started(self) -> Process:
        async with self._starting:
            before = self._process
            if before is not None and not before.ended and (before.eager or not self._source.behind):
                return before
            self._process = None
            if before is not None and (before.ended or not self._has_runs(before)):
                await before.end("another one takes over")
            process = await Process.launch(self._handle, self._source, self._clock)
            self._process = process
            await self._asked(process, self._begin)
            return process

    def _has_runs(self, process: Process) -> bool:
        return any(holder is process for holder, _ in self._runs.values())

    async def _asked(self, process: Process, question: Message) -> Message:
        self._under_way += 1
        try:
            return await process.channel.ask(question)
        except asyncio.CancelledError:
            if not isinstance(question, Drop):
                await process.end("what it did was cancelled")
            raise
        finally:
            self._under_way -= 1
            self._worked_at = self._clock.monotonic()

    async def _handle(self, message: Message) -> Message:
        """The answer to a question of the process."""
        if isinstance(message, Where):
            spots = await self._source.spots(
                message.queue_id, message.offset, message.end, message.max_bytes, message.most
            )
            places = [(spot.position, spot.length, spot.first, spot.end) for spot in spots]
            return Spots(places, self._source.open_from)
        if isinstance(message, Look):
            await self._source.frames(message.queue_id, message.offset, message.end, message.max_bytes)
        return Done()


class Process:
    """One sealing process, from its start to its end."""

    def __init__(
        self, popen: subprocess.Popen[bytes], channel: Channel, source: Log, clock: Clock, eager: bool
    ) -> None:
        """`eager`: it takes cores that others want, too."""
        self.channel = channel
        self.ended = False
        self.eager = eager
        self._popen = popen
        self._source = source
        self._clock = clock
        self._heard_at = clock.monotonic()
        self._tasks = Tasks(lambda _name, _error: self._popen.kill())

    @classmethod
    async def launch(cls, handle: Handle, source: Log, clock: Clock) -> Process:
        """Raises Unavailable."""
        ours, theirs = socket.socketpair()
        eager = source.behind
        if eager:
            log.warning("sealing does not keep up, the disk holds more than it should: it stands back no longer")
        try:
            with theirs:
                popen = await asyncio.get_running_loop().run_in_executor(None, _start, theirs.fileno(), eager)
            process = cls(popen, await Channel.open(ours, 0), source, clock, eager)
        except OSError as error:
            ours.close()
            raise Unavailable("tier_unavailable", f"the sealing process does not start: {error}") from error
        except BaseException:
            ours.close()  # which ends a process that was started
            raise
        process._tasks.spawn(process._listen(handle), "channel to the sealing process")
        process._tasks.spawn(process._watch(), "watch over the sealing process")
        return process

    async def _listen(self, handle: Handle) -> None:
        try:
            await self.channel.listen(handle, self._heard)
        except ValueError as error:
            log.error("the sealing process does not speak as it should: %s", error)
            self._popen.kill()
        finally:
            self.ended = True
            self.channel.close("the sealing process has ended")
        code = await _reaped(self._popen)
        log.error("the sealing process %d %s", self._popen.pid, _how(code))

    def _heard(self) -> None:
        self._heard_at = self._clock.monotonic()

    async def _watch(self) -> None:
        """Tell it how fast it may be, and notice when it hangs."""
        speed, told, tail = pace.Pace(), None, -1
        allowed, wait = speed.begin(*self._done()), pace.LOOK_SECONDS
        while not self.ended:
            found = Pace(0 if self.eager else allowed, self._source.tail == tail)
            if found != told:
                self.channel.tell(found)
            told, tail = found, self._source.tail
            if self._clock.monotonic() - self._heard_at > SEAL_SILENT_SECONDS:
                log.error("the sealing process %d says nothing: it is killed", self._popen.pid)
                self._popen.kill()
                return
            if await self._stirred(wait, after_rest=found.still):
                allowed, wait = speed.begin(*self._done()), pace.STIR_SECONDS
            else:
                allowed, wait = speed.look(*self._done()), pace.LOOK_SECONDS

    def _done(self) -> tuple[float, float, int]:
        """By this process so far, as `pace` has it."""
        return self._clock.monotonic(), time.process_time(), self._source.appended_bytes

    async def _stirred(self, seconds: float, *, after_rest: bool) -> bool:
        """Whether something was appended after a rest, as soon as it is; else False after `seconds`."""
        if not after_rest:
            await asyncio.sleep(seconds)
            return False
        self._source.stirred.clear()
        try:
            async with asyncio.timeout(seconds):
                return await self._source.stirred.wait()
        except TimeoutError:
            return False

    async def end(self, why: str) -> None:
        """Let it end, and see that it has."""
        self.ended = True
        self.channel.close(why)
        await self._tasks.close()
        await _reaped(self._popen)


def _start(handle: int, eager: bool) -> subprocess.Popen[bytes]:
    """In a thread: it takes some milliseconds. A process group of its own, for Ctrl-C in a terminal is for the store,
    but no session: Linux shares the cores among sessions first (autogroup), and priorities count only within one.
    It stands back from its first moment on: what it imports takes a core for more than half a second."""
    popen = subprocess.Popen(  # noqa: S603  # this very program
        [sys.executable, "-P", "-m", "millpond.store.tier.child", str(handle), "eager" if eager else "idle"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(handle,), process_group=0,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    if not eager:
        only_when_idle(popen.pid)
    return popen


async def _reaped(popen: subprocess.Popen[bytes]) -> int | None:
    """Its exit code, once it has ended: by itself, else killed. None when not even that ends it (a disk that hangs)."""
    wait = partial(_wait, popen)
    code = await asyncio.get_running_loop().run_in_executor(None, wait)
    if code is None:
        popen.kill()
        code = await asyncio.get_running_loop().run_in_executor(None, wait)
    return code


def _wait(popen: subprocess.Popen[bytes]) -> int | None:
    try:
        return popen.wait(SEAL_END_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _how(code: int | None) -> str:
    if code is None:
        return "does not end"
    return f"ended by signal {-code}" if code < 0 else f"ended with {code}"
