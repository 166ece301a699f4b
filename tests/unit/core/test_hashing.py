"""Hashes that stand on disk: golden values, and the column form against the reference implementation."""

from __future__ import annotations

import mmh3
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.hashing import dedup_checks, dedup_hash, dedup_hashes, hash_binary, hash_bytes, hash_tags, hash_text

GOLDEN = {
    b"": 1,  # MurmurHash3 of nothing is 0, which is null's
    b"a": 0x3C2569B2,
    b"hello": 0x248BFA47,
    b"hello, world": 0x149BBB7F,
    b"\xff" * 4: 0x76293B50,
    "käse".encode(): 0x751AFB52,
}


def reference(value: bytes | None) -> int:
    return 0 if value is None else mmh3.hash(value, 0, signed=False) or 1


def test_golden_values() -> None:
    """Hashes are on disk in every frame: they never change."""
    assert {value: hash_bytes(value) for value in GOLDEN} == GOLDEN
    assert hash_binary(pa.array(list(GOLDEN) * 3, pa.binary())).tolist() == list(GOLDEN.values()) * 3


@settings(max_examples=150, deadline=None)
@given(st.lists(st.none() | st.binary(max_size=70), min_size=1, max_size=60), st.integers(0, 5))
def test_columns_agree_with_the_reference(values: list[bytes | None], skip: int) -> None:
    """Any lengths, nulls and slices: each row has the reference's hash, null is 0 and nothing else is."""
    array = pa.array(values, pa.binary()).slice(skip)
    assert hash_binary(array).tolist() == [reference(value) for value in values[skip:]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.none() | st.sampled_from(["", "a", "tag", "käse", "a longer tag"]), min_size=1, max_size=40))
def test_tags_hash_like_their_bytes(values: list[str | None]) -> None:
    """Hashing each different tag once gives what hashing every row gives."""
    expected = [reference(None if value is None else value.encode()) for value in values]
    assert hash_tags(pa.array(values, pa.string())).tolist() == expected
    assert [0 if value is None else hash_text(value) for value in values] == expected


def test_dedup_hash_and_check() -> None:
    """BLAKE2b-128 of the id and CRC32C of the body, as the frame format says; rows without id get random bytes."""
    assert dedup_hash("order-1").hex() == "56eea00bbcad2f0a2ca2cc13492405d7"
    hashes = dedup_hashes(["a", None], lambda count: b"r" * count)
    assert hashes.tobytes() == dedup_hash("a") + b"r" * 16
    assert dedup_checks(pa.array([b"123456789", b""])).tolist() == [0xE3069283, 0]
