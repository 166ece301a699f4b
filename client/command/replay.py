"""`millpond replay`: publish a range of a topic's history into another topic, exactly once, on Spark."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from millpond.client.command import show
from millpond.client.command.parts import Starters
from millpond.client.command.session import ApiKey, AsJson, Url, guarded, pairs, run, time_ms
from millpond.client.command.topic import Name
from millpond.client.connection import path_of


def add(app: typer.Typer, starters: Starters) -> None:
    """Add `replay` and `replays` to `app`."""

    @app.command("replay")
    def replay(
        topic: Name,
        target: Annotated[str, typer.Argument(metavar="TARGET", help="The topic to publish into")],
        since: Annotated[str | None, typer.Option("--from", help="Not before this time")] = None,
        until: Annotated[str | None, typer.Option("--to", help="Before this time")] = None,
        clock: Annotated[Literal["store", "born"], typer.Option(help="Whose time")] = "store",
        tag: Annotated[str | None, typer.Option(help='Only these tags: "a || b"')] = None,
        prop: Annotated[list[str] | None, typer.Option("--property", "-p", help="Only with name=value")] = None,
        rate: Annotated[int | None, typer.Option(help="Messages per second at most")] = None,
        replay_id: Annotated[str | None, typer.Option("--id", help="Default: a digest of the arguments")] = None,
        skip_lost: Annotated[
            bool, typer.Option("--skip-lost", help="Leave out messages that have expired or are damaged, and say so")
        ] = False,
        master: Annotated[str, typer.Option(help="Spark master")] = "local[*]",
        url: Url = None,
        api_key: ApiKey = None,
        machine: AsJson = False,
    ) -> None:
        """Replay; killed at any moment and started again, it goes on where it was."""

        def work() -> dict[str, Any]:
            properties = pairs(prop, "--property")
            chosen = {"tag": tag, "properties": properties} if tag or properties else None
            spec = {
                "topic": topic, "target": target, "from": time_ms(since, "--from"), "to": time_ms(until, "--to"),
                "clock": clock, "filter": chosen, "rate": rate,
            }  # fmt: skip
            with show.progress(machine) as bar:
                task = bar.add_task(f"replaying {topic}", total=None, note="starting Spark")

                def report(read: int, published: int, total: int) -> None:
                    bar.update(task, total=total, completed=read, note=f"{published:,} published")

                return starters.replay(url, api_key, replay_id, spec, report, master, skip_lost)

        done = guarded(work, machine)
        if machine:
            show.as_json(done)
        else:
            show.table(list(done), [list(done.values())])

    @app.command("replays")
    def replays(url: Url = None, api_key: ApiKey = None, machine: AsJson = False) -> None:
        """All replays and how far they are."""
        found = run(lambda connection: connection.get(path_of("replays")), url, api_key, machine)
        if machine:
            show.as_json(found)
            return
        rows = [
            (r["replay_id"], r["state"], r["source_topic"], r["target_topic"], r["read"], r["published"])
            for r in found["replays"]
        ]
        show.table(["replay", "state", "from", "into", ">read", ">published"], rows)
