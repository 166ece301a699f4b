"""Makes `format("millpond")` known to Spark, which takes `DefaultSource` of every top-level module `pyspark_*`."""

from millpond.spark.source import MillpondSource as DefaultSource

__all__ = ["DefaultSource"]
