"""The consume-queue index: by segment, in memory and as a file."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.store import index as idx
from millpond.store.directory import FrameSpot, spots_of
from millpond.store.index import OpenIndex


def hashes(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def some_index() -> OpenIndex:
    """Two queues, three frames of queue 7 and one of queue 5."""
    index = OpenIndex(1 << 20)
    index.add(7, 100, 2, (1 << 20) + 0, 400, 300, hashes(1, 2), hashes(0, 0))
    index.add(5, 0, 3, (1 << 20) + 400, 500, 350, hashes(3, 3, 3), hashes(9, 8, 9))
    index.add(7, 102, 1, (1 << 20) + 904, 200, 90, hashes(4), hashes(6))
    index.add(7, 103, 2, (1 << 20) + 1104, 300, 110, hashes(5, 6), hashes(0, 6))
    index.note_time(1000, 1 << 20)
    index.note_time(2000, (1 << 20) + 1104)
    return index


def decoded(index: OpenIndex) -> tuple[idx.IndexHead, np.ndarray, idx.ClosedIndex]:
    data = b"".join(index.close())
    head = idx.decode_head(data[: idx.HEAD_BYTES])
    tables = idx.entries_position(head.entries)
    entries = np.frombuffer(data[idx.HEAD_BYTES : tables], idx.ENTRY)
    return head, entries, idx.decode_tables(head, data[tables:])


def test_entries_go_on_across_frames() -> None:
    """Consecutive offsets are found in one slice, whichever frames they stand in."""
    entries = some_index().entries(7, 101, 10)
    assert entries["tag_hash"].tolist() == [2, 4, 5, 6]
    assert entries["position"].tolist() == [(1 << 20), (1 << 20) + 904, (1 << 20) + 1104, (1 << 20) + 1104]


@pytest.mark.parametrize(("queue", "offset"), [(7, 99), (7, 105), (5, 3), (6, 0)])
def test_an_offset_that_is_not_there_has_no_entry(queue: int, offset: int) -> None:
    """Before, after and in an unknown queue: empty, not the nearest one."""
    assert len(some_index().entries(queue, offset, 5)) == 0


def test_a_closed_index_holds_the_same() -> None:
    """The file sorts by (queue, offset) and joins consecutive frames into one run."""
    head, entries, closed = decoded(some_index())
    assert closed.runs["queue"].tolist() == [5, 7]
    assert closed.runs["first"].tolist() == [0, 100]
    assert closed.runs["count"].tolist() == [3, 5]
    assert closed.runs["bytes"].tolist() == [350, 500]
    opened = [some_index().entries(queue, first, 5) for queue, first in ((5, 0), (7, 100))]
    assert entries.tolist() == np.concatenate(opened).tolist()
    assert entries["tag_hash"].tolist() == [3, 3, 3, 1, 2, 4, 5, 6]
    assert entries["key_hash"].tolist() == [9, 8, 9, 0, 0, 6, 0, 6]
    assert (head.first_ts, head.last_ts) == (1000, 2000)


def test_a_copied_frame_is_found_though_it_is_older() -> None:
    """A frame copied forward has lower offsets than those before it; order in the file is by offset."""
    index = some_index()
    index.add(7, 50, 2, (1 << 20) + 1404, 200, 80, hashes(11, 12), hashes(0, 0))
    assert index.entries(7, 50, 10)["tag_hash"].tolist() == [11, 12]
    assert index.entries(7, 51, 60)["tag_hash"].tolist() == [12]
    _, _, closed = decoded(index)
    assert closed.runs["first"].tolist() == [0, 50, 100]


def test_a_snapshot_restores_the_open_index() -> None:
    """What a checkpoint keeps answers as before, and goes on growing."""
    index = some_index()
    again = OpenIndex.load(index.base, index.snapshot()())
    again.add(5, 3, 1, (1 << 20) + 1404, 200, 80, hashes(13), hashes(0))
    assert again.entries(5, 2, 5)["tag_hash"].tolist() == [3, 13]
    assert again.times.tolist() == index.times.tolist()
    assert again.last_ts == index.last_ts


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 8, 100])
def test_a_file_made_in_parts_is_the_same(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many entries are made at once, less than a frame has among them."""
    whole = b"".join(some_index().close())
    monkeypatch.setattr(idx, "_ENTRIES_AT_ONCE", most)
    assert b"".join(some_index().close()) == whole


