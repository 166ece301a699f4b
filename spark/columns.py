"""The table of a topic in Spark: its columns and types, and Arrow batches fitted to them.

Same columns as a tier object (`core.schema.TIER_SCHEMA`). Spark counts timestamps in us, Millpond in ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from millpond.core.schema import TIER_SCHEMA

TABLE: dict[str, DataType] = {
    "queue": IntegerType(),
    "offset": LongType(),
    "store_ts": TimestampType(),
    "born_ts": TimestampType(),
    "key": BinaryType(),
    "tag": StringType(),
    "properties": MapType(StringType(), StringType()),
    "body": BinaryType(),
    "origin": StringType(),
}
assert list(TABLE) == TIER_SCHEMA.names, "Spark shows every column of the tier"

_ARROW: dict[str, pa.DataType] = {
    field.name: pa.timestamp("us", "UTC") if pa.types.is_timestamp(field.type) else field.type for field in TIER_SCHEMA
}


def struct_type(columns: Sequence[str] | None = None) -> StructType:
    """The Spark schema of these columns (all by default), in their order."""
    names = list(TABLE) if columns is None else list(columns)
    for name in names:
        if name not in TABLE:
            raise ValueError(f"columns: {name!r} is not one of {', '.join(TABLE)}")
    return StructType([StructField(name, TABLE[name], TIER_SCHEMA.field(name).nullable) for name in names])


def checked_columns(schema: StructType) -> None:
    """Raises ValueError naming the column when `schema` is not a choice of the table's columns."""
    for field in schema.fields:
        expected = TABLE.get(field.name)
        if expected is None:
            raise ValueError(f"schema: {field.name!r} is not one of {', '.join(TABLE)}")
        if field.dataType.typeName() != expected.typeName():
            raise ValueError(
                f"schema: {field.name} is {expected.simpleString()}, not {field.dataType.simpleString()}; cast it after"
            )


def arrow_schema(schema: StructType) -> pa.Schema:
    """How Spark wants batches of `schema` in Arrow."""
    return pa.schema([pa.field(field.name, _ARROW[field.name], field.nullable) for field in schema.fields])


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of `schema` out of a `TIER_SCHEMA` batch."""
    columns = [batch.column(field.name) for field in schema]
    return pa.RecordBatch.from_arrays(
        [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(columns, schema, strict=True)
        ],
        schema=schema,
    )
