"""`make run`: the whole life of 336,776 real messages, on this machine, every number checked against the source.

    publish -> consume by tag, ack -> seal to the tier -> count in Spark -> walk back to the blizzard of 2013-02-08/09
    -> replay its cancelled flights into another topic -> consume those -> a table -> stay up to play with

`python -m millpond.demo`, environment: EXIT=1 ends it after the table; PORT (8080 when free, else any). The data is
in a fresh directory that is removed at the end. Exit code 1 when any number differs from the source.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from millpond import flights
from millpond.client.connection import Connection
from millpond.client.consumer import Consumer
from millpond.client.groups import Groups
from millpond.client.producer import Producer
from millpond.client.reader import Reader
from millpond.client.topics import Topics
from millpond.core.clock import Clock, SystemClock
from millpond.core.errors import MillpondError, StartupError
from millpond.spark import replay, session
from millpond.spark.history import history

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC, REPLAYED = "flights", "flights.replayed"
GROUP, TAGS = "new-york", ("B6", "UA")  # JetBlue and United
EASTERN = timezone(timedelta(hours=-5))  # what New York's clocks show in February
BLIZZARD = (datetime(2013, 2, 8, tzinfo=EASTERN), datetime(2013, 2, 10, tzinfo=EASTERN))
DEFAULT_PORT = 8080
STOP_SECONDS, CONSUME_SECONDS = 40.0, 60.0
LOG_COLUMNS = 150  # the table in a file or a pipe


class Row(NamedTuple):
    """One line of the table: `got` messages against what the source says; `seconds` were for `moved` of them."""

    step: str
    got: int
    expected: int
    seconds: float
    bytes: int = 0
    note: str = ""
    exact: bool = True  # false: the count is right and the content is not
    moved: int | None = None  # None: all of them

    @property
    def good(self) -> bool:
        return self.exact and self.got == self.expected


class Story:
    """What is done, step by step; every step adds a `Row`."""

    def __init__(self, url: str, console: Console, clock: Clock) -> None:
        self.rows: list[Row] = []
        self._url = url
        self._console = console
        self._clock = clock
        self._source = flights.read_flights(flights.flights_file())
        self._messages = flights.messages(self._source)

    async def tell(self) -> None:
        async with Connection(self._url) as connection:
            await self._publish(connection)
            await self._consume(connection)
            await self._seal(connection)
            spark = await self._start_spark()
            try:
                await asyncio.to_thread(self._count, spark)
                await self._walk_back(connection)
                await self._replay(connection, spark)
            finally:
                await asyncio.to_thread(spark.stop)
            await self._consume_replayed(connection)

    # -- steps ------------------------------------------------------------------------------------------------

    async def _publish(self, connection: Connection) -> None:
        await Topics(connection).create(TOPIC, queues=4)
        began = self._clock.monotonic()
        async with Producer(TOPIC, connection=connection) as producer:
            ranges = await producer.send_batch(self._messages)
        seconds = self._clock.monotonic() - began
        sent = sum(some.count for some in ranges)
        note = f"fsynced, {len({some.queue for some in ranges})} queues"
        self._add(Row("published", sent, self._source.num_rows, seconds, self._messages.nbytes, note))

    async def _consume(self, connection: Connection) -> None:
        tag = " || ".join(TAGS)
        wanted = pc.is_in(self._messages.column("tag"), value_set=pa.array(TAGS))
        await self._drain(connection, TOPIC, GROUP, tag, self._messages.filter(wanted), f"consumed, tag {tag}")
        lag = await Groups(connection, TOPIC).lag(GROUP)
        self._add(Row("left unacked", lag.total, 0, 0.0, note=f"lag of group {GROUP}"))

    async def _seal(self, connection: Connection) -> None:
        topics = Topics(connection)
        before = _tiered(await topics.history(TOPIC))
        began = self._clock.monotonic()
        await topics.flush(TOPIC)
        seconds = self._clock.monotonic() - began
        plan = await topics.history(TOPIC)
        rows = _tiered(plan)
        size = sum(obj["bytes"] for obj in plan["objects"])
        note = f"{len(plan['objects'])} Parquet objects, {size / 1e6:.1f} MB; {before:,} were sealed meanwhile"
        self._add(Row("sealed to the tier", rows, self._source.num_rows, seconds, 0, note, moved=rows - before))

    def _count(self, spark: SparkSession) -> None:
        """Carrier and month of every message, counted by Spark in the tier, against the source's own columns."""
        from pyspark.sql import functions as F

        began = self._clock.monotonic()
        month = F.month(F.from_utc_timestamp("born_ts", flights.NEW_YORK)).alias("month")
        frame = history(spark, TOPIC, columns=["tag", "born_ts"], url=self._url)
        counted = {(row.tag, row.month): row["count"] for row in frame.groupBy("tag", month).count().collect()}
        seconds = self._clock.monotonic() - began
        expected = flights.per_carrier_and_month(self._source["carrier"], self._source["month"])
        note = f"{len(counted)} counts of carrier and month"
        total = sum(counted.values())
        self._add(Row("counted by Spark", total, sum(expected.values()), seconds, 0, note, counted == expected))

    async def _walk_back(self, connection: Connection) -> None:
        """The group's way back to the storm's first minute by the airlines' own clock: looked up, then read there."""
        start_ms = _ms(BLIZZARD[0])
        born = self._messages.column("born_ts").cast(pa.int64())
        began = self._clock.monotonic()
        places = await Groups(connection, TOPIC).seek(GROUP, time_ms=start_ms, clock="born", dry_run=True)
        late = 0
        for place in places:
            page = await Reader(connection, TOPIC, place.queue).read(offset=place.to_offset, limit=1)
            late += sum(stamp >= start_ms for stamp in page.messages["born_ts"].cast(pa.int64()).to_pylist())
        seconds = self._clock.monotonic() - began
        assert pc.any(pc.greater_equal(born, start_ms)).as_py(), "the year goes on after the storm"
        self._add(
            Row(
                "walked back",
                late,
                len(places),
                seconds,
                note=f"to {BLIZZARD[0]:%Y-%m-%d %H:%M} in each queue",
                moved=0,
            )
        )

    async def _replay(self, connection: Connection, spark: SparkSession) -> None:
        await Topics(connection).create(REPLAYED, queues=2)
        asked = replay.ReplaySpec(
            TOPIC, REPLAYED, _ms(BLIZZARD[0]), _ms(BLIZZARD[1]), "born",
            replay.ReplayFilter(properties={"status": "cancelled"}),
        )  # fmt: skip
        done = await asyncio.to_thread(replay.run, self._url, None, None, asked, spark=spark)
        note = f"{done.read:,} looked at; cancelled from {BLIZZARD[0]:%d %B} to before {BLIZZARD[1]:%d %B}"
        self._add(Row("replayed", done.published, self._stranded().num_rows, done.seconds, 0, note, moved=done.read))

    async def _consume_replayed(self, connection: Connection) -> None:
        expected = self._stranded()
        airlines = len(pc.unique(expected.column("tag")))
        label = f"consumed from {REPLAYED}"
        await self._drain(connection, REPLAYED, GROUP, None, expected, label, f"{airlines} airlines")

    # -- what they share --------------------------------------------------------------------------------------

    async def _drain(
        self, connection: Connection, topic: str, group: str, tag: str | None, expected: pa.RecordBatch, label: str,
        note: str = "",
    ) -> None:  # fmt: skip
        """Consume and ack until as many messages came as expected, and none comes after; compare their bodies."""
        bodies: list[pa.Array] = []
        began = self._clock.monotonic()
        seconds, got = 0.0, 0
        async with Consumer(topic, group, tag=tag, start="earliest", connection=connection) as consumer:
            patience = CONSUME_SECONDS
            while (batch := await consumer.receive(patience)) is not None:
                bodies.append(batch.batch.column("body"))
                got += len(batch)
                batch.ack_soon()
                seconds = self._clock.monotonic() - began
                patience = CONSUME_SECONDS if got < expected.num_rows else 0.5
        came = pa.chunked_array(bodies, pa.binary())
        same = _sorted(came).equals(_sorted(expected.column("body")))
        size = pc.sum(pc.binary_length(came)).as_py() or 0
        self._add(Row(label, got, expected.num_rows, seconds, size, note or "acked in batches", same))

    def _stranded(self) -> pa.RecordBatch:
        """The source's flights that were scheduled in those two days and did not leave."""
        first, end = BLIZZARD
        days = pc.is_in(self._source["day"], pa.array(range(first.day, end.day)))
        stormy = pc.and_(pc.equal(self._source["month"], first.month), days)
        return self._messages.filter(pc.and_(stormy, flights.cancelled(self._source)).combine_chunks())

    async def _start_spark(self) -> SparkSession:
        with self._console.status("starting Spark"):
            return await asyncio.to_thread(session, "millpond demo", config={"spark.sql.shuffle.partitions": "4"})

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self._console.print(f"{'[green]ok[/]' if row.good else '[red]WRONG[/]'}  {row.step}: {row.got:,}")


