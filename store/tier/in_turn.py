"""One call under way beside its caller, the next begins when it has ended: `InTurn`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class InTurn:
    """`put` starts a call once the one before has ended well; a failed one is raised there, or by `finish`, or at the
    end of the `async with` block, and nothing follows it.

    A block that is left by an error lets the last call end first; a cancelled one cancels it.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a call has not been seen to its end."""
        return self._task is not None

    async def put(self, call: Coroutine[Any, Any, None]) -> None:
        try:
            await self.finish()
        except BaseException:
            call.close()
            raise
        self._task = asyncio.create_task(call)

    async def finish(self) -> None:
        """Until the last call has ended. Raises what it raised."""
        task, self._task = self._task, None
        if task is not None:
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                await _cancelled(task)
                raise
            finally:
                del task  # its error names this frame: kept, the two would hold each other, and an object's memory

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            task, self._task = self._task, None
            if task is not None:
                await _cancelled(task)
            return
        await self.finish()


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel `task` and see it end."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # looked at: its caller is gone
