"""Bodies cut out of a JSON request by columns: what is found is what the request says, and the rest is left."""

from __future__ import annotations

import json as standard
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.errors import BadRequest
from millpond.core.http.call import decode_json
from millpond.core.limits import BATCH_BYTES, BATCH_MESSAGES
from millpond.core.schema import message_schema
from millpond.proxy.codec import json, json_bodies

PLAIN = st.text(st.characters(min_codepoint=0x20, exclude_characters='"\\', exclude_categories=["Cs"]), max_size=12)
SPACE = st.text(" \t\r\n", max_size=2)
STRUCTURE = b'"{}[]:,\\ \n\x00\xffbdmX1'


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a request of two messages is taken."""
    monkeypatch.setattr(json_bodies, "_LEAST", 2)
    monkeypatch.setattr(json_bodies, "_LEAST_BYTES", 8)


def said(request: bytes) -> list[str | None] | None:
    """The bodies by the decoder of whole messages; None when they have other fields, or it refuses them."""
    json.budget.fill()
    try:
        whole = decode_json(request, json.ProduceIn)
    except BadRequest:
        return None
    others = ("body_base64", "key", "tag", "properties", "born_ts", "dedup_id", "queue")
    if whole.producer is not None or any(getattr(one, name) is not None for one in whole.messages for name in others):
        return None
    return [one.body for one in whole.messages]


def cut(request: bytes) -> list[str] | None:
    found = json_bodies.bodies(memoryview(request))
    return None if found is None else [body.decode() for body in found.batch.column(0).to_pylist()]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", "\t:")], ids=["compact", "spaces", "lines"])
def test_plain_bodies_are_found(separators: tuple[str, str]) -> None:
    """However the request is spaced, as long as it is so throughout; also empty ones, and what is not ASCII."""
    bodies = ["", "a", "hällo €", "\x7f", "{}[],:", "body", "x" * 3_000]
    messages = [{"body": body} for body in bodies]
    request = standard.dumps({"messages": messages}, ensure_ascii=False, separators=separators)
    assert cut(request.encode()) == bodies


@given(st.lists(st.text("abcd", max_size=30), min_size=2, max_size=40))
def test_the_payload_is_what_pyarrow_makes_of_them(bodies: list[str]) -> None:
    """Byte for byte, and nothing is kept beyond it: also of bodies so short that they stand in their view."""
    found = json_bodies.bodies(memoryview(msgspec.json.encode({"messages": [{"body": body} for body in bodies]})))
    assert found is not None and found.payload is not None
    batch = pa.record_batch([pa.array([body.encode() for body in bodies], pa.binary())], schema=message_schema(0))
    assert found.payload.to_pybytes() == batch.serialize().to_pybytes()
    assert found.batch.equals(batch)
    assert found.payload_size == found.payload.size


@settings(deadline=None, max_examples=300)
@given(st.lists(PLAIN, min_size=2, max_size=5), st.lists(SPACE, min_size=9, max_size=9))
def test_spaces_of_any_kind_are_none_of_the_bodies(bodies: list[str], spaces: list[str]) -> None:
    """Wherever JSON lets them stand."""
    a, b, c, d, e, f, g, h, i = spaces
    messages = f'"{h}}}{e},{d}{{{f}"body"{g}:{i}"'.join(bodies)
    request = f'{a}{{{b}"messages"{c}:{d}[{e}{{{f}"body"{g}:{i}"{messages}"{h}}}{a}]{b}}}{c}'.encode()
    assert cut(request) == bodies == said(request)


@settings(deadline=None, max_examples=1_500)
@given(
    st.lists(PLAIN, min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(STRUCTURE), st.sampled_from("irdw")), max_size=3),
)
def test_what_does_not_fit_is_left(bodies: list[str], changes: list[tuple[int, int, str]]) -> None:
    """A request of which bytes were inserted, replaced, removed or swapped with the next: what is found it does say."""
    request = bytearray(msgspec.json.encode({"messages": [{"body": body} for body in bodies]}))
    for where, byte, how in changes:
        at = where % (len(request) - 1)
        match how:
            case "i":
                request.insert(at, byte)
            case "r":
                request[at] = byte
            case "d":
                del request[at]
            case "w":
                request[at : at + 2] = request[at : at + 2][::-1]
    found = cut(bytes(request))
    assert found is None or found == said(bytes(request))


@pytest.mark.parametrize(
    "message",
    ['{"body":"a\\nb"}', '{"body":"a","key":"k"}', '{"body":"a","body":"b"}', '{"key":"body","body":"a"}', '{"body":5}',
     '{"body":null}', '{"body":"a"},', '{"bodi":"a"}', '{"body":"a"]', '{"body":"\x01"}'],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_message_that_is_not_a_plain_body_alone_is_left(message: str, at: int) -> None:
    """Wherever it stands."""
    messages = ['{"body":"one"}', '{"body":"two"}', '{"body":"three"}']
    messages.insert(at, message)
    assert cut(f'{{"messages":[{",".join(messages)}]}}'.encode()) is None


@pytest.mark.parametrize(
    "request_",
    ['{"messages":[%s],"producer":null}', '{"producer":null,"messages":[%s]}', '{"message":[%s]}', "[%s]",
     '{"messages":[%s]} x'],
)  # fmt: skip
def test_another_request_is_left(request_: str) -> None:
    """Whatever stands around the messages."""
    assert cut((request_ % '{"body":"one"},{"body":"two"}').encode()) is None


def test_bytes_that_are_not_utf8_are_left() -> None:
    """The other way says what is wrong."""
    assert cut(b'{"messages":[{"body":"one"},{"body":"\xff"}]}') is None


@pytest.mark.parametrize("over", [0, 1])
def test_more_than_a_request_may_have_are_left(over: int) -> None:
    """The other way refuses them."""
    found = cut(msgspec.json.encode({"messages": [{"body": "x"}] * (BATCH_MESSAGES + over)}))
    assert (found is None) == bool(over)


def test_positions_of_too_many_quotes_are_not_kept() -> None:
    """No more than of so many words are looked for: eight bytes each would be 32 MiB for the largest request."""
    found = json_bodies._quotes(np.full(BATCH_BYTES, ord('"'), np.uint8))
    assert 4 * BATCH_MESSAGES + 2 < len(found) <= 8 * (4 * BATCH_MESSAGES + 3)


@pytest.mark.parametrize("spaces", range(9))
def test_quotes_are_found_wherever_a_request_ends(spaces: int) -> None:
    """It is looked through eight bytes at a time, and what is left at its end by itself."""
    bodies = ["", "one", "x" * 40, "four"]
    for length in range(9):
        bodies[-1] = "y" * length
        assert cut(msgspec.json.encode({"messages": [{"body": body} for body in bodies]}) + b" " * spaces) == bodies


def test_a_text_longer_than_what_follows_is_left() -> None:
    """What stands between the first two bodies would end beyond the request between the last two."""
    assert cut(b'{"messages":[{"body":"a"},        {"body":"b"},{"body":""}]}') is None


def test_many_plain_bodies_make_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not come to the decoder."""

    def refused(*_: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(json, "decode_json", refused)
    monkeypatch.setattr(json_bodies, "_LEAST", 400)
    batch = json.decode(msgspec.json.encode({"messages": [{"body": f"{at}" * 20} for at in range(400)]})).batch
    assert batch is not None
    assert batch.batch.to_pydict() == {"body": [(f"{at}" * 20).encode() for at in range(400)]}
