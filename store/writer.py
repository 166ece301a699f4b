"""The one task that owns the tail: it writes what has gathered, then flushes once for all of it.

    gather (this turn's state changes) -> write (pwritev) -> flush (fdatasync, off the loop) -> confirmed

The kernel flushes by itself where it can (`kernel_sync`), else a thread does.

Writing and flushing are two loops: while a flush is in flight, the next writes go on, and whatever was written
when it returns shares the next one (group commit without a timer). While bytes are unflushed a flush is in
flight, whatever durability a topic has: durability only decides for which of the two a producer waits.

A failed write or flush is final. The kernel has dropped the dirty pages, so a retry would lie: the writer dies,
everything that waits on it fails, and its owner restarts the store through recovery.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import suppress

from millpond.core.errors import Unavailable
from millpond.core.frame import MARK
from millpond.core.limits import KIB, MARK_IDLE_MS, MIB, UNFLUSHED_BYTES
from millpond.core.threads import Threads
from millpond.store.commitlog import Blank, CommitLog, Draft, Segment
from millpond.store.flushes import Flushes
from millpond.store.kernel_sync import Syncs

INLINE_WRITE_BYTES = 128 * KIB  # a copy into the page cache of ~20 us: cheaper than waking a thread
INLINE_BYTES_MOST = 2 * MIB  # 0.2 ms a MiB; a thread begins when it gets the interpreter, which takes up to a request
INLINE_AWAITED_BYTES_MOST = 5 * MIB  # .. of what is awaited on the disk: the SDK sends 4 MiB and then waits
INLINE_UNFLUSHED_BYTES = 16 * MIB  # .. while no more is on its way there: a write may wait for a disk that is behind

PACE_SECONDS = 0.002  # how long a flush that nobody awaits is put off
STATE_PACE_SECONDS = 0.01  # .. of state alone, which mostly goes with the next messages
PACED_BYTES = 4 * MIB  # .. unless so much waits for it

_NEXT = 0  # the gathering to come: all wait for the same one
_MARK = Draft(MARK, 0, 0, 0, 0, 0, 0, b"", b"", 0, 0)


class Waiters:
    """Who waits for which position: a future each, so that one who leaves takes nothing from the others, and leaves
    nothing behind. `reach` lets all go on that wait at or below a position."""

    def __init__(self) -> None:
        self._positions: list[int] = []  # ascending, as they mostly come
        self._futures: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        return bool(self._positions)

    async def wait(self, position: int) -> None:
        """Until `position` is reached. Raises what `fail` was told."""
        future = asyncio.get_running_loop().create_future()
        at = bisect_right(self._positions, position)
        self._positions.insert(at, position)
        self._futures.insert(at, future)
        try:
            await future
        finally:
            if future.cancelled():
                with suppress(ValueError):  # reached or failed in the same turn: it has been taken out
                    at = self._futures.index(future, bisect_left(self._positions, position))
                    del self._positions[at], self._futures[at]

    def reach(self, position: int) -> None:
        count = bisect_right(self._positions, position)
        for future in self._futures[:count]:
            if not future.done():
                future.set_result(None)
        del self._positions[:count], self._futures[:count]

    def fail(self, error: Exception) -> None:
        for future in self._futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # a future that nobody awaits any more must not complain
        self._futures.clear()
        self._positions.clear()


class Writer:
    """Writes and flushes the tail of `log`.

    `gather` appends what is pending in memory (state changes) before each write, True when all of it had room;
    `flushing` is called when a flush is under way, True when it gave this thread something to do meanwhile; `confirmed`
    is called when the confirmed position has moved; `messages_end` says where the last messages end that no flush has
    taken; `now_ms` stamps marks.
    """

    def __init__(
        self,
        log: CommitLog,
        gather: Callable[[], bool],
        flushing: Callable[[], bool],
        confirmed: Callable[[], None],
        messages_end: Callable[[], int],
        now_ms: Callable[[], int],
    ) -> None:
        self._log = log
        self._gather = gather
        self._flushing = flushing
        self._confirmed = confirmed
        self._messages_end = messages_end
        self._now_ms = now_ms
        self._wake = asyncio.Event()
        self._flush_wake = asyncio.Event()
        self._flushed_some = asyncio.Event()
        self._flush_awaited = asyncio.Event()
        self._hurried = 0  # position
        self.awaiting = Flushes()
        self._gathering = Waiters()
        self._gathered_to = 0  # position
        self._written = Waiters()
        self._flushed = Waiters()
        self._threads = Threads(2, "millpond-log")
        self._syncs = Syncs(self._threads)
        self._zeroing: asyncio.Future[None] | None = None
        self._zeroing_from = 0  # position
        self._mark_timer: asyncio.TimerHandle | None = None
        self._marked = log.tail
        self._failed: Exception | None = None
        self.flushes = 0
        self.flush_seconds = 0.0

    # -- what others wait for ------------------------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()

    async def gathered(self) -> int:
        """Until the state that waits now is at the tail; the position below which it stands."""
        self._check()
        self._wake.set()
        await self._gathering.wait(_NEXT)
        return self._gathered_to

    async def written(self, position: int) -> None:
        """Until everything below `position` was handed to the kernel. Raises Unavailable(unknown_outcome)."""
        self._check("unknown_outcome")
        if self._log.written < position:
            await self._written.wait(position)

    async def flushed(self, position: int, *, make_way: bool = False) -> None:
        """Until everything below `position` is on the disk; with `make_way` readers of old messages make way for such
        flushes. Raises Unavailable(unknown_outcome)."""
        self._check("unknown_outcome")
        if self._log.flushed < position:
            if make_way:
                self.awaiting.awaited()
            self._flush_awaited.set()
            await self._flushed.wait(position)

    def hurry(self) -> None:
        """Somebody waits to read the messages that stand at the tail now: do not put their flush off."""
        self.awaiting.awaited()
        end = self._messages_end()
        if end > self._log.flushed:
            self._hurried = end
            self._flush_awaited.set()

    @property
    def has_room(self) -> bool:
        """Whether less than UNFLUSHED_BYTES wait to be flushed."""
        return self._failed is None and self._log.tail - self._log.flushed < UNFLUSHED_BYTES

    async def room(self, until: float) -> None:
        """Until it `has_room`, for as long as until then, in the loop's seconds. Raises Unavailable (flush_behind;
        store_unavailable when the store has stopped)."""
        self._check()
        if self.has_room:
            return
        try:
            async with asyncio.timeout_at(until):
                while not self.has_room:
                    self._flushed_some.clear()
                    await self._flushed_some.wait()
                    self._check()
        except TimeoutError:
            raise Unavailable("flush_behind", "the disk is behind: too many bytes wait to be flushed") from None

    def _check(self, code: str = "store_unavailable") -> None:
        if self._failed is not None:
            raise Unavailable(code, f"the store has stopped: {self._failed}")

    async def zero(self, blank: Blank, threads: Threads) -> None:
        """Zero these blocks, which stand behind the tail. Nothing is written there before that is done. Raises
        OSError."""
        assert self._zeroing is None and blank.start >= self._log.tail, "what is appended is never zeroed"
        self._zeroing, self._zeroing_from = asyncio.get_running_loop().create_future(), blank.start
        work = threads.run(self._log.zero, blank)
        work.add_done_callback(self._zeroed)
        await asyncio.shield(work)  # a thread goes on, whoever is cancelled
        self._log.zeroed = max(self._log.zeroed, blank.start + blank.length)

    def _zeroed(self, work: asyncio.Future[None]) -> None:
        assert self._zeroing is not None
        self._zeroing.set_result(None)
        self._zeroing = None
        if not work.cancelled():
            work.exception()  # looked at: who waited for it may have been cancelled

    # -- the two loops -------------------------------------------------------------------------------------

    async def write_loop(self) -> None:
        log = self._log
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                self._gather_now()
                writes, end = log.take_writes()
                if not writes:
                    continue
                while self._zeroing is not None and end > self._zeroing_from:
                    await asyncio.shield(self._zeroing)
                if self._is_quick(end):
                    log.write(writes)
                else:
                    await self._threads.run(log.write, writes)
                log.written = end
                self._written.reach(end)
                self._flush_wake.set()
        except OSError as error:
            self._fail(error)
            raise

    def _is_quick(self, end: int) -> bool:
        """Whether a write up to `end` is done here before a thread would begin with it."""
        log = self._log
        most = INLINE_WRITE_BYTES
        if log.written - log.flushed <= INLINE_UNFLUSHED_BYTES:
            most = INLINE_AWAITED_BYTES_MOST if self._flushed else INLINE_BYTES_MOST
        return end - log.written <= most

    def _gather_now(self) -> None:
        if self._gather():
            self._gathered_to = self._log.tail
            self._gathering.reach(_NEXT)

    async def flush_loop(self) -> None:
        log = self._log
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._flush_wake.wait()
                self._flush_wake.clear()
                while log.flushed < log.written:
                    if not self._flushed and log.written - log.flushed < PACED_BYTES:
                        await self._pace()
                    end = log.written
                    started = loop.time()
                    await self._sync(log.segments_between(log.flushed, end), end)
                    self.flushes += 1
                    self.flush_seconds += loop.time() - started
                    log.flushed = log.confirmed = end
                    self._flushed.reach(end)
                    self._flushed_some.set()
                    self._confirmed()
                self._mark_when_idle()
        except OSError as error:
            self._fail(error)
            raise
        finally:
            self._syncs.close()

    async def _sync(self, segments: list[Segment], end: int) -> None:
        self.awaiting.begin()
        try:
            for segment in segments:
                synced = self._syncs.sync(segment.file)
                if self._log.flushing < end:
                    self._log.flushing = end
                    if self._flushing():
                        os.sched_yield()  # the kernel's worker, which is on this core, begins before what was woken
                await synced
        finally:
            self.awaiting.end()

    async def _pace(self) -> None:
        """No producer waits for this flush: let a little more gather, so that flushes do not take the time of requests.
        Ends at once when somebody waits for it; what has come together with messages that a reader awaits goes along.
        """
        flushed = self._log.flushed
        if self._hurried > flushed:
            await asyncio.sleep(0)
            return
        seconds = PACE_SECONDS if self._messages_end() > flushed else STATE_PACE_SECONDS
        self._flush_awaited.clear()
        timer = asyncio.get_running_loop().call_later(seconds, self._flush_awaited.set)
        await self._flush_awaited.wait()
        timer.cancel()

    def _mark_when_idle(self) -> None:
        """Arrange for a mark: a frame whose header says that everything before it is confirmed."""
        if self._mark_timer is None and self._log.tail != self._marked:
            self._mark_timer = asyncio.get_running_loop().call_later(MARK_IDLE_MS / 1000, self._mark)

    def mark(self, *, again: bool = False) -> None:
        """Append a mark now, unless the last frame is one and it is not wanted `again`. Before a clean shutdown."""
        if self._mark_timer is not None:
            self._mark_timer.cancel()
        if again:
            self._marked = -1
        self._mark()

    def _mark(self) -> None:
        self._mark_timer = None
        log = self._log
        if self._failed is not None or log.tail == self._marked:
            return
        if log.flushed == log.tail and log.has_room(_MARK.length):
            log.append([_MARK], self._now_ms())
            self._marked = log.tail
            self.wake()
        elif log.flushed < log.tail:
            self._flush_wake.set()  # busy again: look once more when that is flushed

    def _fail(self, error: Exception) -> None:
        self._failed = error
        # Who waits has frames at the tail, which may or may not be on the disk: only recovery will know.
        failure = Unavailable("unknown_outcome", f"the store has stopped: {error}")
        self._gathering.fail(failure)
        self._written.fail(failure)
        self._flushed.fail(failure)
        self._flushed_some.set()

    def stop(self) -> None:
        """Fail what waits; the loops are cancelled by their owner."""
        if self._mark_timer is not None:
            self._mark_timer.cancel()
        if self._failed is None:
            self._fail(OSError("closed"))
        self._threads.close()
