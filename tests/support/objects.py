"""Whole tier objects in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from millpond.core.limits import SEAL_BYTES
from millpond.core.tier.encoder import Grouping, ObjectEncoder
from millpond.core.tier.layout import QueueRange


class Encoded(NamedTuple):
    data: bytes
    footer_bytes: int
    ranges: list[QueueRange]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def encode(
    queues: Sequence[tuple[int, pa.Table]], topic_id: int, epoch: int, most_bytes: int = SEAL_BYTES, rows: int = 1 << 40
) -> Encoded:
    """The object that holds these rows: (queue, TIER_SCHEMA table of consecutive offsets), sorted by queue; handed to
    the encoder `rows` at a time."""
    data = bytearray()
    encoder, grouping = ObjectEncoder(data.extend, topic_id, epoch), Grouping(most_bytes)
    for queue, table in queues:
        for start in range(0, table.num_rows, rows):
            for group in grouping.add(queue, table.slice(start, rows)):
                encoder.write(group)
    for group in grouping.finish():
        encoder.write(group)
    encoded = encoder.finish()
    assert encoded.bytes == len(data)
    return Encoded(bytes(data), encoded.footer_bytes, encoded.ranges)
