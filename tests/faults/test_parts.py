"""The parts as processes of their own, each killed: a store or a proxy under load, and a proxy exactly between the
store's commit and its own reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from support.checker import Checker
from support.load import GROUPS, Http, Load
from support.processes import Apart, Process
from support.relays import Relay

HELD_SECONDS = 20


async def test_store_and_proxy_killed_under_load(apart: Callable[..., Apart]) -> None:
    """Each is killed once: nothing acknowledged is lost, sessions make no copies, every group drains."""
    parts = await apart().start()
    checker = Checker()
    async with Load(parts.url, checker) as load:
        load.start()
        for part in (parts.store, parts.proxy):
            await load.acknowledged(500)
            part.kill()
            checker.fault("kill -9")
            await part.start()
        await load.acknowledged(500)
        await load.finish()
    checker.check(GROUPS, least=500, faults=2)
    print(f"\n{checker.acknowledged} acknowledged, {checker.unknown} unknown, settled {dict(checker.statuses)}")


async def test_a_proxy_killed_between_commit_and_reply(
    apart: Callable[..., Apart], client: Callable[[Process | Apart], Http]
) -> None:
    """The store has committed and the proxy dies before it can say so: the session's retry is answered with the same
    places, and nothing stands twice."""
    async with Relay() as relay:
        parts = await apart("--advertise", relay.url).start()
        relay.target = ("127.0.0.1", parts.store.port)
        http = client(parts)
        await http.ok("PUT", "/v1/topics/kept", {"queues": 1})
        part = {"id": "p", "queue": 0, "previous": None, "first": 0, "last": 2}
        await http.ok("POST", "/v1/topics/kept/messages", {"messages": [{"body": "a"}] * 3, "producer": part})
        relay.arm(b"/append")
        part = {"id": "p", "queue": 0, "previous": 2, "first": 3, "last": 5}
        again = {"messages": [{"body": body} for body in "bcd"], "producer": part}
        sending = asyncio.create_task(http.call("POST", "/v1/topics/kept/messages", again))
        async with asyncio.timeout(HELD_SECONDS):
            await relay.held.wait()
        parts.proxy.kill()
        assert (await sending).outcome == "unknown"
        await parts.proxy.start()
        results = (await http.ok("POST", "/v1/topics/kept/messages", again))["results"]
        assert [(one["offset"], one["duplicate"]) for one in results] == [(3, True), (4, True), (5, True)]
        start, end, found = await http.whole("kept", 0)
        assert (start, end) == (0, 6)
        assert "".join(one["body"] for one in found) == "aaabcd"
