"""For how long the disk that is measured answered nothing, though something was asked of it: `watched`.

The disk of a virtual machine may stand still for tens of milliseconds, now and then or every few seconds, and whatever
waits for a flush stands still with it. A p99 in milliseconds says nothing where such pauses take about a hundredth of
the time; a median of rounds of which few met one still does. Nothing is written to find them: a process of its own
reads what the kernel counts of the device (Documentation/block/stat.rst) a hundred times a second.

`python -m benchmarks.paused FILE` watches such a file until SIGTERM; prints a line when it begins, then `Pauses` as
JSON.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from benchmarks import children
from benchmarks.harness import Line
from millpond.core.clock import Clock, SystemClock

DEVICES = Path("/sys/dev/block")
PAUSED = "paused: the disk under"
LONGEST = "longest pause of the disk under"
SAMPLE_SECONDS = 0.01
LEAST_SECONDS = 0.02  # what takes less is how disks are
START_SECONDS = 30.0
END_SECONDS = 5.0
_FINISHED = (0, 4, 11, 15)  # reads, writes, discards and flushes that have come to their end
_IN_FLIGHT = 8
_COUNTED_BYTES = 1024
_BEGUN = b"watching\n"


class Pauses(msgspec.Struct):
    """Of `seconds`, the disk was `paused` for so many, the `longest` time in one piece; each at least that."""

    seconds: float = 0.0
    paused: float = 0.0
    longest: float = 0.0


class Watch:
    """Told again and again what the kernel counts, adds up when nothing came to an end though something was asked."""

    def __init__(self, counted: bytes, now: float) -> None:
        self.found = Pauses()
        self._counted, self._at, self._since = _counted(counted), now, 0.0

    def look(self, counted: bytes, now: float) -> None:
        """What is counted `now`, in seconds of a monotonic clock."""
        finished, in_flight = _counted(counted)
        before, waited = self._counted
        step = now - self._at
        self.found.seconds += step
        if finished == before and in_flight and waited:
            self._since += min(step, 2 * SAMPLE_SECONDS)  # a look that comes late does not make the disk's pause
        else:
            self._end()
        self._counted, self._at = (finished, in_flight), now

    def _end(self) -> None:
        if self._since >= LEAST_SECONDS:
            self.found.paused += self._since
            self.found.longest = max(self.found.longest, self._since)
        self._since = 0.0

    def close(self) -> Pauses:
        self._end()
        return self.found


def _counted(text: bytes) -> tuple[list[int], int]:
    """How many requests of each kind have ended, and how many have not."""
    fields = [int(one) for one in text.split()]
    return [fields[place] for place in _FINISHED], fields[_IN_FLIGHT]


class Watched:
    """A disk that is watched, or none; `under` tells, once that has ended, what was seen."""

    def __init__(self) -> None:
        self.pauses: Pauses | None = None

    def under(self, what: str) -> list[Line]:
        """Two lines; none where the kernel does not say, or whoever watched has failed and said so."""
        if self.pauses is None:
            return []
        share = 100 * self.pauses.paused / self.pauses.seconds
        return [
            Line(f"{PAUSED} {what}", "% of the time", [share]),
            Line(f"{LONGEST} {what}", "ms", [1000 * self.pauses.longest]),
        ]


def counted_of(folder: str) -> Path | None:
    """Where the kernel counts for the device that holds `folder` (default: the system's); None where it does not."""
    device = Path(folder or tempfile.gettempdir()).stat().st_dev
    path = DEVICES / f"{os.major(device)}:{os.minor(device)}" / "stat"
    return path if path.exists() and len(path.read_text().split()) > max(_FINISHED) else None


@asynccontextmanager
async def watched(folder: str) -> AsyncIterator[Watched]:
    """The disk of `folder`, watched for the time of the block."""
    disk, path = Watched(), counted_of(folder)
    if path is None:
        yield disk
        return
    command = (sys.executable, "-m", "benchmarks.paused", str(path))
    async with children.running(*command, friendly_seconds=END_SECONDS) as process:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            if await process.stdout.readline() != _BEGUN:
                raise RuntimeError("the disk's pauses are not watched: see above")
        yield disk
    told = await process.stdout.read()
    disk.pauses = msgspec.json.decode(told, type=Pauses) if told else None  # what was measured is worth more


def main(path: Path, clock: Clock) -> Pauses:
    """Watch until SIGTERM."""
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    file = os.open(path, os.O_RDONLY)
    watch = Watch(_read(file), clock.monotonic())
    sys.stdout.buffer.write(_BEGUN)
    sys.stdout.buffer.flush()
    while True:
        time.sleep(SAMPLE_SECONDS)  # a wait for an event takes twice the CPU of a sleep, and this shares the cores
        watch.look(_read(file), clock.monotonic())
        if ended:
            return watch.close()


def _read(file: int) -> bytes:
    return os.pread(file, _COUNTED_BYTES, 0)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(main(Path(sys.argv[1]), SystemClock())))
