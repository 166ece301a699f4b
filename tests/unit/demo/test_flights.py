"""The flights as messages: every column against the row it came from."""

from __future__ import annotations

import json
import zipfile
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millpond import flights

HEADER = (
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,origin,"
    "dest,air_time,distance,hour,minute,time_hour\n"
)
ROWS = (
    "2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z\n"
    "2013,7,8,,1830,,,2015,,B6,711,,JFK,LAS,,2248,18,30,2013-07-08T22:00:00Z\n"
)


@pytest.fixture
def table(tmp_path: Path) -> pa.Table:
    path = tmp_path / "flights.csv.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flights.csv", HEADER + ROWS)
    return flights.read_flights(path)


def test_messages(table: pa.Table) -> None:
    """Key, tag, properties, scheduled departure in UTC on both sides of daylight saving, and the row as JSON."""
    first, second = flights.messages(table).to_pylist()
    assert (first["key"], first["tag"]) == (b"UA1545", "UA")
    assert first["properties"] == [("origin", "EWR"), ("destination", "IAH"), ("status", "departed")]
    assert second["properties"] == [("origin", "JFK"), ("destination", "LAS"), ("status", "cancelled")]
    eastern = ZoneInfo(flights.NEW_YORK)
    assert first["born_ts"] == datetime(2013, 1, 1, 5, 15, tzinfo=eastern)
    assert second["born_ts"] == datetime(2013, 7, 8, 18, 30, tzinfo=eastern)
    assert [json.loads(row["body"]) for row in (first, second)] == table.to_pylist()


def test_text_that_needs_escapes_is_refused(table: pa.Table) -> None:
    """A quote in a text column would make wrong JSON: it stops the run."""
    bad = table.set_column(table.column_names.index("dest"), "dest", pa.array(['"', "LAS"]))
    with pytest.raises(AssertionError, match="dest needs escapes"):
        flights.bodies(bad)


def test_the_real_file() -> None:
    """The installed file is the year's flights, and `hour` agrees with `time_hour` in New York in every row."""
    table = flights.read_flights(flights.flights_file())
    assert table.num_rows == 336_776
    stamps = pc.cast(flights.scheduled_ms(table), pa.timestamp("ms", "UTC")).cast(pa.timestamp("ms", flights.NEW_YORK))
    local = pc.add(pc.multiply(pc.hour(stamps), 100), pc.minute(stamps))
    assert pc.all(pc.equal(local, table["sched_dep_time"])).as_py()
    counts = flights.per_carrier_and_month(table["carrier"], table["month"])
    assert sum(counts.values()) == table.num_rows
