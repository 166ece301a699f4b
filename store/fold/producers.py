"""Producer sessions: what each producer has sent last to each queue, so that a repeated part is told apart.

A part carries `previous`, `first` and `last`; `previous` -1 opens a session. A part is accepted when `previous` is
the session's last, a duplicate when its `last` is not above it, else out of order: a rule of mere ascent would lose
data when 101-200 comes by another proxy before 1-100. Gaps inside a part are legal.

    session -1, no session        accept (opens)
    session -1, session known     duplicate when last <= stored last, else out_of_order
    previous,   no session        unknown_producer
    previous = stored last        accept
    last <= stored last           duplicate
    otherwise                     out_of_order

Sessions end after 7 days without a part, by frame time only, so that every replica ends them at the same frame;
those whose id begins with `replay.` live until they are closed. Above `PRODUCER_SESSIONS` the one that has been
idle longest goes: its producer is told `unknown_producer`, never that a repeat is new.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from millpond.core.frame import ProducerPart
from millpond.core.limits import PRODUCER_IDLE_MS, PRODUCER_PARTS, PRODUCER_SESSIONS
from millpond.store.client import ProducerState

REPLAY = "replay."
OPENS = -1

_PART = struct.Struct("<qqqqq")  # first, last, offset of its first row, rows, store timestamp


class Verdict(Enum):
    ACCEPT = "accept"
    DUPLICATE = "duplicate"
    OUT_OF_ORDER = "out_of_order"
    UNKNOWN_PRODUCER = "unknown_producer"


class Checked(NamedTuple):
    """For a duplicate: `offsets` of its rows, in order, and the timestamp of their frame.

    Empty when the part is older than the last few, or was cut otherwise the first time.
    """

    verdict: Verdict
    offsets: range = range(0)
    store_ts: int = 0
    stored_last: int = -1


class _Session(NamedTuple):
    """`parts`: the last few, packed: a million sessions must fit the memory."""

    last: int
    last_ts: int
    parts: bytes


_Key = tuple[int, str]
_ACCEPTED = Checked(Verdict.ACCEPT)
_UNKNOWN = Checked(Verdict.UNKNOWN_PRODUCER)


class Producers:
    """All sessions of a store, by (queue id, producer id)."""

    def __init__(self) -> None:
        self._idle: OrderedDict[_Key, _Session] = OrderedDict()  # by last_ts: the first has been idle longest
        self._replays: dict[_Key, _Session] = {}
        self._now_ts = 0

    def __len__(self) -> int:
        return len(self._idle) + len(self._replays)

    def check(self, queue_id: int, part: ProducerPart) -> Checked:
        """Whether this part comes next. Changes nothing."""
        session = self._get((queue_id, part.producer_id))
        if session is None:
            return _ACCEPTED if part.previous == OPENS else _UNKNOWN
        if part.last <= session.last:
            offsets, store_ts = _repeated(session, part)
            return Checked(Verdict.DUPLICATE, offsets, store_ts, session.last)
        if part.previous == session.last:
            return Checked(Verdict.ACCEPT, stored_last=session.last)
        return Checked(Verdict.OUT_OF_ORDER, stored_last=session.last)

    def record(self, queue_id: int, part: ProducerPart, first_offset: int, store_ts: int) -> None:
        """An accepted part's rows stand at `first_offset` and up, in a frame stamped `store_ts`. Idempotent."""
        self.advance(store_ts)
        key = (queue_id, part.producer_id)
        sessions = self._of(key)
        session = sessions.get(key)
        packed = _PART.pack(part.first, part.last, first_offset, part.rows, store_ts)
        if session is None:
            sessions[key] = _Session(part.last, store_ts, packed)
        elif part.last > session.last:
            kept = (session.parts + packed)[-PRODUCER_PARTS * _PART.size :]
            sessions[key] = _Session(part.last, store_ts, kept)
            if sessions is self._idle:
                self._idle.move_to_end(key)
        if len(self) > PRODUCER_SESSIONS and self._idle:
            self._idle.popitem(last=False)

    def advance(self, store_ts: int) -> None:
        """A frame was stamped `store_ts`: end the sessions that have been idle for too long then."""
        if store_ts <= self._now_ts:
            return
        self._now_ts = store_ts
        while self._idle:
            key = next(iter(self._idle))
            if self._idle[key].last_ts + PRODUCER_IDLE_MS > store_ts:
                return
            del self._idle[key]

    def close(self, queue_id: int, producer_id: str) -> bool:
        """Forget a session; whether there was one."""
        key = (queue_id, producer_id)
        return self._of(key).pop(key, None) is not None

    def drop_queue(self, queue_id: int) -> None:
        sessions: dict[_Key, _Session]
        for sessions in (self._idle, self._replays):
            for key in [key for key in sessions if key[0] == queue_id]:
                del sessions[key]

    def state(self, queue_id: int, producer_id: str) -> ProducerState | None:
        session = self._get((queue_id, producer_id))
        return None if session is None else ProducerState(queue_id, session.last, session.last_ts)

    def _of(self, key: _Key) -> dict[_Key, _Session]:
        return self._replays if key[1].startswith(REPLAY) else self._idle

    def _get(self, key: _Key) -> _Session | None:
        return self._of(key).get(key)

    # -- snapshot ---------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, pa.Table]:
        """One row for each session, those idle longest first, and the frame time that expiry has seen."""
        keys = [*self._idle, *self._replays]
        sessions = [*self._idle.values(), *self._replays.values()]
        return {
            "producers": pa.table(
                {
                    "queue_id": pa.array([key[0] for key in keys], pa.int64()),
                    "producer_id": pa.array([key[1] for key in keys], pa.string()),
                    "last": pa.array([session.last for session in sessions], pa.int64()),
                    "last_ts": pa.array([session.last_ts for session in sessions], pa.int64()),
                    "parts": pa.array([session.parts for session in sessions], pa.binary()),
                }
            ),
            "producers.time": pa.table({"now_ts": np.array([self._now_ts])}),
        }

    def load(self, tables: dict[str, pa.Table]) -> None:
        """Into an empty instance, what `snapshot` gave."""
        assert not len(self)
        columns = [column.to_pylist() for column in tables["producers"].columns]
        for queue_id, producer_id, last, last_ts, parts in zip(*columns, strict=True):
            key = (queue_id, producer_id)
            self._of(key)[key] = _Session(last, last_ts, parts)
        self._now_ts = tables["producers.time"]["now_ts"][0].as_py()


def _repeated(session: _Session, part: ProducerPart) -> tuple[range, int]:
    for first, last, offset, rows, store_ts in _PART.iter_unpack(session.parts):
        if (first, last, rows) == (part.first, part.last, part.rows):
            return range(offset, offset + rows), store_ts
    return range(0), 0
