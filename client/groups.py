"""`Groups`: consumer groups of a topic: make, see, delete; how far they are; where they go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from millpond.client.connection import Connection, path_of
from millpond.core.errors import BadRequest, NotFound

Start = Literal["earliest", "latest"]


class GroupFilter(msgspec.Struct, frozen=True):
    tag: str | None = None


class Group(msgspec.Struct, frozen=True):
    group: str
    topic: str
    start: Start
    filter: GroupFilter
    filter_version: int
    max_in_flight: int
    created_ms: int


class QueueLag(msgspec.Struct, frozen=True):
    """`committed`: all below it is settled; `lag`: messages from there to the end; `oldest_age_ms` of the first."""

    queue: int
    start_offset: int
    committed: int
    end_offset: int
    lag: int
    in_flight: int
    oldest_age_ms: int | None = None


class Lag(msgspec.Struct, frozen=True):
    queues: list[QueueLag]
    total: int


class QueueSeek(msgspec.Struct, frozen=True, rename={"from_offset": "from", "to_offset": "to"}):
    queue: int
    from_offset: int
    to_offset: int


QueueSeeks = list[QueueSeek]


class _Seek(msgspec.Struct):
    queues: list[QueueSeek]


class _Groups(msgspec.Struct):
    groups: list[Group]


class Groups:
    """Groups of one topic.

    >>> await Groups(connection, "orders").seek("kitchen", time_ms=1_700_000_000_000)
    """

    def __init__(self, connection: Connection, topic: str) -> None:
        self._connection = connection
        self._topic = topic

    async def create(
        self, group: str, *, start: Start = "latest", tag: str | None = None, max_in_flight: int | None = None
    ) -> Group:
        """Make a group, or find it the same; raises Conflict(filter_differs, group_differs)."""
        body: dict[str, object] = {"start": start, "filter": {"tag": tag}}
        if max_in_flight is not None:
            body["max_in_flight"] = max_in_flight
        made: Group = await self._connection.json("PUT", self._path(group), body, shape=Group)
        return made

    async def ensure(self, group: str, *, start: Start = "latest", tag: str | None = None) -> Group:
        """The group, made with `start` when it is not there. Raises Conflict(filter_differs) when `tag` is another."""
        try:
            found = await self.get(group)
        except NotFound as error:
            if error.code != "group_not_found":
                raise
            return await self.create(group, start=start, tag=tag)
        if tag is None or found.filter.tag == tag:
            return found
        return await self.create(group, start=found.start, tag=tag, max_in_flight=found.max_in_flight)

    async def get(self, group: str) -> Group:
        found: Group = await self._connection.get(self._path(group), shape=Group)
        return found

    async def list(self) -> list[Group]:
        answer: _Groups = await self._connection.get(path_of("topics", self._topic, "groups"), shape=_Groups)
        return answer.groups

    async def delete(self, group: str) -> None:
        await self._connection.json("DELETE", self._path(group))

    async def lag(self, group: str) -> Lag:
        lag: Lag = await self._connection.get(self._path(group, "lag"), shape=Lag)
        return lag

    async def seek(
        self,
        group: str,
        *,
        to: Start | None = None,
        time_ms: int | None = None,
        clock: Literal["store", "born"] = "store",
        offsets: Mapping[int, int] | None = None,
        like_group: str | None = None,
        dry_run: bool = False,
    ) -> QueueSeeks:
        """Move the group: `to` an end, to a time, to offsets by queue, or to where another group is; one of them."""
        given = [value for value in (to, time_ms, offsets, like_group) if value is not None]
        if len(given) != 1:
            raise BadRequest.field("seek", "exactly one of to, time_ms, offsets and like_group", len(given))
        target: Any = to
        if time_ms is not None:
            target = {"time": time_ms, "clock": clock}
        elif offsets is not None:
            target = {"offsets": {str(queue): offset for queue, offset in offsets.items()}}
        elif like_group is not None:
            target = {"group": like_group}
        seek_id = self._connection.random.bytes(12).hex()
        body = {"to": target, "dry_run": dry_run, "seek_id": seek_id}
        answer: _Seek = await self._connection.json(
            "POST", self._path(group, "seek"), body, shape=_Seek, repeatable=True
        )
        return answer.queues

    def _path(self, group: str, *rest: str) -> str:
        return path_of("topics", self._topic, "groups", group, *rest)
