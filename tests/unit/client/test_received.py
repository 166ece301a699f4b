"""A receive's Arrow answer as batches of one receipt each."""

from __future__ import annotations

import json
from typing import Any, cast

import pyarrow as pa
import pytest

from millpond.client.errors import UnknownProblem
from millpond.client.received import MessageBatch, decode_receive
from millpond.client.settler import Settler

SETTLER = cast(Settler, None)  # nothing is settled here


def answer(batches: list[list[bytes]], rows: list[str]) -> bytes:
    """Bodies by record batch, and the rows that each receipt names."""
    receipts = [{"receipt": f"token{at}", "queue": at, "rows": one} for at, one in enumerate(rows)]
    schema = pa.schema([pa.field("body", pa.binary())], metadata={"millpond": json.dumps({"receipts": receipts})})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for bodies in batches:
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array(bodies, pa.binary())], schema=schema))
    return sink.getvalue().to_pybytes()


def seen(batches: list[MessageBatch]) -> list[Any]:
    return [(one.receipt, list(one.relative), one.batch.column("body").to_pylist(), one.id_prefix) for one in batches]


def test_one_batch_of_one_receipt_comes_as_it_is() -> None:
    """The usual answer to a consumer that keeps up."""
    found, reason = decode_receive(answer([[b"a", b"b"]], ["0-1"]), SETTLER, 1.0, {0: "m-1-"})
    assert (seen(found), reason) == ([("token0", [0, 1], [b"a", b"b"], "m-1-")], None)


def test_receipts_share_batches_in_their_order() -> None:
    """A receipt may have rows of several record batches, and a batch those of several receipts."""
    found, _ = decode_receive(answer([[b"a"], [b"b", b"c"]], ["0-1", "4"]), SETTLER, 1.0, {0: "m-1-", 1: "m-2-"})
    assert seen(found) == [("token0", [0, 1], [b"a", b"b"], "m-1-"), ("token1", [4], [b"c"], "m-2-")]


@pytest.mark.parametrize("batches", [[[b"a", b"b"]], [[b"a"], [b"b"]], []])
def test_receipts_that_name_more_than_came_are_an_error(batches: list[list[bytes]]) -> None:
    """Nothing is guessed."""
    with pytest.raises(UnknownProblem, match="more messages than it holds"):
        decode_receive(answer(batches, ["0-2"]), SETTLER, 1.0, {})
