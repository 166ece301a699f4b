"""Small Arrow answers, one like the other: what is the same in all of them is read once.

The schema message of an answer has beside the schema a text of JSON, `millpond` in its metadata, that differs from
answer to answer: receipts, offsets. Where all of the message but that text has come before, its schema is known, and
the text has the same place and length (which stands before it). Reading the schema was two thirds of the time that
opening an answer of one message took.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from millpond.core.arrow import PREFIX
from millpond.core.limits import KIB

METADATA_KEY = b"millpond"
SMALL_BYTES = 64 * KIB  # of larger ones the schema is nothing
_KNOWN = 64  # lengths of schema messages that are remembered
_NOTHING = b"{}"


class Opened(NamedTuple):
    """The record batches of an answer, and the JSON beside them."""

    schema: pa.Schema
    batches: list[pa.RecordBatch]
    beside: bytes


class _Seen(NamedTuple):
    """A schema message: what stands in it before and behind the JSON, and what it says."""

    before: bytes
    behind: bytes
    schema: pa.Schema


_seen: dict[int, _Seen] = {}  # by length


def opened(body: bytes | pa.Buffer) -> Opened:
    """All of an answer. Raises pa.ArrowException."""
    reader = pa.ipc.open_stream(body)
    schema = reader.schema
    beside = (schema.metadata or {}).get(METADATA_KEY, _NOTHING)
    if isinstance(body, bytes) and len(body) <= SMALL_BYTES:
        _remember(body, schema, beside)
    return Opened(schema, list(reader), beside)


def opened_again(body: bytes | pa.Buffer) -> Opened | None:
    """The first record batch of a small answer whose schema is known, if it has one. None: see `opened`."""
    if not isinstance(body, bytes) or not PREFIX.size <= len(body) <= SMALL_BYTES:
        return None
    end = _end_of_schema(body)
    seen = _seen.get(end)
    if seen is None or not body.startswith(seen.before) or not body.startswith(seen.behind, end - len(seen.behind)):
        return None
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(body)[end:], seen.schema)
    except (pa.ArrowException, EOFError, OSError):  # no batch, or none of this schema
        return None
    return Opened(seen.schema, [batch], body[len(seen.before) : end - len(seen.behind)])


def _remember(body: bytes, schema: pa.Schema, beside: bytes) -> None:
    end = _end_of_schema(body)
    before, found, behind = body[:end].partition(beside)
    if not found or beside in behind or beside == _NOTHING:
        return  # it cannot be told where the JSON stands
    if len(_seen) == _KNOWN:
        _seen.clear()
    _seen[end] = _Seen(before, behind, schema.remove_metadata())


def _end_of_schema(body: bytes) -> int:
    return int(PREFIX.size + PREFIX.unpack_from(body)[1])
