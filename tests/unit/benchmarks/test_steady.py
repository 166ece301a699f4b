"""How often a service did what it does now and then."""

from __future__ import annotations

from typing import cast

from benchmarks import steady
from millpond.client.connection import Answer, Connection

METRICS = b"""\
# HELP millpond_store_segments Files of the log.
# TYPE millpond_store_segments gauge
millpond_store_segments{store="1"} 3
millpond_store_segments_recycled_total{store="1"} 7
millpond_store_checkpoints_total{store="1"} 2
millpond_store_checkpoints_total{store="2"} 4
millpond_store_seal_objects_total 5
"""


class _Service:
    async def call(self, _method: str, _path: str) -> Answer:
        return Answer(200, {}, METRICS)


async def test_counts_of_all_stores_are_added_up() -> None:
    """And a name is not taken for another that begins with it."""
    assert await steady._counts(cast(Connection, _Service())) == {
        "millpond_store_checkpoints_total": 6,
        "millpond_store_seal_objects_total": 5,
        "millpond_store_segments": 3,
    }
