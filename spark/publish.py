"""Publishing exactly once: one producer session per target queue, whose sequence numbers are source offsets.

    source rows  17 18 21 40 | 41 55 ..       (gaps: what the filter dropped)
    parts        previous 9, first 17, last 40 | previous 40, first 41, ..

A part that was sent and not answered is sent again with the same boundaries, and the store tells the repeat. After a
restart the store says where each session stands, and rows up to there are left out. Whatever was still on its way
from the process before then only makes a part `out_of_order`: the session is asked again, and the rest goes on.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from millpond.core.errors import Conflict, Internal, NotFound
from millpond.core.limits import BATCH_MESSAGES, REPLAY_OUT_OF_STEP, REPLAY_PART_BYTES
from millpond.core.schema import columns_of, message_schema
from millpond.core.tier.rows import cut
from millpond.spark.http import ARROW, HttpClient, path_of


class _Standing(msgspec.Struct, frozen=True):
    queue: int
    last: int


class _Session(msgspec.Struct, frozen=True):
    queues: list[_Standing] = []


class _Taken(msgspec.Struct, frozen=True):
    queue: int
    count: int


class _Answer(msgspec.Struct, frozen=True):
    ranges: list[_Taken] = []


class Sessions:
    """The sessions with id `session_id` in the queues of the topic `target`; made on first use."""

    def __init__(self, client: HttpClient, target: str, session_id: str) -> None:
        self._client = client
        self._messages = path_of("topics", target, "messages")
        self._producer = path_of("topics", target, "producers", session_id)
        self._id = session_id
        self.last = self._ask()

    def publish(self, queue: int, rows: pa.RecordBatch, sequence: pa.Array) -> None:
        """Append `rows` (columns of a message) to `queue`, except those it already has. `sequence` ascends."""
        pending = rows.append_column("sequence", sequence)
        for _ in range(REPLAY_OUT_OF_STEP):
            last = self.last.get(queue)
            if last is not None:
                pending = pending.filter(pc.greater(pending.column("sequence"), last))
            try:
                for part in cut(pending, REPLAY_PART_BYTES, BATCH_MESSAGES):
                    self._send(queue, part)
                return
            except Conflict as error:
                if error.code != "out_of_order":
                    raise
                self.last = self._ask()
        raise Internal("internal", f"{self._id}: another process keeps publishing the same replay to queue {queue}")

    def close(self) -> None:
        """Tell the store to forget the sessions. Idempotent."""
        try:
            self._client.call("DELETE", self._producer)
        except NotFound:
            return

    def _ask(self) -> dict[int, int]:
        """target queue -> last sequence that it has."""
        try:
            session = self._client.get(self._producer, _Session)
        except NotFound as error:
            if error.code != "producer_not_found":
                raise
            return {}
        return {standing.queue: standing.last for standing in session.queues}

    def _send(self, queue: int, part: pa.RecordBatch) -> None:
        sequence = part.column("sequence")
        last = sequence[-1].as_py()
        header = {
            "id": self._id,
            "queue": queue,
            "previous": self.last.get(queue),
            "first": sequence[0].as_py(),
            "last": last,
        }
        headers = {
            "Millpond-Queue": str(queue),
            "Millpond-Producer": msgspec.json.encode(header).decode(),
            "Prefer": "return=minimal",
        }
        rows = part.drop_columns(["sequence"])
        answer = self._client.call("POST", self._messages, _stream(rows), content_type=ARROW, headers=headers)
        taken = sum(r.count for r in self._client.decode(answer, _Answer).ranges)
        if taken != rows.num_rows:
            raise Internal(
                "internal",
                f"{self._id}: the target took {taken} of the messages {header['first']} to {last}: "
                f"{answer.body[:300].decode(errors='replace')}",
            )
        self.last[queue] = last


def message_rows(rows: pa.RecordBatch, origin: pa.Array) -> pa.RecordBatch:
    """Rows of the tier as messages to publish: key, tag, properties, born_ts and body as they are, and `origin`."""
    names = {"key", "tag", "properties", "born_ts"} & {
        name for name in rows.schema.names if rows.column(name).null_count < rows.num_rows
    }
    schema = message_schema(columns_of({*names, "origin"}))
    columns = [origin if field.name == "origin" else rows.column(field.name) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _stream(rows: pa.RecordBatch) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return memoryview(sink.getvalue())
