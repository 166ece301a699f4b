"""From a batch of messages to what one queue's append carries, by column operations.

`split` decides each row's queue and yields `Rows`, one for each queue it goes to: a record batch of the log's schema
and the sidecar's columns. One queue is the common case and copies nothing: a batch that came in exactly the log's
shape keeps its bytes. `Rows.append` makes the store's `QueueAppend`.

A row goes to the queue its producer names, else to key_hash mod n, else to its dedup id's hash mod n, else with all
others of the moment to one queue (`sticky_queue`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.clock import Clock, Random
from millpond.core.errors import FieldError, NotFound, TooLarge
from millpond.core.frame import CODEC_LZ4, CODEC_NONE, CODEC_ZSTD, ProducerPart, Sidecar, pack_sidecar
from millpond.core.hashing import Hashes, dedup_checks, dedup_hashes, hash_binary, hash_tags
from millpond.core.limits import BATCH_BYTES, BATCH_OVERHEAD_BYTES
from millpond.core.message import RowErrors, check_columns
from millpond.core.schema import DEDUP, KEY, TAG, message_schema
from millpond.proxy.incoming import Incoming, Standing
from millpond.store.client import Durability, QueueAppend, QueueRef

Indices = npt.NDArray[np.int64]
STICKY_SECONDS = 0.1  # long enough for large batches, short enough for even queues
_COMPRESSION = {
    CODEC_LZ4: pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False),
    CODEC_ZSTD: pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False),
}


def sticky_queue(clock: Clock, topic_id: int, queues: int) -> int:
    """The queue of messages that do not care: the same one for a short while, each in turn."""
    return (topic_id + int(clock.monotonic() / STICKY_SECONDS)) % queues


@dataclass(slots=True)
class Rows(Standing):
    """Messages of one queue on their way into a frame. Hash columns as in `core.hashing`, dedup ones both or none.
    `decoded`: None while nobody has asked for the batch that stands in `payload`."""

    decoded: pa.RecordBatch | None
    columns: int
    tag_hash: Hashes
    key_hash: Hashes
    dedup_hash: npt.NDArray[np.void] | None = None
    dedup_check: Hashes | None = None
    payload: pa.Buffer | None = None
    payload_size: int = 0
    codec: int = CODEC_NONE

    def __len__(self) -> int:
        return len(self.tag_hash)

    @property
    def bytes(self) -> int:
        """About what they take in memory, and at most in a frame."""
        if self.payload is None:
            return int(self.batch.get_total_buffer_size())
        return max(int(self.payload.size), self.payload_size)  # rows that share a frame are decompressed for it

    def take(self, rows: Indices) -> Rows:
        """These rows only, in their order; a copy."""
        return Rows(
            self.batch.take(pa.array(rows)),
            self.columns,
            self.tag_hash[rows],
            self.key_hash[rows],
            None if self.dedup_hash is None else self.dedup_hash[rows],
            None if self.dedup_check is None else self.dedup_check[rows],
            codec=self.codec,
        )

    def append(
        self, queue: QueueRef, durability: Durability, dedup_window_ms: int, part: ProducerPart | None
    ) -> QueueAppend:
        """Raises TooLarge when the rows make a frame larger than any may be."""
        payload, payload_size = self.payload, self.payload_size
        if payload is None:
            payload = _message(self.batch, self.codec)
            payload_size = payload.size if self.codec == CODEC_NONE else int(self.batch.nbytes)
        if max(payload.size, payload_size) > BATCH_BYTES + BATCH_OVERHEAD_BYTES:
            raise TooLarge("batch_too_large", f"more than {BATCH_BYTES} bytes of messages", limit_bytes=BATCH_BYTES)
        sidecar = Sidecar(self.tag_hash, self.key_hash, None, self.dedup_hash, self.dedup_check, [])
        deduplicated = self.dedup_hash is not None
        return QueueAppend(
            queue=queue,
            count=len(self),
            columns=self.columns | (DEDUP if deduplicated else 0),
            codec=self.codec,
            sidecar=pa.py_buffer(pack_sidecar(sidecar)),
            payload=payload,
            payload_crc=google_crc32c.value(payload),
            payload_size=payload_size,
            durability=durability,
            parts=[] if part is None else [part],
            dedup_window_ms=dedup_window_ms if deduplicated else 0,
        )


def _message(batch: pa.RecordBatch, codec: int) -> pa.Buffer:
    """One record batch message, its buffers compressed by `codec`."""
    if codec == CODEC_NONE:
        return batch.serialize()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_COMPRESSION[codec]) as writer:
        writer.write_batch(batch)
        end = sink.tell()
    stream = sink.getvalue()  # a schema message, which has no body, and then ours
    schema_end = 8 + int.from_bytes(stream[4:8].to_pybytes(), "little")
    return stream[schema_end:end]


def concat(parts: Sequence[Rows]) -> Rows:
    """Rows of several producers as one, all with dedup hashes or none; columns that some lack are null there."""
    if len(parts) == 1:
        return parts[0]
    columns = 0
    for part in parts:
        columns |= part.columns
    schema = message_schema(columns)
    arrays = [pa.concat_arrays([_column(part, field) for part in parts]) for field in schema]
    hashes = [part.dedup_hash for part in parts if part.dedup_hash is not None]
    checks = [part.dedup_check for part in parts if part.dedup_check is not None]
    assert len(hashes) in {0, len(parts)}, "rows with and without dedup hashes never share a frame"
    codecs = {part.codec for part in parts}
    return Rows(
        pa.RecordBatch.from_arrays(arrays, schema=schema),
        columns,
        np.concatenate([part.tag_hash for part in parts]),
        np.concatenate([part.key_hash for part in parts]),
        np.concatenate(hashes) if hashes else None,
        np.concatenate(checks) if checks else None,
        codec=codecs.pop() if len(codecs) == 1 else CODEC_NONE,
    )


def _column(part: Rows, field: pa.Field) -> pa.Array:
    at = part.batch.schema.get_field_index(field.name)
    return part.batch.column(at) if at >= 0 else pa.nulls(len(part), field.type)


class Split(list[tuple[int, "Indices | None", Rows]]):
    """(queue number, rows of the request or None for all, those rows), by queue; and the rows refused."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: RowErrors = {}


