"""The checker notices each kind of wrong: a story that is right passes, one with one thing wrong in it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.checker import Checker, Place

GROUP, TOPIC, LEASE_MS = "readers", "kept", 60_000
PLACES = [Place(TOPIC, 0, offset) for offset in range(4)]
PAYLOADS = ["a", "b", "c", "d"]


class Story:
    """Two messages, a fault, two more; a group gets and acks all of them. Each wrong changes one step of it."""

    def __init__(self) -> None:
        self.checker = Checker()
        self.payloads = list(PAYLOADS)
        self.groups = [GROUP]

    def send(self, payload: str, offset: int, *, key: str | None = "k", once: bool = False) -> None:
        self.checker.sending(TOPIC, [payload], key, once=once)
        self.checker.sent_ok(payload, 0, offset)

    def deliver(self, offset: int, attempt: int = 1, lease_ms: int = LEASE_MS) -> None:
        begun = self.checker.receiving()
        self.checker.delivered(GROUP, PLACES[offset], PAYLOADS[offset], attempt, begun, lease_ms)

    def ack(self, offset: int) -> None:
        self.checker.acking(GROUP, PLACES[offset])
        self.checker.acked(GROUP, PLACES[offset], "ok")

    def tell(self, *, fault: bool = True, forgets: bool = False) -> None:
        for offset in (0, 1):
            self.send(PAYLOADS[offset], offset)
        if fault:
            self.checker.fault("kill", forgets_grants=forgets)
        for offset in (2, 3):
            self.send(PAYLOADS[offset], offset)
        for offset in range(4):
            self.deliver(offset)
            self.ack(offset)
        self.checker.committed(GROUP, TOPIC, 0, 2, 4)
        self.checker.committed(GROUP, TOPIC, 0, 4, 4)

    def verdict(self) -> None:
        self.checker.read_whole(TOPIC, 0, 0, len(self.payloads), self.payloads)
        self.checker.check(self.groups, least=2, faults=1)


def test_a_right_story_passes() -> None:
    """Nothing wrong is seen where nothing is."""
    story = Story()
    story.tell()
    story.verdict()


def lost(story: Story) -> None:
    story.tell()
    story.payloads.pop()


def moved(story: Story) -> None:
    story.tell()
    story.payloads.reverse()


def unexpected(story: Story) -> None:
    story.tell()
    story.payloads.append("never sent")


def refused(story: Story) -> None:
    story.tell()
    story.checker.sending(TOPIC, ["refused"])
    story.checker.sent_fail("refused", "disk_full")
    story.payloads.append("refused")


def twice(story: Story) -> None:
    story.tell()
    story.payloads.append("d")


def session_twice(story: Story) -> None:
    story.checker.sending(TOPIC, ["s"], once=True)
    story.checker.sent_unknown("s")
    story.tell()
    story.payloads += ["s", "s"]


def two_payloads(story: Story) -> None:
    story.tell()
    story.checker.read(TOPIC, 0, 1, "another", "found by key")


def out_of_order(story: Story) -> None:
    story.tell()
    story.checker.sending(TOPIC, ["f", "e"], "other")
    for payload in "ef":
        story.checker.sent_unknown(payload)
    story.payloads += ["e", "f"]


def two_queues(story: Story) -> None:
    story.tell()
    story.checker.sending(TOPIC, ["e"], "k")
    story.checker.sent_ok("e", 1, 0)
    story.checker.read_whole(TOPIC, 1, 0, 1, ["e"])


def acked_again(story: Story) -> None:
    story.tell()
    story.deliver(0, attempt=2, lease_ms=0)


def leased_twice(story: Story) -> None:
    story.deliver(0)
    story.deliver(0, attempt=2)
    story.tell()


def attempts(story: Story) -> None:
    story.deliver(0, attempt=2, lease_ms=0)
    story.tell()


def back(story: Story) -> None:
    story.tell()
    story.checker.committed(GROUP, TOPIC, 0, 3, 4)


def beyond(story: Story) -> None:
    story.tell()
    story.checker.committed(GROUP, TOPIC, 0, 4, 3)


def not_acked(story: Story) -> None:
    story.checker.committed(GROUP, TOPIC, 0, 1, 4)
    story.tell()


def not_drained(story: Story) -> None:
    story.tell()
    story.groups.append("others")


def no_fault(story: Story) -> None:
    story.tell(fault=False)


def vacuous(story: Story) -> None:
    story.checker.fault("too early")
    story.tell(fault=False)


WRONGS: list[tuple[Callable[[Story], None], str]] = [
    (lost, "lost: 'd'"),
    (moved, "was 'a'"),
    (unexpected, "'never sent' at"),
    (refused, "refused"),
    (twice, "'d' is there 2 times"),
    (session_twice, "'s' is there 2 times"),
    (two_payloads, "'another'"),
    (out_of_order, "is before 'f'"),
    (two_queues, "several queues"),
    (acked_again, "delivered again"),
    (leased_twice, "before its lease ended"),
    (attempts, "do not count up"),
    (back, "went back"),
    (beyond, "beyond the end"),
    (not_acked, "nobody acknowledged"),
    (not_drained, "has not drained"),
    (no_fault, "0 faults"),
    (vacuous, "only 0 messages"),
]


@pytest.mark.parametrize(("change", "told"), WRONGS, ids=[change.__name__ for change, _ in WRONGS])
def test_each_wrong_is_noticed(change: Callable[[Story], None], told: str) -> None:
    """One thing is wrong, and the checker says which."""
    story = Story()
    change(story)
    with pytest.raises(AssertionError) as caught:
        story.verdict()
    assert told in str(caught.value)


def test_a_power_cut_may_forget_grants() -> None:
    """The same attempt twice, across a fault that takes back what was not flushed, is allowed; a second kill not."""
    story = Story()
    story.deliver(0)
    story.tell(forgets=True)
    story.verdict()
