"""The console entry `millpond`, and the one place that sees all parts: it wires the command with what starts them.

Parts are imported only when a command starts them, so that `millpond produce` does not load a store; and in the running
process, which stops by a signal from then on and does not look for garbage among what is loaded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from millpond.client.command.app import build
from millpond.client.command.parts import Starters
from millpond.core.config import Config

if TYPE_CHECKING:
    from millpond.process import Running


def main() -> None:
    """Run the command line."""
    application()()


def application() -> typer.Typer:
    return build(Starters(_standalone, _metadata, _store, _proxy, _replay))


def _standalone(config: Config, ready_file: str | None) -> int:
    from millpond.process import run

    def start() -> Awaitable[Running]:
        from millpond.standalone import Standalone

        return Standalone.start(config)

    return run(start, config, ready_file)


def _metadata(config: Config, ready_file: str | None) -> int:
    from millpond.process import run

    def start() -> Awaitable[Running]:
        from millpond.apart import start_metadata

        return start_metadata(config)

    return run(start, config, ready_file)


def _store(config: Config, ready_file: str | None) -> int:
    from millpond.process import run

    def start() -> Awaitable[Running]:
        from millpond.apart import start_store

        return start_store(config)

    return run(start, config, ready_file)


def _proxy(config: Config, ready_file: str | None) -> int:
    from millpond.process import run

    def start() -> Awaitable[Running]:
        if config.proxy.processes != 1:
            from millpond.workers import Workers

            return Workers.start(config)
        from millpond.apart import start_proxy

        return start_proxy(config)

    return run(start, config, ready_file)


def _replay(
    url: str | None,
    key: str | None,
    replay_id: str | None,
    spec: dict[str, Any],
    report: Callable[[int, int, int], None],
    master: str,
    skip_lost: bool,
) -> dict[str, Any]:
    """Run a replay on Spark in this process. Raises StartupError when Spark or Java is missing."""
    from millpond.spark import replay

    wanted = msgspec.convert(spec, replay.ReplaySpec)
    done = replay.run(
        *_service(url, key), replay_id, wanted, lambda at: report(at.read, at.published, at.total),
        master=master, skip_lost=skip_lost,
    )  # fmt: skip
    told: dict[str, Any] = msgspec.to_builtins(done)
    return told


def _service(url: str | None, key: str | None) -> tuple[str, str | None]:
    """Where the service is, as `Connection` finds it. Raises BadRequest."""
    import os

    from millpond.client.connection import service_url

    return service_url(url), key or os.environ.get("MILLPOND_KEY")