def split(
    incoming: Incoming,
    queues: int,
    max_message_bytes: int,
    sticky: int,
    random: Random,
    queue: int | None = None,
    idempotent: int | None = None,
) -> Split:
    """Check and hash the batch, and part it by queue.

    `queue`: all go there (checked by the caller). `sticky`: where those go that do not care. `idempotent`: with an
    Idempotency-Key, its hash: keyless messages of one request stay together, wherever it is repeated.
    """
    result = Split()
    result.errors = _check(incoming, max_message_bytes)
    rows = _hashed(incoming, random)
    where = queue if queue is not None else _queues(incoming, rows, queues, sticky, idempotent, result.errors)
    accepted = None
    if result.errors:
        accepted = np.setdiff1d(np.arange(len(rows)), np.fromiter(result.errors, np.int64, len(result.errors)))
        if not len(accepted):
            return result
    if isinstance(where, int):
        result.append((where, accepted, rows if accepted is None else rows.take(accepted)))
        return result
    chosen = where if accepted is None else where[accepted]
    for number in np.unique(chosen).tolist():
        mine = np.flatnonzero(chosen == number)
        if len(mine) == len(rows):
            result.append((number, None, rows))
        else:
            mine = mine if accepted is None else accepted[mine]
            result.append((number, mine, rows.take(mine)))
    return result


def _check(incoming: Incoming, max_message_bytes: int) -> RowErrors:
    errors = {} if incoming.fits(max_message_bytes) else check_columns(incoming.batch, max_message_bytes)
    if incoming.dedup_ids is not None:
        beside = pa.RecordBatch.from_arrays([incoming.dedup_ids], ["dedup_id"])
        for row, error in check_columns(beside, 0).items():
            errors.setdefault(row, error)
    return errors


def _hashed(incoming: Incoming, random: Random) -> Rows:
    columns, count = incoming.columns, incoming.rows
    rows = Rows(
        incoming.decoded,
        columns,
        hash_tags(incoming.batch.column("tag")) if columns & TAG else np.zeros(count, np.uint32),
        hash_binary(incoming.batch.column("key")) if columns & KEY else np.zeros(count, np.uint32),
        payload=incoming.payload,
        payload_size=incoming.payload_size,
        codec=incoming.codec,
    )
    if incoming.dedup_ids is not None and incoming.dedup_ids.null_count < count:
        rows.dedup_hash = dedup_hashes(incoming.dedup_ids.to_pylist(), random.bytes)
        rows.dedup_check = dedup_checks(incoming.batch.column("body"))
    return rows


def _queues(
    incoming: Incoming, rows: Rows, queues: int, sticky: int, idempotent: int | None, errors: RowErrors
) -> int | npt.NDArray[np.int64]:
    """Each row's queue, or the one of all."""
    keyed = bool(incoming.columns & KEY)
    if incoming.queues is None:
        if queues == 1:
            return 0
        if not keyed and rows.dedup_hash is None:
            return sticky
    where = np.full(len(rows), sticky, np.int64)
    if rows.dedup_hash is not None:
        assert incoming.dedup_ids is not None
        present = incoming.dedup_ids.is_valid().to_numpy(zero_copy_only=False)
        where[present] = queue_of_dedup(rows.dedup_hash[present], queues) if idempotent is None else idempotent % queues
    if keyed:
        present = rows.key_hash != 0
        where[present] = rows.key_hash[present] % queues
    if incoming.queues is not None:
        present = incoming.queues.is_valid().to_numpy(zero_copy_only=False)
        asked = incoming.queues.fill_null(0).to_numpy()
        for row in np.flatnonzero((asked < 0) | (asked >= queues)).tolist():
            errors.setdefault(row, no_queue("queue", int(asked[row]), queues))
        where[present] = asked[present]
    return where


def queue_of_dedup(hashes: npt.NDArray[np.void], queues: int) -> npt.NDArray[np.int64]:
    """By the first four bytes of each hash."""
    words = np.ascontiguousarray(hashes).view("<u4")[::4]
    numbers: npt.NDArray[np.int64] = (words % np.uint32(queues)).astype(np.int64)
    return numbers


def no_queue(field: str, number: int, queues: int) -> NotFound:
    expected = f"a queue from 0 to {queues - 1}"
    return NotFound(
        "queue_not_found",
        f"{field}: expected {expected}, got {number}",
        fields=[FieldError(field, expected, str(number))],
    )
