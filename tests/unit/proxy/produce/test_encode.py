"""From a batch to frames: each row in its queue, each frame opens, and what came in the log's shape keeps its bytes."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.clock import SystemRandom
from millpond.core.errors import BadRequest, MillpondError, TooLarge
from millpond.core.frame import CODEC_LZ4, CODEC_NONE, CODEC_ZSTD
from millpond.core.hashing import dedup_hash, hash_bytes, hash_text
from millpond.core.schema import PROPERTIES_TYPE, message_schema
from millpond.proxy.codec import arrow
from millpond.proxy.encode import Rows, concat, split
from millpond.proxy.incoming import Incoming, gather
from millpond.store.client import QueueRef

from .conftest import Frame, opened

RANDOM = SystemRandom()
REF = QueueRef(1, 9, 100, 0)
CODECS = [(None, CODEC_NONE), ("lz4", CODEC_LZ4), ("zstd", CODEC_ZSTD)]


def stream(table: dict[str, pa.Array], compression: str | None = None, batches: int = 1) -> bytes:
    batch = pa.record_batch(table)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        for _ in range(batches):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def exact(rows: int) -> dict[str, pa.Array]:
    return {
        "key": pa.array([b"key"] * rows),
        "tag": pa.array(["tag"] * rows),
        "body": pa.array([b"body %d" % row for row in range(rows)]),
    }


def frame_of(rows: Rows) -> Frame:
    append = rows.append(REF, "flush", 300_000, None)
    assert append.payload_crc == google_crc32c.value(append.payload.to_pybytes())
    return opened(append)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.binary(max_size=20) | st.text(max_size=10),
            st.none() | st.binary(max_size=9),
            st.none() | st.sampled_from(["a", "b"]),
            st.none() | st.dictionaries(st.text(min_size=1, max_size=3), st.text(max_size=3), max_size=3),
            st.none() | st.integers(0, 10**12),
            st.none() | st.text(min_size=1, max_size=3),
            st.none() | st.integers(0, 2),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_every_row_arrives_once_in_its_queue_and_in_order(messages: list[tuple]) -> None:
    """Through frame and back: contents, hashes, and the queue by number, key or dedup id."""
    found = split(gather(*zip(*messages, strict=True)), 3, 100, 1, RANDOM)
    assert not found.errors
    seen: list[int] = []
    for queue, which, rows in found:
        frame = frame_of(rows)
        indices = list(range(len(messages))) if which is None else which.tolist()
        assert indices == sorted(indices)
        seen += indices
        for at, row in enumerate(indices):
            body, key, tag, properties, born_ts, dedup_id, asked = messages[row]
            stored = frame.batch.slice(at, 1).to_pylist()[0]
            assert stored["body"] == (body if isinstance(body, bytes) else body.encode())
            assert stored.get("key") == key and stored.get("tag") == tag
            assert dict(stored.get("properties") or []) == (properties or {})
            assert frame.sidecar.key_hash[at] == (0 if key is None else hash_bytes(key))
            assert frame.sidecar.tag_hash[at] == (0 if tag is None else hash_text(tag))
            if dedup_id is not None:
                assert frame.sidecar.dedup_hash[at].tobytes() == dedup_hash(dedup_id)
            if born_ts is not None:
                assert frame.batch.column("born_ts").cast(pa.int64())[at].as_py() == born_ts
            assert queue == expected_queue(key, dedup_id, asked)
    assert sorted(seen) == list(range(len(messages)))


def expected_queue(key: bytes | None, dedup_id: str | None, asked: int | None) -> int:
    if asked is not None:
        return asked
    if key is not None:
        return hash_bytes(key) % 3
    return 1 if dedup_id is None else int.from_bytes(dedup_hash(dedup_id)[:4], "little") % 3


def test_rows_without_id_beside_rows_with_one_are_all_different() -> None:
    """Two rows without an id in a frame with ids repeat nothing."""
    nulls = [None] * 3
    incoming = gather(["a", "a", "a"], nulls, nulls, nulls, nulls, ["id", None, None], nulls)
    ((_, _, rows),) = split(incoming, 1, 100, 0, RANDOM)
    assert len(np.unique(rows.dedup_hash)) == 3


def test_refused_rows_stay_out_and_are_named() -> None:
    """One too large, one for a queue there is not: the others go on in order."""
    incoming = gather(["a", "x" * 101, "b", "c"], *[[None] * 4] * 5, [0, 0, 7, 0])
    found = split(incoming, 2, 100, 0, RANDOM)
    assert {row: error.code for row, error in found.errors.items()} == {1: "message_too_large", 2: "queue_not_found"}
    ((queue, which, rows),) = found
    assert (queue, which.tolist(), frame_of(rows).bodies) == (0, [0, 3], [b"a", b"c"])


@pytest.mark.parametrize(("compression", "codec"), CODECS)
def test_the_logs_own_shape_passes_through_untouched(compression: str | None, codec: int) -> None:
    """One queue, columns in the log's order: the frame's payload is the very bytes of the request, not a copy."""
    data = stream(exact(50), compression)
    incoming = arrow.decode(data)
    ((_, which, rows),) = split(incoming, 4, 100, 0, RANDOM)
    frame = frame_of(rows)
    assert which is None and frame.append.codec == codec
    assert frame.batch.to_pydict() == pa.record_batch(exact(50)).to_pydict()
    start = pa.py_buffer(data).address
    assert start <= frame.append.payload.address < start + len(data)


@pytest.mark.parametrize(("compression", "codec"), CODECS)
def test_other_shapes_are_encoded_again_with_their_codec(compression: str | None, codec: int) -> None:
    """Another order of columns, several batches, or several queues: the same messages, the producer's compression."""
    turned = dict(reversed(exact(50).items()))
    for data, queues in ((stream(turned, compression), 1), (stream(exact(50), compression, batches=2), 1)):
        ((_, _, rows),) = split(arrow.decode(data), queues, 100, 0, RANDOM)
        frame = frame_of(rows)
        assert frame.append.codec == codec
        assert frame.bodies[:50] == exact(50)["body"].to_pylist()
    spread = exact(50) | {"queue": pa.array([row % 2 for row in range(50)], pa.int32())}
    frames = [frame_of(rows) for _, _, rows in split(arrow.decode(stream(spread, compression)), 2, 100, 0, RANDOM)]
    assert [frame.append.codec for frame in frames] == [codec] * 2
    assert frames[1].bodies == exact(50)["body"].to_pylist()[1::2]


