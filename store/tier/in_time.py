"""A limit for a step of a run: `in_time`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from millpond.core.errors import Unavailable
from millpond.core.limits import SEAL_STEP_SECONDS


@asynccontextmanager
async def in_time(what: str) -> AsyncIterator[None]:
    """A disk that hangs is an error, Unavailable(tier_unavailable), not a sealer that waits for ever."""
    try:
        async with asyncio.timeout(SEAL_STEP_SECONDS):
            yield
    except TimeoutError:
        raise Unavailable("tier_unavailable", f"{what}: not done within {SEAL_STEP_SECONDS} s") from None
