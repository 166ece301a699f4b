"""Messages out: JSON, msgpack and Arrow say the same, for every kind of body, and without holding the loop."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from millpond.core.limits import ANSWER_COLUMN_BYTES, ANSWER_SLICE_BYTES
from millpond.proxy.codec import answers
from millpond.proxy.codec.answers import Rows
from millpond.proxy.frames import decode

BODIES = [b"text", b"", "grün \u0000 \"'\\ \U0001f600".encode(), b"\xff\xfe", b"\xed\xa0\x80"]


@pytest.fixture(autouse=True, params=["one by one", "by columns"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are turned into objects one by one, many are not: answers are the same."""
    if request.param == "by columns":
        monkeypatch.setattr(answers, "FEW_ROWS", 0)


async def encoded(*arguments: Any) -> bytes:
    """The pieces of an answer as they arrive: one after another."""
    return b"".join(await answers.encode(*arguments))


def rows(frame: Any, **more: Any) -> Rows:
    values: dict[str, Any] = {
        "keys": [b"k", None, b"", b"\xff", b"z"],
        "tags": ["a", None, "", "b", "c"],
        "properties": [{"p": "q", "r": ""}, None, {}, {"ü": "ü"}, None],
    }
    return Rows(decode(frame(10, BODIES, **{**values, **more}), 3), "a-11-")


async def test_json_has_every_field(frame: Any) -> None:
    """Text as text, everything else in base64, null where there is none, properties always a map."""
    body = await encoded(answers.JSON, "t", [rows(frame)], {"next_offset": 15})
    found = json.loads(body)
    assert found["next_offset"] == 15
    first, second, third, fourth, fifth = found["messages"]
    assert first == {
        "message_id": "a-11-10", "topic": "t", "queue": 3, "offset": 10, "store_ts": 1000, "born_ts": None, "key": "k",
        "tag": "a", "properties": {"p": "q", "r": ""}, "body": "text",
    }  # fmt: skip
    assert (second["key"], second["tag"], second["properties"], second["body"]) == (None, None, {}, "")
    assert (third["key"], third["tag"], third["properties"]) == ("", "", {})
    assert third["body"].encode() == BODIES[2]
    assert "body" not in fourth
    assert base64.b64decode(fourth["body_base64"]) == BODIES[3]
    assert "key" not in fourth
    assert base64.b64decode(fourth["key_base64"]) == b"\xff"
    assert base64.b64decode(fifth["body_base64"]) == BODIES[4]


async def test_msgpack_has_bodies_as_bytes(frame: Any) -> None:
    """The same map, bodies as they are; a key that is not text is bytes."""
    body = await encoded(answers.MSGPACK, "t", [rows(frame), rows(frame)], {"reason": "paused", "receipts": []})
    found = msgspec.msgpack.decode(body)
    assert found["reason"] == "paused"
    assert [one["body"] for one in found["messages"]] == BODIES * 2
    assert [one["key"] for one in found["messages"]][:5] == ["k", None, "", b"\xff", "z"]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 70_000])
async def test_msgpack_arrays_of_any_length(frame: Any, count: int) -> None:
    """The array's head is right whatever the head of its slices was."""
    some = [Rows(decode(frame(0, [b"x"] * count), 0), "a-1-")] if count else []
    found = msgspec.msgpack.decode(await encoded(answers.MSGPACK, "t", some, {}))
    assert [one["offset"] for one in found["messages"]] == list(range(count))


async def test_leases_stand_in_each_message(frame: Any) -> None:
    """`lease_id` is the token, a dot and the row relative to the grant's first offset."""
    leased = Rows(rows(frame).batch, "a-11-", np.array([1, 2, 3, 4, 5], np.uint32), "token", 8)
    found = json.loads(await encoded(answers.JSON, "t", [leased], {"receipts": []}))["messages"]
    assert [one["lease_id"] for one in found] == [f"token.{row}" for row in range(2, 7)]
    assert [one["delivery_attempt"] for one in found] == [1, 2, 3, 4, 5]


async def test_arrow_carries_the_rest_in_its_metadata(frame: Any) -> None:
    """Columns of the tier, `delivery_attempt` in a receive only, everything else as JSON under `millpond`."""
    plain = rows(frame)
    reader = pa.ipc.open_stream(await encoded(answers.ARROW, "t", [plain], {"next_offset": 15}))
    assert json.loads(reader.schema.metadata[b"millpond"]) == {"topic": "t", "next_offset": 15}
    assert reader.read_all().to_batches()[0].equals(plain.batch)
    leased = Rows(plain.batch, "a-11-", np.arange(5, dtype=np.uint32), "token", 8)
    for some in ([leased], []):
        reader = pa.ipc.open_stream(await encoded(answers.ARROW, "t", some, {"receipts": []}))
        assert reader.schema.field("delivery_attempt").type == pa.int32()
        assert reader.read_all().num_rows == 5 * len(some)


