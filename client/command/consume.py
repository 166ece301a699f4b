"""`millpond consume` (as a group, acked), `millpond tail` (without a group) and `millpond find` (by id or key)."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from typing import Annotated, Any, Literal

import typer

from millpond.client.columns import properties_of
from millpond.client.command import show
from millpond.client.command.session import ApiKey, AsJson, Url, run, shown_time, time_ms
from millpond.client.command.topic import Name
from millpond.client.connection import Connection
from millpond.client.consumer import Consumer
from millpond.client.reader import Page, Reader
from millpond.client.topics import Topics
from millpond.core import limits

Count = Annotated[int | None, typer.Option("--count", "-n", help="Stop after so many")]


def consume(
    topic: Name,
    group: Annotated[str, typer.Argument(metavar="GROUP")],
    tag: Annotated[str | None, typer.Option(help='The group\'s filter: "a || b"')] = None,
    start: Annotated[Literal["earliest", "latest"], typer.Option(help="Where a new group begins")] = "latest",
    count: Count = None,
    idle: Annotated[float | None, typer.Option(help="Stop after so many seconds without a message")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only count")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    machine: AsJson = False,
) -> None:
    """Receive messages as a group, print them, and ack what was printed. Ends with Ctrl-C."""

    async def work(connection: Connection) -> int:
        taken = 0
        prefetch = min(count or limits.CLIENT_PREFETCH_MESSAGES, limits.CLIENT_PREFETCH_MESSAGES)
        async with Consumer(topic, group, connection=connection, tag=tag, start=start, prefetch=prefetch) as consumer:
            _until_interrupted(consumer)
            while count is None or taken < count:
                batch = await consumer.receive(idle)
                if batch is None:
                    break
                for message in batch.messages():
                    if count is not None and taken >= count:
                        break  # the rest of the batch goes back at close
                    if not quiet:
                        _print_message(message_out(topic, message), machine)
                    message.ack_soon()
                    taken += 1
        return taken

    taken = run(work, url, api_key, machine)
    if machine and quiet:
        show.as_json({"consumed": taken})
    elif not machine:
        show.ERR.print(f"{taken:,} messages")


def _until_interrupted(consumer: Consumer) -> None:
    """Ctrl-C and SIGTERM close the consumer, so that its leases are handed back and its acks are sent."""
    if threading.current_thread() is not threading.main_thread():
        return  # signals are not this thread's
    loop = asyncio.get_running_loop()
    closing: list[asyncio.Task[None]] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: closing.append(loop.create_task(consumer.close())))


def tail(
    topic: Name,
    last: Annotated[int, typer.Option("--last", "-n", help="Begin with so many last messages of each queue")] = 10,
    queue: Annotated[int | None, typer.Option(help="Of this queue only")] = None,
    since: Annotated[str | None, typer.Option(help="Begin at this time instead")] = None,
    clock: Annotated[Literal["store", "born"], typer.Option()] = "store",
    tag: Annotated[str | None, typer.Option(help='Only these tags: "a || b"')] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what arrives")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    machine: AsJson = False,
) -> None:
    """Print messages without a group: nothing is acked or moved."""

    async def work(connection: Connection) -> None:
        at = time_ms(since, "--since")
        queues = [queue] if queue is not None else [q.queue for q in await Topics(connection).queues(topic)]
        lock = asyncio.Lock()

        async def of_queue(number: int) -> None:
            reader = Reader(connection, topic, number)
            begin: dict[str, Any] = {"tail": last} if at is None else {"time_ms": at, "clock": clock}
            retry_seconds = limits.CLIENT_RETRY_SECONDS if follow else None
            async for page in reader.pages(**begin, tag=tag, follow=follow, retry_seconds=retry_seconds):
                async with lock:
                    for one in page_out(topic, page):
                        _print_message(one, machine)

        try:
            async with asyncio.TaskGroup() as tasks:
                for number in queues:
                    tasks.create_task(of_queue(number))
        except ExceptionGroup as group:  # what ended one queue ended all
            raise group.exceptions[0] from None

    run(work, url, api_key, machine)


def find(
    topic: Name,
    message_id: Annotated[str | None, typer.Argument(help="A message id")] = None,
    key: Annotated[str | None, typer.Option(help="All messages with this key")] = None,
    since: Annotated[str | None, typer.Option(help="Not before this time")] = None,
    until: Annotated[str | None, typer.Option(help="Before this time")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    machine: AsJson = False,
) -> None:
    """Find one message by its id, or messages by their key."""
    if (message_id is None) == (key is None):
        raise typer.BadParameter("give either a message id or --key")

    async def work(connection: Connection) -> list[dict[str, Any]]:
        topics = Topics(connection)
        if message_id is not None:
            return [await topics.message(topic, message_id)]
        assert key is not None
        answer = await topics.find(topic, key, time_ms(since, "--since"), time_ms(until, "--until"))
        found: list[dict[str, Any]] = answer.get("messages", [])
        return found

    messages = run(work, url, api_key, machine)
    if machine:
        show.as_json(messages[0] if message_id is not None else {"messages": messages})
        return
    for message in messages:
        _print_message(message, machine)
    if not messages:
        show.ERR.print("nothing found")


def message_out(topic: str, message: Any) -> dict[str, Any]:
    """A received message as the API's JSON has it."""
    out: dict[str, Any] = {
        "message_id": message.message_id, "topic": topic,
        "queue": message.queue, "offset": message.offset, "store_ts": message.store_ts,
        "born_ts": message.born_ts, "key": _text(message.key), "tag": message.tag, "properties": message.properties,
        "delivery_attempt": message.delivery_attempt,
    }  # fmt: skip
    return out | _body(message.body)


def page_out(topic: str, page: Page) -> list[dict[str, Any]]:
    rows = page.messages.combine_chunks()
    columns = {name: rows.column(name) for name in rows.schema.names}
    times = {name: columns[name].cast("int64").to_pylist() for name in ("store_ts", "born_ts")}
    properties = properties_of(columns["properties"].combine_chunks())
    return [
        {
            "topic": topic, "queue": queue, "offset": offset, "store_ts": store_ts, "born_ts": born_ts,
            "key": _text(key), "tag": tag, "properties": some, **_body(body),
        }
        for queue, offset, store_ts, born_ts, key, tag, some, body in zip(
            columns["queue"].to_pylist(), columns["offset"].to_pylist(), times["store_ts"], times["born_ts"],
            columns["key"].to_pylist(), columns["tag"].to_pylist(), properties, columns["body"].to_pylist(),
            strict=True,
        )
    ]  # fmt: skip


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


def _body(body: bytes) -> dict[str, str]:
    import base64

    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def _print_message(message: dict[str, Any], machine: bool) -> None:
    if machine:
        show.as_json(message)
        return
    head = f"{message['queue']}:{message['offset']} {shown_time(message['store_ts'])}"
    marks = [f"key={message['key']}" if message["key"] else "", f"tag={message['tag']}" if message["tag"] else ""]
    marks += [f"{name}={value}" for name, value in (message.get("properties") or {}).items()]
    body = message.get("body", message.get("body_base64", ""))
    sys.stdout.write(" ".join([head, *filter(None, marks)]) + f"  {body}\n")
    sys.stdout.flush()
