"""Background tasks with an owner: nobody's task dies unnoticed.

A `Tasks` belongs to the object that needs the tasks. A task that raises is logged and reported to `on_death`,
whose owner then fails whatever waits on the task. Tasks that end by themselves or are cancelled are not deaths.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger("millpond.tasks")

CANCEL_AGAIN_SECONDS = 1.0

OnDeath = Callable[[str, BaseException], None]


class Tasks:
    """Owner of background tasks. `on_death(name, error)` is called once for each task that raised."""

    def __init__(self, on_death: OnDeath | None = None) -> None:
        self._on_death = on_death
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def closed(self) -> bool:
        """Nothing is started any more; what runs may not have ended yet."""
        return self._closed

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `coro` until it ends or `close` cancels it. After `close` nothing is started: RuntimeError."""
        if self._closed:
            coro.close()
            raise RuntimeError(f"{name}: its owner is closed")
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, seconds: float) -> None:
        """Let the tasks end for so long, also those that they start meanwhile, then `close`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while self._tasks and (left := until - loop.time()) > 0:
            await asyncio.wait(self._tasks, timeout=left)
            await asyncio.sleep(0)  # lets `_ended` run
        await self.close()

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended. Idempotent; a task may not close its own owner."""
        self._closed = True
        assert asyncio.current_task() not in self._tasks, "a task cannot wait for its own end"
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            # a task may meet an answer and the cancel in one turn and go on with the answer: it is told again
            await asyncio.wait(self._tasks, timeout=CANCEL_AGAIN_SECONDS)
            await asyncio.sleep(0)  # lets `_ended` run

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        _log.error("background task %s died", task.get_name(), exc_info=error)
        if self._on_death is not None:
            self._on_death(task.get_name(), error)
