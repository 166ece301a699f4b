"""Which frames a read gives: found in steps, the same as in one go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.disks import MemoryDisk
from support.stores import StoreMetadata, append, messages, open_store

from millpond.core.hashing import hash_bytes
from millpond.store.client import ReadRequest
from millpond.store.local import LocalStore

FRAMES = [2, 5, 1, 4, 9]  # messages in each
TAGS = ["red", "blue", "red", "green", "blue"]


@pytest.fixture(name="store")
async def _store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    for count, tag in zip(FRAMES, TAGS, strict=True):
        await append(store, messages([b"x" * 100] * count, tags=[tag] * count))
    yield store
    await store.close()


async def frames_of(store: LocalStore, request: ReadRequest) -> tuple[list[int], int]:
    result = await store.read(request)
    return [frame.first_offset for frame in result.frames], result.next_offset


async def read_through(store: LocalStore, tag: str | None) -> list[int]:
    """First offsets of the frames of reads that go on where the one before them ended."""
    hashes = None if tag is None else [hash_bytes(tag.encode())]
    found, at = [], 0
    while at < sum(FRAMES):
        frames, then = await frames_of(store, ReadRequest(1, at, 100, 1 << 20, 0, hashes))
        assert then > at
        found, at = found + frames, then
    return found


@pytest.mark.parametrize("tag", [None, "red", "blue"])
@pytest.mark.parametrize("step", [2, 4_096])
async def test_a_read_gives_so_many_frames_and_no_more(
    store: LocalStore, tag: str | None, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small they are; the next read goes on at the first that was left."""
    expected = await read_through(store, tag)
    monkeypatch.setattr("millpond.store.reads._ENTRIES_AT_ONCE", step)
    for most in (1, 2, 3):
        monkeypatch.setattr("millpond.store.reads._FRAMES_AT_ONCE", most)
        frames, _ = await frames_of(store, ReadRequest(1, 0, 100, 1 << 20, 0, None))
        assert len(frames) == most
        assert await read_through(store, tag) == expected


@pytest.mark.parametrize("step", [1, 2, 3, 7])
@pytest.mark.parametrize("max_bytes", [1, 2_000, 1 << 20])
@pytest.mark.parametrize("tag", [None, "blue"])
async def test_steps_change_nothing(
    store: LocalStore, step: int, max_bytes: int, tag: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame that a step cuts is given once, and counts once, from whichever offset and however many are wanted."""
    hashes = None if tag is None else [hash_bytes(tag.encode())]
    wanted = [ReadRequest(1, at, most, max_bytes, 0, hashes) for at in range(sum(FRAMES)) for most in (1, 4, 8, 100)]
    expected = [await frames_of(store, request) for request in wanted]
    monkeypatch.setattr("millpond.store.reads._ENTRIES_AT_ONCE", step)
    assert [await frames_of(store, request) for request in wanted] == expected
