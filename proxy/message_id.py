"""Message ids: `<store group>-<queue id>-<offset>`, e.g. `a-12-4711`. Opaque to clients, stable for good."""

from __future__ import annotations

import re
from typing import NamedTuple

from millpond.metadata.client import QueueInfo

_ID = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)-(0|[1-9][0-9]{0,17})-(0|[1-9][0-9]{0,17})")


class MessageId(NamedTuple):
    group: str
    queue_id: int
    offset: int


def prefix(queue: QueueInfo, offset: int) -> str:
    """What an id starts with; the offset follows. The group is that of the span the offset lies in."""
    group = queue.spans[0].store_group
    for span in queue.spans:
        if span.first_offset <= offset:
            group = span.store_group
    return f"{group}-{queue.queue_id}-"


def parse(text: str) -> MessageId | None:
    """None for what cannot be one of our ids."""
    found = _ID.fullmatch(text)
    return None if found is None else MessageId(found[1], int(found[2]), int(found[3]))
