"""The newest frames in memory."""

import pyarrow as pa

from millpond.store.client import StoredFrame
from millpond.store.recent import Newest, Recent


def _frame(position: int, size: int) -> StoredFrame:
    return StoredFrame(1, position, position, 1, 0, 0, 0, size, pa.py_buffer(b""), pa.py_buffer(bytes(size)))


def test_it_gives_the_very_frame_that_was_added() -> None:
    """No copy and no decoding: what was appended is what a reader gets."""
    recent = Recent(10_000)
    frame = _frame(96, 10)
    recent.add(frame)
    assert recent.get(96) is frame
    assert recent.get(0) is None


def test_the_oldest_go_when_it_is_full() -> None:
    """It holds at most the bytes it was given, and always the newest."""
    recent = Recent(10_000)
    for position in range(20):
        recent.add(_frame(position, 1_000))
    assert recent.bytes <= 10_000
    kept = [position for position in range(20) if recent.get(position) is not None]
    assert kept == [16, 17, 18, 19]


def test_none_is_kept_without_room() -> None:
    """With 0 bytes it is off, and a frame larger than all of it is not kept either."""
    for most in (0, 500):
        recent = Recent(most)
        recent.add(_frame(0, 1_000))
        assert recent.get(0) is None and recent.bytes == 0


def _fill(newest: Newest, begin: int, end: int) -> None:
    for position in range(begin, end, 1_000):
        newest.add(_frame(position, 1_000))


def test_the_newest_are_let_go_while_nobody_asks() -> None:
    """They stay until so much came that nobody asked for; as many bytes as it holds later there is none."""
    newest = Newest(10_240, 40_480)
    _fill(newest, 0, 20_000)
    assert newest.bytes == 5 * 2_024
    _fill(newest, 20_000, 22_000)
    assert 0 < newest.bytes < 5 * 2_024
    _fill(newest, 22_000, 30_000)
    assert newest.bytes == 0


def test_the_newest_are_kept_for_a_reader_at_the_tail() -> None:
    """Asking for one that it would hold, whether it does or not, keeps those that come."""
    newest = Newest(10_240, 20_000)
    _fill(newest, 0, 50_000)
    assert newest.bytes == 0
    assert newest.get(45_000) is None
    _fill(newest, 50_000, 52_000)
    assert newest.get(50_000) is not None and newest.get(51_000) is not None
    for position in range(52_000, 100_000, 4_000):
        _fill(newest, position, position + 4_000)
        assert newest.get(position + 3_000) is not None


def test_a_reader_that_is_far_behind_keeps_nothing() -> None:
    """What is older than all that it could hold is of no use to keep newer ones for."""
    newest = Newest(10_240, 20_000)
    for position in range(0, 50_000, 1_000):
        _fill(newest, position, position + 1_000)
        newest.get(position - 20_000)
    assert newest.bytes == 0
