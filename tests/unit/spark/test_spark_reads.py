"""`format("millpond")` and `history` in a real Spark, against a service with real Parquet files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from millpond.core.schema import TIER_SCHEMA
from millpond.spark.history import history, unreachable
from millpond.spark.plan import HistoryPlan, PlanObject

pytestmark = pytest.mark.usefixtures("pond")


def load(spark: SparkSession, service: Any, **options: str) -> DataFrame:
    return spark.read.format("millpond").options(topic="pond", url=service.url, **options).load()


def offsets(frame: DataFrame) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row in frame.select("queue", "offset").collect():
        found.setdefault(row.queue, []).append(row.offset)
    return {queue: sorted(some) for queue, some in sorted(found.items())}


class TestSource:
    def test_every_message_hot_and_cold(self, spark: SparkSession, service: Any) -> None:
        """The format is known by itself, and a read without options has every offset once."""
        assert offsets(load(spark, service)) == {0: list(range(1_000)), 1: list(range(300))}

    def test_values(self, spark: SparkSession, service: Any, pond: Any) -> None:
        """Every column of the tier arrives with its value; timestamps keep their instant."""
        row = load(spark, service).where("queue = 0 and offset = 4").selectExpr("*", "unix_millis(born_ts) as ms")
        got = row.collect()[0].asDict()
        expected = {name: pond.queues[0][name][4].as_py() for name in TIER_SCHEMA.names if "_ts" not in name}
        assert got["ms"] == 1_004
        assert {name: got[name] for name in expected} == {**expected, "properties": dict(expected["properties"])}

    def test_time_and_tag_options(self, spark: SparkSession, service: Any) -> None:
        """Times bound [start, end) of the clock in question, tags select, in tier and store."""
        frame = load(
            spark, service, startTime="1200", endTime="1970-01-01T00:00:01.700", clock="born", tag="red || blue"
        )
        expected = [o for o in range(200, 700) if o % 3 != 2]
        assert offsets(frame) == {0: expected, 1: [o for o in expected if o < 300]}

    def test_offset_options(self, spark: SparkSession, service: Any) -> None:
        """Offsets bound the queues they name; others are read whole."""
        frame = load(spark, service, startOffsets=json.dumps({"0": 590}), endOffsets=json.dumps({"0": 610}))
        assert offsets(frame) == {0: list(range(590, 610)), 1: list(range(300))}

    def test_schema_subset(self, spark: SparkSession, service: Any) -> None:
        """`.schema(subset)` and the option `columns` give those columns in that order."""
        reader = spark.read.format("millpond").options(topic="pond", url=service.url, queues="1")
        assert reader.schema("body binary, offset long").load().columns == ["body", "offset"]
        assert load(spark, service, columns="tag,offset", queues="1").where("tag = 'red'").count() == 100

    def test_filters_are_not_cached(self, spark: SparkSession, service: Any) -> None:
        """A filtered query leaves the unfiltered one of the same DataFrame whole."""
        frame = load(spark, service)
        assert frame.where("queue = 1").count() == 300
        assert frame.count() == 1_300

    def test_an_empty_plan(self, spark: SparkSession, service: Any) -> None:
        """A range without messages is an empty DataFrame."""
        assert load(spark, service, startTime="900000").count() == 0

    def test_small_partitions(self, spark: SparkSession, service: Any) -> None:
        """Partitions of bounded size together hold every offset once."""
        frame = load(spark, service, partitionBytes="4000")
        assert frame.rdd.getNumPartitions() > 10
        assert offsets(frame) == {0: list(range(1_000)), 1: list(range(300))}

    def test_a_bad_option_names_itself(self, spark: SparkSession, service: Any) -> None:
        """An unknown option and a wrong value are errors that name the option."""
        with pytest.raises(PySparkException, match="startime"):
            load(spark, service, startime="1").count()
        with pytest.raises(PySparkException, match="'clock': expected store or born"):
            load(spark, service, clock="wall").count()
        with pytest.raises(PySparkException, match="offset is bigint, not string"):
            spark.read.format("millpond").options(topic="pond", url=service.url).schema("offset string").load().count()

    def test_data_loss_is_an_error(self, spark: SparkSession, service: Any, pond: Any) -> None:
        """Offsets that retention deleted are an error unless failOnDataLoss is off."""
        pond.start[0] = 100
        with pytest.raises(PySparkException, match="deleted by retention"):
            load(spark, service, startOffsets='{"0": 50}').count()
        assert load(spark, service, startOffsets='{"0": 50}', failOnDataLoss="false").where("queue=0").count() == 900


class TestHistory:
    def test_the_tier_natively(self, spark: SparkSession, service: Any) -> None:
        """Without head: exactly what is tiered, read without asking the service for messages."""
        assert offsets(history(spark, "pond", url=service.url)) == {0: list(range(600))}
        assert not [request for request in service.requests if "/messages" in request]

    def test_head_joins_exactly(self, spark: SparkSession, service: Any) -> None:
        """With head: every offset once, across the cut-over."""
        assert offsets(history(spark, "pond", head=True, url=service.url)) == {
            0: list(range(1_000)), 1: list(range(300)),
        }  # fmt: skip

    def test_sealed_after_the_plan(self, spark: SparkSession, service: Any, pond: Any, tmp_path: Path) -> None:
        """What is sealed between plan and read is neither missed nor read twice."""
        frame = history(spark, "pond", head=True, url=service.url)
        pond.seal(tmp_path, 0, 1_000)
        assert offsets(frame) == {0: list(range(1_000)), 1: list(range(300))}

    def test_time_start_offset_and_columns(self, spark: SparkSession, service: Any, pond: Any) -> None:
        """Rows below start_offset and outside the time are cut, also inside an object."""
        pond.start[0] = 10
        frame = history(spark, "pond", end=1_450, clock="born", columns=["queue", "offset"], url=service.url)
        assert frame.columns == ["queue", "offset"]
        assert offsets(frame) == {0: list(range(10, 450))}

    def test_an_unreachable_tier(self, spark: SparkSession, service: Any, tmp_path: Path) -> None:
        """Where Spark cannot reach the objects, the same rows come through the service."""
        shutil.rmtree(tmp_path)
        assert offsets(history(spark, "pond", queues=[0], url=service.url)) == {0: list(range(600))}

    def test_why_a_tier_is_unreachable(self, spark: SparkSession) -> None:
        """S3 without S3A on the class path, and schemes that Spark cannot read, name the reason."""
        for url, reason in (("s3://pond/x.parquet", "packages=True"), ("https://host/x.parquet", "https:// addresses")):
            plan = HistoryPlan("pond", 1, 1, [PlanObject(url, 1, 1, [])], [])
            assert reason in (unreachable(spark, plan) or "")

    def test_nothing_tiered(self, spark: SparkSession, service: Any) -> None:
        """A queue without tier is an empty DataFrame of the right columns."""
        frame = history(spark, "pond", queues=[1], url=service.url)
        assert frame.count() == 0
        assert frame.columns == TIER_SCHEMA.names