async def test_origins_are_objects(frame: Any) -> None:
    """An origin that is JSON is shown as such, one that is not stays a text, and none is no field."""
    batch = rows(frame).batch
    texts = pa.array(['{"topic":"s","offset":4}', None, "not json", "1" * 400, "[" * 9_000])
    batch = batch.set_column(batch.schema.get_field_index("origin"), "origin", texts)
    for media in (answers.JSON, answers.MSGPACK):
        body = await encoded(media, "t", [Rows(batch, "a-")], {})
        found = (json.loads if media == answers.JSON else msgspec.msgpack.decode)(body)["messages"]
        assert found[0]["origin"] == {"topic": "s", "offset": 4}
        assert "origin" not in found[1]
        assert found[2]["origin"] == "not json"
        assert found[4]["origin"] == "[" * 9_000


@pytest.mark.parametrize(
    ("media", "first", "slice_bytes"),
    [
        (answers.JSON, b"", ANSWER_COLUMN_BYTES),
        (answers.JSON, b'"', ANSWER_SLICE_BYTES),
        (answers.MSGPACK, b"", ANSWER_SLICE_BYTES),
    ],
)
async def test_large_answers_give_the_loop_its_turns(frame: Any, media: str, first: bytes, slice_bytes: int) -> None:
    """Between slices others run, and the slices make one whole; JSON that must be escaped has smaller ones."""
    batch = decode(frame(0, [first + bytes([97 + n % 26]) * 1024 for n in range(2000)]), 0)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count_turns())
    await asyncio.sleep(0)
    body = await encoded(media, "t", [Rows(batch, "a-")], {"end_offset": 2000})
    other.cancel()
    assert turns >= 2000 * 1024 // slice_bytes
    found = json.loads(body) if media == answers.JSON else msgspec.msgpack.decode(body)
    assert [one["offset"] for one in found["messages"]] == list(range(2000))
    assert found["end_offset"] == 2000


@pytest.mark.parametrize("media", [answers.ARROW, answers.JSON, answers.MSGPACK])
async def test_large_answers_pause_as_they_are_told_to(frame: Any, media: str) -> None:
    """Between the steps of all forms."""
    rows = [Rows(decode(frame(at * 1000, [b"x" * 1500] * 1000), 0), "a-") for at in range(3)]
    paused = 0

    async def pause() -> None:
        nonlocal paused
        paused += 1

    body = b"".join(await answers.encode(media, "t", rows, {}, pause))
    assert body == await encoded(media, "t", rows, {})
    assert paused >= 2


async def test_only_the_slice_with_binary_bodies_pays(frame: Any) -> None:
    """A slice of a sliced batch shows its own rows: offsets, maps and bodies stay together."""
    bodies = [b"%d" % n for n in range(100)]
    batch = decode(frame(0, bodies, properties=[{"n": str(n)} for n in range(100)]), 0).slice(40, 20)
    found = json.loads(await encoded(answers.JSON, "t", [Rows(batch, "a-")], {}))["messages"]
    assert [(one["offset"], one["body"], one["properties"]["n"]) for one in found] == [
        (n, str(n), str(n)) for n in range(40, 60)
    ]


@pytest.mark.parametrize("count", [1, answers._FEW, answers._FEW + 1])
async def test_arrow_of_few_and_of_many_rows_says_the_same(frame: Any, count: int) -> None:
    """Small answers are encoded without a writer; what is read is the same."""
    plain = rows(frame)
    table = pa.ipc.open_stream(await encoded(answers.ARROW, "t", [plain] * count, {})).read_all()
    assert table.to_batches() == [plain.batch] * count


@pytest.mark.parametrize("more", [{"properties": [{"p": "x" * 30_000}] * 20}, {}])
async def test_few_large_messages_are_cut_into_slices(frame: Any, monkeypatch: pytest.MonkeyPatch, more: Any) -> None:
    """Whichever column is large: between slices the loop goes on with others."""
    turns = 0
    sleep = asyncio.sleep

    async def counted(seconds: float) -> None:
        nonlocal turns
        turns += 1
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", counted)
    large = Rows(decode(frame(0, [b"\n" if more else b"\n" * 30_000] * 20, **more), 0), "a-")
    await encoded(answers.JSON, "t", [large], {})
    assert turns >= 20 * 30_000 // ANSWER_SLICE_BYTES
