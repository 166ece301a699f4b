"""`millpond standalone | metadata | store | proxy`: commands that start parts. The launcher gives the starters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer

from millpond.client.command.settings import Settings, with_settings
from millpond.core.config import Config

Start = Callable[[Config, str | None], int]
"""Runs parts until they end, given the settings and a file to write the address to; answers the exit code."""


@dataclass(frozen=True)
class Starters:
    """What this package may not import. `replay(url, key, replay_id, spec, report)` runs a replay on Spark."""

    standalone: Start
    metadata: Start
    store: Start
    proxy: Start
    replay: Callable[..., dict[str, Any]]


ReadyFile = Annotated[str | None, typer.Option(help="Written with the address once all is up, removed at the end")]


def add(app: typer.Typer, starters: Starters) -> None:
    """Add the four commands to `app`."""

    @app.command("standalone")
    @with_settings(
        "store.data", "store.group", "store.segment_bytes", "store.local_bytes", "store.checkpoint_bytes",
        "store.checkpoint_frames", "tier.*", "metadata.database", "proxy.listen", "proxy.connections",
        "proxy.frame_cache_bytes", "proxy.tier_cache_bytes", "proxy.cold_reads", "proxy.header_seconds",
        "proxy.body_seconds",
    )  # fmt: skip
    def standalone(
        settings: Settings,
        port: Annotated[int | None, typer.Option(help="Short for --listen 127.0.0.1:PORT; 0: any")] = None,
        ready_file: ReadyFile = None,
    ) -> None:
        """Everything in one process."""
        config = settings.config
        if port is not None:
            listening = msgspec.structs.replace(config.proxy, listen=f"127.0.0.1:{port}")
            config = msgspec.structs.replace(config, proxy=listening)
        raise typer.Exit(starters.standalone(config, ready_file))

    @app.command("metadata")
    @with_settings("metadata.*")
    def metadata(settings: Settings, ready_file: ReadyFile = None) -> None:
        """The catalog, apart: topics, groups, keys, the tier's manifest."""
        raise typer.Exit(starters.metadata(settings.config, ready_file))

    @app.command("store")
    @with_settings("store.*", "tier.*")
    def store(settings: Settings, ready_file: ReadyFile = None) -> None:
        """The log of a store group, apart."""
        raise typer.Exit(starters.store(settings.config, ready_file))

    @app.command("proxy")
    @with_settings("proxy.*", "tier.url", "tier.s3_endpoint", "tier.s3_region")
    def proxy(settings: Settings, ready_file: ReadyFile = None) -> None:
        """The public HTTP interface, apart. Keeps nothing: run as many as you like."""
        raise typer.Exit(starters.proxy(settings.config, ready_file))
