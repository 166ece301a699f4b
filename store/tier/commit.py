"""Brings a made object into the tier and its row into the manifest: `Committer`.

    tier_start (row STARTED) -> put (appears, size and checksum compared) -> tier_commit (one transaction)

Whatever happens between two steps, the manifest names only objects that were verified, and each offset once:
a crash leaves at most an object without a COMMITTED row, which the sweep deletes. A step of unknown outcome is
resolved before anything else is done: a PUT by comparing what is there, a commit by committing once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from millpond.core.clock import Random
from millpond.core.errors import MillpondError, Unavailable
from millpond.core.limits import OBJECT_PAUSE_SECONDS, SEAL_COMMIT_ATTEMPTS
from millpond.metadata.client import MetadataClient, TierObject

log = logging.getLogger(__name__)


class Committer:
    """One object at a time. `store_group` and `epoch` fence every change of the manifest."""

    def __init__(self, metadata: MetadataClient, random: Random) -> None:
        self._metadata = metadata
        self._random = random
        self._unresolved: TierObject | None = None

    async def commit(self, store_group: str, epoch: int, obj: TierObject, put: Callable[[], Awaitable[None]]) -> None:
        """All steps; `put` is that of `work.Work`.

        Raises Unavailable, Conflict(epoch_superseded, manifest_conflict), Internal(tier_corrupt)."""
        await self.resolve(store_group, epoch)
        await self._metadata.tier_start(store_group, epoch, obj)
        try:
            await put()
        except MillpondError:
            await self._abort(obj)
            raise
        self._unresolved = obj
        await self.resolve(store_group, epoch)

    async def resolve(self, store_group: str, epoch: int) -> None:
        """Bring a verified object's commit to an end, this time or next time; nothing to do in between."""
        if self._unresolved is None:
            return
        try:
            await self._commit_row(store_group, epoch, self._unresolved)
        except Unavailable:
            raise  # it may have been committed: the same commit again will tell
        except MillpondError:
            obj, self._unresolved = self._unresolved, None
            await self._abort(obj)
            raise
        self._unresolved = None

    async def _commit_row(self, store_group: str, epoch: int, obj: TierObject) -> None:
        for attempt in range(1, SEAL_COMMIT_ATTEMPTS + 1):
            try:
                await self._metadata.tier_commit(store_group, epoch, obj.object_id)
                return
            except Unavailable:
                if attempt == SEAL_COMMIT_ATTEMPTS:
                    raise
            await asyncio.sleep(self._random.uniform(0, 2 * OBJECT_PAUSE_SECONDS))

    async def _abort(self, obj: TierObject) -> None:
        try:
            await self._metadata.tier_abort(obj.object_id)
        except MillpondError as error:
            log.warning("%s stays STARTED in the manifest until the sweep: %s", obj.path, error.detail)
