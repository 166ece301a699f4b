"""Object stores, as an interface: `ObjectStore`. Implementations: a directory, and S3 (boto3).

Keys are relative to the store's prefix, with `/` between parts. Every call has a timeout and is retried with
jitter inside the implementation, not at call sites. Errors: NotFound(object_not_found), Conflict(object_exists),
Unavailable(tier_unavailable).
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import pyarrow as pa


class ObjectMeta(msgspec.Struct, frozen=True):
    """`sha256` in hex where the store kept it, else None."""

    key: str
    bytes: int
    sha256: str | None


class Staged(Protocol):
    """An object that grows: nobody sees it until it is published. One caller at a time."""

    def write(self, data: memoryview) -> None:
        """More of it. Blocks: called in a thread. Raises Unavailable(tier_unavailable)."""
        ...

    async def publish(self, key: str, sha256: str) -> None:
        """What was written becomes the object, as of `put_new`, and what is there was compared with it:
        Internal(tier_corrupt). May be called again after an error."""
        ...

    def drop(self) -> None:
        """What is left of it goes; called at the end, whether it was published or not. Blocks: called in a thread."""
        ...


class ObjectStore(Protocol):
    """`url` is how others address the prefix: `file:///dir` or `s3://bucket/prefix`."""

    @property
    def url(self) -> str: ...

    async def put_new(self, key: str, data: bytes | memoryview, sha256: str) -> None:
        """Create the object durably; one that is already there is Conflict(object_exists), whatever it holds."""
        ...

    def stage(self) -> Staged:
        """The beginning of an object that comes in pieces and is named when it is whole."""
        ...

    async def replace(self, key: str, data: bytes, etag: str | None) -> str:
        """Create (etag None) or replace exactly that version; returns the new etag. Conflict(object_exists)."""
        ...

    async def get(self, key: str, first: int = 0, end: int | None = None) -> bytes | pa.Buffer:
        """Bytes [first, end) of the object."""
        ...

    async def head(self, key: str) -> ObjectMeta: ...

    async def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[ObjectMeta]: ...

    async def delete(self, key: str) -> None:
        """Absent is fine."""
        ...

    async def check(self) -> None:
        """Whether it can be written and read right now. Raises Unavailable(tier_unavailable) saying why not."""
        ...

    async def close(self) -> None: ...
