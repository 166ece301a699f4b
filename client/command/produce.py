"""`millpond produce`: messages from arguments, from a file's lines, or from the lines of standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from millpond.client.command import show
from millpond.client.command.session import ApiKey, AsJson, Url, pairs, run, time_ms
from millpond.client.command.topic import Name
from millpond.client.connection import Connection
from millpond.client.outbox import Sent
from millpond.client.producer import Producer


def produce(
    topic: Name,
    body: Annotated[list[str] | None, typer.Argument(help="Bodies; none: each line of --file or of stdin")] = None,
    file: Annotated[Path | None, typer.Option(help="Send each line of this file; - is stdin")] = None,
    key: Annotated[str | None, typer.Option(help="Messages of one key stay in order")] = None,
    tag: Annotated[str | None, typer.Option(help="A word that groups can filter by")] = None,
    prop: Annotated[list[str] | None, typer.Option("--property", "-p", help="name=value; several times")] = None,
    born: Annotated[str | None, typer.Option(help="The messages' own time")] = None,
    compression: Annotated[str, typer.Option(help="none, lz4 or zstd")] = "none",
    url: Url = None,
    api_key: ApiKey = None,
    machine: AsJson = False,
) -> None:
    """Send messages; says where they stand."""

    async def work(connection: Connection) -> tuple[int, list[Sent]]:
        properties, born_ts = pairs(prop, "--property"), time_ms(born, "--born")
        async with Producer(topic, connection=connection, compression=compression) as producer:
            if body:
                deliveries = [producer.send_nowait(text, key, tag, properties, born_ts) for text in body]
                return len(body), [await delivery for delivery in deliveries]
            count = 0
            with show.progress(machine) as bar:
                task = bar.add_task(f"sending to {topic}", total=None, note="")
                for line in _lines(file):
                    if not producer.has_room:
                        await producer.ready()
                        bar.update(task, completed=count)
                    producer.send_nowait(line, key, tag, properties, born_ts)
                    count += 1
                await producer.flush()
            return count, []

    count, sent = run(work, url, api_key, machine)
    if machine:
        show.as_json({"sent": count, "messages": [one._asdict() for one in sent]})
    elif sent:
        show.table(["queue", ">offset", "message id"], [(s.queue, s.offset, s.message_id or "-") for s in sent])
    else:
        show.OUT.print(f"sent {count:,} messages")


def _lines(file: Path | None) -> Iterable[bytes]:
    """Lines without their ends."""
    if file is None or str(file) == "-":
        for line in sys.stdin.buffer:
            yield line.rstrip(b"\r\n")
        return
    try:
        with file.open("rb") as source:
            for line in source:
                yield line.rstrip(b"\r\n")
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}", param_hint="--file") from error
