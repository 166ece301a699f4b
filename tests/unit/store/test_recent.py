"""The newest frames in memory."""

import pyarrow as pa

from millpond.store.client import StoredFrame
from millpond.store.recent import Recent


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
