"""Counters of one proxy, for /metrics. Not a metrics library: names are few, labels are part of the name."""

from __future__ import annotations

COUNTER_NAMES = 10_000  # bounds memory should a caller build names from data


class Counters:
    """Monotonic sums by name, e.g. `produced_messages_total` or `requests_total{status="200"}`."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, name: str, value: float = 1) -> None:
        values = self._values
        if name in values:
            values[name] += value
        elif len(values) < COUNTER_NAMES:
            values[name] = value

    def snapshot(self) -> dict[str, float]:
        return dict(self._values)
