"""Types of request fields with their bounds: checked when decoded, and shown in OpenAPI, from one line each."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from millpond.core import limits

Time = Annotated[int, Meta(ge=0, le=limits.TIMESTAMP_MS_MOST, description="Milliseconds since 1970 UTC.")]
Duration = Annotated[int, Meta(ge=1, le=limits.TIMESTAMP_MS_MOST, description="Milliseconds.")]
Bytes = Annotated[int, Meta(ge=1, le=1 << 62)]
Count = Annotated[int, Meta(ge=0, le=limits.SEQUENCE_MOST)]
Queues = Annotated[int, Meta(ge=1, le=limits.QUEUES_PER_TOPIC)]
MessageBytes = Annotated[int, Meta(ge=1, le=limits.MESSAGE_BYTES)]
DedupWindow = Annotated[int, Meta(ge=0, le=limits.DEDUP_WINDOW_MS_MOST, description="Milliseconds; 0: none.")]
InFlight = Annotated[int, Meta(ge=1, le=limits.UNSETTLED_ROWS)]
PageSize = Annotated[int, Meta(ge=1, le=limits.PAGE_SIZE_MOST)]
