"""`millpond proxy --processes N`: N proxies behind one port, each a process (`worker.py`), and their parent, this.

The parent serves nothing. It holds the port, starts the workers, and starts another in the place of one that died:

    bound, never listening      the parent: so that nobody else takes the port, also with `--listen HOST:0`
    SO_REUSEPORT, listening     each worker: the kernel spreads new connections over those that listen

    a worker cannot start       at first: nothing starts, and its reason is the reason. Later: tried again
    a worker dies               logged; another after a pause that doubles from PAUSE_SECONDS to PAUSE_SECONDS_MOST
    a worker hangs              killed when it has not answered SILENT_LOOKS questions in turn; then as above
    none can be started         after GIVE_UP tries while no worker serves: the parent ends with 1
    SIGHUP                      one after the other: a new one, and when it serves the old one drains and ends
    SIGTERM                     all drain; the parent ends when they have
    the parent dies             each sees its channel end (`control.py`), drains and ends
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from typing import Self

import msgspec

from millpond.control import Ask, Begin, Channel, Count, Counters, Counts, Numbers, Ready, Refused, Stop
from millpond.core import limits
from millpond.core.clock import Clock, SystemClock
from millpond.core.config import Config
from millpond.core.errors import StartupError
from millpond.core.http.server import cannot_listen, split_listen
from millpond.core.tasks import Tasks

START_SECONDS = 60.0  # until a worker serves: a cold start on a loaded machine takes a tenth of it
COUNT_SECONDS = 1.0  # for one worker to say what it counts
LOOK_SECONDS = 3.0  # every so often each worker is asked whether it still answers
SILENT_LOOKS = 5  # .. by looks, not by time: when all of them were stopped together, none is to blame
PAUSE_SECONDS = 0.1  # before a worker is started in the place of one that died
PAUSE_SECONDS_MOST = 10.0
STEADY_SECONDS = 60.0  # a worker that served so long died of something else than its start: the pause begins anew
GIVE_UP = 5
DRAIN_SECONDS = 35.0  # of one worker while the others go on: above what it allows itself (process.CLOSE_SECONDS)

_log = logging.getLogger("millpond.workers")


class Worker:
    """One worker process, from its start to its end."""

    def __init__(self, number: int, process: asyncio.subprocess.Process, channel: Channel) -> None:
        self.number = number
        self.ready: asyncio.Future[Ready | StartupError] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.asks = False  # what all of them count
        self._process = process
        self._channel = channel
        self._counting: asyncio.Future[Numbers] | None = None  # asked and not answered
        self._silent_looks = 0

    @classmethod
    async def launch(cls, number: int, config: Config) -> Self:
        """In a session of its own: Ctrl-C in a terminal is for the parent."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", "millpond.worker", str(theirs.fileno()), str(number),
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),), start_new_session=True,
                )  # fmt: skip
            channel = await Channel.open(ours)
        except BaseException:
            ours.close()  # which ends a process that was started
            raise
        channel.send(Begin(number, config))
        return cls(number, process, channel)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def serves(self) -> bool:
        return self.ready.done() and isinstance(self.ready.result(), Ready) and not self.ended.done()

    async def listen(self, asked: asyncio.Event) -> None:
        """Until it has ended; `asked` is set when it wants to know what all of them count."""
        try:
            while (message := await self._channel.receive()) is not None:
                if isinstance(message, Ready):
                    self._is_ready(message)
                elif isinstance(message, Refused):
                    self._is_ready(StartupError(message.detail, message.remedy))
                elif isinstance(message, Counters):
                    self._counted(message.numbers)
                elif isinstance(message, Ask):
                    self.asks = True
                    asked.set()
        except ValueError:
            _log.exception("worker %d does not speak as it should", self.number)
            self.kill()
        code = await self._process.wait()
        self._channel.close()
        self._is_ready(StartupError(f"worker {self.number} {_how(code)} before it was ready", "see the log above"))
        self.ended.set_result(code)

    def _is_ready(self, outcome: Ready | StartupError) -> None:
        if not self.ready.done():
            self.ready.set_result(outcome)

    def _counted(self, numbers: Numbers) -> None:
        if self._counting is not None and not self._counting.done():
            self._counting.set_result(numbers)

    async def count(self) -> Numbers:
        """What it counts; nothing when it does not say in time."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._ask()), COUNT_SECONDS)
        except TimeoutError:
            return {}

    def _ask(self) -> asyncio.Future[Numbers]:
        """One question at a time, whoever wants to know."""
        if self._counting is None or self._counting.done():
            self._counting = asyncio.get_running_loop().create_future()
            self._channel.send(Count())
        return self._counting

    def hangs(self) -> bool:
        """Whether it has been silent for too long; called every LOOK_SECONDS, asks it each time."""
        silent = self._counting is not None and not self._counting.done()
        self._silent_looks = self._silent_looks + 1 if silent else 0
        self._ask()
        return self._silent_looks >= SILENT_LOOKS

    def tell(self, counts: Counts) -> None:
        self.asks = False
        self._channel.send(counts)

    def stop(self) -> None:
        self._channel.send(Stop())

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


class Workers:
    """All of them, up."""

    def __init__(self, config: Config, held: list[socket.socket], clock: Clock) -> None:
        self.address = ""
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._config = config
        self._held = held
        self._clock = clock
        self._facts: dict[str, str] = {}
        self._alive: set[Worker] = set()
        self._places: list[Worker] = []  # by number - 1: who serves there
        self._turns: list[asyncio.Lock] = []  # of each place: one replaces at a time
        self._listeners = Tasks(self._on_death)
        self._keepers = Tasks(self._on_death)
        self._asked = asyncio.Event()
        self._started = 0
        self._misses = 0  # starts that came to nothing since one came to something
        self._rolling: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: Config) -> Workers:
        """All workers serve when it returns. Raises StartupError; then none is left."""
        count = config.proxy.processes
        if not 1 <= count <= limits.PROXY_PROCESSES:
            raise StartupError(
                f"{count} processes of one proxy: 1 to {limits.PROXY_PROCESSES} are possible",
                "give --processes about one for each core",
            )
        listen, held = hold(config.proxy.listen)
        definite = msgspec.structs.replace(config, proxy=msgspec.structs.replace(config.proxy, listen=listen))
        workers = cls(definite, held, SystemClock())
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, workers.roll)
        try:
            await workers._start_all(count)
        except BaseException:
            await workers.close()
            raise
        return workers

    def greeting(self) -> list[str]:
        facts = {**self._facts, "workers": ", ".join(str(worker.pid) for worker in self._places)}
        return ["Millpond proxy", *(f"  {name:<9}{value}" for name, value in facts.items())]

    async def close(self) -> None:
        """Drain all; whoever is left when this is cancelled is killed."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        await self._keepers.close()
        try:
            for worker in self._alive:
                worker.stop()
            if self._alive:
                await asyncio.wait([worker.ended for worker in self._alive])
        finally:
            for worker in self._alive:
                worker.kill()
            if self._alive:
                await asyncio.wait([worker.ended for worker in self._alive])
            await self._listeners.close()
            for one in self._held:
                one.close()

    def roll(self) -> None:
        """Every worker anew, one after the other, without a moment in which fewer serve."""
        if self._rolling is not None and not self._rolling.done():
            _log.warning("the workers are being replaced already")
        elif self._places:
            self._rolling = self._keepers.spawn(self._roll(), "replacing of all workers")

    # -- one after the other -----------------------------------------------------------------------------------

    async def _start_all(self, count: int) -> None:
        """The first one that cannot start is why none does."""
        starting = [asyncio.ensure_future(self._serving(number)) for number in range(1, count + 1)]
        try:
            self._places = await asyncio.gather(*starting)
        finally:
            for one in starting:
                one.cancel()
            await asyncio.wait(starting)
        self._turns = [asyncio.Lock() for _ in self._places]
        ready = self._places[0].ready.result()
        assert isinstance(ready, Ready)
        self.address, self._facts = ready.address, ready.facts
        self._keepers.spawn(self._answer(), "counters of the workers")
        self._keepers.spawn(self._watch(), "watch over the workers")
        for place in range(count):
            self._keepers.spawn(self._keep(place), f"keeper of worker {place + 1}")

    async def _serving(self, number: int) -> Worker:
        """A new worker, once it serves. Raises StartupError; then it has ended."""
        worker = await Worker.launch(number, self._config)
        self._alive.add(worker)
        self._started += 1
        listening = self._listeners.spawn(worker.listen(self._asked), f"channel of worker {number}")
        listening.add_done_callback(lambda _: self._alive.discard(worker))
        try:
            outcome = await asyncio.wait_for(asyncio.shield(worker.ready), START_SECONDS)
        except TimeoutError:
            outcome = StartupError(f"worker {number} is not ready after {START_SECONDS:.0f} s", "see the log above")
        if isinstance(outcome, StartupError):
            worker.kill()
            await asyncio.wait([worker.ended])
            raise outcome
        return worker

    async def _keep(self, place: int) -> None:
        """Start another worker in this place whenever the one there ends."""
        pause = PAUSE_SECONDS
        while True:
            worker, since = self._places[place], self._clock.monotonic()
            code = await asyncio.shield(worker.ended)
            if self._places[place] is not worker:
                continue  # it was replaced on purpose
            if self._clock.monotonic() - since > STEADY_SECONDS:
                pause = PAUSE_SECONDS
            _log.error("worker %d (process %d) %s; another starts in %.1f s",
                       worker.number, worker.pid, _how(code), pause)  # fmt: skip
            while self._places[place] is worker:
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSE_SECONDS_MOST)
                await self._replace(place, worker)

    async def _watch(self) -> None:
        """Kill a worker that hangs; its keeper starts another."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for worker in self._places:
                if worker.serves and worker.hangs():
                    _log.error(
                        "worker %d (process %d) does not answer any more: it is killed", worker.number, worker.pid
                    )
                    worker.kill()

    async def _replace(self, place: int, worker: Worker) -> None:
        """Another one in this worker's place, if it can be had and nobody put one there."""
        async with self._turns[place]:
            if self._places[place] is not worker:
                return
            try:
                self._places[place] = await self._serving(worker.number)
            except (StartupError, OSError) as error:
                self._missed(worker, error)
                return
            self._misses = 0
            _log.info("worker %d serves again, as process %d", worker.number, self._places[place].pid)

    def _missed(self, worker: Worker, error: Exception) -> None:
        self._misses += 1
        _log.error("worker %d cannot start: %s", worker.number, error)
        if self._misses >= GIVE_UP and not any(one.serves for one in self._places) and not self.failed.done():
            self.failed.set_result(error)

    async def _roll(self) -> None:
        for place, worker in enumerate(list(self._places)):
            if self._places[place] is not worker or not worker.serves:
                continue  # its keeper is at it
            await self._replace(place, worker)
            if self._places[place] is worker:
                _log.error("the workers are not replaced: those that serve go on")
                return
            worker.stop()
            done, _ = await asyncio.wait([worker.ended], timeout=DRAIN_SECONDS)
            if not done:
                worker.kill()
        _log.info("every worker was replaced")

    # -- counters ----------------------------------------------------------------------------------------------

    async def _answer(self) -> None:
        """Collect for whoever asks; all who ask meanwhile get the next collection."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            asking = [worker for worker in self._alive if worker.asks]
            serving = [worker for worker in self._places if worker.serves]
            found = await asyncio.gather(*(worker.count() for worker in serving))
            own = {"workers": float(len(serving)), "worker_starts_total": float(self._started)}
            counts = {str(worker.number): numbers for worker, numbers in zip(serving, found, strict=True)}
            for worker in asking:
                worker.tell(Counts({"": own, **counts}))

    def _on_death(self, _name: str, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)


def hold(listen: str) -> tuple[str, list[socket.socket]]:
    """Take `host:port` without listening; with the port in it that was taken for 0. Raises StartupError.

    While they are bound the sockets forbid the address to be reused, so that a port that is in use is refused here,
    once, also when it is other workers' (those let anybody of this user in). Then only workers can share it.
    """
    host, port = split_listen(listen)
    held: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            one = socket.socket(family, socket.SOCK_STREAM)
            held.append(one)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for connections that linger in TIME_WAIT
            one.bind((address[0], port, *address[2:]))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port = one.getsockname()[1]
    except OSError as error:
        for one in held:
            one.close()
        raise cannot_listen(listen, error) from error
    return f"{listen.rpartition(':')[0]}:{port}", held


def _how(code: int) -> str:
    return f"ended by signal {-code}" if code < 0 else f"ended with {code}"
