"""Which tier object holds an offset: windows of the manifest, remembered by queue.

What an object holds never changes, so a remembered window is right as long as its objects exist; what it
lacks may have been sealed since. So a hit is used, a miss always asks the metadata part, and a reader that meets
a deleted object (compaction, retention) asks again with `fresh`. Bounded: TIER_WINDOWS queues.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from typing import NamedTuple

from millpond.core.limits import TIER_WINDOW_OFFSETS, TIER_WINDOWS
from millpond.core.tier.reader import ObjectRef
from millpond.metadata.client import MetadataClient, TierObject


class Piece(NamedTuple):
    """Offsets [first, end) of a queue stand in `obj`."""

    first: int
    end: int
    obj: ObjectRef


def reference(obj: TierObject) -> ObjectRef:
    return ObjectRef(path=obj.path, bytes=obj.bytes, footer_bytes=obj.footer_bytes)


class ManifestViews:
    def __init__(self, metadata: MetadataClient) -> None:
        self._metadata = metadata
        self._windows: OrderedDict[int, list[Piece]] = OrderedDict()

    async def at(self, topic_id: int, queue_id: int, offset: int, *, fresh: bool = False) -> Piece | None:
        """The piece that holds `offset` of a queue, None when the tier has none. Raises Unavailable."""
        if not fresh:
            found = _holding(self._windows.get(queue_id, []), offset)
            if found is not None:
                self._windows.move_to_end(queue_id)
                return found
        view = await self._metadata.tier_view(topic_id, [queue_id], offset, offset + TIER_WINDOW_OFFSETS)
        pieces = [
            Piece(one.first, one.end, reference(obj))
            for obj in view.objects
            for one in obj.ranges
            if one.queue_id == queue_id
        ]
        pieces.sort(key=lambda piece: (piece.first, piece.end))
        self._windows[queue_id] = pieces
        self._windows.move_to_end(queue_id)
        while len(self._windows) > TIER_WINDOWS:
            self._windows.popitem(last=False)
        return _holding(pieces, offset)


def _holding(pieces: list[Piece], offset: int) -> Piece | None:
    at = bisect_right(pieces, offset, key=lambda piece: piece.first) - 1
    return pieces[at] if at >= 0 and offset < pieces[at].end else None
