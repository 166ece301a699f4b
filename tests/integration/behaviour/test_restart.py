"""Processes that end by SIGTERM and start again: everything that was answered is as it was."""

from __future__ import annotations

from typing import Any

import aiohttp
from integration.behaviour.world import Http, Service, bodies, fresh, leases, until


def part(previous: int | None, first: int, last: int) -> dict[str, Any]:
    return {"id": "p", "queue": 0, "previous": previous, "first": first, "last": last}


async def test_a_restart_keeps_everything(service: Service, http: Http) -> None:
    """Messages, positions, leases, attempts, acks, delays, sessions, dedup ids, keys of idempotency, replays."""
    name, produced, target = fresh(), fresh(), fresh()
    await http.make(name)
    await http.make(produced, queues=1)
    await http.make(target)
    await http.sent(name, *({"body": f"{n}", "key": f"k{n}", "tag": "t"} for n in range(10)))
    held = await http.leased(name, "g", max_messages=6, lease_ms=600_000, filter={"tag": "t"})
    ids = leases(held)
    nacks = [{"lease_id": ids[2]}, {"lease_id": ids[3], "delay_ms": 3_600_000}]
    await http.settled(name, "g", acks=ids[:2], nacks=nacks)
    again = await http.leased(name, "g", max_messages=2, lease_ms=600_000)
    second = {one["body"]: one for one in again}
    assert {body: one["delivery_attempt"] for body, one in second.items()} == {"2": 2, "6": 1}
    await http.settled(name, "g", nacks=[{"lease_id": second["2"]["lease_id"]}])
    in_session = await http.sent(produced, "0", "1", producer=part(None, 0, 1))
    deduped = await http.sent(produced, {"body": "2", "dedup_id": "d"})
    idempotent = await http.sent(produced, "3", headers={"Idempotency-Key": "i"})
    plan = (await http.call("PUT", f"/v1/replays/{target}", {"topic": name, "target": target})).ok(201)
    read = (await http.read(name, "offset=0&limit=100")).good
    lag = await http.lag(name, "g")

    await service.restart()
    async with aiohttp.ClientSession() as session:
        new = Http(service.url, session)

        async def ready() -> bool:
            return (await new.get("/readyz")).status == 200

        await until(ready)
        assert (await new.read(name, "offset=0&limit=100")).body == read
        position = (await new.lag(name, "g"))["queues"][0]
        for field in ("committed", "in_flight", "lag", "start_offset", "end_offset"):
            assert position[field] == lag["queues"][0][field], field
        assert await new.settled(name, "g", acks=[ids[0], ids[4], second["6"]["lease_id"]]) == ["already", "ok", "ok"]
        rest = {one["body"]: one["delivery_attempt"] for one in await new.leased(name, "g", filter={"tag": "t"})}
        assert rest == {"2": 3, "7": 1, "8": 1, "9": 1}
        (await new.receive_answer(name, "g", filter={"tag": "other"})).refused(409, "filter_differs")

        repeated = await new.sent(produced, "0", "1", producer=part(None, 0, 1))
        assert [one["message_id"] for one in repeated] == [one["message_id"] for one in in_session]
        (await new.send(produced, "9", producer=part(8, 9, 9))).refused(409, "out_of_order")
        [same] = await new.sent(produced, {"body": "2", "dedup_id": "d"})
        assert (same["message_id"], same["duplicate"]) == (deduped[0]["message_id"], True)
        [same] = await new.sent(produced, "3", headers={"Idempotency-Key": "i"})
        assert (same["message_id"], same["duplicate"]) == (idempotent[0]["message_id"], True)
        (await new.send(produced, {"body": "x", "dedup_id": "d"})).refused(422, "dedup_mismatch")
        [after] = await new.sent(produced, "4")
        assert after["offset"] == 4
        assert bodies(await new.messages(produced)) == ["0", "1", "2", "3", "4"]
        assert after["store_ts"] >= idempotent[0]["store_ts"]
        assert (await new.call("PUT", f"/v1/replays/{target}", {"topic": name, "target": target})).ok() == plan
