"""Producer sessions: which parts are new, which repeat, and when a session ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.frame import ProducerPart
from millpond.core.limits import PRODUCER_IDLE_MS, PRODUCER_PARTS
from millpond.store.fold import producers as module
from millpond.store.fold.producers import Producers, Verdict


def part(previous: int, first: int, last: int, producer: str = "p", rows: int | None = None) -> ProducerPart:
    return ProducerPart(producer, previous, first, last, 0, last - first + 1 if rows is None else rows)


def sent(*parts: ProducerPart) -> Producers:
    """Sessions after these parts, each accepted, at offsets 100, 200, .. of queue 4."""
    producers = Producers()
    for number, one in enumerate(parts, 1):
        assert producers.check(4, one).verdict is Verdict.ACCEPT
        producers.record(4, one, 100 * number, 1000 + number)
    return producers


def test_a_chain_of_parts_is_accepted() -> None:
    """Each part that names the last one is new; gaps inside are legal."""
    assert sent(part(-1, 0, 9), part(9, 20, 29), part(29, 30, 30)).state(4, "p") == module.ProducerState(4, 30, 1003)


def test_a_repeat_names_its_offsets() -> None:
    """A repeated part is a duplicate, with the offsets and the time of the first."""
    checked = sent(part(-1, 0, 9), part(9, 10, 12)).check(4, part(9, 10, 12))
    assert (checked.verdict, list(checked.offsets), checked.store_ts) == (Verdict.DUPLICATE, [200, 201, 202], 1002)


def test_a_later_part_that_came_first_is_not_taken() -> None:
    """101-200 before 1-100 is out of order, and so is a gap between parts."""
    producers = sent(part(-1, 0, 9))
    assert producers.check(4, part(19, 20, 29)).verdict is Verdict.OUT_OF_ORDER
    assert producers.check(4, part(5, 10, 19)).verdict is Verdict.OUT_OF_ORDER


def test_unknown_sessions() -> None:
    """A part that names a previous one of a session nobody knows is refused; in another queue it is another one."""
    assert Producers().check(4, part(9, 10, 19)).verdict is Verdict.UNKNOWN_PRODUCER
    assert sent(part(-1, 0, 9)).check(5, part(9, 10, 19)).verdict is Verdict.UNKNOWN_PRODUCER


def test_opening_twice() -> None:
    """An opening part of a known session repeats it when it is not beyond its last, else it is out of order."""
    producers = sent(part(-1, 0, 9))
    assert producers.check(4, part(-1, 0, 9)).verdict is Verdict.DUPLICATE
    assert producers.check(4, part(-1, 0, 19)).verdict is Verdict.OUT_OF_ORDER


def test_only_the_last_parts_keep_offsets() -> None:
    """A part older than the last few is still a duplicate, without offsets; so is one cut otherwise."""
    parts = [part(number - 1, number, number) for number in range(PRODUCER_PARTS + 2)]
    producers = sent(*parts)
    assert [len(producers.check(4, one).offsets) for one in parts] == [0, 0] + [1] * PRODUCER_PARTS
    assert producers.check(4, part(PRODUCER_PARTS - 1, PRODUCER_PARTS, PRODUCER_PARTS + 1)).offsets == range(0)


def test_idle_sessions_end_by_frame_time() -> None:
    """A session ends seven days after its last part, when a frame says so; those of replays do not."""
    producers = sent(part(-1, 0, 9), part(-1, 0, 9, "replay.x"))
    producers.record(4, part(-1, 0, 0, "q"), 300, 1001 + PRODUCER_IDLE_MS - 1)
    assert producers.check(4, part(9, 10, 19)).verdict is Verdict.ACCEPT
    producers.advance(1001 + PRODUCER_IDLE_MS)
    assert producers.check(4, part(9, 10, 19)).verdict is Verdict.UNKNOWN_PRODUCER
    assert producers.check(4, part(9, 10, 19, "replay.x")).verdict is Verdict.ACCEPT
    assert producers.close(4, "replay.x")
    assert producers.check(4, part(9, 10, 19, "replay.x")).verdict is Verdict.UNKNOWN_PRODUCER


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the bound the session that has been idle longest goes, never one of a replay."""
    monkeypatch.setattr(module, "PRODUCER_SESSIONS", 3)
    names = ["replay.x", "a", "b", "c"]
    producers = sent(*(part(-1, 0, 9, name) for name in names))
    assert [producers.state(4, name) is not None for name in names] == [True, False, True, True]


