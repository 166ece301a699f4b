"""`millpond group`: list, show, delete. `millpond lag` and `millpond seek`: how far a group is, and moving it."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from millpond.client.command import show
from millpond.client.command.session import ApiKey, AsJson, Url, pairs, run, shown_time, time_ms
from millpond.client.command.topic import Name, Yes
from millpond.client.connection import Connection
from millpond.client.groups import Group, Groups, Lag, QueueSeek
from millpond.core.errors import BadRequest

GroupName = Annotated[str, typer.Argument(metavar="GROUP")]

group = typer.Typer(no_args_is_help=True, help="See and delete consumer groups")


@group.command("list")
def list_(topic: Name, url: Url = None, api_key: ApiKey = None, machine: AsJson = False) -> None:
    """A topic's groups."""
    groups = run(lambda connection: Groups(connection, topic).list(), url, api_key, machine)
    if machine:
        show.as_json({"groups": groups})
    else:
        _show(groups)


@group.command("show")
def show_(topic: Name, name: GroupName, url: Url = None, api_key: ApiKey = None, machine: AsJson = False) -> None:
    """A group's settings."""
    found = run(lambda connection: Groups(connection, topic).get(name), url, api_key, machine)
    if machine:
        show.as_json(found)
    else:
        _show([found])


@group.command("delete")
def delete(
    topic: Name, name: GroupName, yes: Yes = False, url: Url = None, api_key: ApiKey = None, machine: AsJson = False
) -> None:
    """Delete a group and its progress."""
    if not yes and not machine:
        typer.confirm(f"Delete group {name} of {topic} and its progress?", abort=True)
    run(lambda connection: Groups(connection, topic).delete(name), url, api_key, machine)
    if machine:
        show.as_json({"deleted": name})
    else:
        show.OUT.print(f"deleted {name}")


def lag(topic: Name, name: GroupName, url: Url = None, api_key: ApiKey = None, machine: AsJson = False) -> None:
    """How far behind a group is, by queue."""
    found: Lag = run(lambda connection: Groups(connection, topic).lag(name), url, api_key, machine)
    if machine:
        show.as_json(found)
        return
    rows = [
        (q.queue, q.start_offset, q.committed, q.end_offset, q.lag, q.in_flight, q.oldest_age_ms) for q in found.queues
    ]
    show.table(["queue", ">start", ">committed", ">end", ">lag", ">in flight", ">oldest, ms"], rows)
    show.OUT.print(f"total {found.total:,}")


def seek(
    topic: Name,
    name: GroupName,
    to: Annotated[Literal["earliest", "latest"] | None, typer.Option(help="To an end")] = None,
    time: Annotated[str | None, typer.Option(help="To a time: 2013-02-08T10:30:00Z, or ms since 1970")] = None,
    clock: Annotated[
        Literal["store", "born"], typer.Option(help="Whose time: the service's or the producer's")
    ] = "store",
    offset: Annotated[list[str] | None, typer.Option(help="QUEUE=OFFSET; may be given several times")] = None,
    like: Annotated[str | None, typer.Option(help="To where another group is")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would happen")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    machine: AsJson = False,
) -> None:
    """Move a group to another place; its leases become void."""

    async def work(connection: Connection) -> list[QueueSeek]:
        offsets = _offsets(offset)
        at = time_ms(time, "--time")
        return await Groups(connection, topic).seek(
            name, to=to, time_ms=at, clock=clock, offsets=offsets, like_group=like, dry_run=dry_run
        )

    moved = run(work, url, api_key, machine)
    if machine:
        show.as_json({"queues": moved, "dry_run": dry_run})
        return
    show.table(["queue", ">from", ">to"], [(q.queue, q.from_offset, q.to_offset) for q in moved])
    if dry_run:
        show.OUT.print("nothing was moved: --dry-run")


def _offsets(texts: list[str] | None) -> dict[int, int] | None:
    if not texts:
        return None
    try:
        return {int(queue): int(offset) for queue, offset in pairs(texts, "--offset").items()}
    except ValueError as error:
        raise BadRequest.field("--offset", "QUEUE=OFFSET, two whole numbers", texts) from error


def _show(groups: list[Group]) -> None:
    rows = [(g.group, g.start, g.filter.tag or "*", g.max_in_flight, shown_time(g.created_ms)) for g in groups]
    show.table(["group", "began at", "filter", ">in flight at most", "made"], rows)
