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
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from millpond.core.frame import ProducerPart
from millpond.core.limits import PRODUCER_IDLE_MS, PRODUCER_PARTS, PRODUCER_SESSIONS
from millpond.store.client import ProducerState
from millpond.store.fold.snapshot import Snapshot, Tables, parted, table_of

REPLAY = "replay."
OPENS = -1

_PART = struct.Struct("<qqqqq")  # first, last, offset of its first row, rows, store timestamp
_NEWEST = struct.Struct("<8xq16xq")  # last and store timestamp of one


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


_Session: TypeAlias = bytes
"""The last few parts, packed: a million sessions must fit the memory, and be nothing to a collector of garbage."""

_Key = tuple[int, str]
_COLUMNS = ["queue_id", "producer_id", "last", "last_ts", "parts"]
_ACCEPTED = Checked(Verdict.ACCEPT)
_UNKNOWN = Checked(Verdict.UNKNOWN_PRODUCER)


class Producers:
    """All sessions of a store, by (queue id, producer id)."""

    def __init__(self) -> None:
        self._idle: OrderedDict[_Key, _Session] = OrderedDict()  # by last_ts: the first has been idle longest
        self._replays: dict[_Key, _Session] = {}
        self._gone: set[int] = set()  # queues that were dropped, and whose sessions are still here
        self._now_ts = 0

    def __len__(self) -> int:
        self._forget_gone()
        return len(self._idle) + len(self._replays)

    def check(self, queue_id: int, part: ProducerPart) -> Checked:
        """Whether this part comes next. Changes nothing."""
        session = self._get((queue_id, part.producer_id))
        if session is None:
            return _ACCEPTED if part.previous == OPENS else _UNKNOWN
        last = _newest(session)[0]
        if part.last <= last:
            offsets, store_ts = _repeated(session, part)
            return Checked(Verdict.DUPLICATE, offsets, store_ts, last)
        return Checked(Verdict.ACCEPT if part.previous == last else Verdict.OUT_OF_ORDER, stored_last=last)

    def record(self, queue_id: int, part: ProducerPart, first_offset: int, store_ts: int) -> None:
        """An accepted part's rows stand at `first_offset` and up, in a frame stamped `store_ts`. Idempotent."""
        self.advance(store_ts)
        key = (queue_id, part.producer_id)
        sessions = self._of(key)
        session = sessions.get(key)
        packed = _PART.pack(part.first, part.last, first_offset, part.rows, store_ts)
        if session is None:
            sessions[key] = packed
        elif part.last > _newest(session)[0]:
            del sessions[key]  # so that it stands at the end, also for `snapshot`
            sessions[key] = (session + packed)[-PRODUCER_PARTS * _PART.size :]
        if len(self) > PRODUCER_SESSIONS and self._idle:
            self._idle.popitem(last=False)

    def advance(self, store_ts: int) -> None:
        """A frame was stamped `store_ts`: end the sessions that have been idle for too long then."""
        if store_ts <= self._now_ts:
            return
        self._now_ts = store_ts
        while self._idle:
            key = next(iter(self._idle))
            if _newest(self._idle[key])[1] + PRODUCER_IDLE_MS > store_ts:
                return
            del self._idle[key]

    def close(self, queue_id: int, producer_id: str) -> bool:
        """Forget a session; whether there was one."""
        key = (queue_id, producer_id)
        return self._of(key).pop(key, None) is not None

    def drop_queue(self, queue_id: int) -> None:
        """Its sessions go with the next call: the queues of a topic go together, and each look at all takes 70 ms for a
        million."""
        self._gone.add(queue_id)

    def _forget_gone(self) -> None:
        if not self._gone:
            return
        sessions: dict[_Key, _Session]
        for sessions in (self._idle, self._replays):
            for key in [key for key in dict.keys(sessions) if key[0] in self._gone]:
                del sessions[key]
        self._gone.clear()

    def state(self, queue_id: int, producer_id: str) -> ProducerState | None:
        session = self._get((queue_id, producer_id))
        return None if session is None else ProducerState(queue_id, *_newest(session))

    def _of(self, key: _Key) -> dict[_Key, _Session]:
        self._forget_gone()
        return self._replays if key[1].startswith(REPLAY) else self._idle

    def _get(self, key: _Key) -> _Session | None:
        return self._of(key).get(key)

    # -- snapshot ---------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """One row for each session, those idle longest first, and the frame time that expiry has seen."""
        self._forget_gone()
        # by an OrderedDict's own iterator, which looks each key up, this takes 1.5 s for a million instead of 0.03
        keys = [*dict.keys(self._idle), *self._replays]
        sessions = [*dict.values(self._idle), *self._replays.values()]
        now_ts = self._now_ts
        return lambda: {"producers": _table(keys, sessions), "producers.time": pa.table({"now_ts": np.array([now_ts])})}

    def load(self, tables: Tables) -> None:
        """Into an empty instance, what `snapshot` gave."""
        assert not len(self)
        columns = [tables["producers"][name].to_pylist() for name in ("queue_id", "producer_id", "parts")]
        for queue_id, producer_id, parts in zip(*columns, strict=True):
            key = (queue_id, producer_id)
            self._of(key)[key] = parts
        self._now_ts = tables["producers.time"]["now_ts"][0].as_py()


def _table(keys: list[_Key], sessions: list[_Session]) -> pa.Table:
    table = table_of(sessions, ("last", "last_ts"), _newest)
    for name, rows, type_, of in (
        ("queue_id", keys, pa.int64(), itemgetter(0)),
        ("producer_id", keys, pa.string(), itemgetter(1)),
        ("parts", sessions, pa.binary(), bytes),
    ):
        table = table.append_column(name, pa.concat_arrays(pa.array(map(of, some), type_) for some in parted(rows)))
    return table.select(_COLUMNS)


def _newest(session: _Session) -> tuple[int, int]:
    """Its last sequence, and the timestamp of the frame that brought it."""
    return _NEWEST.unpack_from(session, len(session) - _PART.size)


def _repeated(session: _Session, part: ProducerPart) -> tuple[range, int]:
    for first, last, offset, rows, store_ts in _PART.iter_unpack(session):
        if (first, last, rows) == (part.first, part.last, part.rows):
            return range(offset, offset + rows), store_ts
    return range(0), 0
