"""Messages as JSON by columns: for rows whose texts stand in JSON as they are, which is most of what is sent.

One kernel call joins the constant texts between the fields with the columns of the fields: no object for a message
is made, and a body is copied once. A text stands in JSON as it is when it is UTF-8 without quotes, backslashes and
control characters: asked for a whole column at once. Rows with properties or an origin, or with a text that must be
escaped or is not UTF-8, are left to `answers` (None): it says the same about them, field by field.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Text: TypeAlias = str | pa.StringArray
"""A constant, or a column without nulls."""

_FIRST_PLAIN = 0x20  # what is below is a control character


def joined(
    topic: str, batch: pa.RecordBatch, id_prefix: str, attempts: npt.NDArray[np.uint32] | None, token: str, base: int
) -> pa.Buffer | None:
    """The rows of `batch` (TIER_SCHEMA, at least one) as JSON objects with a comma behind each; see `answers.Rows`.

    None when some text cannot stand in JSON as it is.
    """
    column = batch.column
    body = plain(column("body"))
    key, tag = _nullable(column("key")), _nullable(column("tag"))
    for name in ("properties", "origin"):
        if column(name).null_count < batch.num_rows:
            return None
    if body is None or key is None or tag is None:
        return None
    offsets = column("offset")
    offset = offsets.cast(pa.string())
    pieces: list[Text] = [
        '{"message_id":"', id_prefix, offset, f'","topic":{_quoted(topic)},"queue":', _number(column("queue")),
        ',"offset":', offset, ',"store_ts":', _number(column("store_ts").cast(pa.int64())),
        ',"born_ts":', _number(column("born_ts").cast(pa.int64())), ',"key":', *key, ',"tag":', *tag,
        ',"properties":{},"body":"', body, '"',
    ]  # fmt: skip
    if attempts is not None:
        pieces += [',"delivery_attempt":', _number(pa.array(attempts))]
    if token:
        pieces += [f',"lease_id":"{token}.', pc.subtract(offsets, base).cast(pa.string()), '"']
    pieces.append("},")
    return data_of(pc.binary_join_element_wise(*_fewer(pieces), ""))


def plain(column: pa.BinaryArray | pa.StringArray) -> pa.StringArray | None:
    """`column` as texts when all of it stands in JSON as it is; what a null stands over counts too."""
    try:
        text = column.cast(pa.string())
    except pa.ArrowInvalid:
        return None
    data = data_of(text)
    if not data.size:
        return text
    # one pass each, of which the first two are memchr: the quickest there is
    raw = data.to_pybytes()
    if b'"' in raw or b"\\" in raw or int(np.frombuffer(raw, np.uint8).min()) < _FIRST_PLAIN:
        return None
    return text


def _nullable(column: pa.BinaryArray | pa.StringArray) -> list[Text] | None:
    """A text or null, with its quotes; None when it must be escaped."""
    if column.null_count == len(column):
        return ["null"]
    text = plain(column)
    if text is None:
        return None
    if not text.null_count:
        return ['"', text, '"']
    return [pc.coalesce(pc.binary_join_element_wise('"', text, '"', ""), "null")]


def _number(column: pa.Array) -> Text:
    """Integers or null; one text when all are the same."""
    if column.null_count == len(column):
        return "null"
    if not column.null_count and pc.count_distinct(column).as_py() == 1:
        return str(column[0].as_py())
    text = column.cast(pa.string())
    whole: pa.StringArray = pc.coalesce(text, "null") if text.null_count else text
    return whole


def _fewer(pieces: list[Text]) -> list[Text]:
    """The same with neighbouring constants put together: each piece costs a copy for each row."""
    found: list[Any] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
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
