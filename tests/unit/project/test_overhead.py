"""What a message costs in the log beside its body, as docs/formats.md says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from millpond.core.frame import HEADER_BYTES, Sidecar, aligned, pack_sidecar
from millpond.core.schema import BORN_TS, KEY, PROPERTIES, TAG, message_schema

DOCS = Path(__file__).parents[3] / "docs" / "formats.md"
BODY_BYTES = 1024
SHAPES = {
    "body only": 0,
    "key of 8 bytes, tag of 4": KEY | TAG,
    "key, tag, two properties of 16 bytes each, born_ts": KEY | TAG | PROPERTIES | BORN_TS,
}
ROWS = (1, 10, 100, 1000)


def frame_bytes(columns: int, rows: int) -> int:
    """Of one uncompressed messages frame in the log."""
    values = {
        "key": [b"12345678"] * rows,
        "tag": ["abcd"] * rows,
        "properties": [[("origin01", "12345678"), ("target01", "12345678")]] * rows,
        "born_ts": [0] * rows,
        "body": [b"x" * BODY_BYTES] * rows,
    }
    schema = message_schema(columns)
    payload = pa.record_batch([pa.array(values[f.name], f.type) for f in schema], schema=schema).serialize()
    hashes = np.zeros(rows, np.uint32)
    return aligned(HEADER_BYTES + len(pack_sidecar(Sidecar(hashes, hashes, None, None, None, []))) + payload.size)


def beside_the_body(columns: int, rows: int) -> float:
    return frame_bytes(columns, rows) / rows - BODY_BYTES


@pytest.mark.parametrize("shape", SHAPES)
def test_docs_say_what_a_message_costs(shape: str) -> None:
    """Bytes beside the body for each number of messages in a frame, rounded, in the table of docs/formats.md."""
    row = re.search(rf"^\| {re.escape(shape)} \|(.*)\|$", DOCS.read_text(), re.MULTILINE)
    assert row is not None
    written = [int(cell.replace(",", "")) for cell in row.group(1).split("|")]
    assert written == [round(beside_the_body(SHAPES[shape], rows)) for rows in ROWS]