def test_a_large_index_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has outgrown its first megabyte its columns have room for a segment: they stay where they are."""
    monkeypatch.setattr(idx, "_LARGE_BYTES", 1 << 13)
    index = OpenIndex(0)
    places = set()
    for number in range(40):
        index.add(1, 1000 * number, 1000, 100 * number, 90, 10, np.full(1000, number, np.uint32), hashes(*[0] * 1000))
        places.add(index._tags._array.ctypes.data)
    assert len(places) <= 3
    assert index._tags.values.tolist() == [number for number in range(40) for _ in range(1000)]


@pytest.mark.parametrize("frames", [idx._ROWS_AT_ONCE - 1, idx._ROWS_AT_ONCE, 2 * idx._ROWS_AT_ONCE + 1])
def test_a_snapshot_of_many_frames(frames: int) -> None:
    """Each column has every frame's value, in order, and none of what is added later."""
    index = OpenIndex(0)
    for number in range(frames):
        index.add(number % 3, number, 1, 100 * number, 90, 10 + number, hashes(1), hashes(0))
    snapshot = index.snapshot()
    index.note_time(9, 0)
    for number in range(frames + 1):
        index.add(1, (1 << 30) + number, 1, 100 * (frames + number), 90, 10, hashes(2), hashes(0))
    tables = snapshot()
    table = tables["index.frames"]
    assert tables["index.hashes"]["tag"].to_pylist() == [1] * frames
    assert tables["index.times"].num_rows == 0
    assert table["queue"].to_pylist() == [number % 3 for number in range(frames)]
    assert table["position"].to_pylist() == list(range(0, 100 * frames, 100))
    assert table["bytes"].to_pylist() == list(range(10, 10 + frames))


def test_key_positions_name_frames_once() -> None:
    """A frame with the key in two rows is named once; other queues are not."""
    index = some_index()
    assert index.key_positions({5, 7}, 9) == [((1 << 20) + 400, 500)]
    assert index.key_positions({7}, 9) == []
    assert index.key_positions({5, 7}, 6) == [((1 << 20) + 904, 200), ((1 << 20) + 1104, 300)]


@pytest.mark.parametrize("part", ["head", "tables"])
def test_damage_is_noticed(part: str) -> None:
    """A flipped bit in head or tables is a ValueError: the index is rebuilt, not believed."""
    data = bytearray(b"".join(some_index().close()))
    head = idx.decode_head(bytes(data[: idx.HEAD_BYTES]))
    tables = idx.entries_position(head.entries)
    data[20 if part == "head" else tables + 3] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        idx.decode_tables(idx.decode_head(bytes(data[: idx.HEAD_BYTES])), bytes(data[tables:]))


@pytest.mark.parametrize(("queue", "offset", "most"), [(7, 100, 5), (7, 101, 3), (7, 101, 10), (5, 1, 1), (7, 104, 1)])
def test_spots_are_those_of_the_entries(queue: int, offset: int, most: int) -> None:
    """The frames of a stretch, found without a look at each message, are those that its entries name."""
    index = some_index()
    assert [FrameSpot(*spot) for spot in index.spots(queue, offset, most)] == spots_of(
        index.entries(queue, offset, most), offset
    )


@pytest.mark.parametrize(("queue", "offset"), [(7, 99), (7, 105), (6, 0)])
def test_an_offset_that_is_not_there_has_no_spot(queue: int, offset: int) -> None:
    """Before, after and in an unknown queue: none."""
    assert some_index().spots(queue, offset, 5) == []


@pytest.mark.parametrize(
    "counts", [[1], [2000], [600, 512, 513, 1], [1, 2, 700, 700], [513, 5000, 3, 3, 3], [512, 512]]
)
def test_large_frames_are_passed_over(counts: list[int]) -> None:
    """Spots of entries are the same whether a frame is looked through or passed over in steps."""
    entries = np.zeros(sum(counts), idx.ENTRY)
    entries["position"] = np.repeat(np.arange(len(counts)) * 8 + 80, counts)
    entries["length"] = np.repeat(np.array(counts) * 10, counts)
    ends = (7 + np.cumsum(counts)).tolist()
    expected = [
        FrameSpot(80 + 8 * number, 10 * count, end - count, end)
        for number, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]
    assert spots_of(entries, 7) == expected
    assert spots_of(entries, 7, 2) == expected[:2]
    wanted = np.arange(sum(counts)) % 700 == 3
    some = [spot for spot in expected if wanted[spot.first - 7 : spot.end - 7].any()]
    assert spots_of(entries, 7, wanted=wanted) == some
    assert spots_of(entries, 7, 1, wanted) == some[:1]
