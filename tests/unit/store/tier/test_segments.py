"""The store's segments as its sealing process reads them: how, and for how long they are open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millpond.core.tier.gentle import Steps
from millpond.store.commitlog import segment_name
from millpond.store.tier.channel import Place
from millpond.store.tier.segments import SealFile, SegmentFiles

SEGMENT_BYTES = 1 << 20
BASES = (0, SEGMENT_BYTES)


@pytest.fixture(name="files")
def _files(tmp_path: Path) -> SegmentFiles:
    """Two segments; the store writes to the second one."""
    for base in BASES:
        path = tmp_path / segment_name(base)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"frames")
    files = SegmentFiles(Place(str(tmp_path), SEGMENT_BYTES, 1), Steps())
    files.open_from = SEGMENT_BYTES
    return files


def opened(files: SegmentFiles, base: int) -> SealFile:
    segment = files.segment_of(base)
    assert segment is not None and isinstance(segment.file, SealFile)
    return segment.file


def test_they_are_read_past_the_page_cache_once_nobody_writes_to_them(files: SegmentFiles) -> None:
    """Those before the open one always; the open one while the log is still."""

    def written_to() -> list[bool]:
        return [opened(files, base).written_to for base in BASES]

    assert written_to() == [False, True]
    files.still = True
    assert written_to() == [False, False]
    files.still = False
    assert written_to() == [False, True]


def test_a_read_that_waits_for_its_turn_heeds_what_is_written(files: SegmentFiles) -> None:
    """It was asked for while the log was still, and something is appended before it begins."""
    files.still = True
    waiting = opened(files, SEGMENT_BYTES)
    assert not waiting.written_to
    files.still = False
    assert waiting.written_to


def test_one_is_open_as_long_as_somebody_reads_it(files: SegmentFiles) -> None:
    """Also when it is no longer kept for later."""
    reading = opened(files, 0)
    files.trim(0)
    assert reading.read(0, 6) == b"frames"
    handle = reading.fileno()
    del reading
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_one_that_is_not_there(files: SegmentFiles) -> None:
    assert files.segment_of(2 * SEGMENT_BYTES) is None
