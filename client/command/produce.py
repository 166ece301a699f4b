"""`millpond produce`: messages from arguments, from a file's lines, or from the lines of standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer

from millpond.client.command import show
from millpond.client.command.session import ApiKey, AsJson, Url, pairs, run, time_ms
from millpond.client.command.topic import Name
from millpond.client.connection import Connection
from millpond.client.outbox import Sent
from millpond.client.producer import Producer
from millpond.core.limits import KIB, MESSAGE_BYTES
from millpond.core.threads import Threads

READ_BYTES = 256 * KIB  # of a file at once, or what a pipe has


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
                async with aclosing(_lines(file)) as chunks:
                    async for lines in chunks:
                        for line in lines:
                            if not producer.has_room:
                                await producer.ready()
                            producer.send_nowait(line, key, tag, properties, born_ts)
                            count += 1
                        bar.update(task, completed=count)
                        if producer.failed:
                            break
                await producer.flush()
            return count, []

    count, sent = run(work, url, api_key, machine)
    if machine:
        show.as_json({"sent": count, "messages": [one._asdict() for one in sent]})
    elif sent:
        show.table(["queue", ">offset", "message id"], [(s.queue, s.offset, s.message_id or "-") for s in sent])
    else:
        show.OUT.print(f"sent {count:,} messages")


async def _lines(file: Path | None) -> AsyncGenerator[list[bytes], None]:
    """Lines without their ends, as they come. A thread waits for them: what was taken is sent meanwhile."""
    threads = Threads(1, "millpond-lines")
    is_stdin = file is None or str(file) == "-"
    source = None
    try:
        source = sys.stdin.fileno() if is_stdin else await threads.run(os.open, str(file), os.O_RDONLY)
        rest = b""
        while data := await threads.run(os.read, source, READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MESSAGE_BYTES + len(b"\r"):  # refused where it is sent: nothing more of it is read
                lines, rest = [*lines, rest], b""
            yield [line.rstrip(b"\r") for line in lines]
        if rest:
            yield [rest.rstrip(b"\r")]
    except OSError as error:
        shown = "standard input" if is_stdin else file
        raise typer.BadParameter(f"cannot read {shown}: {error.strerror}", param_hint="--file") from error
    finally:
        threads.close(wait=False)
        if source is not None and not is_stdin:
            os.close(source)
