"""`millpond topic`: create, list, show, set, delete. `millpond flush` and `millpond tier files`: its cold copy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import typer

from millpond.client.command import show
from millpond.client.command.session import ApiKey, AsJson, Url, run, shown_time
from millpond.client.connection import Connection
from millpond.client.topics import QueueState, Retention, Topic, Topics
from millpond.core import limits

Name = Annotated[str, typer.Argument(metavar="TOPIC")]
Queues = Annotated[int, typer.Option(help="Units of order: one key's messages stay in one")]
RetentionMs = Annotated[int | None, typer.Option(help="How long to keep messages; default for ever")]
RetentionBytes = Annotated[int | None, typer.Option(help="How much to keep; default all")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")]

topic = typer.Typer(no_args_is_help=True, help="Make, see, change and delete topics")
tier = typer.Typer(no_args_is_help=True, help="The cold copy of topics")


@topic.command("create")
def create(
    name: Name,
    queues: Queues = limits.QUEUES_DEFAULT,
    durability: Annotated[Literal["flush", "memory"], typer.Option(help="When a send is answered")] = "flush",
    retention_ms: RetentionMs = None,
    retention_bytes: RetentionBytes = None,
    max_message_bytes: int = limits.MESSAGE_BYTES,
    url: Url = None,
    api_key: ApiKey = None,
    machine: AsJson = False,
) -> None:
    """Make a topic. It is fine when it is there with the same settings."""

    async def work(connection: Connection) -> Topic:
        return await Topics(connection).create(
            name, queues=queues, durability=durability, retention_ms=retention_ms, retention_bytes=retention_bytes,
            max_message_bytes=max_message_bytes,
        )  # fmt: skip

    _show([run(work, url, api_key, machine)], machine, one=True)


@topic.command("list")
def list_(url: Url = None, api_key: ApiKey = None, machine: AsJson = False) -> None:
    """All topics, by name."""

    async def work(connection: Connection) -> list[Topic]:
        return [found async for found in Topics(connection).list()]

    _show(run(work, url, api_key, machine), machine)


@topic.command("show")
def show_(name: Name, url: Url = None, api_key: ApiKey = None, machine: AsJson = False) -> None:
    """A topic's settings, and where each of its queues begins and ends."""

    async def work(connection: Connection) -> tuple[Topic, list[QueueState]]:
        topics = Topics(connection)
        return await topics.get(name), await topics.queues(name)

    found, queues = run(work, url, api_key, machine)
    if machine:
        show.as_json({**msgspec.to_builtins(found), "queue_states": queues})
        return
    _show([found], machine)
    show.table(
        ["queue", ">start", ">tiered to", ">end", ">messages"],
        [(q.queue, q.start_offset, q.tiered_to, q.end_offset, q.end_offset - q.start_offset) for q in queues],
    )


@topic.command("set")
def set_(
    name: Name,
    queues: Annotated[int | None, typer.Option(help="May only grow")] = None,
    durability: Annotated[Literal["flush", "memory"] | None, typer.Option()] = None,
    retention_ms: RetentionMs = None,
    retention_bytes: RetentionBytes = None,
    forever: Annotated[bool, typer.Option("--forever", help="Keep messages for ever")] = False,
    max_message_bytes: int | None = None,
    url: Url = None,
    api_key: ApiKey = None,
    machine: AsJson = False,
) -> None:
    """Change settings; what is not given stays as it is."""
    given: dict[str, Any] = {"queues": queues, "durability": durability, "max_message_bytes": max_message_bytes}
    changes = {field: value for field, value in given.items() if value is not None}

    async def work(connection: Connection) -> Topic:
        topics = Topics(connection)
        if forever:
            changes["retention"] = Retention()
        elif retention_ms is not None or retention_bytes is not None:
            now = (await topics.get(name)).retention
            ms, size = retention_ms or now.ms, retention_bytes or now.bytes
            changes["retention"] = Retention(ms, size)
        return await topics.change(name, **changes)

    _show([run(work, url, api_key, machine)], machine, one=True)


@topic.command("delete")
def delete(name: Name, yes: Yes = False, url: Url = None, api_key: ApiKey = None, machine: AsJson = False) -> None:
    """Delete a topic and all its messages."""
    if not yes and not machine:
        typer.confirm(f"Delete {name} and all its messages?", abort=True)
    run(lambda connection: Topics(connection).delete(name), url, api_key, machine)
    if machine:
        show.as_json({"deleted": name})
    else:
        show.OUT.print(f"deleted {name}")


def flush(name: Name, url: Url = None, api_key: ApiKey = None, machine: AsJson = False) -> None:
    """Bring everything that is confirmed to the tier now."""

    async def work(connection: Connection) -> dict[str, Any]:
        with show.progress(machine) as bar:
            bar.add_task(f"sealing {name}", total=None, note="")
            return await Topics(connection).flush(name)

    done = run(work, url, api_key, machine)
    if machine:
        show.as_json(done)
    else:
        show.table(["queue", ">tiered to"], [(q["queue"], q["tiered_to"]) for q in done.get("queues", [])])


@tier.command("files")
def files(name: Name, url: Url = None, api_key: ApiKey = None, machine: AsJson = False) -> None:
    """The exact objects that hold a topic's cold copy: what other engines should read."""
    plan = run(lambda connection: Topics(connection).history(name), url, api_key, machine)
    objects = plan.get("objects", [])
    if machine:
        show.as_json({"topic": name, "topic_id": plan.get("topic_id"), "objects": objects})
        return
    rows = [(o["url"], o["bytes"], sum(r["rows"] for r in o["ranges"]), _span(o["ranges"])) for o in objects]
    show.table(["object", ">bytes", ">messages", "store time"], rows)


def _span(ranges: list[dict[str, Any]]) -> str:
    first, last = min(r["min_store_ts"] for r in ranges), max(r["max_store_ts"] for r in ranges)
    return f"{shown_time(first)} .. {shown_time(last)}"


def _show(topics: list[Topic], machine: bool, one: bool = False) -> None:
    if machine:
        show.as_json(topics[0] if one else {"topics": topics})
        return
    rows = [
        (t.topic, t.queues, t.durability, _kept(t.retention), t.max_message_bytes, shown_time(t.created_ms))
        for t in topics
    ]
    show.table(["topic", ">queues", "durability", "kept", ">message bytes", "made"], rows)


def _kept(retention: Retention) -> str:
    parts = []
    if retention.ms is not None:
        parts.append(f"{retention.ms:,} ms")
    if retention.bytes is not None:
        parts.append(f"{retention.bytes:,} bytes")
    return " and ".join(parts) or "for ever"
