"""Messages as JSON by columns: for rows whose texts stand in JSON as they are, which is most of what is sent.

One kernel call joins the constant texts between the fields with the columns of the fields: no object for a message
is made, and a body is copied once. A text stands in JSON as it is when it is UTF-8 without quotes, backslashes and
control characters: asked for a whole column at once. Rows with properties or an origin, or with a text that must be
escaped or is not UTF-8, are left to `answers` (None): it says the same about them, field by field.
"""

from __future__ import annotations

from itertools import groupby, islice
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.core.gathered import Buffer
from millpond.core.limits import RECEIVE_MESSAGES
from millpond.proxy.codec import fixed

Piece: TypeAlias = bytes | fixed.Table | pa.StringArray
"""A constant, texts of one width, or a column without nulls."""

_SMALL = pa.array(range(RECEIVE_MESSAGES)).cast(pa.string())
_IN_PLACE_BYTES = 128 * 1024  # a copy of fewer takes less than NumPy's call
_FIRST_PLAIN = 0x20  # what is below is a control character


def joined(
    topic: str, batch: pa.RecordBatch, id_prefix: str, attempts: npt.NDArray[np.uint32] | None, token: str, base: int
) -> pa.Buffer | None:
    """The rows of `batch` (TIER_SCHEMA, at least one) as JSON objects with a comma behind each; see `answers.Rows`.

    None when some text cannot stand in JSON as it is.
    """
    column = batch.column
    for name in ("properties", "origin"):
        if column(name).null_count < batch.num_rows:
            return None
    body, key, tag = plain(column("body")), _nullable(column("key")), _nullable(column("tag"))
    if body is None or key is None or tag is None:
        return None
    offsets = column("offset").to_numpy()
    offset = _ascending(offsets)
    pieces: list[Piece] = [
        f'{{"message_id":"{id_prefix}'.encode(), *offset, f'","topic":{_quoted(topic)},"queue":'.encode(),
        _number(column("queue")), b',"offset":', *offset, b',"store_ts":', _number(column("store_ts").view(pa.int64())),
        b',"born_ts":', _number(column("born_ts").view(pa.int64())), b',"key":', *key, b',"tag":', *tag,
        b',"properties":{},"body":"', body, b'"',
    ]  # fmt: skip
    if attempts is not None:
        pieces += [b',"delivery_attempt":', _numbers(attempts)]
    if token:
        pieces += [f',"lease_id":"{token}.'.encode(), *_ascending(offsets - base), b'"']
    pieces.append(b"},")
    return data_of(pc.binary_join_element_wise(*_fewer(pieces, batch.num_rows), ""))


def plain(column: pa.BinaryArray | pa.StringArray) -> pa.StringArray | None:
    """`column` as texts when all of it stands in JSON as it is; what a null stands over counts too."""
    texts = unescaped(column)
    if texts is None:
        return None
    data = data_of(column)
    return None if holds(data, b'"') or holds(data, b"\\") else texts


def holds(data: Buffer, byte: bytes) -> bool:
    """Whether the byte is among those of `data`: by memchr, the quickest there is, much of it in place."""
    size = memoryview(data).nbytes
    if size < _IN_PLACE_BYTES:
        return byte in bytes(data)
    return bool(np.strings.find(np.frombuffer(data, f"S{size}"), byte)[0] >= 0)


def unescaped(column: pa.BinaryArray | pa.StringArray) -> pa.StringArray | None:
    """The same of one that has neither quotes nor backslashes."""
    data = data_of(column)
    if not data.size:
        return column.view(pa.string())
    # the least byte as a signed one tells control characters and all that is not ASCII
    if int(np.frombuffer(data, np.int8).min()) >= _FIRST_PLAIN:
        return column.view(pa.string())
    if int(np.frombuffer(data, np.uint8).min()) < _FIRST_PLAIN:
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
    if (numbers == numbers[0]).all():
        return str(numbers[0]).encode()
    digits = fixed.decimal(numbers)
    return digits if digits is not None else pa.array(numbers).cast(pa.string())


def _ascending(numbers: npt.NDArray[np.int64]) -> list[Piece]:
    """Where none is left out, they have their first digits in common and the last ones are looked up at once, or they
    are known as texts."""
    first, end = int(numbers[0]), int(numbers[-1]) + 1
    if end - first == len(numbers):
        runs = list(islice(fixed.consecutive(first, end), 2))
        if len(runs) == 1:
            return list(runs[0])
        if end <= len(_SMALL):
            return [_SMALL.slice(first, len(numbers))]
    return [_numbers(numbers)]


def _fewer(pieces: list[Piece], count: int) -> list[str | pa.StringArray]:
    """The same with what stands beside each other in one width put together: each piece costs a copy for each row."""
    found: list[str | pa.StringArray] = []
    for varies, group in groupby(pieces, lambda piece: isinstance(piece, pa.StringArray)):
        run: list[Any] = list(group)
        if varies:
            found += run
        elif all(isinstance(piece, bytes) for piece in run):
            found.append(b"".join(run).decode())
        else:
            found.append(fixed.column(fixed.beside(run, count)))
    return found


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def data_of(text: pa.StringArray) -> pa.Buffer:
    """The bytes of all rows, one after another."""
    if not len(text):
        return pa.py_buffer(b"")
    _, offsets, data = text.buffers()
    bounds = np.frombuffer(offsets, np.int32)[text.offset :]
    first, end = int(bounds[0]), int(bounds[len(text)])
    return data.slice(first, end - first) if data is not None else pa.py_buffer(b"")
