"""`spark.read.format("millpond")`: a topic as a table, hot and cold, through the public API.

Options (names in any case)
    topic                      required
    url, key                   the service; default MILLPOND_URL and MILLPOND_KEY, else http://127.0.0.1:8080
    queues                     "0,3": only these
    startTime, endTime         ms since 1970 or ISO 8601; startTime <= clock value < endTime
    clock                      "store" (default) or "born"
    startOffsets, endOffsets   JSON {"queue": offset}; queues that are not named are read whole
    tag                        "a || b"
    columns                    "offset,body": fewer columns (`.schema(..)` does the same)
    failOnDataLoss             "true" (default): what retention deletes meanwhile, or is damaged, is an error;
                               "false": what is left is read, and the log of the task names the rest
    partitionBytes             about how much one task reads

A DataFrame is a snapshot: what is confirmed when Spark plans it. Filters are options and not pushed down, because
PySpark caches a pushed plan on the shared relation and then answers other queries wrongly; Spark applies its own
`where` itself. Executors need `pip install millpond[spark]`, nothing else.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, MutableMapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from millpond.core.limits import SPARK_PARTITION_BYTES, TIMESTAMP_MS_MOST
from millpond.spark.columns import TABLE, arrow_schema, checked_columns, fitted, struct_type
from millpond.spark.http import HttpClient
from millpond.spark.plan import ClockName, HistoryPlan, fetch_plan, partitions, stretches
from millpond.spark.read_range import Range, read_range, select, tag_set

_log = logging.getLogger("millpond.spark.source")

FORMAT = "millpond"
DEFAULT_URL = "http://127.0.0.1:8080"
OPTIONS = frozenset(
    {
        "topic", "url", "key", "queues", "starttime", "endtime", "clock", "startoffsets", "endoffsets", "tag",
        "columns", "failondataloss", "partitionbytes", "path",
    }
)  # fmt: skip


class Options(msgspec.Struct, frozen=True):
    """The options of one read, checked. Times in ms."""

    topic: str
    url: str
    key: str | None
    queues: list[int] | None
    from_ms: int | None
    to_ms: int | None
    clock: ClockName
    start_offsets: dict[int, int]
    end_offsets: dict[int, int]
    tag: str | None
    columns: list[str]
    fail_on_data_loss: bool
    partition_bytes: int

    def client(self) -> HttpClient:
        return HttpClient(self.url, self.key)


class QueuePart(InputPartition):
    """Offsets [first, end) of one queue of the topic that had `topic_id` when the read was planned."""

    def __init__(self, topic_id: int, queue: int, first: int, end: int) -> None:
        super().__init__((topic_id, queue, first, end))
        self.topic_id, self.queue, self.first, self.end = topic_id, queue, first, end


class MillpondSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return struct_type(parse_options(self.options).columns)

    def reader(self, schema: StructType) -> MillpondReader:
        return MillpondReader(parse_options(self.options), schema)


class MillpondReader(DataSourceReader):
    """Plans in the driver (`partitions`), reads in the executors (`read`)."""

    def __init__(self, options: Options, schema: StructType) -> None:
        checked_columns(schema)
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with options.client() as client:
            plan = fetch_plan(client, options.topic, options.from_ms, options.to_ms, options.clock)
        timed = options.from_ms is not None or options.to_ms is not None
        asked = stretches(plan, _bounds(plan, options), timed=timed)
        return [
            QueuePart(plan.topic_id, piece.queue, piece.first, piece.end)
            for piece in partitions(asked, options.partition_bytes)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, QueuePart):
            return  # how Spark hands over an empty plan
        options, schema = self._options, arrow_schema(self._schema)
        span = Range(options.topic, partition.queue, partition.first, partition.end, partition.topic_id)
        tags = tag_set(options.tag)
        with options.client() as client:
            for batch in read_range(client, span, lost=None if options.fail_on_data_loss else partial(_tell, span)):
                wanted = select(batch, clock=options.clock, from_ms=options.from_ms, to_ms=options.to_ms, tags=tags)
                if wanted.num_rows:
                    yield fitted(wanted, schema)


def _tell(span: Range, first: int, end: int) -> None:
    _log.warning("topic %s, queue %d: messages %d to %d are lost", span.topic, span.queue, first, end - 1)


def parse_options(given: MutableMapping[str, str]) -> Options:
    """Raises ValueError naming the option."""
    named = {name.lower(): value for name, value in given.items()}
    for name in named:
        if name not in OPTIONS:
            raise ValueError(f"option {name!r}: not one of millpond's: {', '.join(sorted(OPTIONS - {'path'}))}")
    if not named.get("topic"):
        raise ValueError("option 'topic': required")
    clock = named.get("clock", "store")
    if clock not in {"store", "born"}:
        raise ValueError(f"option 'clock': expected store or born, got {clock!r}")
    queues = named.get("queues")
    columns = named.get("columns")
    return Options(
        topic=named["topic"],
        url=named.get("url") or os.environ.get("MILLPOND_URL") or DEFAULT_URL,
        key=named.get("key") or os.environ.get("MILLPOND_KEY") or None,
        queues=None if not queues else [_whole("queues", part) for part in queues.split(",")],
        from_ms=time_ms("startTime", named.get("starttime")),
        to_ms=time_ms("endTime", named.get("endtime")),
        clock="born" if clock == "born" else "store",
        start_offsets=_offsets("startOffsets", named.get("startoffsets")),
        end_offsets=_offsets("endOffsets", named.get("endoffsets")),
        tag=named.get("tag"),
        columns=list(TABLE) if not columns else _column_names(columns),
        fail_on_data_loss=_flag("failOnDataLoss", named.get("failondataloss", "true")),
        partition_bytes=max(1, _whole("partitionBytes", named.get("partitionbytes", str(SPARK_PARTITION_BYTES)))),
    )


def time_ms(name: str, value: str | int | datetime | None) -> int | None:
    """Milliseconds since 1970 UTC of a number, an ISO 8601 text (UTC when it names no zone) or a datetime."""
    if value is None or value == "":
        return None
    if isinstance(value, str) and value.lstrip("-").isdigit():
        value = int(value)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError as error:
            raise ValueError(f"{name}: expected ms since 1970 or ISO 8601, got {value!r}") from error
    if isinstance(value, datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        value = round(aware.timestamp() * 1000)
    if not 0 <= value <= TIMESTAMP_MS_MOST:
        raise ValueError(f"{name}: expected 0 to {TIMESTAMP_MS_MOST} ms, got {value}")
    return value


def _bounds(plan: HistoryPlan, options: Options) -> dict[int, tuple[int, int]]:
    there = {queue.queue: queue for queue in plan.queues}
    for queue in {*(options.queues or ()), *options.start_offsets, *options.end_offsets}:
        if queue not in there:
            raise ValueError(f"queue {queue}: topic {plan.topic!r} has queues 0 to {len(there) - 1}")
    chosen = set(there) if options.queues is None else set(options.queues)
    bounds: dict[int, tuple[int, int]] = {}
    for number in sorted(chosen):
        queue = there[number]
        first = options.start_offsets.get(number, queue.start_offset)
        if first < queue.start_offset and options.fail_on_data_loss:
            raise ValueError(
                f"startOffsets: queue {number} begins at {queue.start_offset}, {first} was deleted by retention "
                "(failOnDataLoss=false reads what is left)"
            )
        bounds[number] = (first, options.end_offsets.get(number, queue.end_offset))
    return bounds


def _column_names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in TABLE:
            raise ValueError(f"option 'columns': {name!r} is not one of {', '.join(TABLE)}")
    return names


def _offsets(name: str, text: str | None) -> dict[int, int]:
    if not text:
        return {}
    try:
        decoded: Any = json.loads(text)
        return {int(queue): msgspec.convert(offset, int) for queue, offset in decoded.items()}
    except (ValueError, AttributeError, msgspec.ValidationError) as error:
        raise ValueError(f'option {name!r}: expected JSON {{"queue": offset}}, got {text!r}') from error


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"option {name!r}: expected a whole number, got {text!r}") from error


def _flag(name: str, text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise ValueError(f"option {name!r}: expected true or false, got {text!r}")
    return text.lower() == "true"
