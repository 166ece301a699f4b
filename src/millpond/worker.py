"""`python -m millpond.worker FD NUMBER`: one proxy process of several behind one port, started by `workers.py`.

FD is its end of the channel to the parent (`control.py`): the settings come through it, and its end is the parent's
death, whatever killed that: then this process drains and ends, too.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import TYPE_CHECKING

import uvloop

from millpond.client.command import exits
from millpond.control import Ask, Begin, Channel, Count, Counters, Counts, Numbers, Ready, Refused
from millpond.core.tasks import Tasks
from millpond.process import CANNOT_START, Stop, prepare, until_ended, words

if TYPE_CHECKING:
    from millpond.apart import Part

ASK_SECONDS = 3.0  # for the counters of all workers; then this one answers with its own


class Worker:
    """This process's side of the channel. `numbers` says what it counts, once it is up."""

    def __init__(self, channel: Channel, number: int, stop: Stop) -> None:
        self._channel = channel
        self._number = number
        self._stop = stop
        self._running: Part | None = None
        self._asked: asyncio.Future[dict[str, Numbers]] | None = None

    async def listen(self) -> None:
        """Obey the parent until it is gone."""
        while True:
            message = await self._channel.receive()
            if isinstance(message, Count):
                self._channel.send(Counters(self._numbers()))
            elif isinstance(message, Counts):
                self._answered(message.workers)
            else:
                break
        if message is None:  # also while it drains already: then at once
            self._stop.again()
        else:
            self._stop.once()
            while await self._channel.receive() is not None:
                pass
            self._stop.again()

    def ready(self, running: Part) -> None:
        self._running = running
        self._channel.send(Ready(running.address, running.facts))

    async def counts(self) -> dict[str, Numbers]:
        """What all workers count, by number: through the parent. When it does not answer, this one's alone."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().create_future()
            self._channel.send(Ask())
        try:
            return await asyncio.wait_for(asyncio.shield(self._asked), ASK_SECONDS)
        except TimeoutError:
            self._asked = None
            return {str(self._number): self._numbers()}

    def _answered(self, workers: dict[str, Numbers]) -> None:
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(workers)

    def _numbers(self) -> Numbers:
        return self._running.numbers() if self._running is not None else {}


async def work(channel: Channel) -> int:
    """Until told to end; the exit code."""
    begin = await channel.receive()
    if not isinstance(begin, Begin):  # the parent died at once
        return exits.FAILED
    stop = Stop()
    stop.on_signals()
    worker = Worker(channel, begin.number, stop)

    async def start() -> Part:
        from millpond import apart

        return await apart.start_proxy(begin.config, worker.counts)

    tasks = Tasks(lambda _name, _error: stop.once())
    try:
        prepare(begin.config, begin.number)
        tasks.spawn(worker.listen(), "channel to the parent")
        return await until_ended(start, stop, worker.ready, lambda: None)
    except CANNOT_START as error:
        channel.send(Refused(*words(error)))
        return exits.FAILED
    finally:
        await tasks.close()
        channel.close()


async def _main(handle: int) -> int:
    return await work(await Channel.open(socket.socket(fileno=handle)))


if __name__ == "__main__":
    sys.exit(uvloop.run(_main(int(sys.argv[1]))))
