"""Counters of one proxy, for /metrics. Not a metrics library: names are few, labels are part of the name."""

from __future__ import annotations

from collections.abc import Callable

COUNTER_NAMES = 10_000  # bounds memory should a caller build names from data


class Counters:
    """Monotonic sums by name, e.g. `produced_messages_total` or `requests_total{status="200"}`, and gauges: values
    that are asked for when somebody looks."""

    __slots__ = ("_gauges", "_groups", "_values")

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._gauges: dict[str, Callable[[], float]] = {}
        self._groups: list[tuple[str, str, Callable[[], dict[str, float]]]] = []

    def add(self, name: str, value: float = 1) -> None:
        values = self._values
        if name in values:
            values[name] += value
        elif len(values) < COUNTER_NAMES:
            values[name] = value

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        self._gauges[name] = read

    def group(self, name: str, label: str, read: Callable[[], dict[str, float]]) -> None:
        """One number for each value of `label`."""
        self._groups.append((name, label, read))

    def snapshot(self) -> dict[str, float]:
        found = self._values | {name: read() for name, read in self._gauges.items()}
        for name, label, read in self._groups:
            found |= {f'{name}{{{label}="{value}"}}': number for value, number in read().items()}
        return found
