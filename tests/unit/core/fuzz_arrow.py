"""Run by test_arrow_streams: feed hostile streams to the Arrow codec in this process for some seconds.

Arguments: seed, seconds. Ends with 0 when every stream gave a batch or a MillpondError and memory stayed bounded;
a crash is the process's own end.
"""

from __future__ import annotations

import random
import resource
import struct
import sys
from collections import Counter

import pyarrow as pa

from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.errors import MillpondError
from millpond.core.schema import PROPERTIES_TYPE, TIMESTAMP
from millpond.proxy.codec import arrow
from millpond.proxy.encode import split

GROWTH_KIB = 400 * 1024  # one decode of the largest batch a few times over, far below what hostile claims ask for


def samples() -> list[bytes]:
    rows = 20
    columns = {
        "key": pa.array([None if row % 7 == 0 else b"k%d" % row for row in range(rows)], pa.binary()),
        "tag": pa.array(["tag"] * rows),
        "properties": pa.array([[("a", "b"), ("c", "d")]] * rows, PROPERTIES_TYPE),
        "born_ts": pa.array([1] * rows, pa.int64()).cast(TIMESTAMP),
        "body": pa.array([b"body" * 50] * rows, pa.binary()),
    }
    views = {
        "key": columns["key"].cast(pa.large_binary()),
        "tag": columns["tag"].cast(pa.string_view()),
        "body": columns["body"].cast(pa.binary_view()),
        "dedup_id": pa.array([f"id {row}" for row in range(rows)]),
        "queue": pa.array([row % 3 for row in range(rows)], pa.int32()),
    }
    dictionary = {"body": columns["body"], "tag": columns["tag"].dictionary_encode()}
    found = []
    for table in (columns, views, dictionary):
        for compression in (None, "lz4", "zstd"):
            sink = pa.BufferOutputStream()
            batch = pa.record_batch(table)
            options = pa.ipc.IpcWriteOptions(compression=compression)
            with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
                writer.write_batch(batch)
                writer.write_batch(batch.slice(3, 5))
            found.append(sink.getvalue().to_pybytes())
    return found


INTERESTING = [0, 1, 7, 8, -1, -2, 127, 255, 2**15, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63)]


def mutate(data: bytearray, chance: random.Random) -> bytearray:
    for _ in range(chance.choice([1, 1, 2, 3, 8])):
        at = chance.randrange(max(1, len(data) - 8))
        match chance.randrange(6):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at] = chance.randrange(256)
            case 2:
                data[at : at + 4] = struct.pack("<I", chance.choice(INTERESTING) & 0xFFFFFFFF)
            case 3:
                at &= ~7
                data[at : at + 8] = struct.pack("<Q", chance.choice(INTERESTING) & (2**64 - 1))
            case 4:
                del data[at : at + chance.choice([1, 8, 64])]
            case 5:
                other = chance.randrange(max(1, len(data) - 8))
                data[at : at + 8] = data[other : other + 8]
    return data


def feed(data: bytes) -> str:
    try:
        incoming = arrow.decode(data)
        for _, _, rows in split(incoming, 3, 1 << 20, 0, SystemRandom()):
            payload = rows.payload if rows.payload is not None else rows.batch.serialize()
            pa.ipc.read_record_batch(payload, rows.batch.schema).validate(full=True)
    except MillpondError as error:
        return error.code
    return "good"


def main(seed: int, seconds: float) -> None:
    chance, clock = random.Random(seed), SystemClock()  # noqa: S311 (repeatable, not secret)
    good = samples()
    assert [feed(data) for data in good] == ["good"] * 6 + ["invalid_request"] * 3
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end = clock.monotonic() + seconds
    counts: Counter[str] = Counter()
    while clock.monotonic() < end:
        data = bytearray(chance.choice(good))
        match chance.randrange(8):
            case 0:
                data = data[: chance.randrange(len(data))]
            case 1:
                data = bytearray(chance.randbytes(chance.randrange(400)))
            case 2:
                other = chance.choice(good)
                data = data[: chance.randrange(len(data)) & ~7] + other[chance.randrange(len(other)) & ~7 :]
            case _:
                data = mutate(data, chance)
        counts[feed(bytes(data))] += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(dict(counts), "grown KiB", grown)
    assert set(counts) <= {"good", "malformed_body", "invalid_request", "unknown_field", "batch_too_large"}, counts
    assert counts["good"] > 0 and counts["malformed_body"] > 0
    assert grown < GROWTH_KIB, f"memory grew by {grown} KiB"


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
