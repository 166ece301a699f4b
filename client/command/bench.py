"""`millpond bench`: what this machine and the service on it can do, in a minute."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import typer

from millpond.client.command import show
from millpond.client.command.session import ApiKey, AsJson, Url, run
from millpond.client.connection import Connection, path_of
from millpond.client.load import batched
from millpond.client.load.figures import Rate, Single, Times
from millpond.client.load.single import in_own_process
from millpond.client.topics import Topics

KINDS = ("single", "batched", "consume", "latency")
Figures = dict[str, Rate | Times | Single]


def bench(
    kind: Annotated[list[str] | None, typer.Argument(help="single, batched, consume, latency; default all")] = None,
    seconds: Annotated[float, typer.Option(help="For each of them")] = 5.0,
    message_bytes: Annotated[int, typer.Option("--bytes", help="Body of a message")] = 1024,
    queues: Annotated[int, typer.Option(help="Queues of the topic")] = 4,
    durability: Annotated[Literal["flush", "memory"], typer.Option(help="When a send is answered")] = "flush",
    rate: Annotated[int, typer.Option(help="Messages per second when latency is measured")] = 1000,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the topic there afterwards")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    machine: AsJson = False,
) -> None:
    """Measure a service from this machine, in a topic of its own that is deleted afterwards."""
    kinds = kind or list(KINDS)
    if set(kinds) - set(KINDS):
        raise typer.BadParameter(f"choose from {', '.join(KINDS)}", param_hint="KIND")

    async def work(connection: Connection) -> Figures:
        topics = Topics(connection)
        topic = f"bench.{connection.random.bytes(6).hex()}"
        await topics.create(topic, queues=queues, durability=durability)
        try:
            with show.progress(machine) as bar:
                return await _measure(connection, topic, kinds, seconds, message_bytes, rate, api_key, bar)
        finally:
            if not keep:
                await topics.delete(topic)

    found = run(work, url, api_key, machine)
    if machine:
        show.as_json({"message_bytes": message_bytes, "durability": durability, "queues": queues, **found})
        return
    show.table(
        ["", ">messages/s", ">MB/s", ">messages", ">p50 ms", ">p99 ms", ">p99.9 ms"],
        [_row(name, figure) for name, figure in found.items()],
        title=f"{message_bytes:,} B messages, {durability}, {queues} queues, {connection_name(url)}",
    )


async def _measure(
    connection: Connection,
    topic: str,
    kinds: list[str],
    seconds: float,
    message_bytes: int,
    rate: int,
    api_key: str | None,
    bar: Any,
) -> Figures:
    found: Figures = {}
    produced = 0

    async def step(name: str, call: Callable[[Callable[[int], None]], Awaitable[Any]], total: int | None) -> None:
        task = bar.add_task(name, total=total, note="")
        found[name] = await call(lambda done: bar.update(task, completed=done))
        bar.update(task, total=1, completed=1)

    if "batched" in kinds or "consume" in kinds:
        await step(
            "batched",
            lambda tell: batched.produce(connection, topic, message_bytes, seconds=seconds, report=tell),
            None,
        )
        batch = found["batched"]
        assert isinstance(batch, Rate)
        produced = batch.count
    if "consume" in kinds:
        await step(
            "consume",
            lambda tell: batched.consume(connection, topic, "bench", produced, message_bytes, report=tell),
            produced,
        )
    if "single" in kinds:
        path = path_of("topics", topic, "messages")
        key = api_key or os.environ.get("MILLPOND_KEY") or ""
        await step("single", lambda _: in_own_process(connection.url, path, message_bytes, seconds, key), None)
    if "latency" in kinds:
        await step(
            "latency",
            lambda tell: batched.latency(
                connection, topic, "latency", message_bytes, seconds=seconds, per_second=rate, report=tell
            ),
            int(seconds * rate),
        )
    return found


def connection_name(url: str | None) -> str:
    return Connection(url).url


def _row(name: str, figure: Rate | Times | Single) -> list[object]:
    if isinstance(figure, Single):
        return [*_row(name, figure.rate)[:4], *_times(figure.times)]
    if isinstance(figure, Rate):
        return [name, round(figure.per_second), figure.megabytes_per_second, figure.count, None, None, None]
    return [name, None, None, figure.count, *_times(figure)]


def _times(times: Times) -> list[object]:
    return [times.p50_ms, times.p99_ms, times.p999_ms]
