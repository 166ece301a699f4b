"""What the sealer needs of its store: `SealSource`. The engine implements it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from millpond.store.client import QueueRef, StoredFrame


class SealSource(Protocol):
    """Confirmed messages only. `wake` is set when a topic has gathered enough to be looked at at once."""

    @property
    def store_group(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def wake(self) -> asyncio.Event: ...

    @property
    def appended_bytes(self) -> int:
        """Payload bytes appended since the start, all topics together."""
        ...

    def topic_ids(self) -> list[int]:
        """Every topic with queues here."""
        ...

    def queue_refs(self, topic_id: int) -> list[QueueRef]: ...

    def confirmed_end(self, queue_id: int) -> int: ...

    def start_offset(self, queue_id: int) -> int:
        """Messages below have expired: those that were never tiered may be gone, and never will be."""
        ...

    def unsealed(self, topic_id: int) -> tuple[int, int]:
        """Estimates: raw bytes not tiered yet, and the oldest such message's store timestamp (ms)."""
        ...

    def unsealed_of(self, queue_id: int) -> int:
        """The same of one queue, bytes only."""
        ...

    async def frames(self, queue_id: int, offset: int, end: int, max_bytes: int) -> list[StoredFrame]:
        """Confirmed local frames from the one that holds `offset` to the one that holds `end - 1`, consecutive; at
        least one when there is one, then as many as take `max_bytes`.

        Raises Internal(corrupt_range) when one of them is damaged: with `offset`, the first message that cannot be
        read, and `next_offset`, the first behind it that may.
        """
        ...

    def tiered(self, queue_id: int, end: int) -> None:
        """Offsets below `end` are in the tier: their local bytes may be recycled."""
        ...
