"""What commands that call the service share: `--url`, `--api-key`, `--json`, and how a failure ends the command."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

import typer
import uvloop

from millpond.client.command import exits, show
from millpond.client.connection import Connection
from millpond.core.errors import BadRequest, MillpondError, StartupError

Url = Annotated[str | None, typer.Option("--url", help="Where the service is; default MILLPOND_URL, else this machine")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="The API key; default MILLPOND_KEY")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON")]
Result = TypeVar("Result")
RETRY_SECONDS = 3.0  # a person waits: unreachable is told soon


def run(
    work: Callable[[Connection], Coroutine[Any, Any, Result]], url: str | None, api_key: str | None, machine: bool
) -> Result:
    """The result of `work` with a connection. A failure is printed and ends the command with its exit code."""

    async def connected() -> Result:
        async with Connection(url, api_key, retry_seconds=RETRY_SECONDS) as connection:
            return await work(connection)

    return guarded(lambda: uvloop.run(connected()), machine)


def guarded(work: Callable[[], Result], machine: bool) -> Result:
    try:
        return work()
    except (MillpondError, StartupError) as error:
        told = exits.failure_of(error)
        show.failure(told, machine)
        raise typer.Exit(told.exit_code) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


def time_ms(text: str | None, field: str) -> int | None:
    """`2013-02-08`, `2013-02-08T10:30:00Z` (UTC unless it says otherwise), or milliseconds since 1970."""
    from datetime import UTC, datetime

    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadRequest.field(
            field, "a time such as 2013-02-08T10:30:00Z, or milliseconds since 1970", text
        ) from error
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def shown_time(ms: int | None) -> str:
    from datetime import UTC, datetime

    if ms is None:
        return "-"
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.") + f"{ms % 1000:03d}"


def pairs(values: list[str] | None, field: str) -> dict[str, str]:
    """`name=value` texts as a mapping."""
    found = {}
    for text in values or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadRequest.field(field, "name=value", text)
        found[name] = value
    return found
