"""Few messages of a receive say in an Arrow answer what they would say by columns."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.frames import plain

from millpond.core.errors import Internal
from millpond.proxy.codec import answers, few
from millpond.proxy.codec.answers import Rows
from millpond.proxy.frames import decode, within
from millpond.store.client import ReceiveResult, StoredFrame

BESIDE: dict[str, Any] = {"receipts": [{"receipt": "token", "queue": 3, "rows": "0-2"}]}


def rows_of(frames: list[StoredFrame], first: int, end: int) -> tuple[Rows, Rows]:
    """The same rows both ways."""
    found = few.few(frames, 3, first, end)
    assert found is not None
    assert found.num_rows == end - first
    attempts = np.arange(1, end - first + 1, dtype=np.uint32)
    batch = pa.concat_batches([decode(frame, 3, within([frame], first, end)) for frame in frames])
    return Rows(found, "a-11-", attempts, "token", first), Rows(batch, "a-11-", attempts, "token", first)


async def encoded(media_type: str, *rows: Rows) -> bytes:
    return b"".join(await answers.encode(media_type, "orders", rows, BESIDE))


async def table_of(rows: Rows) -> pa.Table:
    return pa.ipc.open_stream(await encoded(answers.ARROW, rows)).read_all()


LAYOUTS = [
    ([plain(5, [b"x"])], 5, 6),
    ([plain(5, [b""])], 5, 6),
    ([plain(5, [b"", b"abc", b"", b"12345678"])], 5, 9),
    ([plain(5, [b"cut", b"this", b"row", b"out"])], 6, 8),
    ([plain(5, [b"one", b"two"], 1_000), plain(7, [b"three"], 2_000), plain(8, [b"four", b"five"], 3_000)], 6, 9),
    ([plain(0, [bytes([at]) * at for at in range(64)])], 0, 64),
]


@pytest.mark.parametrize(("frames", "first", "end"), LAYOUTS)
async def test_the_answer_is_that_of_columns(frames: list[StoredFrame], first: int, end: int) -> None:
    """Whatever the lengths of bodies, however many frames, and wherever they are cut."""
    straight, columns = rows_of(frames, first, end)
    found, expected = await table_of(straight), await table_of(columns)
    found.validate(full=True)
    assert found.equals(expected, check_metadata=True)
    assert found.column("offset").to_pylist() == list(range(first, end))
    bodies = [row for frame in frames for row in decode(frame, 3).column("body").to_pylist()]
    assert found.column("body").to_pylist() == bodies[first - frames[0].first_offset :][: end - first]


async def test_the_bytes_are_those_that_pyarrow_makes() -> None:
    """Of one whole frame, where it has nothing to put together; so any reader of Arrow takes them."""
    straight, _ = rows_of(*LAYOUTS[2])
    columns = Rows(decode(LAYOUTS[2][0][0], 3), "a-11-", straight.attempts, "token", 5)
    assert await encoded(answers.ARROW, straight) == await encoded(answers.ARROW, columns)


@pytest.mark.parametrize("media_type", answers.MEDIA_TYPES)
async def test_other_forms_and_several_grants_say_the_same(media_type: str) -> None:
    """JSON, msgpack, and Arrow with more than one grant, are made of columns."""
    one, its_columns = rows_of(*LAYOUTS[4])
    two, other_columns = rows_of(*LAYOUTS[3])
    found, expected = await encoded(media_type, one, two), await encoded(media_type, its_columns, other_columns)
    if media_type == answers.ARROW:
        assert pa.ipc.open_stream(found).read_all().equals(pa.ipc.open_stream(expected).read_all(), check_metadata=True)
    else:
        assert found == expected


def test_rows_that_are_many_large_or_have_more_than_bodies_are_not_few(frame: Any) -> None:
    """Columns are made of these."""
    assert few.few([plain(0, [b"x"] * 64)], 3, 0, 64) is not None
    assert few.few([plain(0, [b"x"] * 65)], 3, 0, 65) is None
    assert few.few([plain(0, [b"x"] * 65)], 3, 0, 1) is None
    assert few.few([plain(0, [b"x" * few.BYTES])], 3, 0, 1) is None
    assert few.few([frame(0, [b"x"], keys=[b"k"])], 3, 0, 1) is None
    assert few.few([plain(0, [b"x"]), frame(1, [b"x"], codec="zstd")], 3, 0, 2) is None


def test_a_frame_that_does_not_open_is_not_few() -> None:
    """It was damaged behind its checksum: whoever makes columns of it says so."""
    broken = plain(0, [b"x"])
    longer = StoredFrame(11, 8, 0, 2, 0, 0, 1, broken.payload_size, broken.sidecar, broken.payload)
    assert few.few([longer], 3, 0, 2) is None
    with pytest.raises(Internal, match="has 1 rows"):
        decode(longer, 3)


async def test_a_receive_answers_them(world: Any, granted: Any) -> None:
    """Over HTTP, in Arrow and in JSON."""
    frames = [plain(10, [b"a", b"b"]), plain(12, [b"c"])]
    expected = [("b", 11, 1), ("c", 12, 3)]
    for accept in (answers.ARROW, answers.JSON):
        world.store.answers = [ReceiveResult([granted([11, 12], frames=frames, attempts=[1, 3])])]
        _, body = await world.call("POST", "/groups/g/messages/receive", json={}, headers={"Accept": accept})
        beside, messages = body, body
        if accept == answers.ARROW:
            table = pa.ipc.open_stream(body).read_all()
            messages = {"messages": [{**one, "body": one["body"].decode()} for one in table.to_pylist()]}
            beside = json.loads(table.schema.metadata[b"millpond"])
        assert [(one["body"], one["offset"], one["delivery_attempt"]) for one in messages["messages"]] == expected
        assert [one["rows"] for one in beside["receipts"]] == ["0-1"]
