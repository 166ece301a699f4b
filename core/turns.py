"""What would hold the event loop for long goes in pieces, and others have their turns between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from millpond.core.limits import TURN_ROWS

Pause: TypeAlias = Callable[[], Awaitable[None]]
"""Between two pieces: done when the next one may begin."""


async def turn() -> None:
    """The least pause: whoever is ready goes first."""
    await asyncio.sleep(0)


async def turn_behind(rows: int, pause: Pause = turn) -> None:
    """A pause behind a step of the work on a batch of so many rows, if they are many: who wants a few does not wait."""
    if rows >= TURN_ROWS:
        await pause()
