"""What a measurement says: rates, and quantiles of times."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Rate(msgspec.Struct, frozen=True):
    """`count` messages of `message_bytes` each in `seconds`."""

    count: int
    message_bytes: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.count / self.seconds if self.seconds else 0.0

    @property
    def megabytes_per_second(self) -> float:
        """10**6 bytes of bodies."""
        return self.per_second * self.message_bytes / 1e6


class Times(msgspec.Struct, frozen=True):
    """Quantiles in milliseconds of `count` times."""

    count: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    most_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        if not len(seconds):
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        p50, p99, p999, most = (float(q) * 1000 for q in np.quantile(np.asarray(seconds), [0.5, 0.99, 0.999, 1.0]))
        return cls(len(seconds), round(p50, 3), round(p99, 3), round(p999, 3), round(most, 3))


class Single(msgspec.Struct, frozen=True):
    """One message a request."""

    rate: Rate
    times: Times
    errors: int
    connections: int
