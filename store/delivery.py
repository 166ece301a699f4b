"""Delivery: receive, lease, settle, seek, lag and delete_group of a store.

    receive -> Handout decides (under the queue's lock) -> Cursor.grant -> state frame written -> answer with frames
            -> messages that were being flushed are on the disk -> shown
    settle  -> `settles.py`: Cursor.settle by columns -> state frame flushed (written, if the topic says so) -> statuses

Single-threaded on the event loop. The cursors are the fold's; what is kept beside them (who waits, which queues may
have something, claims, attempt ids) is memory of the primary and may be lost.

A grant whose caller goes away before it is answered is released uncounted: the next delivery has the same attempt.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from millpond.core.errors import Conflict, MillpondError, NotFound, Unavailable
from millpond.store.attempts import Attempts
from millpond.store.client import (
    Grant,
    GroupRef,
    LagRequest,
    LagResult,
    LeaseRequest,
    ReceiveRequest,
    ReceiveResult,
    Risen,
    SeekRequest,
    SeekResult,
    SettleRequest,
    SettleResult,
    StoredFrame,
)
from millpond.store.fold.cursors import Cursors
from millpond.store.groups import Groups, first_number
from millpond.store.handout import DeliveryLog, Drawn, Handout
from millpond.store.moves import Moves
from millpond.store.parked import Parked, Woken
from millpond.store.places import DueTimes, Group, Place
from millpond.store.settles import Settles, offsets_of
from millpond.store.waiters import Waiter, WaiterCount

__all__ = ["Delivery", "DeliveryLog"]

_SCAN_ROUNDS = 8  # of slices that a receive filters which does not wait
_KEEN_MS = 1_000  # a consumer that has waited is expected back for so long


class Delivery:
    def __init__(
        self, log: DeliveryLog, cursors: Cursors, now_ms: Callable[[], int], waiting: Callable[[], None] = lambda: None
    ) -> None:
        """`now_ms`: the store's clock. The cursors are those of the fold, loaded and replayed. `waiting` is called when
        a receive begins to wait."""
        self._log = log
        self._cursors = cursors
        self._now_ms = now_ms
        self._due = DueTimes()
        self._waiting = WaiterCount(self._sleeping)
        self._groups = Groups(log, cursors, now_ms, self._waiting, self._due)
        self._moves = Moves(log, self._groups, now_ms, self._note_due)
        self._settles = Settles(log, self._groups, now_ms, self._note_due)
        self._begins_to_wait = waiting
        self._timer: tuple[int, asyncio.TimerHandle] | None = None
        self.attempts = Attempts(self._groups, now_ms)
        # A power cut may forget the newest grants, and their numbers must not be given to others: those of
        # this start lie above all of earlier ones.
        self._first_lease = self._next_claim = first_number(now_ms())

    def close(self) -> None:
        """All waiting receives end with Unavailable(shutting_down)."""
        self._waiting.ends.close()
        if self._timer is not None:
            self._timer[1].cancel()
            self._timer = None
        for group in self._groups:
            group.waiters.fail(Unavailable("shutting_down", "the store is shutting down"))

    @property
    def waiting(self) -> int:
        """Receives that wait for a message."""
        return self._waiting.count

    # -- what the engine tells --------------------------------------------------------------------------------

    def on_flushing(self, queue_id: int) -> bool:
        """A flush has begun that will move the confirmed end of a queue: who waits for that has his answer made
        meanwhile. Whether somebody does."""
        places = self._groups.at(queue_id)
        if not places:
            return False
        woken = False
        end = self._log.flushing_end(queue_id)
        for place in places:
            group = place.group
            if place.cursor.head < end and queue_id not in group.full and place.claim is None:
                woken = group.expect(queue_id) or woken
        return woken

    def on_confirmed(self, queue_id: int) -> None:
        """The confirmed end of a queue moved."""
        places = self._groups.at(queue_id)
        if not places:
            return
        end = self._log.ends(queue_id).end_offset
        for place in places:
            group = place.group
            group.flushing.pop(queue_id, None)
            new = place.cursor.head < end and queue_id not in group.full and place.claim is None
            if new or place.withheld:
                place.withheld = False
                group.rouse(queue_id)

    def awaits(self, queue_id: int) -> bool:
        """Whether a receive waits for more of this queue, or one did a moment ago: its consumer comes again."""
        places = self._groups.at(queue_id)
        if not places:
            return False
        since = self._now_ms() - _KEEN_MS
        return any(place.group.waiters or place.group.waited_ms > since for place in places)

    def _sleeping(self) -> None:
        self._begins_to_wait()
        self._arm()

    def wake_due(self) -> None:
        """Rows, or claims, fell due by now: their queues may have something."""
        for place in self._due.pop(self._now_ms()):
            place.group.rouse(place.queue_id)

    def _arm(self) -> None:
        """Have `wake_due` called at the earliest due time, if anybody waits for it."""
        due = self._due.earliest
        if self._timer is not None and self._timer[0] <= due:
            return
        delay_ms = max(1, min(due - self._now_ms(), 3_600_000))
        if self._timer is not None:
            self._timer[1].cancel()
        self._timer = (due, asyncio.get_running_loop().call_later(delay_ms / 1000, self._on_timer))

    def _on_timer(self) -> None:
        self._timer = None
        self.wake_due()
        if self._waiting.count:
            self._arm()

    def _note_due(self, place: Place, due: int) -> None:
        self._due.note(place, due)
        if self._waiting.count:
            self._arm()

    # -- receive ----------------------------------------------------------------------------------------------

    async def receive(self, request: ReceiveRequest) -> ReceiveResult:
        """Raises BadRequest, NotFound(group_not_found) when the group is deleted meanwhile, TooManyRequests."""
        group, created = self._groups.of_request(request)
        handout = self._handout(group, request)
        repeated = self.attempts.repeated(request)
        if not repeated:
            return await self._served(group, request, handout, self._fill(group, request, handout), created)
        handout.drawn = repeated
        try:
            return await self._answer(group, request, handout, created)
        finally:
            group.pass_on()

    async def _served(
        self,
        group: Group,
        request: ReceiveRequest,
        handout: Handout,
        filled: Awaitable[None],
        created: bool,
        parked: Parked | None = None,
    ) -> ReceiveResult:
        """The answer once the handout is `filled`; what it has is released when nobody takes it."""
        try:
            await filled
            result = await self._answer(group, request, handout, created, parked)
        except BaseException:
            self._release(handout)
            raise
        finally:
            group.pass_on()
        if request.attempt_id is not None and handout.drawn:
            self.attempts.remember(request.group.group_id, request.attempt_id, handout.drawn)
        return result

    def park(self, request: ReceiveRequest, rises: Callable[[Risen], None]) -> Parked | None:
        """The receive as one that waits without a task, when waiting is all it can do now; None: `receive` it. `rises`
        is told how the wait ends, perhaps before this returns.

        Raises nothing, and changes nothing when it is None.
        """
        group = self._groups.get(request.group.group_id)
        if group is None or group.checked is not request.queues or len(group.places) != len(request.queues):
            return None
        if not request.wait_ms or group.ready or group.full or self._waiting.full:
            return None
        now = self._now_ms()
        if self._due.earliest <= now or self.attempts.repeated(request):
            return None
        group.waited_ms = now
        self._waiting.enter()
        parked = Parked(group, request, rises, self._resume, self._log.shown, self._waiting.leave)
        if group.flushing:
            group.pass_on()
        return parked

    async def _resume(self, parked: Parked) -> ReceiveResult:
        """Serve one that was woken; when others were faster it goes back to its place in the line."""
        handout = self._handout(parked.group, parked.request)
        filled = self._fill_woken(parked, handout)
        return await self._served(parked.group, parked.request, handout, filled, created=False, parked=parked)

    def _take_at_hand(self, parked: Parked, handout: Handout) -> bool:
        """What one that was woken mostly finds: new messages of one queue, in memory. Whether it did; else it has to
        look for them, and nothing has changed."""
        group = parked.group
        place = self._groups.only_place(group, parked.request, handout.now)
        if place is None:
            return False
        place.cursor.next_lease = max(place.cursor.next_lease, self._first_lease)
        if not handout.take_at_hand(place, early=not group.ready):
            return False
        self._after(place)
        self._log.state_changed()
        return True

    async def _fill_woken(self, parked: Parked, handout: Handout) -> None:
        group, request = parked.group, parked.request
        try:
            if self._groups.get(group.ref.group_id) is not group:
                raise _group_gone(group.ref)
            if not self._take_at_hand(parked, handout):
                await self._draw(group, handout, request)
        finally:
            group.waiters.done()
        if handout.empty:
            await self._wait(group, request, handout, Woken(parked.waiter, parked.deadline))

    def _handout(self, group: Group, request: ReceiveRequest) -> Handout:
        half, odd = divmod(request.max_messages, 2)
        if odd:
            half += group.favour_due
            group.favour_due = not group.favour_due
        if group.full:
            group.recheck_full(request.max_in_flight)
        return Handout(self._log, request, self._now_ms(), half)

    async def _fill(self, group: Group, request: ReceiveRequest, handout: Handout) -> None:
        """Until the handout has something, or may not wait any longer."""
        if not request.wait_ms or not group.waiters.awake:
            rounds = 0
            while handout.empty and (rounds == 0 or handout.unfinished) and rounds < _SCAN_ROUNDS:
                await self._draw(group, handout, request)
                rounds += 1
        if handout.empty and request.wait_ms and not group.is_full(group.named(request.queues)):
            self._waiting.enter()
            try:
                await self._wait(group, request, handout)
            finally:
                self._waiting.leave()

    async def _wait(
        self,
        group: Group,
        request: ReceiveRequest,
        handout: Handout,
        before: Woken | None = None,
    ) -> None:
        """`before`: it has waited, and was woken for nothing."""
        loop = asyncio.get_running_loop()
        deadline = before.deadline if before is not None else loop.time() + request.wait_ms / 1000
        waiter = before.waiter if before is not None else Waiter(request.queues)
        woken_before = before is not None
        while handout.empty and loop.time() < deadline:
            waiter.queue_ids = wanted = group.named(request.queues)
            if group.is_full(wanted):
                return
            if self._groups.get(group.ref.group_id) is not group:
                raise _group_gone(group.ref)
            if group.has_ready(wanted) and not group.waiters.awake:
                await asyncio.sleep(0)  # a long scan leaves the loop to others in between
                await self._draw(group, handout, request)
                continue
            group.waited_ms = self._now_ms()
            woken = await group.waiters.sleep(waiter, deadline - loop.time(), first=woken_before)
            if not woken:
                return
            woken_before = True
            try:
                await self._draw(group, handout, request)
            finally:
                group.waiters.done()

    async def _draw(self, group: Group, handout: Handout, request: ReceiveRequest) -> None:
        """One round over the queues that may have something, each at most once, of those that the request names."""
        handout.now = now = self._now_ms()
        handout.unfinished = handout.early = False
        if self._due.earliest <= now:
            self.wake_due()
        try:
            await self._go_round(group, group.ready, handout, request)
            if handout.empty and request.wait_ms and group.flushing:
                handout.early = True
                await self._go_round(group, group.flushing, handout, request)
            for place in handout.more_due:
                if not handout.satisfied:
                    await handout.visit_again(place)
                    self._after(place)
        finally:
            handout.more_due.clear()
            if self._cursors.dirty:
                self._log.state_changed()

    async def _go_round(
        self, group: Group, queue_ids: OrderedDict[int, None], handout: Handout, request: ReceiveRequest
    ) -> None:
        known, wanted = len(group.places), group.named(request.queues)
        for _ in range(len(queue_ids)):
            if handout.satisfied or not queue_ids:
                return
            queue_id = next(iter(queue_ids))
            queue_ids.move_to_end(queue_id)  # before any wait: whoever comes meanwhile begins with another
            if len(group.places) != known:  # the group has got more meanwhile
                known, wanted = len(group.places), group.named(request.queues)
            if wanted is not None and queue_id not in wanted:
                continue
            place = self._groups.find(group.ref.group_id, queue_id)
            if place is not None:
                await self._visit(place, handout)

    async def _visit(self, place: Place, handout: Handout) -> None:
        place.cursor.next_lease = max(place.cursor.next_lease, self._first_lease)
        self._next_claim += 1
        try:
            await handout.visit(place, self._next_claim)
        except MillpondError:
            # this queue's index cannot be read; what the others gave is worth more than saying so now
            if handout.empty:
                raise
        finally:
            self._after(place)

    def _after(self, place: Place) -> None:
        """Keep or drop a queue among the ready ones and those being flushed, by what it has now."""
        now, queue_id, cursor = self._now_ms(), place.queue_id, place.cursor
        group, end = place.group, self._log.ends(queue_id).end_offset
        free = queue_id not in group.full and not place.claimed(now)
        if (free and cursor.head < end) or (not place.withheld and cursor.has_due(now)):
            group.ready[queue_id] = None
        else:
            group.ready.pop(queue_id, None)
        if free and end <= cursor.head < self._log.flushing_end(queue_id):
            group.flushing[queue_id] = None
        else:
            group.flushing.pop(queue_id, None)
        self._note_due(place, cursor.earliest_due)
        if place.claim is not None:
            self._note_due(place, place.claim.until)

    async def _answer(
        self, group: Group, request: ReceiveRequest, handout: Handout, created: bool, parked: Parked | None = None
    ) -> ReceiveResult:
        """All of it may be shown; but to a `parked` one that has every frame, which waits for that by itself."""
        room = request.max_bytes
        grants: list[Grant] = []
        shown_at, whole = 0, True
        for drawn in handout.drawn:
            ends = self._log.ends(drawn.place.queue_id)
            if drawn.offsets[-1] >= ends.end_offset:
                shown_at = self._log.flushing
            frames = await self._frames(drawn, ends.local_offset, room)
            whole = whole and drawn.spots is not None and len(frames) == len(drawn.spots)
            room = max(0, room - sum(len(frame.payload) for frame in frames))
            grants.append(drawn.grant(ends.local_offset, frames))
        if grants or created:
            await self._log.state_written()
        if parked is not None and whole:
            parked.shown_at = shown_at
        elif shown_at:
            await self._log.shown(shown_at)
        reason = None
        if handout.empty:
            reason = "in_flight_full" if group.full else "scanning" if handout.unfinished else None
        return ReceiveResult(grants, handout.claims, reason, created)

    async def _frames(self, drawn: Drawn, local: int, max_bytes: int) -> list[StoredFrame]:
        offsets = drawn.offsets
        if drawn.spots is not None and max_bytes > 0:
            at_hand = self._log.frames_in_memory(drawn.spots, max_bytes)
            if at_hand is not None:
                return at_hand
            try:
                return await self._log.frames_at(drawn.place.queue_id, drawn.spots, max_bytes)
            except MillpondError:
                return []  # as below
        if offsets[0] < local:
            offsets = offsets[int(offsets.searchsorted(local)) :]
        if not len(offsets) or max_bytes <= 0:
            return []
        try:
            return await self._log.frames_for(drawn.place.queue_id, offsets, max_bytes)
        except MillpondError:
            return []  # granted without its frames: the proxy's own read says what is wrong with them

    def _release(self, handout: Handout) -> None:
        """Nobody takes what was handed out: it waits again, uncounted."""
        now = self._now_ms()
        for drawn in handout.drawn:
            place = drawn.place
            place.cursor.settle(drawn.lease, drawn.generation, drawn.offsets, "release", now)
            place.group.rouse(place.queue_id)
        for claim in handout.claims:
            for place in self._groups.at(claim.queue_id):
                if place.claim is not None and place.claim.number == claim.claim:
                    place.claim = None
                    place.group.rouse(place.queue_id)
        if handout.drawn:
            self._log.state_changed()

    # -- claims -----------------------------------------------------------------------------------------------

    async def lease(self, request: LeaseRequest) -> Grant:
        """Lease what the proxy took of a claimed range. Raises Conflict(claim_ended), BadRequest."""
        now = self._now_ms()
        place = self._groups.find(request.group.group_id, request.queue_id)
        claim = place.claim if place is not None and place.claimed(now) else None
        if place is None or claim is None or claim.number != request.claim:
            raise _claim_ended()
        cursor = place.cursor
        if cursor.generation != request.generation or cursor.head != claim.first:
            raise _claim_ended()
        take = offsets_of(request.take)
        claim.check(take, request.end)
        place.claim = None
        until = now + request.lease_ms
        cursor.next_lease = max(cursor.next_lease, self._first_lease)
        lease, attempts = cursor.grant(take, until, request.end)
        drawn = Drawn(place, cursor.generation, lease, take, attempts, until)
        self._after(place)
        place.group.pass_on()
        self._log.state_changed()
        await self._log.state_written()
        return drawn.grant(self._log.ends(place.queue_id).local_offset, [])

    # -- settle, seek, lag, delete ----------------------------------------------------------------------------

    async def settle(self, request: SettleRequest) -> SettleResult:
        """Answers when the state is as durable as the topic asks. Raises Unavailable(deadline_exceeded)."""
        return await self._settles.settle(request)

    async def seek(self, request: SeekRequest) -> SeekResult:
        """Raises BadRequest. Offsets beyond a queue's ends are taken for that end."""
        return await self._moves.seek(request)

    async def lag(self, request: LagRequest) -> LagResult:
        return await self._moves.lag(request)

    def groups(self) -> list[GroupRef]:
        """Those that have begun here."""
        return [group.ref for group in self._groups]

    async def delete_group(self, group: GroupRef) -> None:
        """Idempotent. Receives that wait end with NotFound(group_not_found)."""
        if self.drop_group(group):
            await self._log.state_flushed()

    def drop_group(self, group: GroupRef) -> bool:
        """Delete it; it may be there again after a crash. Whether it was there."""
        known = self._groups.get(group.group_id)
        if known is None:
            return False
        self._forget(known, _group_gone(group))
        self._cursors.delete_group(group)
        self._log.state_changed()
        return True

    def drop_topic(self, topic_id: int) -> None:
        """Its queues are gone, and the cursors in them. Receives that wait end with NotFound(topic_not_found)."""
        for group in [group for group in self._groups if group.ref.topic_id == topic_id]:
            self._forget(group, NotFound("topic_not_found", "the topic was deleted"))

    def _forget(self, group: Group, error: NotFound) -> None:
        self._groups.remove(group)
        group.waiters.fail(error)


def _claim_ended() -> Conflict:
    return Conflict("claim_ended", "the claim has run out, or the group was moved")


def _group_gone(group: GroupRef) -> NotFound:
    return NotFound("group_not_found", f"group {group.group_id} was deleted")
