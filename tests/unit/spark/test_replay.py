"""Replays: exactly once, in order, through lost answers and kills; steps alone, and the whole on a real Spark."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from pyspark.sql import SparkSession

from millpond.core.errors import Conflict, Internal, NotFound, OffsetExpired
from millpond.core.hashing import hash_bytes
from millpond.spark import publish, replay_step
from millpond.spark.http import HttpClient
from millpond.spark.plan import Stretch
from millpond.spark.replay import ReplayFilter, ReplayProgress, ReplaySpec, run
from millpond.spark.replay_step import Route, Step, run_step, session_id


def step(service: Any, queue: int = 0, at: int = 0, end: int = 1_000, **route: Any) -> Step:
    settings: dict[str, Any] = {
        "replay_id": "r1", "source": "pond", "source_topic_id": 1, "target": "copy", "target_queues": 3,
        "clock": "store", "from_ms": None, "to_ms": None, "tag": None, "properties": {}, "rate": None,
    }  # fmt: skip
    return Step(
        service.url, None, Route(**{**settings, **route}), queue, at, end, [Stretch(queue, at, end, 0)], seconds=30.0
    )


def copied(service: Any, target: str = "copy") -> dict[int, list[int]]:
    """Source queue -> source offsets at the target, checked to ascend within each target queue."""
    found: dict[int, list[int]] = defaultdict(list)
    for table in service.topics[target].queues.values():
        in_queue: dict[int, list[int]] = defaultdict(list)
        for origin in table["origin"].to_pylist():
            came = json.loads(origin)
            in_queue[came["queue"]].append(came["offset"])
        for queue, some in in_queue.items():
            assert some == sorted(some), "source order per source queue"
            found[queue] += some
    return {queue: sorted(some) for queue, some in sorted(found.items())}


@pytest.fixture
def copy(service: Any, pond: Any) -> Any:
    return service.topic("copy", 3)


class TestStep:
    def test_a_whole_queue(self, service: Any, copy: Any, pond: Any) -> None:
        """Every message once, with its columns and its origin, keyed ones by their key's hash."""
        assert run_step(step(service)).published == 1_000
        assert copied(service) == {0: list(range(1_000))}
        for number, table in copy.queues.items():
            assert {hash_bytes(key) % 3 for key in table["key"].to_pylist()} <= {number}
        first = copy.queues[hash_bytes(b"key 0") % 3].slice(0, 1).to_pylist()[0]
        source = pond.queues[0].slice(0, 1).to_pylist()[0]
        assert {n: first[n] for n in ("key", "tag", "properties", "body", "born_ts")} == {
            n: source[n] for n in ("key", "tag", "properties", "body", "born_ts")
        }
        assert json.loads(first["origin"]) == {"topic": "pond", "queue": 0, "offset": 0, "replay": "r1"}

    def test_filters(self, service: Any, copy: Any) -> None:
        """Tag, properties and time must all hold."""
        result = run_step(step(service, tag="red||blue", properties={"parity": "1"}, clock="born", to_ms=1_500))
        expected = [o for o in range(500) if o % 3 != 2 and o % 2]
        assert (result.published, copied(service)) == (len(expected), {0: expected})

    def test_keyless_messages(self, service: Any, make_rows: Any) -> None:
        """Messages without a key go to source queue mod n."""
        service.topic("pond", 5).add(make_rows(4, 0, 10, key=[None] * 10))
        copy = service.topic("copy", 3)
        run_step(step(service, queue=4, end=10))
        assert [table.num_rows for table in copy.queues.values()] == [0, 10, 0]

    def test_lost_answers(self, service: Any, copy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A publish whose answer is lost is repeated with the same boundaries and done once."""
        monkeypatch.setattr(publish, "REPLAY_PART_BYTES", 2_000)
        service.drop_answers = 3
        assert run_step(step(service)).published == 1_000
        assert copied(service) == {0: list(range(1_000))}

    def test_uneven_rows(self, service: Any, make_rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows that are large by their properties, among small ones, make no request larger than a part."""
        monkeypatch.setattr(publish, "REPLAY_PART_BYTES", 20_000)
        properties = [[("note", "x" * 4_000)]] * 10 + [[]] * 190
        service.topic("pond", 1).add(make_rows(0, 0, 200, key=[None] * 200, properties=properties))
        service.topic("copy", 1)
        assert run_step(step(service, end=200, target_queues=1)).published == 200
        assert len(service.published_bytes) == 4
        assert max(service.published_bytes) < 25_000  # with Arrow's own

    def test_run_again_after_a_kill(self, service: Any, copy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A step that starts before what was already published counts it again and does not publish it again."""
        monkeypatch.setattr(publish, "REPLAY_PART_BYTES", 2_000)
        monkeypatch.setattr(replay_step, "REPLAY_SCANNED_ROWS", 100)
        run_step(step(service, end=730))
        result = run_step(step(service, at=300))
        assert (result.at, result.read, result.published) == (1_000, 700, 700)
        assert copied(service) == {0: list(range(1_000))}

    def test_a_process_that_should_be_gone(self, service: Any, copy: Any) -> None:
        """A part of an earlier process that arrives late puts the session ahead: the rest still goes on, once."""
        with HttpClient(service.url) as client:
            sessions = publish.Sessions(client, "copy", session_id("r1", 0))
            run_step(step(service, end=500))
            rows = service.topics["pond"].queues[0].combine_chunks().to_batches()[0]
            for queue, part in replay_step.routed(rows, 3):
                messages = publish.message_rows(part, replay_step.origins(part, "pond", "r1"))
                sessions.publish(queue, messages, part.column("offset"))
        assert copied(service) == {0: list(range(1_000))}

    def test_a_step_ends_in_time(self, service: Any, copy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A step whose time is over stops at a boundary: all before `at` is published, nothing after."""
        monkeypatch.setattr(replay_step, "REPLAY_SCANNED_ROWS", 1)
        monkeypatch.setattr(replay_step, "READ_MESSAGES", 100)
        whole = step(service)
        result = run_step(Step(whole.url, None, whole.route, 0, 0, 1_000, whole.stretches, seconds=0))
        assert (result.at, copied(service)) == (100, {0: list(range(100))})

    def test_expired_source(self, service: Any, copy: Any, pond: Any) -> None:
        """Retention that overtakes a replay is an error that says so, never a silent gap."""
        pond.start[0] = 50
        with pytest.raises(OffsetExpired):
            run_step(step(service))

    def test_damaged_source(self, service: Any, copy: Any, pond: Any) -> None:
        """Damaged messages are an error; left out when that was asked for, and counted."""
        pond.damaged = range(20, 30)
        with pytest.raises(Internal, match="damaged"):
            run_step(step(service))
        result = run_step(step(service, skip_lost=True))
        assert (result.at, result.read, result.published, result.lost) == (1_000, 990, 990, 10)
        assert copied(service) == {0: [*range(20), *range(30, 1_000)]}


class TestRun:
    def test_to_the_end(self, service: Any, copy: Any, spark: SparkSession) -> None:
        """All queues, progress, closed sessions, state done; once more changes nothing."""
        spec = ReplaySpec("pond", "copy", clock="born", from_ms=1_100, filter=ReplayFilter(properties={"parity": "0"}))
        seen: list[ReplayProgress] = []
        result = run(service.url, None, None, spec, seen.append, spark=spark)
        expected = {0: list(range(100, 1_000, 2)), 1: list(range(100, 300, 2))}
        assert copied(service) == expected
        assert (result.state, result.published) == ("done", 550)
        assert (seen[-1].published, seen[-1].read, seen[-1].total) == (550, 1_300, 1_300)
        assert service.replays[spec.default_id()]["state"] == "done"
        assert copy.sessions == {}
        again = run(service.url, None, None, spec, spark=spark)
        assert (again.published, copied(service)) == (550, expected)

    def test_taken_up_after_a_kill(self, service: Any, copy: Any, spark: SparkSession) -> None:
        """What one process published without reporting is neither repeated nor counted twice by the next."""
        spec = ReplaySpec("pond", "copy")
        run_step(step(service, end=400, replay_id="mine"))
        result = run(service.url, None, "mine", spec, spark=spark)
        assert (result.read, result.published) == (1_300, 1_300)
        assert copied(service) == {0: list(range(1_000)), 1: list(range(300))}

    def test_a_failure_stands_in_the_row(self, service: Any, copy: Any, pond: Any, spark: SparkSession) -> None:
        """A replay that fails says why in its row, and the next run goes on from there."""
        pond.start[0], begun = 50, 0
        service.put_replay("mine", {"topic": "pond", "target": "copy", "clock": "store"})
        pond.start[0], begun = 60, 50
        with pytest.raises(OffsetExpired, match="stands at 50"):
            run(service.url, None, "mine", ReplaySpec("pond", "copy"), spark=spark)
        row = service.replays["mine"]
        assert (row["state"], "OffsetExpired" in row["detail"]) == ("failed", True)
        pond.start[0] = begun
        assert run(service.url, None, "mine", ReplaySpec("pond", "copy"), spark=spark).state == "done"
        assert copied(service) == {0: list(range(50, 1_000)), 1: list(range(300))}

    def test_what_is_lost_can_be_left_out(self, service: Any, copy: Any, pond: Any, spark: SparkSession) -> None:
        """The same replay that failed goes on without what has expired and what is damaged, and its row tells."""
        spec = ReplaySpec("pond", "copy")
        service.put_replay("mine", {"topic": "pond", "target": "copy", "clock": "store"})
        pond.damaged = range(70, 75)
        with pytest.raises(Internal, match=r"'pond' queue 0, from offset 70 on: damaged"):
            run(service.url, None, "mine", spec, spark=spark)
        pond.start[0] = 50
        with pytest.raises(OffsetExpired, match="stands at 0"):
            run(service.url, None, "mine", spec, spark=spark)
        result = run(service.url, None, "mine", spec, spark=spark, skip_lost=True)
        assert (result.state, result.lost, result.published) == ("done", 55, 1_245)
        assert copied(service) == {0: [*range(50, 70), *range(75, 1_000)], 1: list(range(300))}
        assert service.replays["mine"]["detail"] == "55 messages were lost, and are left out"

    def test_another_plan_under_the_same_id(self, service: Any, copy: Any, spark: SparkSession) -> None:
        """An id stands for one plan."""
        run(service.url, None, "mine", ReplaySpec("pond", "copy", to_ms=1_010), spark=spark)
        with pytest.raises(Conflict, match="another plan"):
            run(service.url, None, "mine", ReplaySpec("pond", "copy"), spark=spark)

    def test_unknown_topic(self, service: Any) -> None:
        """A problem of the service comes out as its own error."""
        with pytest.raises(NotFound), HttpClient(service.url) as client:
            publish.Sessions(client, "nowhere", "x")
