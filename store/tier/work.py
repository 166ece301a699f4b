"""The work of sealing, apart from what is decided and committed: `Work`, an interface.

    begin     a run is read from the log and becomes an object's bytes, staged in the tier: nobody sees them yet
    finish    the last of them are there; another run may begin meanwhile
    put       the object appears under its name, and what is there is compared with what was made
    drop      it will not be

`making.LocalWork` does it in this process, `apart.WorkApart` has a process of its own do it. Policy, names, manifest
and the commit are the sealer's, so what is sealed twice or not at all does not depend on who made it.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from millpond.metadata.client import ObjectRange
from millpond.store.tier.run import Lost, Piece, Wanted


class Job(msgspec.Struct, frozen=True):
    """A run of `topic_id`, about `most_bytes` raw, of the UTC date of `oldest_ts` if there is anything of it."""

    topic_id: int
    epoch: int
    wanted: Wanted
    oldest_ts: int
    most_bytes: int


class Begun(msgspec.Struct, frozen=True):
    """A run that was read to its end; the last of it may still be encoded. `number`: for `finish` and `drop`; `ends`:
    queue id -> where its offsets in it end."""

    number: int
    pieces: list[Piece]

    @property
    def ends(self) -> dict[int, int]:
        return {piece.queue.queue_id: piece.end for piece in self.pieces}


class Made(msgspec.Struct, frozen=True):
    """A staged object, whole. `number`: that of its run; `first_ts`: a store timestamp of its date; `lost`: what of the
    ranges could not be read."""

    number: int
    bytes: int
    sha256: str
    footer_bytes: int
    ranges: list[ObjectRange]
    lost: list[Lost]
    first_ts: int
    raw_bytes: int


class Work(Protocol):
    """Errors are MillpondErrors; what a call that failed or was cancelled had staged is gone."""

    async def begin(self, job: Job) -> Begun | None:
        """None when there is nothing to read. Raises Unavailable(tier_unavailable), Internal(corrupt_range)."""
        ...

    async def finish(self, number: int) -> Made:
        """Of a run that has begun. Raises Unavailable(tier_unavailable)."""
        ...

    async def put(self, made: Made, path: str) -> None:
        """Raises Unavailable(tier_unavailable), Internal(tier_corrupt)."""
        ...

    async def drop(self, number: int) -> None:
        """Of a run: after `put`, or instead of it. Never fails."""
        ...

    async def rest(self) -> None:
        """There is nothing to do just now: memory and processes may go."""
        ...

    async def close(self) -> None: ...
