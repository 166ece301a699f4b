"""What a message may be: the limits of its parts, checked by columns (a batch) or one by one (a single message).

A violation belongs to its message, so a check answers `{row: error}` and leaves the others alone.

    body        up to the topic's max_message_bytes
    key         up to 1 KiB, any bytes; the empty key is a key
    tag         1 to 127 bytes of UTF-8 without spaces, control characters, `|` and `*` (they mean something in filters)
    properties  names and values together up to 32 KiB; a name is not empty and stands once; a value is a string
    born_ts     0 .. the year 9999, in milliseconds
    origin      a JSON object of up to 1 KiB
    dedup_id    1 to 256 bytes of UTF-8
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.core.errors import BadRequest, MillpondError, TooLarge
from millpond.core.limits import (
    DEDUP_ID_BYTES,
    KEY_BYTES,
    ORIGIN_BYTES,
    PROPERTIES_BYTES,
    TAG_BYTES,
    TIMESTAMP_MS_MOST,
)
from millpond.core.texts import offsets_and_data

RowErrors = dict[int, MillpondError]
Lengths = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

TAG_EXPECTED = f"1 to {TAG_BYTES} bytes without spaces, control characters, '|' and '*'"
_TAG_REFUSED = re.compile(r"[\s|*\x00-\x1f\x7f-\x9f]")
_TAG_REFUSED_RE2 = r"[\p{Z}\p{Cc}|*]"  # the same characters; a test compares the two over all of Unicode
_BORN_EXPECTED = f"milliseconds since 1970 UTC, 0 to {TIMESTAMP_MS_MOST}"
_PROPERTIES_EXPECTED = f"names and values of at most {PROPERTIES_BYTES} bytes together"
_NAMES_EXPECTED = "names that are not empty and stand once, with strings as values"
_DEDUP_EXPECTED = f"1 to {DEDUP_ID_BYTES} bytes"


def check_columns(batch: pa.RecordBatch, max_message_bytes: int) -> RowErrors:
    """Check the columns `batch` has (of `message_schema`, plus `dedup_id` utf8). Rows without error are not named."""
    errors: RowErrors = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "body":
            if _bytes_within(column) <= max_message_bytes:
                continue
            for row in _rows(lengths(column) > max_message_bytes):
                errors.setdefault(row, body_too_large(max_message_bytes))
        elif column.null_count < len(column):
            _CHECKS[name](column, errors)
    return errors


def check_single(
    body_bytes: int,
    max_message_bytes: int,
    key: bytes | str | None,
    tag: str | None,
    properties: dict[str, str] | None,
    born_ts: int | None,
    dedup_id: str | None,
) -> int:
    """The same rules for one message. How many bytes its parts have in all. Raises the violation."""
    size = body_bytes
    if body_bytes > max_message_bytes:
        raise body_too_large(max_message_bytes)
    if key is not None:
        key_bytes = size_of(key)
        if key_bytes > KEY_BYTES:
            raise _refused("key", f"at most {KEY_BYTES} bytes")
        size += key_bytes
    if tag is not None:
        tag_bytes = size_of(tag)
        if not tag or tag_bytes > TAG_BYTES or _TAG_REFUSED.search(tag) is not None:
            raise _refused("tag", TAG_EXPECTED)
        size += tag_bytes
    if properties:
        properties_bytes = sum(map(size_of, properties)) + sum(map(size_of, properties.values()))
        if properties_bytes > PROPERTIES_BYTES:
            raise _refused("properties", _PROPERTIES_EXPECTED)
        if "" in properties:
            raise _refused("properties", _NAMES_EXPECTED)
        size += properties_bytes
    if born_ts is not None and not 0 <= born_ts <= TIMESTAMP_MS_MOST:
        raise _refused("born_ts", _BORN_EXPECTED)
    if dedup_id is not None and not 1 <= size_of(dedup_id) <= DEDUP_ID_BYTES:
        raise _refused("dedup_id", _DEDUP_EXPECTED)
    return size


def size_of(value: bytes | str) -> int:
    """Bytes of `value` (a string's UTF-8)."""
    return len(value) if isinstance(value, bytes) or value.isascii() else len(value.encode())


def lengths(array: pa.Array) -> Lengths:
    """i64[n] lengths in bytes of a binary or utf8 array."""
    if not len(array):
        return np.zeros(0, np.int64)
    return np.diff(offsets_and_data(array)[0]).astype(np.int64)


def _bytes_within(array: pa.Array) -> int:
    """No value of a binary array is longer than this: all that its offsets may point into."""
    data = array.buffers()[2]
    return 0 if data is None else int(data.size)


def body_too_large(max_message_bytes: int) -> TooLarge:
    return TooLarge("message_too_large", f"body: larger than {max_message_bytes} bytes", limit_bytes=max_message_bytes)


def _refused(field: str, expected: str) -> BadRequest:
    return BadRequest.field(field, expected)


def _rows(mask: Mask) -> list[int]:
    rows: list[int] = np.flatnonzero(mask).tolist() if mask.any() else []
    return rows


def _name(rows: Iterable[int], field: str, expected: str, errors: RowErrors) -> None:
    for row in rows:
        errors.setdefault(row, _refused(field, expected))


def _present(column: pa.Array) -> Mask:
    mask: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    return mask


def _check_key(column: pa.Array, errors: RowErrors) -> None:
    _name(_rows(lengths(column) > KEY_BYTES), "key", f"at most {KEY_BYTES} bytes", errors)


def _check_tag(column: pa.Array, errors: RowErrors) -> None:
    encoded = column.dictionary_encode()
    words = encoded.dictionary
    bad = pc.match_substring_regex(words, _TAG_REFUSED_RE2).to_numpy(zero_copy_only=False)
    sizes = lengths(words)
    bad |= (sizes > TAG_BYTES) | (sizes == 0)
    if bad.any():
        flags = np.append(bad, False)
        _name(_rows(flags[encoded.indices.fill_null(len(bad)).to_numpy()]), "tag", TAG_EXPECTED, errors)


def _check_born_ts(column: pa.Array, errors: RowErrors) -> None:
    values = column.cast(pa.int64()).fill_null(0).to_numpy()
    _name(_rows((values < 0) | (values > TIMESTAMP_MS_MOST)), "born_ts", _BORN_EXPECTED, errors)


def _check_dedup_id(column: pa.Array, errors: RowErrors) -> None:
    sizes = lengths(column)
    _name(_rows(((sizes == 0) | (sizes > DEDUP_ID_BYTES)) & _present(column)), "dedup_id", _DEDUP_EXPECTED, errors)


def _check_origin(column: pa.Array, errors: RowErrors) -> None:
    """Rows that have an origin are few (replays) and short, so each is decoded by itself."""
    for row, text in enumerate(column.to_pylist()):
        if text is None:
            continue
        try:
            fits = len(text) <= ORIGIN_BYTES and isinstance(msgspec.json.decode(text), dict)
        except (msgspec.DecodeError, RecursionError):
            fits = False
        if not fits:
            errors.setdefault(row, _refused("origin", f"a JSON object of at most {ORIGIN_BYTES} bytes"))


def _check_properties(column: pa.Array, errors: RowErrors) -> None:
    ends = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)
    first, count = int(ends[0]), int(ends[-1] - ends[0])
    if not count:
        return
    ends = ends - first
    names, values = column.keys.slice(first, count), column.items.slice(first, count)
    name_bytes = lengths(names)
    sizes = np.concatenate(([0], np.cumsum(name_bytes + lengths(values))))
    _name(_rows(sizes[ends[1:]] - sizes[ends[:-1]] > PROPERTIES_BYTES), "properties", _PROPERTIES_EXPECTED, errors)
    bad = _repeated_names(names, ends) | (name_bytes == 0)
    if values.null_count:
        bad |= ~_present(values)
    if bad.any():
        rows = np.searchsorted(ends, np.flatnonzero(bad), side="right") - 1
        _name(np.unique(rows).tolist(), "properties", _NAMES_EXPECTED, errors)


def _repeated_names(names: pa.Array, ends: npt.NDArray[np.int32]) -> Mask:
    """Which entries repeat a name of their own row: a map with such a row cannot be read everywhere."""
    codes = names.dictionary_encode().indices.fill_null(0).to_numpy().astype(np.int64)
    rows = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    pairs = rows * (int(codes.max()) + 1) + codes
    repeated = np.ones(len(pairs), bool)
    repeated[np.unique(pairs, return_index=True)[1]] = False
    return repeated


_CHECKS = {
    "key": _check_key,
    "tag": _check_tag,
    "properties": _check_properties,
    "born_ts": _check_born_ts,
    "origin": _check_origin,
    "dedup_id": _check_dedup_id,
}
