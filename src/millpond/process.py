"""A process of one or more parts: start, say that it is ready, run until a signal or a death, drain.

SIGTERM and SIGINT drain and end with 0; a second one ends at once. A part that dies, or cannot start, ends the
process with 1 and one line that says why and what to do.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import uvloop

from millpond import logs
from millpond.client.command import exits
from millpond.core.clock import SystemClock
from millpond.core.config import Config
from millpond.core.errors import MillpondError, StartupError
from millpond.core.lean import do_without_pandas
from millpond.memory import Tidier

CANNOT_START = (StartupError, MillpondError, OSError)  # in words, without a traceback
CLOSE_SECONDS = 30.0  # draining, checkpoint and mark; systemd's default patience is 90 s
# A request makes dozens of objects that die with it: collect once in hundreds. What is imported stays: garbage was
# looked for in it during a twelfth of a start. The loop stands still for 4 ms while 10,000 objects that stay are looked
# at, and for far longer when those of a hundred such collections are looked at again, which comes about never.
GC_THRESHOLD = (10_000, 100, 50)
log = logging.getLogger("millpond")


class Running(Protocol):
    """Parts that are up. `address`: where they listen; `failed` is done once one of them cannot go on."""

    address: str
    failed: asyncio.Future[BaseException]

    def greeting(self) -> list[str]:
        """Lines for whoever started it."""
        ...

    async def close(self) -> None: ...


RunningT = TypeVar("RunningT", bound=Running)


def run(start: Callable[[], Awaitable[Running]], config: Config, ready_file: str | None) -> int:
    """Run until told to end; the exit code."""
    try:
        prepare(config)
        return uvloop.run(_run(start, ready_file))
    except CANNOT_START as error:
        logs.log_failure(SystemClock(), told(error), config.log_json)
        return exits.FAILED


def prepare(config: Config, worker: int | None = None) -> None:
    """What a process needs before it imports and starts parts. Raises StartupError."""
    logs.configure(config.log_level, config.log_json, worker)
    gc.set_threshold(*GC_THRESHOLD)
    do_without_pandas()


async def _run(start: Callable[[], Awaitable[Running]], ready_file: str | None) -> int:
    stop = Stop()
    stop.on_signals()
    return await until_ended(start, stop, lambda running: _ready(running, ready_file), lambda: _not_ready(ready_file))


class Stop:
    """The wish that this process ends: by a signal, or by whoever started it. A second one ends it at once."""

    def __init__(self) -> None:
        self._wished = asyncio.Event()

    def on_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.again)

    def once(self) -> None:
        self._wished.set()

    def again(self) -> None:
        if self._wished.is_set():
            os._exit(exits.FAILED)
        self._wished.set()

    async def wait(self) -> None:
        await self._wished.wait()


async def until_ended(
    start: Callable[[], Awaitable[RunningT]],
    stop: Stop,
    on_ready: Callable[[RunningT], None],
    on_end: Callable[[], None],
) -> int:
    """Start, serve until `stop` or a death, close. Raises what `start` raises; then nothing was ready."""
    starting = asyncio.ensure_future(start())
    waiting = asyncio.ensure_future(stop.wait())
    first: list[asyncio.Future[Any]] = [starting, waiting]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        return exits.DONE
    running = await starting
    gc.freeze()  # what is loaded now stays: a collection need not look at it again
    tidying = asyncio.create_task(Tidier().run(), name="memory")
    tidying.add_done_callback(_tell_death)
    try:
        on_ready(running)
        either: list[asyncio.Future[Any]] = [waiting, running.failed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if running.failed.done():
            error = running.failed.result()
            log.critical("a part died: this process ends now", exc_info=error)
            return exits.FAILED
        log.info("stopping")
        return exits.DONE
    finally:
        waiting.cancel()
        tidying.cancel()
        on_end()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await running.close()
        except TimeoutError:
            log.error("stopping took longer than %d s: ending without the rest", CLOSE_SECONDS)


def _tell_death(task: asyncio.Task[None]) -> None:
    """What runs beside the parts can be done without: its end is told, and the parts go on."""
    if not task.cancelled():
        log.error("the task %s died", task.get_name(), exc_info=task.exception())


def _ready(running: Running, ready_file: str | None) -> None:
    """Tell people, and then programs: the file appears whole, the line comes last."""
    for line in running.greeting():
        sys.stdout.write(line + "\n")
    if ready_file:
        partial = Path(ready_file + ".partial")
        partial.write_text(running.address + "\n")
        partial.replace(ready_file)
    sys.stdout.write(f"ready {running.address}\n")
    sys.stdout.flush()


def _not_ready(ready_file: str | None) -> None:
    if ready_file:
        Path(ready_file).unlink(missing_ok=True)


def told(error: StartupError | MillpondError | OSError) -> str:
    """One line: what is wrong, and the remedy."""
    detail, remedy = words(error)
    return f"cannot start: {detail}. {_sentence(remedy)}".strip()


def words(error: StartupError | MillpondError | OSError) -> tuple[str, str]:
    """What is wrong, and the remedy."""
    if isinstance(error, StartupError):
        return error.detail, error.remedy
    if isinstance(error, OSError):
        return f"{error.filename or 'the system'}: {error.strerror or error}", _os_remedy(error)
    failure = exits.failure_of(error)
    return _sentence(failure.error).rstrip("."), failure.remedy


def _os_remedy(error: OSError) -> str:
    remedies = {
        errno.EACCES: "Make the directory writable for this user, or name another with --data.",
        errno.EPERM: "Make the directory writable for this user, or name another with --data.",
        errno.EROFS: "The file system is read-only: mount it writable, or name another directory with --data.",
        errno.ENOSPC: "The disk is full: make room, or name another directory with --data.",
        errno.ENOTDIR: "Name a directory with --data.",
        errno.EEXIST: "Name a directory with --data.",
        errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    }
    return remedies.get(error.errno or 0, "Check the path, and the log above.")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "." if text else ""
