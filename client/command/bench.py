"""`millpond bench`: what this machine and the service on it can do, in a minute; beside a Kafka, if there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.client.command import bench_table, show
from millpond.client.command.bench_systems import (
    BATCHED,
    CONSUME,
    CONSUMES,
    LATENCY,
    READ,
    READS,
    SINGLE,
    Durability,
    Millpond,
    OtherKafka,
    Plan,
    System,
)
from millpond.client.command.bench_table import Figure, Figures
from millpond.client.command.session import ApiKey, AsJson, Url, run
from millpond.client.connection import Connection
from millpond.client.load import kafka

if TYPE_CHECKING:
    from rich.progress import Progress

KINDS = (BATCHED, READ, CONSUME, SINGLE, LATENCY)
WARM_SECONDS = 2.0  # of each system, uncounted, where two are compared
TICK_SECONDS = 0.1


def bench(
    kind: Annotated[
        list[str] | None, typer.Argument(help="batched, read, consume, single, latency; default all")
    ] = None,
    seconds: Annotated[float, typer.Option(help="For each of them")] = 5.0,
    message_bytes: Annotated[int, typer.Option("--bytes", min=8, help="Body of a message")] = 1024,
    queues: Annotated[int, typer.Option(help="Queues of the topic")] = 4,
    durability: Annotated[Durability, typer.Option(help="When a send is answered")] = "flush",
    rate: Annotated[int, typer.Option(help="Messages per second when latency is measured")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the middle one is shown")] = 1,
    compare: Annotated[
        str | None, typer.Option(metavar="kafka[=HOST:PORT]", help=f"Do the same at a Kafka; default {kafka.ADDRESS}")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the topic there afterwards")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    machine: AsJson = False,
) -> None:
    """Measure a service from this machine, in a topic of its own that is deleted afterwards."""
    kinds = kind or list(KINDS)
    if set(kinds) - set(KINDS):
        raise typer.BadParameter(f"choose from {', '.join(KINDS)}", param_hint="KIND")
    address = None if compare is None else peer_address(compare)
    plan = Plan(works_of(kinds), seconds, message_bytes, queues, durability, rate)

    async def work(connection: Connection) -> dict[str, Figures]:
        topic = f"bench.{connection.random.bytes(6).hex()}"
        systems: list[System] = [Millpond(connection, topic, plan, api_key, keep)]
        if address is not None:
            systems.append(await OtherKafka.found(address, topic, plan, connection, keep))
        with shown_steps(connection, machine) as steps:
            return await measured(systems, plan, rounds, steps)

    found = run(work, url, api_key, machine)
    tell(found, plan, machine, connection_name(url), address)


def peer_address(text: str) -> str:
    """`kafka` or `kafka=host:port`."""
    name, _, address = text.partition("=")
    host, _, port = address.rpartition(":")
    if name != "kafka" or (address and not (host and port.isascii() and port.isdigit())):
        raise typer.BadParameter("kafka, or kafka=HOST:PORT", param_hint="--compare")
    return address or kafka.ADDRESS


def works_of(kinds: list[str]) -> list[str]:
    """What is to be measured for these kinds: what is read or consumed must have been produced."""
    works = [BATCHED] if {BATCHED, READ, CONSUME} & set(kinds) else []
    works += READS if READ in kinds else ()
    works += CONSUMES if CONSUME in kinds else ()
    return works + [kind for kind in (SINGLE, LATENCY) if kind in kinds]


# -- how ----------------------------------------------------------------------------------------------------------


async def measured(systems: list[System], plan: Plan, rounds: int, steps: Steps) -> dict[str, Figures]:
    """The middle round of each work at each system, which take turns. Cleans up, also when it is interrupted."""
    found: dict[str, dict[str, list[Figure]]] = {system.name: {} for system in systems}
    begun: list[System] = []
    try:
        for system in systems:
            begun.append(system)
            await system.prepare()
            if len(systems) > 1:
                warm = plan._replace(seconds=WARM_SECONDS)
                await steps.take(f"warming {system.name}", system, BATCHED, warm)
        for number in range(rounds):
            for work in plan.works:
                for system in systems:
                    parts = [system.name if len(systems) > 1 else "", work, f"{number + 1}" if rounds > 1 else ""]
                    figure = await steps.take(" ".join(filter(None, parts)), system, work, plan)
                    found[system.name].setdefault(work, []).append(figure)
    finally:
        for system in begun:
            await system.clean()
    return {
        name: {work: bench_table.middle(figures) for work, figures in works.items()} for name, works in found.items()
    }


class Steps:
    """Progress: a bar for each step, which grows with time, and what has been done beside it."""

    def __init__(self, connection: Connection, bar: Progress, lines: bool) -> None:
        self._clock = connection.clock
        self._bar = bar
        self._lines = lines

    async def take(self, title: str, system: System, work: str, plan: Plan) -> Figure:
        task = self._bar.add_task(title, total=plan.seconds, note="")
        ticking = asyncio.create_task(self._tick(task, plan.seconds))
        try:
            figure = await system.measure(work, plan, lambda done: self._bar.update(task, note=f"{done:,} messages"))
        finally:
            ticking.cancel()
        self._bar.update(task, completed=plan.seconds)
        if self._lines:
            show.ERR.print(f"{title}: done")
        return figure

    async def _tick(self, task: object, seconds: float) -> None:
        begin = self._clock.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._bar.update(task, completed=min(seconds, self._clock.monotonic() - begin))  # type: ignore[arg-type]


@contextmanager
def shown_steps(connection: Connection, machine: bool) -> Iterator[Steps]:
    """Bars on stderr; a line for each step where that is no terminal; nothing for machines."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn(),
        console=show.ERR, transient=True, disable=machine or not show.ERR.is_terminal,
    )  # fmt: skip
    with bar:
        yield Steps(connection, bar, lines=not machine and not show.ERR.is_terminal)


