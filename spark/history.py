"""`history(...)`: a topic's history as a DataFrame, read by Spark's own Parquet reader.

Exactly the objects of one plan are read, with the schema given and never inferred, so orphans and half-finished
work in the same directories are never seen. Where this Spark cannot reach the tier (another machine's directory,
S3 without S3A), the same ranges come through the data source (`format("millpond")`) instead.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from millpond.spark.plan import ClockName, HistoryPlan, fetch_plan

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_WILDCARD = re.compile(r"[{}\[\]*?\\]")


def history(
    spark: SparkSession,
    topic: str,
    start: str | int | datetime | None = None,
    end: str | int | datetime | None = None,
    clock: ClockName = "store",
    queues: Sequence[int] | None = None,
    columns: Sequence[str] | None = None,
    head: bool = False,
    url: str | None = None,
    key: str | None = None,
) -> DataFrame:
    """Messages with `start` <= clock value < `end` (ms, ISO 8601 text or datetime), as one snapshot.

    Without `head` it ends where the tier ends; with it, messages that are not tiered yet are read through the API
    and added, cut exactly where the tier of this plan ended. Columns are those of `columns.TABLE`. `url` and `key`
    default to MILLPOND_URL and MILLPOND_KEY. Raises NotFound, Unreachable, ValueError.
    """
    from millpond.spark.columns import struct_type
    from millpond.spark.http import HttpClient
    from millpond.spark.source import DEFAULT_URL, time_ms

    url = url or os.environ.get("MILLPOND_URL") or DEFAULT_URL
    key = key or os.environ.get("MILLPOND_KEY") or None
    from_ms, to_ms = time_ms("start", start), time_ms("end", end)
    shown = struct_type(columns)
    with HttpClient(url, key) as client:
        plan = fetch_plan(client, topic, from_ms, to_ms, clock)
    chosen = _chosen(plan, queues)
    options = {"topic": topic, "url": url, **({"key": key} if key else {}), "clock": clock}
    options |= {name: str(ms) for name, ms in (("startTime", from_ms), ("endTime", to_ms)) if ms is not None}
    if unreachable(spark, plan) is None:
        cold = _native(spark, plan, queues, clock, from_ms, to_ms)
    else:
        cold = _through_source(spark, options, {q: (s, t) for q, (s, t, _) in chosen.items()})
    if head:
        cold = cold.unionByName(_through_source(spark, options, {q: (max(s, t), e) for q, (s, t, e) in chosen.items()}))
    return cold.select(*shown.fieldNames())


def unreachable(spark: SparkSession, plan: HistoryPlan) -> str | None:
    """Why Spark's own reader cannot read the plan's objects; None when it can."""
    if not plan.objects:
        return None
    first = urlsplit(plan.objects[0].url)
    if first.scheme == "file":
        if not (spark.sparkContext.master or "").startswith("local"):
            return "the tier is a directory, which executors elsewhere may not have"
        there = Path(unquote(first.path)).exists()
        return None if there else "the tier is a directory of another machine"
    if first.scheme in {"s3", "s3a"}:
        jvm = spark.sparkContext._jvm
        assert jvm is not None, "a live SparkContext has a JVM"
        try:
            jvm.java.lang.Class.forName("org.apache.hadoop.fs.s3a.S3AFileSystem", False, _class_loader(jvm))
        except Exception as error:  # noqa: BLE001  # py4j's own types, as any other class that is not there
            return f"S3A is not on Spark's class path ({type(error).__name__}): millpond.spark.session(packages=True)"
        return None
    return f"objects are {first.scheme}:// addresses"


def _class_loader(jvm: object) -> object:
    return jvm.java.lang.Thread.currentThread().getContextClassLoader()  # type: ignore[attr-defined]  # py4j


def _chosen(plan: HistoryPlan, queues: Sequence[int] | None) -> dict[int, tuple[int, int, int]]:
    """queue -> (start_offset, tiered_to, end_offset) of the chosen ones."""
    there = {queue.queue: (queue.start_offset, queue.tiered_to, queue.end_offset) for queue in plan.queues}
    missing = sorted(set(queues or ()) - set(there))
    if missing:
        raise ValueError(f"queues: topic {plan.topic!r} has no queue {missing[0]}")
    return there if queues is None else {queue: there[queue] for queue in sorted(set(queues))}


def _native(
    spark: SparkSession,
    plan: HistoryPlan,
    queues: Sequence[int] | None,
    clock: ClockName,
    from_ms: int | None,
    to_ms: int | None,
) -> DataFrame:
    from pyspark.sql import functions as F

    from millpond.spark.columns import struct_type

    chosen = None if queues is None else set(queues)
    objects = [obj for obj in plan.objects if chosen is None or any(part.queue in chosen for part in obj.ranges)]
    if not objects:
        return spark.createDataFrame([], struct_type())
    frame = spark.read.schema(struct_type()).parquet(*(_address(obj.url) for obj in objects))
    stamp = F.col(f"{clock}_ts")
    conditions: list[Column] = []
    if chosen is not None:
        conditions.append(F.col("queue").isin(sorted(chosen)))
    if from_ms is not None:
        conditions.append(stamp >= F.timestamp_millis(F.lit(from_ms)))
    if to_ms is not None:
        conditions.append(stamp < F.timestamp_millis(F.lit(to_ms)))
    conditions += _kept(plan)
    for condition in conditions:
        frame = frame.where(condition)
    return frame


def _kept(plan: HistoryPlan) -> list[Column]:
    """Cuts queues whose objects reach below start_offset (expired) or past tiered_to (sealed meanwhile)."""
    from pyspark.sql import functions as F

    edges: dict[int, tuple[int, int]] = {}
    for obj in plan.objects:
        for part in obj.ranges:
            low, high = edges.get(part.queue, (part.first, part.end))
            edges[part.queue] = (min(low, part.first), max(high, part.end))
    conditions: list[Column] = []
    for queue in plan.queues:
        low, high = edges.get(queue.queue, (queue.start_offset, queue.tiered_to))
        if low < queue.start_offset or high > queue.tiered_to:
            kept = F.col("offset").between(queue.start_offset, queue.tiered_to - 1)
            conditions.append((F.col("queue") != queue.queue) | kept)
    return conditions


def _through_source(spark: SparkSession, options: dict[str, str], bounds: dict[int, tuple[int, int]]) -> DataFrame:
    from millpond.spark.columns import struct_type

    bounds = {queue: (first, end) for queue, (first, end) in bounds.items() if first < end}
    if not bounds:
        return spark.createDataFrame([], struct_type())
    reader = spark.read.format("millpond").options(**options)
    reader = reader.option("queues", ",".join(map(str, bounds)))
    reader = reader.option("startOffsets", json.dumps({str(queue): first for queue, (first, _) in bounds.items()}))
    return reader.option("endOffsets", json.dumps({str(queue): end for queue, (_, end) in bounds.items()})).load()


def _address(url: str) -> str:
    """How Hadoop names it: s3a instead of s3, paths as they are (not percent-encoded), no character a wildcard."""
    if url.startswith("s3://"):
        url = "s3a://" + url.removeprefix("s3://")
    elif url.startswith("file:"):
        url = unquote(url)
    return _WILDCARD.sub(r"\\\g<0>", url)
