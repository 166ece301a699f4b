"""The commitlog's own promises about what it hands to the disk."""

from __future__ import annotations

import itertools

import google_crc32c
import pytest
from support.disks import MemoryDisk

from millpond.core.frame import HEADER_BYTES, MARK
from millpond.core.gathered import Buffer
from millpond.store.checkpoint import Checkpoints
from millpond.store.commitlog import FOLDER, PAGE_BYTES, CommitLog, Draft
from millpond.store.restore import restore

SEGMENT_BYTES = 64 * 1024


class _Noting:
    """Stands before a segment's file and notes where writes begin and end."""

    def __init__(self, file: object) -> None:
        self._file = file
        self.writes: list[tuple[int, int]] = []

    def write(self, position: int, buffers: list[Buffer]) -> None:
        self.writes.append((position, position + sum(map(len, buffers))))
        self._file.write(position, buffers)  # type: ignore[attr-defined]


def test_pages_are_written_whole() -> None:
    """Whatever the sizes of frames, a write ends with a page or with its segment, and begins in a page that the one
    before has written: no page of a recycled segment has to be read because it is written to in part."""
    disk = MemoryDisk()
    disk.make_folder(FOLDER)
    log = CommitLog(disk, SEGMENT_BYTES, 1)
    noting = []
    for _ in range(3):
        log.add_segment(log.allocate_segment())
        noting.append(_Noting(log.segments[-1].file))
        log.segments[-1].file = noting[-1]  # type: ignore[assignment]
    for size in itertools.islice(itertools.cycle((0, 100, 4_000, 9_999, 20_000)), 20):
        body = b"x" * size
        log.append([Draft(MARK, 0, 0, 0, 0, 0, 0, b"", body, 0, size)], 1)
        writes, _ = log.take_writes()
        log.write(writes)
    for file in noting:
        before = 0
        for begin, end in file.writes:
            assert end % PAGE_BYTES == 0
            assert begin // PAGE_BYTES * PAGE_BYTES <= before
            before = end
    assert len(noting[1].writes) > 1


@pytest.mark.parametrize("left", [0, 8, 1_000])
def test_a_log_that_ended_just_before_its_next_segment_goes_on(left: int) -> None:
    """The next segment is made when the open one is half full, and a store may end before: its start finds room for
    what a start writes, however little is left of the last segment."""
    disk = MemoryDisk()
    disk.make_folder(FOLDER)
    log = CommitLog(disk, SEGMENT_BYTES, 1)
    log.add_segment(log.allocate_segment())
    body = b"x" * (SEGMENT_BYTES - HEADER_BYTES - left)
    crc = google_crc32c.value(body)
    log.append([Draft(MARK, 0, 0, 0, 0, 0, 0, b"", body, crc, len(body))], 1)
    log.write(log.take_writes()[0])
    again = CommitLog(disk, SEGMENT_BYTES, 1)
    restore(disk, again, Checkpoints(disk))
    assert SEGMENT_BYTES - left <= again.tail <= SEGMENT_BYTES
    assert again.has_room(HEADER_BYTES, SEGMENT_BYTES // 4)
    again.append([Draft(MARK, 0, 0, 0, 0, 0, 0, b"", b"", 0, 0)], 2)
