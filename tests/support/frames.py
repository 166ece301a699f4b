"""Stored frames as a store hands them out."""

from __future__ import annotations

import pyarrow as pa

from millpond.core.schema import message_schema
from millpond.store.client import StoredFrame


def plain(first: int, bodies: list[bytes], store_ts: int = 1_000) -> StoredFrame:
    """A frame of bodies alone."""
    payload = pa.RecordBatch.from_arrays([pa.array(bodies, pa.binary())], schema=message_schema(0)).serialize()
    return StoredFrame(
        11, first * 4096 + 8, first, len(bodies), 0, 0, store_ts, payload.size, pa.py_buffer(b""), payload
    )
