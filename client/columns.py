"""Messages one by one out of columns: `Columns`, a batch whose columns become lists when asked for, and `Row`.

Making every field of every message cost more than receiving it. So a `Row` has its body, and knows its number; the
other fields are looked up when somebody asks. Bodies are made for some rows at a time: their memory is then used again
for the next ones while it is still in the processor's cache (1 KiB: 0.14 us a message; a whole page at once: 0.6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

AT_ONCE = 256
"""Rows whose bodies are made together."""

ColumnsT = TypeVar("ColumnsT", bound="Columns")
RowT = TypeVar("RowT")


class Columns:
    """`batch`: columns of TIER_SCHEMA, perhaps with others behind them."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self._lists: dict[str, list[Any]] = {}

    def value(self, name: str, row: int) -> Any:
        """One field of one row."""
        values = self._lists.get(name)
        if values is None:
            values = self._lists[name] = _list_of(name, self.batch.column(name))
        return values[row]


class Row(msgspec.Struct, gc=False, eq=False):
    """A message. Times are milliseconds since 1970 UTC. It keeps the batch that it is a row of in memory."""

    _columns: Columns
    _row: int
    body: bytes

    def __repr__(self) -> str:
        name, size = type(self).__name__, len(self.body)
        return f"{name}(queue={self.queue}, offset={self.offset}, key={self.key!r}, {size} bytes)"

    @property
    def queue(self) -> int:
        value: int = self._columns.value("queue", self._row)
        return value

    @property
    def offset(self) -> int:
        value: int = self._columns.value("offset", self._row)
        return value

    @property
    def store_ts(self) -> int:
        value: int = self._columns.value("store_ts", self._row)
        return value

    @property
    def born_ts(self) -> int | None:
        value: int | None = self._columns.value("born_ts", self._row)
        return value

    @property
    def key(self) -> bytes | None:
        value: bytes | None = self._columns.value("key", self._row)
        return value

    @property
    def tag(self) -> str | None:
        value: str | None = self._columns.value("tag", self._row)
        return value

    @property
    def properties(self) -> dict[str, str]:
        """Empty when there are none."""
        value: dict[str, str] = self._columns.value("properties", self._row)
        return value

    @property
    def origin(self) -> str | None:
        """Where a replayed message came from, as JSON."""
        value: str | None = self._columns.value("origin", self._row)
        return value

    @property
    def text(self) -> str:
        """The body as UTF-8."""
        return self.body.decode()


def each(kind: Callable[[ColumnsT, int, bytes], RowT], columns: ColumnsT) -> Iterator[RowT]:
    """A `kind` for each row."""
    bodies = columns.batch.column("body")
    if len(bodies) <= AT_ONCE:
        return iter(_some(kind, columns, 0, bodies))
    starts = range(0, len(bodies), AT_ONCE)
    return chain.from_iterable(_some(kind, columns, first, bodies.slice(first, AT_ONCE)) for first in starts)


def _some(
    kind: Callable[[ColumnsT, int, bytes], RowT], columns: ColumnsT, first: int, bodies: pa.BinaryArray
) -> Iterable[RowT]:
    return map(kind, repeat(columns), range(first, first + len(bodies)), bodies.to_pylist())


def _list_of(name: str, column: pa.Array) -> list[Any]:
    if name in {"store_ts", "born_ts"}:
        column = column.cast(pa.int64())
    values: list[Any] = properties_of(column) if name == "properties" else column.to_pylist()
    return values


def properties_of(column: pa.MapArray) -> list[dict[str, str]]:
    """A dictionary for each row; empty for null."""
    if column.null_count == len(column):
        return [{} for _ in range(len(column))]
    return [dict(pairs) if pairs else {} for pairs in column.to_pylist()]
