"""Answers like those before: what is remembered of them changes nothing of what they say."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.client import answers
from millpond.client.answers import SMALL_BYTES, opened, opened_again


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_seen", {})


def answer(beside: str, bodies: list[bytes] | None, name: str = "body", then: list[bytes] | None = None) -> bytes:
    """An Arrow stream with `beside` in its schema's metadata, of a batch for each list."""
    schema = pa.schema([pa.field(name, pa.binary())], metadata={"millpond": beside})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for some in (bodies, then):
            if some is not None:
                writer.write_batch(pa.record_batch([pa.array(some, pa.binary())], schema=schema))
    return bytes(sink.getvalue().to_pybytes())


def test_only_the_text_beside_may_differ() -> None:
    """Of as many bytes: then nothing but the text and the rows is read of the answer."""
    opened(answer('{"rows":"0-1"}', [b"a", b"b"]))
    found = opened_again(answer('{"rows":"7-9"}', [b"c"]))
    assert found is not None
    assert (found.beside, found.batches[0].to_pydict()) == (b'{"rows":"7-9"}', {"body": [b"c"]})


@pytest.mark.parametrize(
    "other",
    [
        answer('{"rows":"0-10"}', [b"a"]),
        answer('{"rows":"0-1"}', [b"a"], name="bodz"),
        answer('{"rows":"0-1"}', None),
        answer('{"rows":"0-1"}', [b"a"])[:-40],
        b"",
        b"\xff\xff\xff\xff\xf0\xff\xff\xff",
    ],
    ids=["longer", "another column", "no batch", "cut short", "empty", "negative length"],
)
def test_what_differs_otherwise_is_left_to_a_full_look(other: bytes) -> None:
    """Right or wrong."""
    opened(answer('{"rows":"0-1"}', [b"a"]))
    assert opened_again(other) is None


def test_a_text_that_stands_there_twice_is_not_remembered() -> None:
    """It could not be told which of the two is beside the rows."""
    text = "0123456789"
    opened(answer(text, [b"a"], name=text))
    assert opened_again(answer("9876543210", [b"a"], name=text)) is None


def test_large_answers_are_not_looked_at() -> None:
    """Of those the schema is nothing, and their buffer is not copied."""
    large = answer('{"rows":"0"}', [b"x" * SMALL_BYTES])
    opened(large)
    assert opened_again(large) is None
    small = answer('{"rows":"0"}', [b"x"])
    opened(small)
    assert opened_again(small) is not None
    assert opened_again(pa.py_buffer(small)) is None


def test_what_is_remembered_is_bounded() -> None:
    """Whatever lengths a service sends."""
    for length in range(0, 8_000, 8):  # a schema message's length is a multiple of eight
        opened(answer(f'{{"rows":"{"0" * length}"}}', [b"a"]))
    assert len(answers._seen) <= answers._KNOWN


ANSWERS = st.tuples(
    st.from_regex(r'\{"rows":"[0-9,-]{1,9}"\}', fullmatch=True),
    st.lists(st.binary(max_size=9), max_size=3),
    st.sampled_from(["body", "bodz", "b"]),
)


@given(st.lists(ANSWERS, min_size=2, max_size=12))
def test_a_remembered_schema_is_that_of_the_answer(sent: list[tuple[str, list[bytes], str]]) -> None:
    """In any order of answers that are like each other, and not quite."""
    answers._seen.clear()
    for text, bodies, name in sent:
        data = answer(text, bodies, name)
        again, whole = opened_again(data), opened(data)
        if again is not None:
            assert again.schema.equals(whole.schema.remove_metadata(), check_metadata=True)
            assert (again.beside, again.batches[0].to_pydict()) == (whole.beside, whole.batches[0].to_pydict())
