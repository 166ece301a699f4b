"""What a receive with an attempt id was given, for when it is repeated: `Attempts`. Memory of the primary only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from millpond.core.limits import ATTEMPT_ID_SECONDS, ATTEMPT_IDS
from millpond.store.client import ReceiveRequest
from millpond.store.groups import Groups
from millpond.store.handout import Drawn


class _Remembered(NamedTuple):
    until: int
    drawn: list[Drawn]


class Attempts:
    def __init__(self, groups: Groups, now_ms: Callable[[], int]) -> None:
        self._groups = groups
        self._now_ms = now_ms
        self._attempts: OrderedDict[tuple[int, str], _Remembered] = OrderedDict()

    def remember(self, group_id: int, attempt_id: str, drawn: list[Drawn]) -> None:
        now = self._now_ms()
        self._attempts[group_id, attempt_id] = _Remembered(now + ATTEMPT_ID_SECONDS * 1000, drawn)
        self._attempts.move_to_end((group_id, attempt_id))
        while len(self._attempts) > ATTEMPT_IDS or next(iter(self._attempts.values())).until <= now:
            self._attempts.popitem(last=False)

    def repeated(self, request: ReceiveRequest) -> list[Drawn]:
        """What an earlier receive with the same attempt id was given and still holds."""
        if request.attempt_id is None:
            return []
        remembered = self._attempts.get((request.group.group_id, request.attempt_id))
        now = self._now_ms()
        if remembered is None or remembered.until <= now:
            return []
        held: list[Drawn] = []
        for drawn in remembered.drawn:
            place = self._groups.find(request.group.group_id, drawn.place.queue_id)
            if place is drawn.place and place.cursor.generation == drawn.generation:
                mask, until = place.cursor.still_leased(drawn.lease, drawn.offsets, now)
                if mask.any():
                    held.append(drawn._replace(offsets=drawn.offsets[mask], attempts=drawn.attempts[mask], until=until))
        return held
