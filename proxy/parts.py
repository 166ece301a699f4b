"""What a proxy's handlers work with: `Parts`, built once by `proxy.app` and never changed.

Handlers reach everything through `call.parts`; nothing is global. `ProxyCall` is the type of their argument.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from millpond.core.clock import Clock, Random
from millpond.core.config import ProxyConfig
from millpond.core.errors import Unavailable
from millpond.core.http.call import Call
from millpond.core.tasks import Tasks
from millpond.metadata.client import MetadataClient, QueueInfo
from millpond.proxy.queue_lists import QueueLists
from millpond.store.client import Parks, StoreClient

if TYPE_CHECKING:
    from millpond.core.tier.objects import ObjectStore
    from millpond.proxy.catalog import Catalog
    from millpond.proxy.coalesce import Coalescer
    from millpond.proxy.counters import Counters
    from millpond.proxy.read_range import RangeReader
    from millpond.proxy.receipts import LeaseTokens


Siblings: TypeAlias = Callable[[], Awaitable[dict[str, dict[str, float]]]]
"""What all processes of this proxy count, by the number of the process; what is of none of them under an empty name."""


class Stores:
    """The store groups by name. The mapping may be filled and changed by its owner (`proxy.app`)."""

    def __init__(self, clients: Mapping[str, StoreClient]) -> None:
        self.clients = clients

    def of(self, queue: QueueInfo) -> StoreClient:
        """Where the queue's next message goes: the group of its last span."""
        return self.group(queue.spans[-1].store_group)

    def group(self, name: str) -> StoreClient:
        """Raises Unavailable(store_unavailable) for a group nobody has registered."""
        client = self.clients.get(name)
        if client is None:
            raise Unavailable("store_unavailable", f"no store of group {name!r} is known")
        return client

    def parking(self, name: str) -> Parks | None:
        """That group's store when it is in this process."""
        client = self.clients.get(name)
        return client if client is not None and _parks(client) else None


def _parks(client: StoreClient) -> TypeGuard[Parks]:
    return hasattr(client, "park")  # `isinstance` of a protocol takes microseconds


@dataclass(frozen=True, slots=True)
class Parts:
    config: ProxyConfig
    clock: Clock
    random: Random
    metadata: MetadataClient
    catalog: Catalog
    stores: Stores
    objects: ObjectStore
    tokens: LeaseTokens
    coalescer: Coalescer
    reader: RangeReader
    counters: Counters
    siblings: Siblings | None = None
    queue_lists: QueueLists = field(default_factory=QueueLists)
    releases: Tasks = field(default_factory=Tasks)
    """Leases that nobody can take any more, on their way back."""


ProxyCall: TypeAlias = Call[Parts]
