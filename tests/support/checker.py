"""The checker: what a run with faults must keep, whatever was killed, cut or full.

Every attempt is recorded as ok, fail (surely nothing was done) or unknown (a timeout, a broken connection). After
the heal and a full drain, `check` compares what was promised with what is there:

    lost         acknowledged, and not to be read
    unexpected   to be read, and never sent or refused
    places       (topic, queue, offset) holds one payload, in every answer of every kind; an acknowledged offset is
                 the one it is read at; offsets are dense
    copies       as many as attempts allow: one for a session or a dedup id, else one for each ok or unknown
    order        of one key: in one queue, in the order sent
    deliveries   a message acknowledged with `ok` is not handed out again; a lease is not handed out twice before its
                 end; attempts count up
    committed    never goes back, never passes the confirmed end nor a message that nobody acknowledged

and that the run was worth something: enough acknowledgements before and after each fault.

It is told of events in the order in which the client saw them; `now` numbers them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from millpond.core.clock import SystemClock

CLOCK_SLACK_SECONDS = 0.1  # a lease's end as the store sees it, against this process's clock


class Place(NamedTuple):
    topic: str
    queue: int
    offset: int


@dataclass(slots=True)
class Sent:
    """One payload: all attempts to send it. `once`: a session or a dedup id forbids copies."""

    topic: str
    payload: str
    key: str | None
    once: bool
    batch: int  # event number of the first attempt: messages of one request stand in its order
    attempts: int = 0
    ok: int = 0
    unknown: int = 0
    places: set[Place] = field(default_factory=set)
    answered: int = -1
    refused: str = ""

    @property
    def copies(self) -> int:
        return min(1, self.ok + self.unknown) if self.once else self.ok + self.unknown


class Delivery(NamedTuple):
    """`begun`, `ended`: event numbers of the receive; `begun_at`, `ended_at`: the same in seconds."""

    begun: int
    ended: int
    begun_at: float
    ended_at: float
    attempt: int
    lease_seconds: float


class Fault(NamedTuple):
    """`forgets_grants`: grants are written and not flushed, so a power cut may take back the newest ones."""

    name: str
    at: int
    forgets_grants: bool


Item = tuple[str, Place]  # a group's view of a message: topic and group name, and where it stands


class Checker:
    def __init__(self) -> None:
        self._clock = SystemClock()
        self._events = 0
        self._sent: dict[str, Sent] = {}
        self._keys: defaultdict[tuple[str, str], list[Sent]] = defaultdict(list)
        self._held: dict[Place, str] = {}
        self._whole: defaultdict[str, dict[int, range]] = defaultdict(dict)
        self._deliveries: defaultdict[Item, list[Delivery]] = defaultdict(list)
        self._given_back: defaultdict[Item, list[int]] = defaultdict(list)
        self._acking: dict[Item, int] = {}
        self._acked: dict[Item, int] = {}
        self._committed: dict[tuple[str, str, int], tuple[int, int]] = {}
        self._faults: list[Fault] = []
        self._ok_at: list[int] = []
        self.wrong: list[str] = []
        self.statuses: Counter[str] = Counter()

    def now(self) -> int:
        self._events += 1
        return self._events

    # -- produce -------------------------------------------------------------------------------------------

    def sending(self, topic: str, payloads: list[str], key: str | None = None, *, once: bool = False) -> None:
        """An attempt to send these in one request begins: the first one, or another one."""
        begun = self.now()
        for payload in payloads:
            self._sending(topic, payload, key, once, begun)

    def _sending(self, topic: str, payload: str, key: str | None, once: bool, begun: int) -> None:
        sent = self._sent.get(payload)
        if sent is None:
            line = self._keys[topic, key] if key is not None else []
            sent = self._sent[payload] = Sent(topic, payload, key, once, begun)
            line.append(sent)
        sent.attempts += 1

    def sent_ok(self, payload: str, queue: int, offset: int | None) -> None:
        """`offset` None: acknowledged as a duplicate whose place is forgotten."""
        sent = self._sent[payload]
        sent.ok += 1
        sent.answered = self.now()
        self._ok_at.append(sent.answered)
        if offset is not None:
            place = Place(sent.topic, queue, offset)
            sent.places.add(place)
            self._hold(place, payload, "acknowledged")

    def sent_fail(self, payload: str, why: str) -> None:
        """Refused: it must not be there, unless another attempt put it there."""
        self._sent[payload].answered = self.now()
        self._sent[payload].refused = why

    def sent_unknown(self, payload: str) -> None:
        self._sent[payload].unknown += 1

    # -- reads ---------------------------------------------------------------------------------------------

    def _hold(self, place: Place, payload: str, how: str) -> None:
        there = self._held.setdefault(place, payload)
        if there != payload:
            self.wrong.append(f"{place} is {payload!r} ({how}) and was {there!r}")

    def read(self, topic: str, queue: int, offset: int, payload: str, how: str) -> None:
        """Seen in an answer: a direct read, a search, the tier."""
        self._hold(Place(topic, queue, offset), payload, how)

    def read_whole(self, topic: str, queue: int, start: int, end: int, payloads: list[str]) -> None:
        """A queue from its start to its confirmed end, after the drain."""
        self._whole[topic][queue] = range(start, end)
        if len(payloads) != end - start:
            self.wrong.append(f"{topic}/{queue}: {len(payloads)} messages between offsets {start} and {end}")
        for offset, payload in enumerate(payloads, start):
            self.read(topic, queue, offset, payload, "read at the end")

    # -- consume -------------------------------------------------------------------------------------------

    def receiving(self) -> tuple[int, float]:
        """Give the answer to `delivered`."""
        return self.now(), self._clock.monotonic()

    def delivered(
        self, group: str, place: Place, payload: str, attempt: int, begun: tuple[int, float], lease_ms: int
    ) -> None:
        self._hold(place, payload, f"delivered to {group}")
        one = Delivery(begun[0], self.now(), begun[1], self._clock.monotonic(), attempt, lease_ms / 1000)
        self._deliveries[group, place].append(one)

    def given_back(self, group: str, place: Place) -> None:
        """A nack is about to be sent."""
        self._given_back[group, place].append(self.now())

    def acking(self, group: str, place: Place) -> None:
        self._acking.setdefault((group, place), self.now())

    def acked(self, group: str, place: Place, status: str) -> None:
        self.statuses[status] += 1
        if status == "ok":
            self._acked.setdefault((group, place), self.now())

    def committed(self, group: str, topic: str, queue: int, committed: int, end: int) -> None:
        """A group's progress as `lag` shows it. Observations of one queue come one after another."""
        before = self._committed.get((group, topic, queue), (0, 0))[0]
        if committed < before:
            self.wrong.append(f"{group}: committed offset of {topic}/{queue} went back from {before} to {committed}")
        if committed > end:
            self.wrong.append(f"{group}: committed offset {committed} of {topic}/{queue} is beyond the end {end}")
        for offset in range(before, committed):
            if (group, Place(topic, queue, offset)) not in self._acking:
                self.wrong.append(f"{group}: {topic}/{queue} is committed beyond {offset}, which nobody acknowledged")
        self._committed[group, topic, queue] = (max(before, committed), end)

    def drained(self, group: str, topic: str, messages: int) -> bool:
        """Whether the group's progress, as last told, is at the end of every queue of the topic: `messages` in all."""
        seen = [one for (name, of, _), one in self._committed.items() if (name, of) == (group, topic)]
        return sum(committed for committed, _ in seen) == messages and all(done == end for done, end in seen)

    # -- faults and the verdict ----------------------------------------------------------------------------

    def fault(self, name: str, *, forgets_grants: bool = False) -> None:
        """A fault has happened now, and was proven to."""
        self._faults.append(Fault(name, self.now(), forgets_grants))

    @property
    def acknowledged(self) -> int:
        return len(self._ok_at)

    @property
    def unknown(self) -> int:
        return sum(sent.unknown for sent in self._sent.values())

    def check(self, groups: Sequence[str], *, least: int, faults: int) -> None:
        """Raises AssertionError naming what is wrong. `groups`: they must have drained every topic that was read
        whole. `least`: acknowledgements before the first, between any two and after the last of `faults` faults."""
        self._check_messages()
        for topic in list(self._whole):
            for group in groups:
                self._check_group(group, topic)
        self._check_deliveries()
        self._check_worth(least, faults)
        assert not self.wrong, f"{len(self.wrong)} violations:\n" + "\n".join(self.wrong[:30])

    def _check_messages(self) -> None:
        found: defaultdict[str, set[Place]] = defaultdict(set)
        for topic, queues in self._whole.items():
            for queue, offsets in queues.items():
                for offset in offsets:
                    place = Place(topic, queue, offset)
                    found[self._held[place]].add(place)
        for place in self._held:
            whole = self._whole.get(place.topic, {}).get(place.queue)
            if whole is not None and place.offset not in whole:
                self.wrong.append(f"{place} was seen, and is not there at the end")
        for payload, places in found.items():
            sent = self._sent.get(payload)
            if sent is None or sent.topic != next(iter(places)).topic or not sent.copies:
                self.wrong.append(f"unexpected: {payload!r} at {sorted(places)} was never sent, or refused: {sent}")
            elif len(places) > sent.copies:
                self.wrong.append(f"{payload!r} is there {len(places)} times: {sorted(places)}; {sent}")
        for sent in self._sent.values():
            if sent.topic in self._whole and sent.ok and not sent.places <= found[sent.payload]:
                self.wrong.append(f"lost: {sent.payload!r}, acknowledged at {sorted(sent.places)}")
            if sent.topic in self._whole and sent.ok and not found[sent.payload]:
                self.wrong.append(f"lost: {sent.payload!r}, acknowledged")
        self._check_order(found)

    def _check_order(self, found: dict[str, set[Place]]) -> None:
        for (topic, key), line in self._keys.items():
            there = [(sent, min(found[sent.payload])) for sent in line if found.get(sent.payload)]
            if len({place.queue for _, place in there}) > 1:
                self.wrong.append(f"key {key!r} of {topic} is in several queues")
            highest: tuple[int, Sent] | None = None  # of those whose place was settled before the next was sent
            batch: list[tuple[int, Sent]] = []
            for sent, place in there:
                if batch and batch[0][1].batch != sent.batch:
                    batch = []
                for offset, earlier in (highest, *batch) if highest else batch:
                    if offset >= place.offset:
                        self.wrong.append(f"key {key!r}: {sent.payload!r} at {place} is before {earlier.payload!r}")
                batch.append((place.offset, sent))
                if sent.once or sent.answered >= 0:
                    highest = max(highest or (-1, sent), (place.offset, sent), key=lambda one: one[0])

    def _check_group(self, group: str, topic: str) -> None:
        if not self.drained(group, topic, sum(len(offsets) for offsets in self._whole[topic].values())):
            self.wrong.append(f"{group} has not drained {topic}: {self._committed}")
        for queue, offsets in self._whole[topic].items():
            for offset in offsets:
                if (group, Place(topic, queue, offset)) not in self._deliveries:
                    self.wrong.append(f"{group} never got {topic}/{queue}/{offset}")

    def _check_deliveries(self) -> None:
        for item, deliveries in self._deliveries.items():
            ok_at = self._acked.get(item)
            for one in deliveries:
                if ok_at is not None and one.begun > ok_at:
                    self.wrong.append(f"{item} was acknowledged with ok and delivered again: {one}")
            for earlier in deliveries:
                for later in deliveries:
                    if earlier.ended < later.begun:
                        self._check_pair(item, earlier, later)

    def _check_pair(self, item: Item, earlier: Delivery, later: Delivery) -> None:
        forgotten = any(f.forgets_grants and earlier.begun < f.at < later.ended for f in self._faults)
        if forgotten:
            return
        if later.attempt <= earlier.attempt:
            self.wrong.append(f"{item}: attempts do not count up: {earlier}, {later}")
        ended = later.ended_at - earlier.begun_at >= earlier.lease_seconds - CLOCK_SLACK_SECONDS
        if not ended and not any(earlier.begun < at < later.ended for at in self._given_back[item]):
            self.wrong.append(f"{item}: handed out again before its lease ended: {earlier}, {later}")

    def _check_worth(self, least: int, faults: int) -> None:
        assert len(self._faults) == faults, f"{len(self._faults)} faults happened, {faults} were meant to"
        borders = [0, *(fault.at for fault in self._faults), self._events + 1]
        for first, end in pairwise(borders):
            count = sum(first < at < end for at in self._ok_at)
            assert count >= least, f"only {count} messages were acknowledged between two faults"
