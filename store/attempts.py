"""What a receive with an attempt id was given, for when it is repeated: `Attempts`. Memory of the primary only.

Every receive of the SDK has an attempt id, and each is remembered for a minute: so a run of messages is kept as a run,
and what is not is bounded in bytes. Nor is any of it looked at by the collector of garbage (`gc=False`, and no tuple or
list for a receive of one run): tens of thousands that stay would hold the loop up for tens of milliseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from millpond.core.limits import ATTEMPT_BYTES, ATTEMPT_ID_SECONDS, ATTEMPT_IDS
from millpond.store.client import ReceiveRequest
from millpond.store.fold.operations import Ints
from millpond.store.groups import Groups
from millpond.store.handout import Drawn
from millpond.store.places import Place
from millpond.store.waiters import ids_of


class _Rows(msgspec.Struct, frozen=True, gc=False):
    """A `Drawn`; `offsets` as a range when they are one, `attempts` None when all are the first."""

    place: Place
    generation: int
    lease: int
    offsets: Ints | range
    attempts: npt.NDArray[np.uint32] | None

    @property
    def nbytes(self) -> int:
        offsets = 0 if isinstance(self.offsets, range) else self.offsets.nbytes
        return offsets + (0 if self.attempts is None else self.attempts.nbytes)


class _Remembered(msgspec.Struct, frozen=True, gc=False):
    until: int
    first: _Rows
    others: Sequence[_Rows]

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + sum(one.nbytes for one in self.others)


class Attempts:
    """`nbytes`: of arrays that are held."""

    def __init__(self, groups: Groups, now_ms: Callable[[], int]) -> None:
        self._groups = groups
        self._now_ms = now_ms
        self._attempts: OrderedDict[str, _Remembered] = OrderedDict()
        self.nbytes = 0

    def remember(self, group_id: int, attempt_id: str, drawn: list[Drawn]) -> None:
        now = self._now_ms()
        key = _key(group_id, attempt_id)
        self._forget(self._attempts.pop(key, None))
        first, *others = drawn
        until = now + ATTEMPT_ID_SECONDS * 1000
        remembered = _Remembered(until, _compact(first), tuple(map(_compact, others)))
        self._attempts[key] = remembered
        self.nbytes += remembered.nbytes
        while self._attempts and (
            len(self._attempts) > ATTEMPT_IDS
            or self.nbytes > ATTEMPT_BYTES
            or next(iter(self._attempts.values())).until <= now
        ):
            self._forget(self._attempts.popitem(last=False)[1])

    def _forget(self, remembered: _Remembered | None) -> None:
        if remembered is not None:
            self.nbytes -= remembered.nbytes

    def repeated(self, request: ReceiveRequest) -> list[Drawn]:
        """What an earlier receive with the same attempt id was given and still holds."""
        if request.attempt_id is None:
            return []
        remembered = self._attempts.get(_key(request.group.group_id, request.attempt_id))
        now = self._now_ms()
        if remembered is None or remembered.until <= now:
            return []
        held: list[Drawn] = []
        named = ids_of(request.queues)
        for rows in (remembered.first, *remembered.others):
            if rows.place.queue_id not in named:  # who asks again does not know this queue yet
                continue
            place = self._groups.find(request.group.group_id, rows.place.queue_id)
            if place is rows.place and place.cursor.generation == rows.generation:
                drawn = _whole(rows, now)
                mask, until = place.cursor.still_leased(drawn.lease, drawn.offsets, now)
                if mask.any():
                    held.append(drawn._replace(offsets=drawn.offsets[mask], attempts=drawn.attempts[mask], until=until))
        return held


def _key(group_id: int, attempt_id: str) -> str:
    return f"{group_id} {attempt_id}"


def _compact(drawn: Drawn) -> _Rows:
    first, last = int(drawn.offsets[0]), int(drawn.offsets[-1])
    if drawn.spots is not None:  # new ones, which follow each other
        return _Rows(drawn.place, drawn.generation, drawn.lease, range(first, last + 1), None)
    dense = last - first == len(drawn.offsets) - 1
    offsets = range(first, last + 1) if dense else drawn.offsets
    again = np.count_nonzero(drawn.attempts != 1)
    return _Rows(drawn.place, drawn.generation, drawn.lease, offsets, drawn.attempts if again else None)


def _whole(rows: _Rows, until: int) -> Drawn:
    offsets = np.arange(rows.offsets.start, rows.offsets.stop) if isinstance(rows.offsets, range) else rows.offsets
    attempts = np.ones(len(offsets), np.uint32) if rows.attempts is None else rows.attempts
    return Drawn(rows.place, rows.generation, rows.lease, offsets, attempts, until)