def test_types_of_the_same_kind_are_cast() -> None:
    """Large and view types, text as bytes, null columns, second time zone, other names inside the map."""
    entry = pa.map_(pa.field("k", pa.string(), nullable=False), pa.field("v", pa.string()))
    table = {
        "body": pa.array(["a", "b"], pa.large_string()),
        "key": pa.array([b"k", None], pa.binary_view()),
        "tag": pa.array(["t", "u"], pa.string_view()),
        "properties": pa.array([[("p", "q")], None], entry),
        "born_ts": pa.array([1, 2], pa.timestamp("ms")),
        "origin": pa.nulls(2),
        "dedup_id": pa.array(["d", None], pa.large_string()),
    }
    incoming = arrow.decode(stream(table))
    assert incoming.batch.schema == message_schema(incoming.columns)
    assert incoming.batch.schema.field("properties").type == PROPERTIES_TYPE
    assert incoming.batch.to_pydict()["properties"] == [[("p", "q")], None]
    assert incoming.batch.column("body").to_pylist() == [b"a", b"b"]
    assert incoming.dedup_ids.to_pylist() == ["d", None]
    assert incoming.payload is None


@pytest.mark.parametrize(
    ("column", "array"),
    [
        ("key", pa.array([1])),
        ("tag", pa.array([b"t"])),
        ("tag", pa.array(["t"]).dictionary_encode()),
        ("properties", pa.array([{"a": "b"}])),
        ("properties", pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32()))),
        ("born_ts", pa.array([1])),
        ("born_ts", pa.array([1], pa.timestamp("us"))),
        ("queue", pa.array([1], pa.int64())),
        ("dedup_id", pa.array([b"d"])),
        ("delay_ms", pa.array([1])),
        ("colour", pa.array(["red"])),
    ],
)
def test_other_columns_and_types_are_refused_by_name(column: str, array: pa.Array) -> None:
    """The problem names the column."""
    with pytest.raises(BadRequest) as caught:
        arrow.decode(stream({"body": pa.array([b"x"]), column: array}))
    assert caught.value.fields[0].field == column


@pytest.mark.parametrize("body", [None, pa.array([1]), pa.nulls(1), pa.array([b"x", None])])
def test_a_body_is_required(body: pa.Array | None) -> None:
    """No column, another type, a null: all name `body`."""
    table = {"tag": pa.array(["t"] * (1 if body is None else len(body)))} | ({} if body is None else {"body": body})
    with pytest.raises(BadRequest) as caught:
        arrow.decode(stream(table))
    assert caught.value.fields[0].field == "body"


def test_views_cannot_multiply_what_they_point_at() -> None:
    """Ten thousand views of one megabyte are ten gigabytes once cast: refused before."""
    views = np.zeros((10_000, 4), np.int32)
    views[:, 0] = 1 << 20
    column = pa.Array.from_buffers(pa.binary_view(), 10_000, [None, pa.py_buffer(views), pa.py_buffer(bytes(1 << 20))])
    with pytest.raises(TooLarge):
        arrow.decode(stream({"body": column}))


def test_a_frame_beyond_the_bound_is_refused() -> None:
    """However it came about, no frame is larger than a store takes."""
    part = Rows(
        pa.record_batch({"body": pa.array([bytes(8 << 20)])}), 0, np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    )
    with pytest.raises(MillpondError, match="bytes of messages"):
        concat([part, part, part]).append(REF, "flush", 0, None)


def test_incoming_defaults() -> None:
    """A batch gathered from rows has no payload of its own and only the columns somebody used."""
    incoming: Incoming = gather(["a", "b"], *[[None] * 2] * 6)
    assert (incoming.columns, incoming.payload, incoming.batch.schema.names) == (0, None, ["body"])


def test_a_schema_seen_before_is_judged_as_at_first() -> None:
    """Remembered schemas are told apart, refusals are repeated, and each batch is looked at anew."""
    for _ in range(2):
        assert arrow.decode(stream(exact(3))).batch.schema.names == ["key", "tag", "body"]
        assert arrow.decode(stream({"body": pa.array([b"x"])})).payload is not None
        assert arrow.decode(stream({"body": pa.array([b"x"]), "tag": pa.array(["t"])})).payload is None
        with pytest.raises(BadRequest, match="colour"):
            arrow.decode(stream({"body": pa.array([b"x"]), "colour": pa.array(["red"])}))
        with pytest.raises(BadRequest, match="nulls"):
            arrow.decode(stream({"body": pa.array([b"x", None])}))
        with pytest.raises(BadRequest):
            arrow.decode(stream({"body": pa.array([b"x"] * 0, pa.binary())}))