# -- what is said -------------------------------------------------------------------------------------------------


def unfair(plan: Plan) -> list[str]:
    """What a reader of the comparison should know."""
    fsync = (
        "flush: Kafka's topic has flush.messages=1, so that both answer after an fsync; by default Kafka does not."
        if plan.durability == "flush"
        else "memory: neither waits for an fsync before it answers; Millpond's consumers see only what was fsynced."
    )
    return [
        fsync,
        "To Millpond: its client is Python over HTTP, Kafka's is C with a binary protocol.",
        f"To Kafka: {WARM_SECONDS:.0f} s are a short time for a JVM to warm up; --seconds and --rounds make it longer.",
        "Kafka's client has one way to consume, which stands beside all of Millpond's: it makes an object of each "
        "message (to Kafka where Millpond hands out Arrow batches, not 'one by one'), reads its log in order and "
        "commits one position (to Millpond where that leases and acks each message, in 'consume'; 'read' is what Kafka "
        "does). Its time begins when the first messages have come, as joining takes seconds.",
        f"single: {kafka.UNDER_WAY} connections that wait for each answer, against one connection with that many "
        "requests under way.",
        "Both run on this machine with their clients, one after the other; the idle one keeps its memory and caches.",
        "One node, one copy: neither replicates.",
    ]


def tell(found: dict[str, Figures], plan: Plan, machine: bool, url: str, address: str | None) -> None:
    ours = found[Millpond.name]
    theirs = found.get(OtherKafka.name)
    if machine:
        about = {"message_bytes": plan.message_bytes, "durability": plan.durability, "queues": plan.queues}
        other = {} if theirs is None else {
            "kafka": {"address": address, **bench_table.as_builtins(theirs)},
            "ratios": bench_table.ratios(ours, theirs),
            "unfair": unfair(plan),
        }  # fmt: skip
        show.as_json({**about, **bench_table.as_builtins(ours), **other})
        return
    title = f"{plan.message_bytes:,} B messages, {plan.durability}, {plan.queues} queues, {url}"
    if theirs is None:
        show.OUT.print(title)
        show.table(bench_table.COLUMNS, bench_table.rows(ours))
        return
    show.OUT.print(f"{title}, beside Kafka at {address}")
    columns = [column.format(OtherKafka.name) for column in bench_table.SIDE_COLUMNS]
    show.table(columns, bench_table.side_by_side(ours, theirs))
    for line in unfair(plan):
        show.OUT.print(f"  {show.escape(line)}", soft_wrap=True)


def connection_name(url: str | None) -> str:
    return Connection(url).url
