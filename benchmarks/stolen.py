"""What the host of a virtual machine took from its cores while something was measured: `Stolen`.

A core that waits for its host looks busy from inside. Rates fall by about the share that is taken; a p99 of
milliseconds says nothing any more, since the host takes a core for milliseconds at a time.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import Line

STAT = Path("/proc/stat")
TAKEN = "taken by the host under"
_STEAL = 7  # of the numbers behind "cpu": user, nice, system, idle, iowait, irq, softirq, steal, ..


class Stolen:
    """From its making on."""

    def __init__(self) -> None:
        self._before = _ticks()

    def under(self, what: str) -> list[Line]:
        """One line; none where the kernel does not say."""
        spent = [now - then for now, then in zip(_ticks(), self._before, strict=True)]
        if sum(spent) <= 0:
            return []
        return [Line(f"{TAKEN} {what}", "% of the cores", [100 * spent[_STEAL] / sum(spent)])]


def _ticks() -> list[int]:
    """Of all cores together; guests' are in the user's already."""
    first = STAT.read_text().partition("\n")[0].split() if STAT.exists() else []
    return [int(one) for one in first[1 : _STEAL + 2]]
