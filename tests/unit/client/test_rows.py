"""Streams made without copying bodies are the streams that pyarrow makes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from millpond.client.rows import Rows, compressed_stream, stream
from millpond.core.http.wire import Buffers
from millpond.core.schema import PROPERTIES_TYPE, TIMESTAMP, columns_of, message_schema

BESIDE = {
    "key": pa.array([b"k", None, b""], pa.binary()),
    "tag": pa.array(["a", "b", None], pa.string()),
    "properties": pa.array([[("n", "v")], None, []], PROPERTIES_TYPE),
    "born_ts": pa.array([1, None, 3], TIMESTAMP),
}


def read(encoded: Buffers) -> pa.Table:
    whole = b"".join(bytes(memoryview(one)) for one in encoded)
    assert len(whole) == encoded.length, "as long as it says"
    return pa.ipc.open_stream(whole).read_all()


@pytest.mark.parametrize("names", [[], ["key"], ["tag", "born_ts"], list(BESIDE)])
@pytest.mark.parametrize("bodies", [[b"", b"", b""], [b"x", b"yy", b"zzz"], [b"a" * 999, b"", b"b" * 1_000_001]])
def test_stream_is_what_pyarrow_would_say(names: list[str], bodies: list[bytes]) -> None:
    """Whatever the columns and lengths: the log's exact schema, valid, and the same values."""
    beside = pa.RecordBatch.from_pydict({name: BESIDE[name] for name in names}) if names else None
    table = read(stream([Rows.of_bodies(bodies, beside)]))
    table.validate(full=True)
    assert table.schema.equals(message_schema(columns_of(set(names))))
    assert table.column("body").to_pylist() == bodies
    for name in names:
        assert table.column(name).combine_chunks().equals(BESIDE[name])


def test_parts_go_together() -> None:
    """Parts of one stream stand in order, whether their bodies are single or slices of a batch."""
    batch = pa.RecordBatch.from_pydict({"key": [b"%d" % i for i in range(9)], "body": [b"-" * i for i in range(9)]})
    batch = batch.cast(message_schema(columns_of({"key"})))
    single = Rows.of_bodies([b"one", b"two"], pa.RecordBatch.from_pydict({"key": pa.array([b"a", None], pa.binary())}))
    table = read(stream([Rows.of_batch(batch.slice(3, 4)), single, Rows.of_batch(batch.slice(0, 1))]))
    assert table.column("body").to_pylist() == [b"---", b"----", b"-----", b"------", b"one", b"two", b""]
    assert table.column("key").to_pylist() == [b"3", b"4", b"5", b"6", b"a", None, b"0"]


def test_bodies_are_not_copied() -> None:
    """What is handed to the socket are the very objects that were sent."""
    bodies = [bytes([i]) * 1024 for i in range(10)]
    assert [one for one in stream([Rows.of_bodies(bodies)]) if any(one is body for body in bodies)] == bodies


def test_take() -> None:
    """Rows taken keep their columns together."""
    rows = Rows.of_bodies([b"a", b"bb", b"ccc"], pa.RecordBatch.from_pydict({"key": BESIDE["key"]}))
    table = read(stream([rows.take(np.array([2, 0]))]))
    assert table.to_pydict() == {"key": [b"", b"k"], "body": [b"ccc", b"a"]}


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed(compression: str) -> None:
    """A compressed stream says the same and is smaller."""
    rows = Rows.of_bodies([b"a" * 5000] * 20)
    encoded = compressed_stream([rows, rows], compression)
    assert encoded.length < 20_000
    assert read(encoded).column("body").to_pylist() == [b"a" * 5000] * 40
