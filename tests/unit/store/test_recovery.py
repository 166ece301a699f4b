"""Recovery of the log: what is believed after a crash, and what is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import pytest

from millpond.core import limits
from millpond.core.frame import HEADER_BYTES, MARK, MESSAGES, MORE
from millpond.store import recovery
from millpond.store.commitlog import CommitLog, Draft, segment_name
from millpond.store.disk import SystemDisk
from millpond.store.recovery import Recovered, Scanned, cut, recover

SEGMENT = 64 * 1024
SEED = 0x1234


def draft(number: int, size: int = 100, kind: int = MESSAGES, flags: int = 0) -> Draft:
    payload = bytes([number % 251]) * size
    return Draft(kind, 7, number, 1, 0, 0, flags, b"12345678", payload, google_crc32c.value(payload), size)


def new_log(path: Path, segments: int = 2, segment_bytes: int = SEGMENT) -> CommitLog:
    disk = SystemDisk(path)
    disk.make_folder("log")
    log = CommitLog(disk, segment_bytes, SEED)
    for _ in range(segments):
        log.add_segment(log.allocate_segment())
    log.epoch = 1
    return log


def write(log: CommitLog) -> None:
    writes, end = log.take_writes()
    log.write(writes)
    log.written = log.flushed = log.confirmed = end


def reopened(path: Path, seed: int = SEED, segment_bytes: int = SEGMENT) -> CommitLog:
    log = CommitLog(SystemDisk(path), segment_bytes, seed)
    log.open_segments()
    return log


def replay(log: CommitLog, start: int = 0, confirmed: int = 0) -> tuple[list[int], Recovered]:
    offsets: list[int] = []

    def fold(group: list[Scanned]) -> None:
        offsets.extend(frame.header.first_offset for frame in group if frame.header.kind == MESSAGES)

    found = recover(log, start, confirmed, 0, fold)
    return offsets, found


def file_of(path: Path, base: int = 0) -> Path:
    return path / segment_name(base)


def test_every_frame_comes_back(tmp_path: Path) -> None:
    """Frames over several segments, fillers between them, are folded in order; the end is the tail."""
    log = new_log(tmp_path, 4)
    for number in range(1000):
        log.append([draft(number)], 5)
        if number % 7 == 0:
            write(log)
    write(log)
    offsets, found = replay(reopened(tmp_path))
    assert offsets == list(range(1000))
    assert found.end == log.tail > 2 * SEGMENT
    assert not found.damage


def test_a_log_cut_at_every_byte_loses_only_the_frame_it_cuts(tmp_path: Path) -> None:
    """Whatever is left of the last frame, all before it come back and the end is where it began."""
    log = new_log(tmp_path)
    for number in range(3):
        log.append([draft(number)], 5)
    write(log)
    last = log.append([draft(3, size=57)], 5)
    write(log)
    whole = file_of(tmp_path).read_bytes()
    content_end = last.position + HEADER_BYTES + 8 + 57
    for length in range(last.position, content_end):
        file_of(tmp_path).write_bytes(whole[:length] + bytes(len(whole) - length))
        offsets, found = replay(reopened(tmp_path))
        assert offsets == [0, 1, 2], length
        assert found.end == last.position, length


def test_a_group_that_is_not_whole_is_cut_whole(tmp_path: Path) -> None:
    """Frames with `more` whose last one is missing are not folded, though each of them is intact."""
    log = new_log(tmp_path)
    log.append([draft(0)], 5)
    write(log)
    group = log.append([draft(1), draft(2), draft(3)], 5)
    write(log)
    data = bytearray(file_of(tmp_path).read_bytes())
    data[group.positions[2] + HEADER_BYTES] ^= 1
    file_of(tmp_path).write_bytes(data)
    offsets, found = replay(reopened(tmp_path))
    assert offsets == [0]
    assert found.end == group.position


def test_damage_below_the_confirmed_position_is_never_cut(tmp_path: Path) -> None:
    """A bad payload that a later header calls confirmed is quarantined, and what follows comes back."""
    log = new_log(tmp_path)
    places = []
    for number in range(5):
        places.append(log.append([draft(number)], 5))
        write(log)
    log.append([draft(0, kind=MARK)], 5)
    write(log)
    data = bytearray(file_of(tmp_path).read_bytes())
    data[places[2].position + HEADER_BYTES + 20] ^= 0x10
    file_of(tmp_path).write_bytes(data)
    offsets, found = replay(reopened(tmp_path))
    assert offsets == [0, 1, 3, 4]
    assert [(damage.position, damage.end) for damage in found.damage] == [(places[2].position, places[2].end)]
    assert found.damage[0].header is not None
    assert found.end == log.tail


def test_damage_above_the_confirmed_position_cuts_also_what_follows(tmp_path: Path) -> None:
    """Valid frames behind a bad one that nobody was promised are cut with it: pages are kept in any order."""
    log = new_log(tmp_path)
    log.append([draft(0)], 5)
    write(log)
    second = log.append([draft(1)], 5)
    log.append([draft(2)], 5)
    writes, _ = log.take_writes()
    log.write(writes)
    data = bytearray(file_of(tmp_path).read_bytes())
    data[second.position + HEADER_BYTES + 20] ^= 0x10
    file_of(tmp_path).write_bytes(data)
    again = reopened(tmp_path)
    offsets, found = replay(again)
    assert offsets == [0]
    assert found.end == second.position
    cut(again, found.end, found.last_header)
    offsets, found = replay(reopened(tmp_path))
    assert (offsets, found.end) == ([0], second.position), "what was cut does not come back"


def test_what_is_left_of_the_largest_frame_is_cut_to_its_end(tmp_path: Path) -> None:
    """Of a frame whose header never came to the disk no byte stays."""
    torn = limits.BATCH_BYTES + limits.BATCH_OVERHEAD_BYTES
    log = new_log(tmp_path, segments=1, segment_bytes=2 * torn)
    log.append([draft(0)], 5)
    write(log)
    with file_of(tmp_path).open("r+b") as file:
        file.seek(log.tail + HEADER_BYTES)
        file.write(b"x" * torn)
    again = reopened(tmp_path, segment_bytes=2 * torn)
    _, found = replay(again)
    cut(again, found.end, found.last_header)
    behind = file_of(tmp_path).read_bytes()[log.tail :]
    assert found.end == log.tail
    assert behind.count(0) == len(behind)


def test_a_flipped_bit_in_a_confirmed_header_is_mended(tmp_path: Path) -> None:
    """The checksum tells which bit: nothing is lost, and the disk is put right."""
    log = new_log(tmp_path)
    places = [log.append([draft(number)], 5) for number in range(3)]
    write(log)
    log.append([draft(3)], 5)
    write(log)
    whole = file_of(tmp_path).read_bytes()
    for bit in range(0, 8 * HEADER_BYTES, 5):
        data = bytearray(whole)
        data[places[1].position + (bit >> 3)] ^= 1 << (bit & 7)
        file_of(tmp_path).write_bytes(data)
        offsets, found = replay(reopened(tmp_path))
        assert offsets == [0, 1, 2, 3], bit
        assert found.mended == [places[1].position], bit
        assert file_of(tmp_path).read_bytes() == whole, bit


def test_an_unreadable_confirmed_header_is_a_quarantined_range(tmp_path: Path) -> None:
    """More than a bit of a confirmed header is gone: its range ends where the next frame begins."""
    log = new_log(tmp_path)
    places = [log.append([draft(number)], 5) for number in range(3)]
    write(log)
    log.append([draft(3)], 5)
    write(log)
    data = bytearray(file_of(tmp_path).read_bytes())
    data[places[1].position : places[1].position + 40] = bytes(40)
    file_of(tmp_path).write_bytes(data)
    offsets, found = replay(reopened(tmp_path))
    assert offsets == [0, 2, 3]
    assert [(damage.position, damage.end, damage.header) for damage in found.damage] == [
        (places[1].position, places[2].position, None)
    ]


def test_a_frame_inside_a_body_is_not_believed(tmp_path: Path) -> None:
    """A message body that is a frame of another log id, at its very position, stays a body."""
    other = new_log(tmp_path / "other")
    other.seed = 0x9999
    log = new_log(tmp_path / "log")
    log.append([draft(0)], 5)
    write(log)
    other.tail = log.tail + HEADER_BYTES + 8
    other.append([draft(666)], 5)
    forged = b"".join(bytes(buffer) for buffer in other.take_writes()[0][0].buffers)
    log.append([msgspec.structs.replace(draft(1), payload=forged, payload_crc=google_crc32c.value(forged))], 5)
    write(log)
    data = bytearray(file_of(tmp_path / "log").read_bytes())
    start = log.tail - len(forged) - HEADER_BYTES - 8
    data[start - start % 8 : start - start % 8 + 8] = bytes(8)
    file_of(tmp_path / "log").write_bytes(data)
    offsets, _ = replay(reopened(tmp_path / "log"))
    assert 666 not in offsets


def test_stale_frames_of_a_recycled_segment_are_not_believed(tmp_path: Path) -> None:
    """A recycled segment is full of valid frames of other positions: the log ends where it really ends."""
    log = new_log(tmp_path, 2)
    for number in range(600):
        log.append([draft(number)], 5)
    write(log)
    assert log.tail > SEGMENT
    old = log.drop_first_segment()
    log.add_segment(log.recycle_segment(old))
    while log.tail < 2 * SEGMENT + 5000:
        log.append([draft(1000)], 5)
    write(log)
    _, found = replay(reopened(tmp_path), start=SEGMENT)
    assert found.end == log.tail


def test_what_is_empty_is_read_no_further_than_frames_can_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the last frame only as much as may be written and not confirmed, however long the segment is."""
    log = new_log(tmp_path)
    for number in range(3):
        log.append([draft(number)], 5)
        write(log)
    most, chunk = 4_096, 512
    monkeypatch.setattr(recovery, "_UNCONFIRMED_BYTES", most)
    monkeypatch.setattr(recovery, "_CHUNK", chunk)
    opened = reopened(tmp_path)
    first, ends = opened.segments[0].file, []
    read = type(first).read

    def counted(file: Any, at: int, length: int) -> bytes:
        if file is first:
            ends.append(at + length)
        return read(file, at, length)

    monkeypatch.setattr(type(first), "read", counted)
    offsets, found = replay(opened)
    assert offsets == [0, 1, 2]
    assert found.end + most // 2 < max(ends) <= found.end + most + HEADER_BYTES + chunk


def test_a_segment_cut_off_while_it_was_allocated_is_made_again(tmp_path: Path) -> None:
    """The last file has the wrong size: nothing was ever in it."""
    log = new_log(tmp_path, 2)
    log.append([draft(0)], 5)
    write(log)
    file_of(tmp_path, SEGMENT).write_bytes(bytes(100))
    again = reopened(tmp_path)
    assert [segment.base for segment in again.segments] == [0]


def test_a_missing_segment_is_refused(tmp_path: Path) -> None:
    """A gap in the log is an error, not a shorter log."""
    new_log(tmp_path, 3)
    file_of(tmp_path, SEGMENT).unlink()
    with pytest.raises(ValueError, match="segment missing"):
        reopened(tmp_path)


def test_more_marks_all_frames_of_a_group_but_its_last(tmp_path: Path) -> None:
    """Groups are told by the flag alone."""
    log = new_log(tmp_path)
    group = log.append([draft(0), draft(1)], 5)
    write(log)
    flags = [header.flags for position in group.positions if (header := log.read_header(position)) is not None]
    assert flags == [MORE, 0]
