"""Tier objects in memory, and an object store that counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from support.objects import Encoded, encode

from millpond.core.errors import NotFound
from millpond.core.schema import PROPERTIES_TYPE, TIER_SCHEMA, TIMESTAMP
from millpond.core.tier.reader import ObjectRef

NOON = 1_700_049_600_000


def rows(queue: int, first: int, count: int, body_bytes: int = 100, keyed: bool = True) -> pa.Table:
    """`count` messages: store_ts rises by 10 ms every 4 rows, born_ts jumps about, every fifth has no key."""
    i = np.arange(first, first + count)
    noise = np.random.default_rng(queue * 1000 + first)
    bodies = [noise.bytes(body_bytes) for _ in range(count)]
    columns = {
        "queue": pa.array(np.full(count, queue, np.int32)),
        "offset": pa.array(i),
        "store_ts": pa.array(NOON + i // 4 * 10).cast(TIMESTAMP),
        "born_ts": pa.array([None if n % 7 == 3 else int(NOON - (n * 37) % 1000) for n in i], pa.int64()).cast(
            TIMESTAMP
        ),
        "key": pa.array([f"key-{n:06d}".encode() if keyed and n % 5 else None for n in i], pa.binary()),
        "tag": pa.array(["red" if n % 2 else "blue" for n in i]),
        "properties": pa.array([[("n", str(n))] if n % 3 else None for n in i], PROPERTIES_TYPE),
        "body": pa.array(bodies, pa.binary()),
        "origin": pa.nulls(count, pa.string()),
    }
    return pa.Table.from_arrays([columns[name] for name in TIER_SCHEMA.names], schema=TIER_SCHEMA)


class CountingObjects:
    """Objects in memory; `gets` lists every (key, first, end) that was asked for."""

    url = "memory:"

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.gets: list[tuple[str, int, int | None]] = []
        self.on_get: Callable[[], object] | None = None

    def add(self, path: str, encoded: Encoded) -> ObjectRef:
        self.data[path] = bytes(encoded.data)
        return ObjectRef(path, len(encoded.data), encoded.footer_bytes)

    async def get(self, key: str, first: int = 0, end: int | None = None) -> bytes:
        self.gets.append((key, first, end))
        if self.on_get is not None:
            await self.on_get()  # type: ignore[misc]  # a coroutine function
        if key not in self.data:
            raise NotFound("object_not_found", key)
        return self.data[key][first:end]


@pytest.fixture
def objects() -> CountingObjects:
    return CountingObjects()


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., pa.Table]:
    return rows


@pytest.fixture(scope="session")
def large() -> tuple[Encoded, dict[int, pa.Table]]:
    """An object of 3 queues; queue 0 has 4 row groups from offset 1000 on, queue 2 has two, queue 5 a short one."""
    tables = {0: rows(0, 1000, 3_200, 5_000), 2: rows(2, 0, 1_000, 5_000), 5: rows(5, 70, 10)}
    return encode(list(tables.items()), topic_id=7, epoch=3), tables
