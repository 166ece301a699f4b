"""Large answers of one listener make way for its other requests: `Bulk`.

Four MiB in one write hold the loop for a millisecond, and whoever reads as fast as it can gives it the next four at
once: what others do in between takes five turns of the loop each, and their threads find neither the interpreter nor a
core free. So a large answer goes in slices, each with a turn of the loop behind it; and while there are other requests,
with a pause, one listener's pauses one after another. The same behind each batch on its way into the answer: twelve
steps of 0.1 ms in a row, turns of the loop between them or not, are a millisecond more for whoever comes meanwhile, and
some pages a second are the hundredth of the time that a p99 is made of. So all large answers together get a step in
each PAUSE_SECONDS; and are held up by nothing when nobody else is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from millpond.core.gathered import Buffer
from millpond.core.limits import KIB

SLICE_BYTES = 512 * KIB  # written in one go: 0.2 ms
PAUSE_SECONDS = 0.001  # the least that the loop's timers know
OTHERS_SECONDS = 0.1  # after the last other request, another is likely


class Bulk:
    """Of one listener, on its event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._other_at = float("-inf")

    def other(self) -> None:
        """A request that is not for something large."""
        self._other_at = self._now()

    async def pause(self) -> None:
        """Behind a piece of the work on an answer, in turn with other answers."""
        async with self._turn:
            others = self._now() - self._other_at < OTHERS_SECONDS
            await asyncio.sleep(PAUSE_SECONDS if others else 0)

    def _now(self) -> float:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # asked for once: each time it asks the kernel for the process id
        return self._loop.time()


def sliced(pieces: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """`pieces` in lists of SLICE_BYTES; the last has the rest. None is copied."""
    part: list[Buffer] = []
    room = SLICE_BYTES
    for piece in pieces:
        rest: Buffer = piece
        while len(rest) > room:
            view = memoryview(rest)
            part.append(view[:room])
            rest = view[room:]
            yield part
            part, room = [], SLICE_BYTES
        part.append(rest)
        room -= len(rest)
    yield part
