"""A checkpoint whose tables are being made, and what a store does meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.disks import MemoryDisk
from support.stores import StoreMetadata, append, messages, open_store, queue

from millpond.core.frame import ProducerPart
from millpond.store.checkpoint import Head
from millpond.store.client import (
    GroupRef,
    ReceiveRequest,
    Settle,
    SettleRequest,
)
from millpond.store.fold.snapshot import Snapshot, Tables
from millpond.store.housekeeping import Housekeeping


async def checkpoint_held_up(
    housekeeping: Housekeeping, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.Future[None], threading.Event]:
    """A checkpoint whose moment is over, and what its tables wait for."""
    noted, may, snapshot = threading.Event(), threading.Event(), housekeeping._snapshot

    def held() -> tuple[Head, Snapshot]:
        head, tables = snapshot()

        def later() -> Tables:
            noted.set()
            assert may.wait(10)
            return tables()

        return head, later

    with monkeypatch.context() as patch:
        patch.setattr(housekeeping, "_snapshot", held)
        taking = asyncio.ensure_future(housekeeping.checkpoint())
        assert await asyncio.to_thread(noted.wait, 10)
    return taking, may


async def test_nobody_waits_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are made and filled while its tables are made, however long that takes."""
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    taking, may = await checkpoint_held_up(store.engine.housekeeping, monkeypatch)
    async with asyncio.timeout(5):
        while len(store.engine.log.segments) < 5:
            await append(store, messages([b"x" * 9_000]))
    assert not taking.done()
    may.set()
    await taking
    await store.close()


async def test_a_checkpoint_is_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is appended, leased and settled while its tables are made comes from the log after a power cut."""
    disk, metadata = MemoryDisk(), StoreMetadata()
    store = await open_store(disk, metadata, tmp_path)
    housekeeping, group = store.engine.housekeeping, GroupRef(1, 1, 5)
    ask = ReceiveRequest(group, [queue()], "earliest", 3, 1 << 20, 30_000)
    parts = [ProducerPart("p", -1, 0, 0, 0, 1), ProducerPart("p", 0, 1, 1, 0, 1)]
    await append(store, messages([b"%d" % number for number in range(9)]), messages([b"a"], number=1, part=parts[0]))
    first = (await store.receive(ask)).grants[0]
    taking, may = await checkpoint_held_up(housekeeping, monkeypatch)
    acked = pa.py_buffer(np.array([0, 2], np.int64).tobytes())
    ack = Settle(first.queue_id, first.generation, first.lease, "ack", ranges=acked)
    await store.settle(SettleRequest(group, [ack], "flush", 5_000))
    await store.receive(ask)
    await append(store, messages([b"b"], number=1, part=parts[1]), messages([b"of a new queue"], number=2))
    may.set()
    await taking
    await store.engine.writer.flushed(store.engine.log.tail)
    expected = store.engine.fold.snapshot()()
    left = {name: bytes(disk.inodes[inode]) for name, inode in disk.named.items()}
    await store.close()
    disk = MemoryDisk()
    for name, data in left.items():
        disk.write_whole(name, [data])
    store = await open_store(disk, metadata, tmp_path)
    assert store.engine.fold.snapshot()() == expected
    await store.close()
