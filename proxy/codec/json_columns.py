"""Messages as JSON by columns: for rows whose texts stand in JSON as they are, which is most of what is sent.

One kernel call joins the constant texts between the fields with the columns of the fields: no object for a message
is made, and a body is copied once. A text stands in JSON as it is when it is UTF-8 without quotes, backslashes and
control characters: asked for a whole column at once. Rows with properties or an origin, or with a text that must be
escaped or is not UTF-8, are left to `answers` (None): it says the same about them, field by field.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.core.gathered import Buffer
from millpond.core.limits import RECEIVE_MESSAGES
from millpond.core.texts import data_of
from millpond.proxy.codec import fixed
from millpond.proxy.frames import Bodies

Piece: TypeAlias = bytes | fixed.Table | pa.StringArray
"""A constant, texts of one width, or a column without nulls."""

_SMALL = pa.array(range(RECEIVE_MESSAGES)).cast(pa.string())
_IN_PLACE_BYTES = 128 * 1024  # a copy of fewer takes less than NumPy's call
_FIRST_PLAIN = 0x20  # what is below is a control character


class _Fields(NamedTuple):
    """Of all rows. Offsets are a range where none is left out."""

    body: pa.StringArray
    queue: Piece
    offsets: range | npt.NDArray[np.int64]
    store_ts: Piece
    born_ts: Piece = b"null"
    key: Sequence[Piece] = (b"null",)
    tag: Sequence[Piece] = (b"null",)


def joined(
    topic: str,
    batch: pa.RecordBatch | Bodies,
    id_prefix: str,
    attempts: npt.NDArray[np.uint32] | None,
    token: str,
    base: int,
) -> pa.Buffer | None:
    """The rows of `batch` (at least one) as JSON objects with a comma behind each; see `answers.Rows`.

    None when some text cannot stand in JSON as it is.
    """
    fields = _of_bodies(batch) if isinstance(batch, Bodies) else _of_columns(batch)
    if fields is None:
        return None
    offset = _ascending(fields.offsets)
    pieces: list[Piece] = [
        f'{{"message_id":"{id_prefix}'.encode(), *offset, f'","topic":{_quoted(topic)},"queue":'.encode(),
        fields.queue, b',"offset":', *offset, b',"store_ts":', fields.store_ts, b',"born_ts":', fields.born_ts,
        b',"key":', *fields.key, b',"tag":', *fields.tag, b',"properties":{},"body":"', fields.body, b'"',
    ]  # fmt: skip
    if attempts is not None:
        pieces += [b',"delivery_attempt":', _numbers(attempts)]
    if token:
        pieces += [f',"lease_id":"{token}.'.encode(), *_ascending(_less(fields.offsets, base)), b'"']
    pieces.append(b"},")
    return data_of(pc.binary_join_element_wise(*_fewer(pieces, batch.num_rows), ""))


def _of_bodies(rows: Bodies) -> _Fields | None:
    body = plain(rows.column)
    if body is None:
        return None
    return _Fields(body, str(rows.queue).encode(), rows.offsets, str(rows.store_ts).encode())


def _of_columns(batch: pa.RecordBatch) -> _Fields | None:
    """Of TIER_SCHEMA."""
    column = batch.column
    for name in ("properties", "origin"):
        if column(name).null_count < batch.num_rows:
            return None
    body, key, tag = plain(column("body")), _nullable(column("key")), _nullable(column("tag"))
    if body is None or key is None or tag is None:
        return None
    offsets = column("offset").to_numpy()
    first, end = int(offsets[0]), int(offsets[-1]) + 1
    return _Fields(
        body, _number(column("queue")), range(first, end) if end - first == len(offsets) else offsets,
        _number(column("store_ts").view(pa.int64())), _number(column("born_ts").view(pa.int64())), key, tag,
    )  # fmt: skip


def _less(numbers: range | npt.NDArray[np.int64], base: int) -> range | npt.NDArray[np.int64]:
    return range(numbers.start - base, numbers.stop - base) if isinstance(numbers, range) else numbers - base


def plain(column: pa.BinaryArray | pa.StringArray) -> pa.StringArray | None:
    """`column` as texts when all of it stands in JSON as it is; what a null stands over counts too."""
    data = data_of(column)
    texts = unescaped(column, data)
    return None if texts is None or holds(data, b'"') or holds(data, b"\\") else texts


def holds(data: Buffer, byte: bytes) -> bool:
    """Whether the byte is among those of `data`: by memchr, the quickest there is, much of it in place."""
    size = memoryview(data).nbytes
    if size < _IN_PLACE_BYTES:
        return byte in bytes(data)
    return bool(np.strings.find(np.frombuffer(data, f"S{size}"), byte)[0] >= 0)


def unescaped(column: pa.BinaryArray | pa.StringArray, data: pa.Buffer) -> pa.StringArray | None:
    """The same of one that has neither quotes nor backslashes; `data` is that of its rows."""
    # the least byte as a signed one tells control characters and all that is not ASCII
    if not data.size or np.minimum.reduce(np.frombuffer(data, np.int8)) >= _FIRST_PLAIN:
        return column.view(pa.string())
    if np.minimum.reduce(np.frombuffer(data, np.uint8)) < _FIRST_PLAIN:
        return None
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return None


def _nullable(column: pa.BinaryArray | pa.StringArray) -> list[Piece] | None:
    """A text or null, with its quotes; None when it must be escaped."""
    if column.null_count == len(column):
        return [b"null"]
    text = plain(column)
    if text is None:
        return None
    if not text.null_count:
        return [b'"', text, b'"']
    return [pc.coalesce(pc.binary_join_element_wise('"', text, '"', ""), "null")]


def _number(column: pa.Array) -> Piece:
    """Integers or null."""
    if column.null_count == len(column):
        return b"null"
    if column.null_count:
        return pc.coalesce(column.cast(pa.string()), "null")
    return _numbers(column.to_numpy())


def _numbers(numbers: npt.NDArray[Any]) -> Piece:
    """One text when all are the same."""
    data = numbers.tobytes()
    if data == data[: numbers.itemsize] * len(numbers):
        return str(numbers[0]).encode()
    digits = fixed.decimal(numbers)
    return digits if digits is not None else pa.array(numbers).cast(pa.string())


def _ascending(numbers: range | npt.NDArray[np.int64]) -> list[Piece]:
    """Those of a range have their first digits in common and the last ones are looked up at once, or they are known as
    texts."""
    if not isinstance(numbers, range):
        return [_numbers(numbers)]
    runs = list(islice(fixed.consecutive(numbers.start, numbers.stop), 2))
    if len(runs) == 1:
        return list(runs[0])
    if numbers.stop <= len(_SMALL):
        return [_SMALL.slice(numbers.start, len(numbers))]
    return [_numbers(np.arange(numbers.start, numbers.stop))]


def _fewer(pieces: Sequence[Piece], count: int) -> list[str | pa.StringArray]:
    """The same with what stands beside each other in one width put together: each piece costs a copy for each row."""
    found: list[str | pa.StringArray] = []
    run: list[bytes | fixed.Table] = []
    for piece in (*pieces, None):
        if isinstance(piece, bytes | np.ndarray):
            run.append(piece)
            continue
        if run:
            found.append(fixed.texts(run, count))
            run = []
        if piece is not None:
            found.append(piece)
    return found


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
