"""Arrow streams from strangers: every answer is a batch or a MillpondError, and memory stays bounded."""

from __future__ import annotations

import struct
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from millpond.core import limits
from millpond.core.arrow import BUFFER, DECODED_BYTES, places, scan
from millpond.core.errors import BadRequest, TooLarge
from millpond.core.frame import CODEC_LZ4, CODEC_NONE, CODEC_ZSTD

BATCH = pa.record_batch(
    {
        "key": pa.array([b"a", None, b"ccc"], pa.binary()),
        "properties": pa.array([[("a", "b")], None, []], pa.map_(pa.string(), pa.string())),
        "body": pa.array([b"x" * 200, b"", b"y" * 300], pa.binary()),
    }
)


def stream(*batches: pa.RecordBatch, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(("compression", "codec"), [(None, CODEC_NONE), ("lz4", CODEC_LZ4), ("zstd", CODEC_ZSTD)])
def test_a_good_stream_opens(compression: str | None, codec: int) -> None:
    """Any codec: the batches come out equal, and the scan told rows, codec and size before."""
    scanned = scan(stream(BATCH, BATCH, compression=compression))
    assert scanned.rows == 6
    assert {message.codec for message in scanned.messages} == {codec}
    assert all(message.decoded_bytes >= 500 for message in scanned.messages)
    assert all(batch.equals(BATCH) for batch in scanned.batches())


def test_a_message_in_place_opens_with_its_schema() -> None:
    """The bytes the scan points at are one record batch message, as a frame's payload is."""
    data = stream(BATCH, compression="lz4")
    message = scan(data).messages[0]
    assert pa.ipc.read_record_batch(pa.py_buffer(data)[message.start : message.end], BATCH.schema).equals(BATCH)


def test_a_stream_without_end_mark_is_complete_at_a_message_boundary() -> None:
    """Writers may just close the stream; bytes after an end mark are refused."""
    data = stream(BATCH)
    assert scan(data[:-8]).rows == 3
    with pytest.raises(BadRequest, match="after its end"):
        scan(data + b"\0")


@pytest.mark.parametrize("cut", range(1, 600, 7))
def test_a_cut_stream_is_malformed(cut: int) -> None:
    """Cut anywhere inside a message: malformed_body."""
    data = stream(BATCH)[:-8]
    with pytest.raises(BadRequest) as caught:
        scan(data[: len(data) - cut]).batches()
    assert caught.value.code == "malformed_body"


def test_declared_sizes_are_believed_before_anything_is_decoded() -> None:
    """A compressed buffer that claims a gigabyte is refused by its claim."""
    data = bytearray(stream(pa.record_batch({"body": pa.array([b"x" * 100_000])}), compression="zstd"))
    claim = data.rindex(struct.pack("<q", 100_000))
    data[claim : claim + 8] = struct.pack("<q", 1 << 30)
    with pytest.raises(TooLarge) as caught:
        scan(bytes(data))
    assert caught.value.code == "batch_too_large"


def test_remembered_metadata_is_not_believed_about_other_bytes() -> None:
    """A batch that says the same as an earlier one is measured again: its body's length, and what its buffers claim."""
    data = bytearray(stream(pa.record_batch({"body": pa.array([b"x" * 100_000])}), compression="zstd"))
    message = scan(bytes(data)).messages[0]
    with pytest.raises(BadRequest, match="impossible length"):
        scan(bytes(data[: message.end - 8]))
    claim = data.rindex(struct.pack("<q", 100_000))
    data[claim : claim + 8] = struct.pack("<q", 1 << 30)
    with pytest.raises(TooLarge):
        scan(bytes(data))


def test_a_buffer_outside_of_its_body_is_malformed() -> None:
    """Before pyarrow sees it."""
    data = bytearray(stream(BATCH))
    message = scan(bytes(data)).messages[0]
    at = places(data[message.start : message.end])
    last = message.start + at.buffers + BUFFER.size * (at.buffer_count - 1)
    offset, length = BUFFER.unpack_from(data, last)
    BUFFER.pack_into(data, last, offset, length + 1_000)
    with pytest.raises(BadRequest, match="outside its body"):
        scan(bytes(data))


def test_a_negative_claim_is_malformed() -> None:
    """Only -1 has a meaning among negative sizes."""
    data = bytearray(stream(pa.record_batch({"body": pa.array([b"x" * 100_000])}), compression="zstd"))
    claim = data.rindex(struct.pack("<q", 100_000))
    data[claim : claim + 8] = struct.pack("<q", -2)
    with pytest.raises(BadRequest, match="negative"):
        scan(bytes(data))


def test_what_inflates_beyond_the_bound_is_refused() -> None:
    """Honest zeros that compress a thousandfold are too large all the same."""
    with pytest.raises(TooLarge):
        scan(stream(pa.record_batch({"body": pa.array([bytes(DECODED_BYTES)])}), compression="zstd"))


def test_rows_and_batches_are_counted_before_decoding() -> None:
    """More rows than a request may have, or more batches, are too large; null columns cost nothing to claim."""
    with pytest.raises(TooLarge, match="messages"):
        scan(stream(pa.record_batch({"body": pa.nulls(limits.BATCH_MESSAGES + 1)})))
    with pytest.raises(TooLarge, match="record batches"):
        scan(stream(*[BATCH.slice(0, 1)] * (limits.ARROW_BATCHES + 1)))


def _schema_table(data: bytearray) -> int:
    """Where the schema's flatbuffer table stands: behind the prefix, the message's `header` field leads there."""
    message = 8 + int.from_bytes(data[8:12], "little")
    header = message + _slots(data, message)[2]
    return header + int.from_bytes(data[header : header + 4], "little")


def _slots(data: bytearray, table: int) -> list[int]:
    vtable = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    size = int.from_bytes(data[vtable : vtable + 2], "little")
    return [int.from_bytes(data[at : at + 2], "little") for at in range(vtable + 4, vtable + size, 2)]


def test_a_foreign_byte_order_is_refused() -> None:
    """It would make the log's bytes unreadable. pyarrow writes none, so the field is made to point at another one."""
    data = bytearray(stream(BATCH))
    table = _schema_table(data)
    vtable = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    assert _slots(data, table)[0] == 0, "little-endian is the default, and left out"
    data[vtable + 4 : vtable + 6] = data[vtable + 6 : vtable + 8]
    with pytest.raises(BadRequest, match="big-endian"):
        scan(bytes(data))


def test_a_table_that_points_outside_is_malformed() -> None:
    """Before the metadata, where Python would count from its end, and behind it."""
    for away in (2**20, -(2**20)):
        data = bytearray(stream(BATCH))
        table = _schema_table(data)
        data[table : table + 4] = away.to_bytes(4, "little", signed=True)
        with pytest.raises(BadRequest) as caught:
            scan(bytes(data))
        assert caught.value.code == "malformed_body"


def test_old_metadata_is_refused() -> None:
    """V4 is not written by anyone now."""
    old = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, BATCH.schema, options=old) as writer:
        writer.write_batch(BATCH)
    with pytest.raises(BadRequest, match="V5"):
        scan(sink.getvalue().to_pybytes())


def test_not_an_arrow_stream() -> None:
    """Empty, text, an IPC file, no schema: malformed_body."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, BATCH.schema) as writer:
        writer.write_batch(BATCH)
    for data in (b"", b"{}", b'{"messages":[]}', sink.getvalue().to_pybytes(), BATCH.serialize().to_pybytes()):
        with pytest.raises(BadRequest) as caught:
            scan(data)
        assert caught.value.code == "malformed_body"
    with pytest.raises(BadRequest, match="does not begin with a schema"):
        scan(pa.record_batch({"body": pa.nulls(1)}).serialize().to_pybytes())


def test_utf8_is_validated() -> None:
    """A utf8 column with other bytes in it is malformed."""
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
    )
    with pytest.raises(BadRequest):
        scan(stream(pa.record_batch({"tag": broken}))).batches()


def test_fuzz_in_a_process_of_its_own() -> None:
    """Thousands of mutated, cut, spliced and random streams: no crash, nothing but MillpondErrors, memory bounded."""
    script = __file__.replace("test_arrow_streams.py", "fuzz_arrow.py")
    done = subprocess.run(  # noqa: S603 (our own script)
        [sys.executable, script, "20261121", "4"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
