"""`millpond key`: create, list, revoke API keys. The first key ends the open mode."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from millpond.client.command import show
from millpond.client.command.session import ApiKey, AsJson, Url, run, shown_time
from millpond.client.connection import Connection, path_of

key = typer.Typer(no_args_is_help=True, help="API keys")
PATH = path_of("tenant", "keys")


@key.command("create")
def create(
    name: Annotated[str, typer.Argument(help="What it is for")],
    scope: Annotated[list[str] | None, typer.Option(help="produce, consume, admin; several times; default all")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    machine: AsJson = False,
) -> None:
    """Make a key. Its credential is shown this once."""
    body = {"name": name, "scopes": scope or ["produce", "consume", "admin"]}
    made: dict[str, Any] = run(lambda c: c.json("POST", PATH, body), url, api_key, machine)
    if machine:
        show.as_json(made)
        return
    show.OUT.print(f"key {made['key_id']} for {', '.join(made['scopes'])}")
    show.OUT.print(f"  export MILLPOND_KEY={made['credential']}", soft_wrap=True)
    show.OUT.print("It is not shown again.")


@key.command("list")
def list_(url: Url = None, api_key: ApiKey = None, machine: AsJson = False) -> None:
    """All keys, without their secrets."""
    found: dict[str, Any] = run(lambda c: c.get(PATH), url, api_key, machine)
    if machine:
        show.as_json(found)
        return
    rows = [
        (k["key_id"], k["name"], ", ".join(k["scopes"]), shown_time(k["created_ms"]), shown_time(k["revoked_ms"]))
        for k in found["keys"]
    ]
    show.table(["key", "name", "scopes", "made", "revoked"], rows)


@key.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="KEY")],
    url: Url = None,
    api_key: ApiKey = None,
    machine: AsJson = False,
) -> None:
    """Revoke a key: it stops working within seconds."""

    async def work(connection: Connection) -> None:
        await connection.json("DELETE", path_of("tenant", "keys", key_id))

    run(work, url, api_key, machine)
    if machine:
        show.as_json({"revoked": key_id})
    else:
        show.OUT.print(f"revoked {key_id}")
