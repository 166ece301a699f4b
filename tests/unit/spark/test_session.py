"""Settings of a session that must be right before the JVM starts."""

from __future__ import annotations

from pyspark.sql import SparkSession

from millpond.spark.session import hadoop_version, is_running, s3a_config, session


def test_s3a_without_packages() -> None:
    """S3A is set up per bucket, fails fast, and fetches nothing unless asked."""
    config = s3a_config("pond", "http://127.0.0.1:9000", "eu-west-1", "key", "secret")
    bucket = "spark.hadoop.fs.s3a.bucket.pond."
    assert config[bucket + "endpoint"] == "http://127.0.0.1:9000"
    assert config[bucket + "access.key"] == "key"
    assert config["spark.hadoop.fs.s3a.input.stream.type"] == "classic"
    assert "spark.jars.packages" not in config


def test_s3a_packages_match_this_spark() -> None:
    """The packages are of the Hadoop version inside this PySpark, without the SDK bundle."""
    config = s3a_config("pond", packages=True)
    assert f"org.apache.hadoop:hadoop-aws:{hadoop_version()}" in config["spark.jars.packages"]
    assert "awssdk:bundle" in config["spark.jars.excludes"]


def test_settings_in_force(spark: SparkSession) -> None:
    """The session is in UTC, guesses no partition types, shows no web page, and is not made twice."""
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.sources.partitionColumnTypeInference.enabled") == "false"
    assert spark.sparkContext.uiWebUrl is None
    assert is_running()
    assert session() is spark
