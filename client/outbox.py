"""What a producer holds until it is sent: `Intake` (messages as columns), `Piece` (rows of one queue), `Delivery`.

    send_nowait --> Intake (lists; one append a message) --drain--> Pieces (rows, one for each queue) --> lane

A message costs an append and a `Delivery`, which only remembers its intake and row. Acknowledgements are kept for
each piece, as ranges of offsets; a delivery looks its own up when it is asked.

Not here: how pieces travel (`lane`), and when an intake is drained (`producer`).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.client.message import checked_key, checked_properties, checked_tag, checked_time
from millpond.client.rows import Rows
from millpond.core.errors import MillpondError
from millpond.core.schema import PROPERTIES_TYPE, TIMESTAMP


class Sent(NamedTuple):
    """An acknowledged message. `message_id` is opaque; (queue, offset) is its place in the topic."""

    message_id: str
    queue: int
    offset: int


class SentRange(msgspec.Struct, frozen=True):
    """`count` messages acknowledged at `first_offset` and on; `row` is the first one's row in what was sent.
    `id_prefix` and an offset make a message id."""

    queue: int
    first_offset: int
    count: int
    row: int
    id_prefix: str

    def sent(self, row: int) -> Sent:
        offset = self.first_offset + row - self.row
        return Sent(f"{self.id_prefix}{offset}", self.queue, offset)


class Piece:
    """Rows of one queue, ready to travel, and in the end their answer. `count` stays when the rows are gone."""

    __slots__ = ("_row_bounds", "_waiters", "bytes", "count", "error", "observed", "ranges", "rows")

    def __init__(self, rows: Rows) -> None:
        self.rows: Rows = rows
        self.count = len(rows)
        self.bytes = rows.bytes
        self.ranges: list[SentRange] | None = None
        self.error: MillpondError | None = None
        self.observed = False
        self._row_bounds: list[int] = []
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def done(self) -> bool:
        return self.ranges is not None or self.error is not None

    def settle(self, ranges: list[SentRange]) -> None:
        """Acknowledged: `ranges` cover its rows in order."""
        self.ranges = ranges
        self._row_bounds = [r.row for r in ranges]
        self._finish()

    def fail(self, error: MillpondError) -> None:
        self.error = error
        self._finish()

    def _finish(self) -> None:
        del self.rows  # the memory is free; nobody asks for it again
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self) -> None:
        self.observed = True
        if not self.done:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def sent(self, row: int) -> Sent:
        """Where row `row` of this piece stands; raises its error."""
        self.observed = True
        if self.error is not None:
            raise self.error
        assert self.ranges is not None
        return self.ranges[bisect_right(self._row_bounds, row) - 1].sent(row)


class Intake:
    """Messages taken and not yet partitioned. Each optional column is as long as up to its last value, None where a
    row has none.

    A body, alone or with a key like all before it, is taken without a further look while fewer than `room_rows` are
    held and `room_bytes` are not reached.
    After `drain`: `pieces` by queue, and for each row the piece and the row in it.
    """

    __slots__ = (
        "_born", "_drained", "_pieces", "_properties", "_row_in_piece", "_tags", "_which", "bodies", "bytes", "keys",
        "room_bytes", "room_rows",
    )  # fmt: skip

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.bytes = 0
        self.room_bytes = self.room_rows = 0
        self.keys: list[bytes | None] = []
        self._tags: list[str | None] = []
        self._properties: list[list[tuple[str, str]] | None] = []
        self._born: list[int | None] = []
        self._drained: list[asyncio.Future[None]] = []
        self._pieces: list[Piece] | None = None
        self._which: npt.NDArray[np.intp] | None = None
        self._row_in_piece: npt.NDArray[np.intp] | None = None

    def open(self, room_bytes: int, room_rows: int) -> None:
        """Let bodies be taken without a further look up to there."""
        self.room_bytes, self.room_rows = room_bytes, room_rows

    def add_columns(
        self,
        row: int,
        key: bytes | str | None,
        tag: str | None,
        properties: Mapping[str, str] | None,
        born_ts: int | None,
    ) -> None:
        """The optional columns of `row`. Raises BadRequest, TooLarge; then nothing was added."""
        known_key = None if key is None else checked_key(key)
        known_tag = None if tag is None else checked_tag(tag)
        items, size = checked_properties(properties) if properties else ([], 0)
        if born_ts is not None:
            _put(self._born, row, checked_time(born_ts))
        if known_key is not None:
            _put(self.keys, row, known_key)
            self.bytes += len(known_key)
        if known_tag is not None:
            _put(self._tags, row, known_tag)
            self.bytes += len(known_tag)
        if items:
            _put(self._properties, row, items)
            self.bytes += size + 8 * len(items)

    def to_rows(self) -> Rows:
        """All of them, with the columns in use."""
        if not (self.keys or self._tags or self._properties or self._born):
            return Rows.of_bodies(self.bodies, size=self.bytes)
        count = len(self.bodies)
        columns: dict[str, tuple[list[Any], pa.DataType]] = {
            "key": (self.keys, pa.binary()),
            "tag": (self._tags, pa.string()),
            "properties": (self._properties, PROPERTIES_TYPE),
            "born_ts": (self._born, TIMESTAMP),
        }
        present = {
            name: pa.array(values + [None] * (count - len(values)), type_)
            for name, (values, type_) in columns.items()
            if values
        }
        return Rows.of_bodies(self.bodies, pa.RecordBatch.from_pydict(present))

    def drained(
        self,
        pieces: list[Piece],
        which: npt.NDArray[np.intp] | None = None,
        row_in_piece: npt.NDArray[np.intp] | None = None,
    ) -> None:
        """Its rows are in `pieces`: all in the only one, or row i in `pieces[which[i]]` at `row_in_piece[i]`."""
        self._pieces, self._which, self._row_in_piece = pieces, which, row_in_piece
        self.bodies = []
        for waiter in self._drained:
            if not waiter.done():
                waiter.set_result(None)
        self._drained.clear()

    def locate(self, row: int) -> tuple[Piece, int] | None:
        """The piece that holds `row` and the row in it; None before it is drained."""
        if self._pieces is None:
            return None
        if self._which is None or self._row_in_piece is None:
            return self._pieces[0], row
        return self._pieces[int(self._which[row])], int(self._row_in_piece[row])

    def observe(self) -> None:
        """Somebody will look at every answer: what fails is not for `flush()` to raise."""
        for piece in self._pieces or []:
            piece.observed = True

    async def wait_drained(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._drained.append(waiter)
        await waiter


class Delivery(msgspec.Struct, eq=False, gc=False):
    """One message on its way: awaited, it is `Sent` or raises. Dropping it is fine: `flush()` raises what failed.

    A struct because one is made for every message; an intake does not know them, so there is no cycle to collect.
    """

    intake: Intake
    _row: int

    def done(self) -> bool:
        place = self.intake.locate(self._row)
        return place is not None and place[0].done

    def result(self) -> Sent:
        """`Sent` of a message that is `done()`; raises its error, or InvalidStateError when it is not done."""
        place = self.intake.locate(self._row)
        if place is None or not place[0].done:
            raise asyncio.InvalidStateError("the message is not yet acknowledged")
        return place[0].sent(place[1])

    def __await__(self) -> Generator[Any, None, Sent]:
        return self._wait().__await__()

    async def _wait(self) -> Sent:
        place = self.intake.locate(self._row)
        if place is None:
            await self.intake.wait_drained()
            place = self.intake.locate(self._row)
            assert place is not None
        await place[0].wait()
        return place[0].sent(place[1])


def _put(column: list[Any], row: int, value: Any) -> None:
    """`value` at `row` of a column that is no longer than that."""
    column += [None] * (row - len(column))
    column.append(value)
