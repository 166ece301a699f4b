"""Millpond in Spark: `session`, `history`, the data source `format("millpond")` and the process behind replays.

Needs the extra `millpond[spark]`; importing this package alone does not load PySpark.
"""

from millpond.spark.history import history
from millpond.spark.session import session

__all__ = ["history", "session"]