def test_which_session_has_been_idle_longest_survives_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next to go is the same one after a restart, also when frames have the same time."""
    producers = sent(part(-1, 0, 9, "a"), part(-1, 0, 9, "b"), part(-1, 0, 9, "c"))
    for name in ("b", "a"):
        producers.record(4, part(9, 10, 19, name), 400, 1003)
    loaded = Producers()
    loaded.load(producers.snapshot()())
    monkeypatch.setattr(module, "PRODUCER_SESSIONS", 3)
    for one in (producers, loaded):
        for new in "de":
            one.record(4, part(-1, 0, 9, new), 500, 1004)
        assert [name for name in "abcde" if one.state(4, name) is not None] == ["a", "d", "e"]


def test_dropping_a_queue_ends_its_sessions() -> None:
    """A deleted queue's sessions are unknown."""
    producers = sent(part(-1, 0, 9), part(-1, 0, 9, "replay.x"))
    producers.drop_queue(4)
    assert len(producers) == 0


@pytest.mark.parametrize("name", ["p", "replay.x"])
def test_sessions_of_a_dropped_queue_are_nobodys(name: str) -> None:
    """Whatever is asked first after it; those of others stay, and the queue's next one opens anew."""

    def opens_anew(one: Producers) -> bool:
        one.record(4, part(-1, 0, 0, name), 0, 2_000)
        state = one.state(4, name)
        return state is not None and state.last == 0

    asked: list[Callable[[Producers], object]] = [
        lambda one: one.check(4, part(9, 10, 19, name)).verdict is Verdict.UNKNOWN_PRODUCER,
        lambda one: one.state(4, name) is None,
        lambda one: not one.close(4, name),
        lambda one: one.snapshot()()["producers"]["queue_id"].to_pylist() == [7],
        opens_anew,
    ]
    for ask in asked:
        producers = sent(part(-1, 0, 9, name))
        producers.record(7, part(-1, 0, 9, name), 0, 1_000)
        producers.drop_queue(4)
        assert ask(producers)
        assert producers.state(7, name) is not None


def test_queues_that_go_together_are_one_look_at_all_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may have a million of them."""
    producers = sent(part(-1, 0, 9))
    looks: list[int] = []
    forget = producers._forget_gone

    def counted() -> None:
        looks.extend([1] * bool(producers._gone))
        forget()

    monkeypatch.setattr(producers, "_forget_gone", counted)
    for queue_id in range(64):
        producers.drop_queue(queue_id)
    assert len(producers) == 0
    assert len(looks) == 1


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.integers(1, 3)), max_size=30))
def test_snapshot_and_replay_are_idempotent(steps: list[tuple[int, str, int]]) -> None:
    """A snapshot loads equal, and recording the same frames again changes nothing."""
    producers, last = Producers(), dict[tuple[int, str], int]()
    frames = []
    for number, (queue_id, name, rows) in enumerate(steps):
        previous = last.get((queue_id, name), -1)
        one = part(previous, previous + 1, previous + rows, name)
        assert producers.check(queue_id, one).verdict is Verdict.ACCEPT
        last[queue_id, name] = previous + rows
        frames.append((queue_id, one, number * 10, number))
        producers.record(*frames[-1])
    loaded = Producers()
    loaded.load(producers.snapshot()())
    for frame in frames:
        loaded.record(*frame)
    assert loaded.snapshot()() == producers.snapshot()()
