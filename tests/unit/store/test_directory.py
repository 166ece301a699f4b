"""Where messages stand, beside a plain list of frames that is looked through one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from support.disks import MemoryDisk

from millpond.store.directory import Directory
from millpond.store.index import OpenIndex

SEGMENT_BYTES = 1 << 20
QUEUE, OTHER = 7, 5


class Frame(NamedTuple):
    first: int
    count: int
    position: int
    length: int
    size: int
    tags: list[int]


@pytest.fixture(name="directory")
def _directory() -> Iterator[Directory]:
    disk = MemoryDisk()
    disk.make_folder("log")
    directory = Directory(disk, SEGMENT_BYTES, rebuild=OpenIndex)
    yield directory
    directory.stop()


def filled(directory: Directory, random: np.random.Generator) -> list[Frame]:
    """Three segments: a closed one, one whose index is not written yet, the open one. Frames of a queue by offset;
    another queue's stand between them."""
    frames: list[Frame] = []
    offset = int(random.integers(3))
    for segment in range(3):
        base = position = segment * SEGMENT_BYTES
        if segment:
            directory.roll(base)
        if segment == 2:
            directory.close_segment_now(directory.closing()[0])
        for _ in range(int(random.integers(1, 12))):
            frame = Frame(
                offset,
                int(random.integers(1, 5)),
                position,
                int(random.integers(100, 900)),
                int(random.integers(1, 999)),
                [],
            )
            frame.tags.extend(int(random.integers(1, 99)) for _ in range(frame.count))
            frames.append(frame)
            add(directory, QUEUE, frame)
            add(directory, OTHER, frame._replace(first=offset * 2, position=position + 5_000))
            offset += frame.count
            position += 10_000
    return frames


def add(directory: Directory, queue_id: int, frame: Frame) -> None:
    tags = np.array(frame.tags, np.uint32)
    directory.open.add(
        queue_id, frame.first, frame.count, frame.position, frame.length, frame.size, tags, np.zeros_like(tags)
    )


@pytest.mark.parametrize("seed", range(8))
def test_entries_are_those_of_every_frame(directory: Directory, seed: int) -> None:
    """Of any stretch, across frames and segments: each message's frame and tag."""
    frames = filled(directory, np.random.default_rng(seed))
    rows = [(frame.position, frame.length, tag) for frame in frames for tag in frame.tags]
    start = frames[0].first
    for first in range(len(rows)):
        for most in (1, 2, 7, len(rows)):
            found = asyncio.run(directory.entries(QUEUE, start + first, most))
            named = zip(*(found[name].tolist() for name in ("position", "length", "tag_hash")), strict=True)
            assert list(named) == rows[first : first + most]
    assert len(asyncio.run(directory.entries(QUEUE, start + len(rows), 5))) == 0


@pytest.mark.parametrize("seed", range(8))
def test_the_first_message_from_a_position_on(directory: Directory, seed: int) -> None:
    """The least offset whose frame stands there or later, wherever that is between frames."""
    frames = filled(directory, np.random.default_rng(seed))
    for position in [frame.position + beside for frame in frames for beside in (-1, 0, 1)]:
        expected = min((frame.first for frame in frames if frame.position >= position), default=None)
        assert asyncio.run(directory.first_from_position(QUEUE, position)) == expected


@pytest.mark.parametrize("seed", range(8))
def test_sizes_from_an_offset_and_back(directory: Directory, seed: int) -> None:
    """Bytes from each offset on: whole frames behind it, and its share of its own where that is in memory; and the
    offset from which on no more than so many are kept, by whole frames."""
    frames = filled(directory, np.random.default_rng(seed))
    in_memory = [frame for frame in frames if frame.position >= SEGMENT_BYTES]
    for frame in in_memory:
        for offset in range(frame.first, frame.first + frame.count):
            behind = sum(each.size for each in in_memory if each.first > offset)
            share = frame.size * (frame.first + frame.count - offset) / frame.count
            assert directory.bytes_of(QUEUE, offset) == int(behind + share)
    total = sum(frame.size for frame in in_memory)
    for keep in range(0, total, 97):
        kept = keep
        for frame in reversed(in_memory):
            if frame.size > kept:
                break
            kept -= frame.size
        assert directory.offset_of_bytes(QUEUE, keep) == frame.first + frame.count


def test_a_frame_that_was_copied_twice_counts_once(directory: Directory) -> None:
    """As messages do that stand in two frames."""
    for position in (0, 10_000):
        add(directory, QUEUE, Frame(50, 2, position, 100, 80, [1, 2]))
    assert asyncio.run(directory.entries(QUEUE, 50, 10))["tag_hash"].tolist() == [1, 2]
    assert directory.bytes_of(QUEUE, 50) == 80


def test_of_a_queue_that_is_not_here_there_is_nothing(directory: Directory) -> None:
    """No entry, no offset, no byte."""
    filled(directory, np.random.default_rng(1))
    assert len(asyncio.run(directory.entries(9, 0, 5))) == 0
    assert asyncio.run(directory.first_from_position(9, 0)) is None
    assert (directory.bytes_of(9, 0), directory.offset_of_bytes(9, 0)) == (0, 0)
