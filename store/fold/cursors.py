"""All cursors of a store: `Cursors`, one `Cursor` for each (group, queue).

Persisted as *absolute deltas*: `take_deltas` gives, for every cursor touched since the last one, one operation with its
final state (`operations` draws the bytes). So all grants and settles gathered between two frames are one operation for
each (group, queue), and applying an operation twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from millpond.store.client import GroupRef, QueueRef
from millpond.store.fold.cursor import Cursor, Deleted, Key, LastSeek
from millpond.store.fold.operations import CursorDelta, GroupDrop, Operation, QueueDrop, QueueTrim, Rows, decode
from millpond.store.fold.snapshot import Snapshot, Tables, table_of
from millpond.store.fold.unsettled import Unsettled

_NO_QUEUE = -1


class Cursors:
    """All cursors of a store. `dirty`: those with changes that no operation holds yet."""

    def __init__(self) -> None:
        self.by_key: dict[Key, Cursor] = {}
        self._of_queue: dict[int, dict[int, Cursor]] = {}  # queue id -> group id -> cursor
        self.dirty: dict[Key, Cursor | Deleted] = {}

    def __len__(self) -> int:
        return len(self.by_key)

    def get(self, group_id: int, queue_id: int) -> Cursor | None:
        return self.by_key.get((group_id, queue_id))

    def open(self, group: GroupRef, queue: QueueRef, head: int) -> Cursor:
        """A new cursor of a group, which hands out from `head` on."""
        cursor = self._add(group, queue, head)
        cursor.mark()
        return cursor

    def _add(self, group: GroupRef, queue: QueueRef, head: int) -> Cursor:
        cursor = Cursor(group, queue, head, self.dirty)
        assert cursor.key not in self.by_key
        self.by_key[cursor.key] = cursor
        self._of_queue.setdefault(queue.queue_id, {})[group.group_id] = cursor
        return cursor

    def delete_group(self, group: GroupRef) -> None:
        """Forget a group's cursors, and say so with the next deltas, before those of a group opened anew."""
        self.drop_group(group)
        self.dirty[group.group_id, _NO_QUEUE] = Deleted(group)

    def drop_group(self, group: GroupRef) -> None:
        """Forget a group's cursors. The log says so already."""
        self._drop(key for key in self.by_key if key[0] == group.group_id)

    def drop_queue(self, queue_id: int) -> None:
        """Forget the cursors in a queue. The caller writes QUEUE_DROP."""
        self._drop([(group_id, queue_id) for group_id in self._of_queue.get(queue_id, ())])

    def trim_queue(self, queue_id: int, start_offset: int) -> None:
        """Move the cursors of a queue up to its first kept offset. The caller writes QUEUE_TRIM."""
        for cursor in self._of_queue.get(queue_id, {}).values():
            cursor.trim(start_offset)

    def _drop(self, keys: Iterable[Key]) -> None:
        for key in list(keys):
            self.by_key.pop(key).detach()
            self.dirty.pop(key, None)
            group_id, queue_id = key
            of_queue = self._of_queue[queue_id]
            del of_queue[group_id]
            if not of_queue:
                del self._of_queue[queue_id]

    # -- persistence ------------------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Whether there is anything for `take_deltas` to take."""
        return bool(self.dirty)

    def take_deltas(self) -> tuple[bytes, int]:
        """The payload of one state frame, and how many operations it holds; empty and 0 when nothing changed."""
        operations = [changed.take_delta() for changed in self.dirty.values()]
        self.dirty.clear()
        return b"".join(operations), len(operations)

    def apply(self, payload: bytes | memoryview, operations: int) -> list[Operation]:
        """Fold a state frame. Returns the operations that others must fold too (all but CURSOR and GROUP_DROP).

        Raises NewerFormat, ValueError.
        """
        others: list[Operation] = []
        for operation in decode(payload, operations):
            match operation:
                case CursorDelta():
                    self.apply_delta(operation)
                case GroupDrop(group):
                    self.drop_group(group)
                case QueueDrop(queue_id):
                    self.drop_queue(queue_id)
                case QueueTrim(queue_id, start_offset):
                    self.trim_queue(queue_id, start_offset)
                case _:
                    pass
            if not isinstance(operation, CursorDelta | GroupDrop):
                others.append(operation)
        return others

    def apply_delta(self, delta: CursorDelta) -> None:
        """Idempotent."""
        cursor = self.get(delta.group.group_id, delta.queue.queue_id)
        if cursor is None:
            cursor = self._add(delta.group, delta.queue, delta.head)
        cursor.apply(delta)

    # -- snapshot ---------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """One row for each cursor, and one for each unsettled row (`cursor`: its number)."""
        cursors = list(self.by_key.values())
        scalars = list(map(_scalars_of, cursors))
        busy = [(number, cursor.table.held()) for number, cursor in enumerate(cursors) if cursor.table.live]
        return lambda: {"cursors": table_of(scalars, _SCALARS, _flat), "cursors.rows": _rows_table(busy)}

    def load(self, tables: Tables) -> None:
        """Into an empty instance, what `snapshot` gave."""
        assert not self.by_key
        cursors = [self._loaded(*row.values()) for row in tables["cursors"].to_pylist()]
        rows = {name: column.to_numpy() for name, column in zip(
            tables["cursors.rows"].column_names, tables["cursors.rows"].columns, strict=True)}  # fmt: skip
        bounds = rows["cursor"].searchsorted(np.arange(len(cursors) + 1))
        busy = np.flatnonzero(np.diff(bounds))
        for number in busy.tolist():
            where = slice(bounds[number], bounds[number + 1])
            cursors[number].table.upsert(Rows._make(np.array(rows[name][where]) for name in _ROWS))

    def _loaded(
        self, tenant: int, topic: int, group: int, queue_id: int, queue: int, generation: int, head: int,
        next_lease: int, skipped: int, seek_hash: int, seek_from: int, seek_to: int,
    ) -> Cursor:  # fmt: skip
        cursor = self._add(GroupRef(tenant, topic, group), QueueRef(tenant, topic, queue_id, queue), head)
        cursor.generation, cursor.next_lease, cursor.skipped = generation, next_lease, skipped
        cursor.last_seek = LastSeek(seek_hash, seek_from, seek_to)
        return cursor


_ROWS = {name: np.empty(0, dtype) for name, dtype in zip(
    Rows._fields, (np.int64, np.int64, np.int64, np.uint32, np.uint8), strict=True)}  # fmt: skip
_SCALARS = (
    "tenant_id", "topic_id", "group_id", "queue_id", "queue", "generation", "head", "next_lease", "skipped",
    "seek_hash", "seek_from", "seek_to",
)  # fmt: skip


_scalars_of = attrgetter("group", "queue", "generation", "head", "next_lease", "skipped", "last_seek")


def _flat(scalars: tuple[Any, ...]) -> tuple[int, ...]:
    group, queue, *numbers, last_seek = scalars
    return group.tenant_id, group.topic_id, group.group_id, queue.queue_id, queue.queue, *numbers, *last_seek


def _rows_table(busy: list[tuple[int, Unsettled]]) -> pa.Table:
    living = [(table.columns, table.living()) for _, table in busy]
    numbers = np.array([number for number, _ in busy], np.int64)
    columns = {"cursor": np.repeat(numbers, [table.live for _, table in busy])}
    for name, empty in _ROWS.items():  # a column at a time: there may be millions of rows
        columns[name] = np.concatenate([empty, *(getattr(rows, name)[where] for rows, where in living)])
    return pa.table(columns)
