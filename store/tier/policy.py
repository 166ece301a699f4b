"""When a topic's unsealed messages are worth an object: `due`."""

from __future__ import annotations

from typing import Literal

from millpond.core.config import TierConfig
from millpond.store.tier.run import DAY_MS

Reason = Literal["full", "trickle", "age", "midnight"]


def due(unsealed_bytes: int, oldest_ts: int, now_ms: int, config: TierConfig) -> Reason | None:
    """Why a run closes now, or None: it may still grow.

    full: an object's worth is there; trickle: 4 MiB that are 10 minutes old; age: whatever is 6 hours old; midnight:
    its UTC day is over. So ten thousand trickling topics make at most five small objects a day each.
    """
    if unsealed_bytes <= 0:
        return None
    if unsealed_bytes >= config.seal_bytes:
        return "full"
    if oldest_ts // DAY_MS < now_ms // DAY_MS:
        return "midnight"
    age_ms = now_ms - oldest_ts
    if age_ms >= config.seal_age_ms:
        return "age"
    if age_ms >= config.seal_trickle_ms and unsealed_bytes >= config.seal_trickle_bytes:
        return "trickle"
    return None
