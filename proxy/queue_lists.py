"""Queues as stores name them: `queue_ref`, and all of a topic, `QueueLists`."""

from __future__ import annotations

from typing import NamedTuple

from millpond.core.limits import QUEUE_LISTS
from millpond.metadata.client import QueueInfo, TopicInfo
from millpond.store.client import QueueRef


def queue_ref(topic: TopicInfo, queue: QueueInfo) -> QueueRef:
    return QueueRef(topic.tenant_id, topic.topic_id, queue.queue_id, queue.queue)


class QueueList(NamedTuple):
    """All queues of a topic, and the store that has them all, if one has."""

    topic: TopicInfo
    refs: list[QueueRef]
    by_id: dict[int, QueueInfo]
    store: str | None


class QueueLists:
    """The same list again for the same topic: a store knows it by its identity. Bounded; the oldest go first."""

    def __init__(self) -> None:
        self._known: dict[int, QueueList] = {}

    def of(self, topic: TopicInfo) -> QueueList:
        known = self._known.get(topic.topic_id)
        if known is None or known.topic is not topic:
            stores = {queue.spans[-1].store_group for queue in topic.queues}
            store = stores.pop() if len(stores) == 1 else None
            refs = [queue_ref(topic, queue) for queue in topic.queues]
            known = QueueList(topic, refs, {queue.queue_id: queue for queue in topic.queues}, store)
            self._known[topic.topic_id] = known
            if len(self._known) > QUEUE_LISTS:
                del self._known[next(iter(self._known))]
        return known
