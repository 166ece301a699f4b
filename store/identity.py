"""Whose data directory this is: `store.json`, written once, checked at every start.

    {"format": 1, "group": "a", "node": "<random>", "log_id": "<random, secret>", "segment_bytes": 268435456}

`log_id` seeds the checksums of frame headers, so it must not be known to those who write message bodies: the file
is readable by its owner only. `segment_bytes` is fixed here: a position says in which segment it stands.
"""

from __future__ import annotations

import msgspec

from millpond.core.clock import Random
from millpond.core.errors import MillpondError
from millpond.store.disk import Disk

NAME = "store.json"
FORMAT = 1


class DirectoryRefused(MillpondError):
    """The data directory cannot be used as it is; `detail` says why and what to do."""

    status, title = 500, "Data directory refused"
    codes = ("directory_refused",)

    def __init__(self, detail: str) -> None:
        super().__init__("directory_refused", detail)


class Identity(msgspec.Struct, frozen=True):
    format: int
    group: str
    node: str
    log_id: str
    segment_bytes: int


def load_or_create(disk: Disk, group: str, segment_bytes: int, random: Random) -> Identity:
    """The directory's identity; a new one in an empty directory. Raises DirectoryRefused."""
    try:
        data = disk.read_whole(NAME)
    except FileNotFoundError:
        if disk.names("log"):
            raise DirectoryRefused(f"there is a log but no {NAME}: restore that file from a backup") from None
        identity = Identity(FORMAT, group, random.bytes(8).hex(), random.bytes(16).hex(), segment_bytes)
        disk.write_whole(NAME, [msgspec.json.format(msgspec.json.encode(identity))])
        return identity
    try:
        identity = msgspec.json.decode(data, type=Identity)
    except msgspec.DecodeError as error:
        raise DirectoryRefused(f"{NAME} cannot be read ({error}): restore that file from a backup") from error
    if identity.format > FORMAT:
        raise DirectoryRefused(
            f"the data directory has format {identity.format}, this release knows {FORMAT}: start a newer release"
        )
    if identity.group != group:
        raise DirectoryRefused(
            f"the data directory belongs to store group {identity.group!r}, not {group!r}: "
            f"start with --group {identity.group}, or name another data directory"
        )
    return identity
