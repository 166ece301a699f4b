"""API keys: the first one ends the open mode; scopes, foreign tenants, revocation."""

from __future__ import annotations

from typing import Any

import aiohttp
from integration.behaviour.world import Http, Service, leases, until

SCOPES = ["produce", "consume", "admin"]


def bearer(credential: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {credential}"}


def routes_of(document: Any, topic: str, message_id: str) -> list[tuple[str, str, dict[str, Any] | None]]:
    """(method, path, body) of every call that names an object, from the interface's own description."""
    names = {
        "topic": topic,
        "group": "g",
        "queue": "0",
        "id": message_id,
        "producer": "p",
        "replay": "r",
        "key_id": "k",
    }
    bodies: dict[str, dict[str, Any]] = {
        "receive": {"max_messages": 1}, "settle": {"acks": []}, "seek": {"to": "earliest"},
        "put_replay": {"topic": topic, "target": topic}, "post_progress": {"state": "done"},
        "produce": {"messages": [{"body": "x"}]},
    }  # fmt: skip
    found = []
    for path, methods in document["paths"].items():
        if "{" not in path:
            continue
        for method, operation in methods.items():
            body = bodies.get(operation["operationId"], {} if "requestBody" in operation else None)
            query = "?offset=0" if operation["operationId"] == "read" else ""
            query = "?key=k" if operation["operationId"] == "find_by_key" else query
            found.append((method.upper(), path.format(**names) + query, body))
    return found


async def test_keys_over_their_life(own_service: Service) -> None:
    """Open until the first key; then 401 without, 403 beyond the scopes, 404 for what is another tenant's."""
    service = own_service
    async with aiohttp.ClientSession() as session:
        nobody = Http(service.url, session)
        assert (await nobody.get("/v1/tenant")).ok()["open"] is True
        await nobody.make("orders")
        await nobody.sent("orders", {"body": "a", "key": "k"})
        first = {"name": "first", "scopes": ["produce"]}
        (await nobody.call("POST", "/v1/tenant/keys", first)).refused(400, "invalid_request", "scopes")
        made = (await nobody.call("POST", "/v1/tenant/keys", {"name": "first", "scopes": SCOPES})).ok(201)
        owner = Http(service.url, session, bearer(made["credential"]))

        document = (await nobody.get("/openapi.json")).ok()
        for method, path, body in routes_of(document, "orders", "a-1-0"):
            answer = await nobody.call(method, path, body)
            answer.refused(401, "unauthenticated")
            assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        for credential in ("", "mp_x_y", made["credential"][:-1], made["credential"] + "x", "a" * 5_000):
            wrong = Http(service.url, session, bearer(credential))
            (await wrong.get("/v1/topics")).refused(401, "unauthenticated")
        assert (await nobody.get("/healthz")).status == (await nobody.get("/readyz")).status == 200

        [message] = await owner.leased("orders", "g")
        who = (await owner.get("/v1/tenant")).ok()
        assert (who["tenant"], who["scopes"], who["open"]) == ("default", SCOPES, False)
        await _scopes(service, session, owner)
        await _foreign(service, session, owner, document, message)
        await _revoked(service, session, owner)


async def _scopes(service: Service, session: aiohttp.ClientSession, owner: Http) -> None:
    """A key does what its scopes say, and 403 names the one that is missing."""
    keys = {}
    for scope in SCOPES:
        made = (await owner.call("POST", "/v1/tenant/keys", {"name": scope, "scopes": [scope]})).ok(201)
        keys[scope] = Http(service.url, session, bearer(made["credential"]))
    await keys["produce"].sent("orders", "b")
    await keys["consume"].leased("orders", "h")
    await keys["admin"].make("made")
    for refused, needed in ((keys["consume"], "produce"), (keys["admin"], "produce")):
        assert (await refused.send("orders", "c")).refused(403, "forbidden")["scope"] == needed
    (await keys["produce"].receive_answer("orders", "h")).refused(403, "forbidden")
    (await keys["consume"].call("DELETE", "/v1/topics/made")).refused(403, "forbidden")
    (await keys["produce"].call("POST", "/v1/tenant/keys", {"name": "x", "scopes": SCOPES})).refused(403, "forbidden")
    assert await owner.ends("orders") == [2]


async def _foreign(service: Service, session: aiohttp.ClientSession, owner: Http, document: Any, message: Any) -> None:
    """Another tenant finds nothing of this one on any route, not even whether it is there."""
    async with service.metadata() as metadata:
        made = await metadata.create_key("other", "k", SCOPES)
    stranger = Http(service.url, session, bearer(f"mp_{made.key.key_id}_{made.secret}"))
    await owner.sent("orders", "0", producer={"id": "p", "queue": 0, "previous": None, "first": 0, "last": 0})
    (await owner.call("PUT", "/v1/replays/r", {"topic": "orders", "target": "orders"})).ok(201)
    before = (await owner.get("/v1/topics/orders")).body, await owner.ends("orders")
    for method, path, body in routes_of(document, "orders", message["message_id"]):
        if (method, path) == ("PUT", "/v1/topics/orders"):
            continue  # makes a topic of its own; below
        answer = await stranger.call(method, path, body)
        assert answer.status == 404, (method, path, answer.body)
        answer.refused(404, answer.json["code"])
    assert (
        (await stranger.get("/v1/topics")).ok()["topics"] == (await stranger.get("/v1/replays")).ok()["replays"] == []
    )
    await stranger.make("orders")
    assert await stranger.ends("orders") == [0]
    await stranger.leased("orders", "g")
    assert await stranger.settled("orders", "g", acks=leases([message])) == ["unknown"]
    (await stranger.get(f"/v1/topics/orders/messages/{message['message_id']}")).refused(404, "message_not_found")
    (await stranger.get("/v1/topics/orders/producers/p")).refused(404, "producer_not_found")
    assert ((await owner.get("/v1/topics/orders")).body, await owner.ends("orders")) == before
    assert await owner.settled("orders", "g", acks=leases([message])) == ["ok"]


async def _revoked(service: Service, session: aiohttp.ClientSession, owner: Http) -> None:
    """A revoked key is nobody's within moments; its secret is shown nowhere."""
    made = (await owner.call("POST", "/v1/tenant/keys", {"name": "short", "scopes": ["consume"]})).ok(201)
    short = Http(service.url, session, bearer(made["credential"]))
    assert (await short.get("/v1/topics")).status == 200
    assert (await owner.call("DELETE", f"/v1/tenant/keys/{made['key_id']}")).status == 204

    async def refused() -> bool:
        return (await short.get("/v1/topics")).status == 401

    await until(refused, 5)
    listed = await owner.get("/v1/tenant/keys")
    secret = made["credential"].removeprefix(f"mp_{made['key_id']}_")
    assert secret.encode() not in listed.body
    assert [one["revoked_ms"] is None for one in listed.ok()["keys"] if one["key_id"] == made["key_id"]] == [False]
    (await owner.call("DELETE", "/v1/tenant/keys/nobody")).refused(404, "key_not_found")
