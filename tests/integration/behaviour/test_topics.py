"""Topics and groups: made once, changed by name, listed in pages, gone when deleted; and what operators ask."""

from __future__ import annotations

from integration.behaviour.world import Http, bodies, fresh


async def test_a_topic_over_its_life(http: Http) -> None:
    """Made (201), made again the same (200), refused with other settings (409), changed, deleted, not found."""
    name = fresh()
    path = f"/v1/topics/{name}"
    made = (await http.call("PUT", path, {"queues": 2, "durability": "memory"})).ok(201)
    assert (made["topic"], made["queues"], made["durability"]) == (name, 2, "memory")
    assert (await http.call("PUT", path, {"queues": 2, "durability": "memory"})).ok() == made
    (await http.call("PUT", path, {"queues": 2})).refused(409, "topic_differs")
    changed = (await http.call("PATCH", path, {"durability": "flush", "max_message_bytes": 100})).ok()
    assert changed["version"] > made["version"]
    assert (await http.get(path)).ok() == changed
    assert (await http.call("DELETE", path)).status == 204
    (await http.get(path)).refused(404, "topic_not_found")
    (await http.call("DELETE", path)).refused(404, "topic_not_found")


async def test_topics_come_in_pages(http: Http) -> None:
    """Pages of two hold every topic once, in order of names."""
    names = {fresh("page-") for _ in range(5)}
    for name in names:
        await http.make(name)
    found: list[str] = []
    token = ""
    while True:
        page = (await http.get(f"/v1/topics?page_size=2&page_token={token}")).ok()
        assert len(page["topics"]) <= 2
        found += [one["topic"] for one in page["topics"]]
        if "next_page_token" not in page:
            break
        token = page["next_page_token"]
    assert found == sorted(set(found))
    assert names <= set(found)


async def test_queues_grow_and_never_shrink(http: Http, topic: str) -> None:
    """A grown topic takes messages in its new queues, and a group that was there receives them."""
    await http.sent(topic, "before")
    assert bodies(await http.leased(topic, "g")) == ["before"]
    grown = (await http.call("PATCH", f"/v1/topics/{topic}", {"queues": 3})).ok()
    assert grown["queues"] == 3
    [result] = await http.sent(topic, {"body": "after", "queue": 2})
    assert (result["queue"], result["offset"]) == (2, 0)
    assert bodies(await http.leased(topic, "g", wait_ms=5_000)) == ["after"]
    assert await http.ends(topic) == [1, 0, 1]
    (await http.call("PATCH", f"/v1/topics/{topic}", {"queues": 2})).refused(400, "invalid_request", "queues")


async def test_a_deleted_topics_name_is_free(http: Http, topic: str) -> None:
    """The next topic of the name is another one: no message, no group and no lease of the old one is in it."""
    await http.sent(topic, "old")
    [old] = await http.leased(topic, "g")
    first = (await http.get(f"/v1/topics/{topic}")).ok()
    (await http.call("DELETE", f"/v1/topics/{topic}")).ok(204)
    second = await http.make(topic)
    assert second["topic_id"] != first["topic_id"]
    assert await http.ends(topic) == [0]
    (await http.get(f"/v1/topics/{topic}/groups/g")).refused(404, "group_not_found")
    assert await http.leased(topic, "g") == []
    assert await http.settled(topic, "g", acks=[old["lease_id"]]) == ["unknown"]
    (await http.get(f"/v1/topics/{topic}/messages/{old['message_id']}")).refused(404, "message_not_found")


async def test_a_group_over_its_life(http: Http, topic: str) -> None:
    """Made, made again, changed by name, listed, deleted."""
    path = f"/v1/topics/{topic}/groups/g"
    made = (await http.call("PUT", path, {"start": "earliest", "filter": {"tag": "b||a"}})).ok(201)
    assert made["filter"] == {"tag": "a || b"}
    assert (await http.call("PUT", path, {"start": "earliest", "filter": {"tag": "a || b"}})).ok() == made
    (await http.call("PUT", path, {"start": "earliest", "filter": {"tag": "c"}})).refused(409, "filter_differs")
    (await http.call("PUT", path, {"start": "latest", "filter": {"tag": "a||b"}})).refused(409, "group_differs")
    changed = (await http.call("PATCH", path, {"filter": {"tag": "*"}})).ok()
    assert changed["filter_version"] == made["filter_version"] + 1
    assert (await http.get(f"/v1/topics/{topic}/groups")).ok()["groups"] == [changed]
    assert (await http.call("DELETE", path)).status == 204
    (await http.get(path)).refused(404, "group_not_found")


async def test_a_deleted_group_starts_anew(http: Http, topic: str) -> None:
    """A group of the same name later knows nothing of the old one's progress or leases."""
    await http.sent(topic, "a", "b")
    old = await http.leased(topic, "g")
    await http.settled(topic, "g", acks=[old[0]["lease_id"]])
    (await http.call("DELETE", f"/v1/topics/{topic}/groups/g")).ok(204)
    again = await http.leased(topic, "g")
    assert [(one["body"], one["delivery_attempt"]) for one in again] == [("a", 1), ("b", 1)]
    assert await http.settled(topic, "g", acks=[old[1]["lease_id"]]) == ["unknown"]


async def test_operators_are_answered(http: Http, topic: str) -> None:
    """Alive, ready, counted: a produce shows in /metrics."""
    assert (await http.get("/healthz")).ok() == {"status": "ok"}
    assert (await http.get("/readyz")).ok() == {"ready": True, "reasons": []}
    before = await http.metrics()
    await http.sent(topic, "a", "b")
    after = await http.metrics()
    assert after["millpond_proxy_produced_messages_total"] - before["millpond_proxy_produced_messages_total"] == 2
    assert after['millpond_store_up{group="a"}'] == 1
    position = 'millpond_store_confirmed_position_bytes{group="a"}'
    assert after[position] > before[position]


async def test_the_interface_describes_itself(http: Http) -> None:
    """OpenAPI 3.1 and a page to browse it."""
    document = (await http.get("/openapi.json")).ok()
    assert document["openapi"].startswith("3.1")
    assert "/v1/topics/{topic}/messages" in document["paths"]
    page = await http.get("/docs")
    assert page.status == 200
    assert b"/v1/topics/{topic}/messages" in page.body
