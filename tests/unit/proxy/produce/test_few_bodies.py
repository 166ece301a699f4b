"""Few bodies of a known schema are taken without pyarrow: what it would take, as it would take it, and nothing else."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millpond.core.arrow import END_OF_STREAM, scan
from millpond.core.errors import BadRequest, TooLarge
from millpond.core.schema import message_schema
from millpond.proxy.codec import arrow, few
from millpond.proxy.incoming import Incoming

ROWS = [[b"x"], [b""], [b"", b"abc", b"", b"12345678"], [bytes([at]) * at for at in range(64)]]


def stream(bodies: list[bytes], schema: pa.Schema | None = None) -> bytes:
    schema = schema or message_schema(0)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([pa.array(bodies, schema.field(0).type)], schema=schema))
    made: bytes = sink.getvalue().to_pybytes()
    return made


@pytest.fixture
def known() -> None:
    """A request with that schema has been taken."""
    arrow.decode(stream([b"first"]))


def usual(body: bytes) -> Incoming:
    """As it was taken before."""
    scanned = scan(body)
    standing = arrow._standing(scanned.schema_message)
    assert standing is not None
    return arrow._as_it_is(scanned, *standing)


def shown(incoming: Incoming) -> object:
    assert incoming.payload is not None
    return (
        incoming.batch.to_pydict(), incoming.rows, incoming.columns, incoming.codec,
        incoming.payload.to_pybytes(), incoming.payload_size,
    )  # fmt: skip


@pytest.mark.parametrize("bodies", ROWS)
@pytest.mark.parametrize("end", [END_OF_STREAM, b""])
def test_it_is_what_pyarrow_makes_of_it(known: None, bodies: list[bytes], end: bytes) -> None:
    """The same rows and the same payload, from bytes and from a view of them, with and without an end mark."""
    body = stream(bodies).removesuffix(END_OF_STREAM) + end
    expected = shown(usual(body))
    for given in (body, memoryview(body)):
        found = arrow.decode(given)
        assert found.decoded is None
        assert shown(found) == expected


@pytest.mark.parametrize(
    "body",
    [
        stream([b"x"] * 65),
        stream([b"x" * few.BYTES]),
        stream([b"x"], pa.schema([("body", pa.large_binary())])),
        stream([b"x"]) + b"more",
        stream([b"x"])[:-9],
        stream([b"x"])[:7],
        b"",
    ],
)
def test_all_else_goes_the_usual_way(known: None, body: bytes) -> None:
    """What is many, large, of another schema, or cut."""
    assert arrow._few(body) is None


def test_what_is_broken_is_never_taken(known: None) -> None:
    """Whatever byte is another one: what is taken here pyarrow takes, too, and finds the same in it."""
    body = stream([b"abc", b"", b"12345678"])
    taken = 0
    for at in range(len(body)):
        for value in (0x00, 0x01, 0x07, 0x80, 0xFF):
            broken = bytearray(body)
            broken[at] = value
            found = arrow._few(bytes(broken))
            if found is None:
                continue
            taken += 1
            try:
                expected = usual(bytes(broken))
            except (BadRequest, TooLarge) as error:
                pytest.fail(f"byte {at} as {value:#x}: {error}")
            assert shown(found) == shown(expected)
    assert taken > 5 * 8  # the bodies' own bytes are anything


def test_a_body_that_is_too_large_is_still_named(known: None) -> None:
    """Its row, as with any batch."""
    found = arrow.decode(stream([b"abc", b"12345678"]))
    assert (found.fits(8), found.fits(7)) == (True, False)
