"""Replays as rows: fixed when they are made. (Running one is Spark's: tests/integration/spark.)"""

from __future__ import annotations

from integration.behaviour.world import Http, fresh


async def test_a_replay_is_planned_once(http: Http, wide: str, topic: str) -> None:
    """The same PUT answers the same plan, whatever was produced since; another plan under the id is refused."""
    name = fresh("replay")
    await http.sent(wide, *({"body": f"{n}", "queue": n % 4} for n in range(8)))
    wanted = {"topic": wide, "target": topic, "from": 5, "to": 2**40, "clock": "born", "rate": 100,
              "filter": {"tag": "b||a", "properties": {"p": "q"}}}  # fmt: skip
    made = (await http.call("PUT", f"/v1/replays/{name}", wanted)).ok(201)
    assert [(one["queue"], one["first"], one["end"]) for one in made["queues"]] == [(q, 0, 2) for q in range(4)]
    assert (made["state"], made["filter"]) == ("planned", {"tag": "a || b", "properties": {"p": "q"}})
    await http.sent(wide, "later")
    assert (await http.call("PUT", f"/v1/replays/{name}", wanted)).ok() == made
    for other in ({"from": 6}, {"rate": 99}, {"filter": None}, {"target": wide}, {"clock": "store"}):
        (await http.call("PUT", f"/v1/replays/{name}", {**wanted, **other})).refused(409, "replay_differs")
    assert (await http.get(f"/v1/replays/{name}")).ok() == made
    assert made in (await http.get("/v1/replays")).ok()["replays"]
    (await http.get("/v1/replays/nobody")).refused(404, "replay_not_found")


async def test_a_plan_needs_both_topics(http: Http, topic: str) -> None:
    """Source and target must be there, and the fields make sense; nothing is planned otherwise."""
    name = fresh("replay")
    path = f"/v1/replays/{name}"
    (await http.call("PUT", path, {"topic": "nobody", "target": topic})).refused(404, "topic_not_found")
    (await http.call("PUT", path, {"topic": topic, "target": "nobody"})).refused(404, "topic_not_found")
    (await http.call("PUT", path, {"topic": topic})).refused(400, "invalid_request", "target")
    (await http.call("PUT", path, {"topic": topic, "target": topic, "rate": 0})).refused(400, "invalid_request", "rate")
    (await http.call("PUT", path, {"topic": topic, "target": topic, "until": 1})).refused(400, "unknown_field", "until")
    (await http.get(path)).refused(404, "replay_not_found")