def table(rows: list[Row]) -> Table:
    shown = Table(title="Flights that left New York in 2013, through Millpond", title_justify="left")
    shown.add_column("step", no_wrap=True)
    for name in ("messages", "source says", "seconds", "messages/s", "MB/s"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("equal")
    shown.add_column("")
    for row in rows:
        timed = row.seconds > 0
        moved = row.got if row.moved is None else row.moved
        rate = f"{moved / row.seconds:,.0f}" if timed and moved else ""
        speed = f"{row.bytes / row.seconds / 1e6:,.0f}" if timed and row.bytes else ""
        seconds = f"{row.seconds:,.2f}" if timed else ""
        equal = "[green]yes[/]" if row.good else "[bold red]NO[/]"
        shown.add_row(row.step, f"{row.got:,}", f"{row.expected:,}", seconds, rate, speed, equal, row.note)
    return shown


@contextmanager
def standalone(data: Path, port: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A service of its own process in `data`; its address. Stopped by SIGTERM at the end. Raises StartupError."""
    command = [sys.executable, "-m", "millpond", "standalone", "--data", str(data), "--port", str(port)]
    environment = {"MILLPOND_LOG_LEVEL": "warning", **os.environ}
    process = subprocess.Popen(  # noqa: S603  # this very program
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready "):
                yield line.split()[1], process
                return
        raise StartupError("the service did not start", "see its message above")
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, LOG_COLUMNS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the service is ended too
    stay = os.environ.get("EXIT", "") in {"", "0"}
    try:
        with tempfile.TemporaryDirectory(prefix="millpond-run-", ignore_cleanup_errors=True) as directory:
            with standalone(Path(directory) / "data", _port(stay)) as (url, process):
                console.print(f"Millpond is up at {url}, fresh data in {directory}")
                story = Story(url, console, SystemClock())
                asyncio.run(story.tell())
                console.print(table(story.rows))
                good = all(row.good for row in story.rows)
                if stay and good:
                    _stay(console, url, process)
            return 0 if good else 1
    except (StartupError, MillpondError) as error:
        console.print(f"[red]{type(error).__name__}[/]: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def _stay(console: Console, url: str, process: subprocess.Popen[str]) -> None:
    """Leave the service up until Ctrl-C, or until it ends."""
    console.print(f"It stays up for you to play with (Ctrl-C ends it): {url}/docs\n")
    console.print(f"  curl '{url}/v1/topics/{REPLAYED}/queues/0/messages?offset=0&limit=2'", soft_wrap=True)
    console.print(f"  curl '{url}/v1/topics/{TOPIC}/messages?key=UA1545'", soft_wrap=True)
    console.print(f"  millpond tail {REPLAYED} --url {url}\n", soft_wrap=True)
    try:
        process.wait()
    except KeyboardInterrupt:
        console.print("ended")


def _port(stay: bool) -> int:
    """PORT when set; 8080 when somebody will use it and it is free; else any."""
    if os.environ.get("PORT"):
        return int(os.environ["PORT"])
    if not stay:
        return 0
    with socket.socket() as probe:
        return DEFAULT_PORT if probe.connect_ex(("127.0.0.1", DEFAULT_PORT)) else 0


def _tiered(plan: dict[str, Any]) -> int:
    """Messages that the objects of a plan hold."""
    return sum(part["rows"] for obj in plan["objects"] for part in obj["ranges"])


def _ms(at: datetime) -> int:
    return round(at.astimezone(UTC).timestamp() * 1000)


def _sorted(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    taken = column.take(pc.sort_indices(column))
    return taken.combine_chunks() if isinstance(taken, pa.ChunkedArray) else taken


if __name__ == "__main__":
    raise SystemExit(main())
