"""The `millpond` command: all subcommands on one typer application, built by the launcher."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from millpond import __version__
from millpond.client.command import bench, consume, group, keys, parts, produce, replay, settings, show, topic
from millpond.client.command.session import AsJson, guarded

CONTEXT = {"help_option_names": ["-h", "--help"]}


def build(starters: parts.Starters) -> typer.Typer:
    """The application; `starters` start what this package may not import."""
    app = typer.Typer(
        name="millpond",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings=CONTEXT,
    )
    app.callback()(whole_command)
    parts.add(app, starters)
    app.add_typer(topic.topic, name="topic")
    app.add_typer(group.group, name="group")
    app.command("produce")(produce.produce)
    app.command("consume")(consume.consume)
    app.command("tail")(consume.tail)
    app.command("find")(consume.find)
    app.command("seek")(group.seek)
    app.command("lag")(group.lag)
    app.command("flush")(topic.flush)
    app.add_typer(topic.tier, name="tier")
    replay.add(app, starters)
    app.add_typer(keys.key, name="key")
    app.command("config")(config)
    app.command("bench")(bench.bench)
    return app


def _show_version(asked: bool) -> None:
    if asked:
        show.OUT.print(f"millpond {__version__}")
        raise typer.Exit


def whole_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A message queue that is both a pipe and a pool. Exit codes: 0 done, 1 failed, 2 usage, 3 unreachable, 4 not
    found, 5 refused."""


def config(
    file: Annotated[str | None, typer.Option("--config", metavar="FILE", help="TOML file with settings")] = None,
    machine: AsJson = False,
) -> None:
    """Every setting, its value in force and where that comes from: flag, environment, file or default."""
    found = guarded(lambda: settings.load({}, os.environ, file), machine)
    if machine:
        show.as_json({s.key: {"value": s.shown, "from": s.origin} for s in found.all})
        return
    rows = [(s.key, s.shown if s.shown != "" else "-", s.origin, settings.variable_of(s.key)) for s in found.all]
    show.table(["setting", ">value", "from", "environment variable"], rows)
