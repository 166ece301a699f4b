"""Rows of frames that hold bodies alone say in every answer what they would say by columns."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from support.frames import plain

from millpond.core.frame import CODEC_ZSTD
from millpond.proxy.codec import answers
from millpond.proxy.codec.answers import Rows
from millpond.proxy.frames import bodies, decode, has_bodies_alone
from millpond.store.client import ReceiveResult, StoredFrame

BESIDE: dict[str, Any] = {"receipts": [{"receipt": "token", "queue": 3, "rows": "0-2"}]}
MANY = answers.FEW_ROWS + 40  # enough to be put together by columns


def both(frame: StoredFrame, first: int, end: int, base: int) -> tuple[Rows, Rows]:
    """The rows [first, end) of it, as they are and by columns."""
    attempts = np.arange(1, end - first + 1, dtype=np.uint32)
    found = bodies(frame, 3, first, end)
    assert found.num_rows == end - first
    columns = decode(frame, 3, range(first, end))
    return Rows(found, "a-11-", attempts, "tok", base), Rows(columns, "a-11-", attempts, "tok", base)


TEXTS = {
    "plain": b"text",
    "not ASCII": "grün".encode(),
    "escaped": b'a "quote"',
    "not UTF-8": b"\xff",
    "empty": b"",
}


@pytest.mark.parametrize("media_type", answers.MEDIA_TYPES)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize(("first", "count"), [(5, MANY), (9_950, MANY), (70, 3), (0, 1)])
async def test_the_answer_is_that_of_columns(media_type: str, text: bytes, first: int, count: int) -> None:
    """Out of the middle of a frame; few and many, and where numbers gain a digit."""
    frame = plain(first, [b"before", *(text + b"%d" % number for number in range(count)), b"behind"])
    rows, columns = both(frame, first + 1, first + 1 + count, max(0, first - 8))
    found, expected = [
        b"".join(map(memoryview, await answers.encode(media_type, "orders", [one], BESIDE))) for one in (rows, columns)
    ]
    assert found == expected
    if media_type == answers.JSON:
        assert [one["offset"] for one in json.loads(found)["messages"]] == list(range(first + 1, first + 1 + count))


@pytest.mark.parametrize("media_type", [answers.JSON, answers.MSGPACK])
async def test_many_bytes_are_encoded_in_slices(monkeypatch: pytest.MonkeyPatch, media_type: str) -> None:
    """The loop has a turn between; they say the same."""
    for name in ("ANSWER_COLUMN_BYTES", "ANSWER_SLICE_BYTES"):
        monkeypatch.setattr(answers, name, MANY * 100)
    turns: list[None] = []

    async def pause() -> None:
        turns.append(None)

    rows, columns = both(plain(0, [b"x" * 300] * MANY), 0, MANY, 0)
    found = b"".join(map(memoryview, await answers.encode(media_type, "orders", [rows], BESIDE, pause)))
    assert len(turns) >= 2
    assert found == b"".join(map(memoryview, await answers.encode(media_type, "orders", [columns], BESIDE)))


def test_columns_beside_the_bodies_and_compressed_frames_are_left(frame: Any) -> None:
    """The cache keeps what was inflated."""
    assert has_bodies_alone(plain(0, [b"x"]))
    assert not has_bodies_alone(frame(0, [b"x"], keys=[b"k"]))
    assert not has_bodies_alone(msgspec.structs.replace(plain(0, [b"x"]), codec=CODEC_ZSTD))


@pytest.mark.parametrize("accept", [answers.ARROW, answers.JSON])
async def test_a_receive_answers_them_beside_others(world: Any, granted: Any, frame: Any, accept: str) -> None:
    """Over HTTP: a grant that begins within one such frame and ends within one that has keys."""
    frames = [
        plain(10, [b"p%d" % number for number in range(MANY)]),
        frame(10 + MANY, [b"k%d" % number for number in range(MANY)], keys=[b"key"] * MANY),
    ]
    offsets = list(range(15, 5 + 2 * MANY))
    world.store.answers = [ReceiveResult([granted(offsets, frames=frames)])]
    request = {"max_messages": 1_000}
    _, answer = await world.call("POST", "/groups/g/messages/receive", json=request, headers={"Accept": accept})
    found = answer["messages"] if accept == answers.JSON else pa.ipc.open_stream(answer).read_all().to_pylist()
    assert [one["offset"] for one in found] == offsets
    texts = [one["body"] if accept == answers.JSON else one["body"].decode() for one in found]
    assert texts == [f"p{number}" for number in range(5, MANY)] + [f"k{number}" for number in range(MANY - 5)]
