"""An object store in a directory: `DirectoryObjects`, an `ObjectStore`.

    <root>/v1/tenant=.../...parquet     objects, each under its key
    <root>/.tmp/<random>                objects being written; a name that starts with a dot is never a key
    <root>/.tmp/replace.lock            held (flock) during a replace, also between processes

An object appears under its name whole or not at all, also across a power cut: it is written to a temporary
file and read back step by step, fsynced, linked to its name (link(2) fails when the name is taken: that is the
create-if-absent), and its directory is fsynced, as is every directory made on the way.

SHA-256 is not stored beside the file: `head` computes it from the bytes that are there. A sidecar file would
be a second thing to lose, and extended attributes do not survive a copy to another disk; a recomputed checksum
cannot disagree with the content. `list` leaves it out.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from millpond.core.clock import Clock, Random
from millpond.core.errors import Conflict, NotFound, Unavailable
from millpond.core.limits import KIB, OBJECT_BYTES_PER_SECOND, OBJECT_SECONDS, OBJECT_TEMPORARY_MS, OBJECT_THREADS
from millpond.core.tier.gentle import GentleFile, Steps, read_through
from millpond.core.tier.keys import check_key
from millpond.core.tier.objects import ObjectMeta
from millpond.core.tier.pool import ObjectPool

T = TypeVar("T")

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted (does this file system have hard links?)",
    errno.EOPNOTSUPP: "this file system has no hard links",
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.EEXIST: "a part of the path is not a directory",
}
SEALING_THREADS = 2  # puts and the look at what was put: one object is on its way at a time
_READ_BYTES = 256 * KIB  # read at once


class DirectoryObjects:
    """Objects as files under `root`, which is made when it is first written to."""

    def __init__(self, root: Path, clock: Clock, random: Random, steps: Steps | None = None) -> None:
        """`steps`: in which what is sealed is written and read back; short ones when not given."""
        self._root = root.absolute()
        self._steps = steps or Steps()
        self._temporary = self._root / ".tmp"
        self._clock = clock
        self._random = random
        self._pool = ObjectPool(OBJECT_THREADS, "tier")
        self._sealing = ObjectPool(SEALING_THREADS, "tier-seal")  # readers have the other one

    @property
    def url(self) -> str:
        return self._root.as_uri()

    async def put_new(self, key: str, data: bytes | memoryview, sha256: str) -> None:
        """See `ObjectStore`. `sha256` is not needed here: `head` computes it from the file."""
        path = self._path(key)
        await self._run("put", key, lambda: self._create(path, key, data), len(data), self._sealing)

    def stage(self) -> StagedFile:
        return StagedFile(self._temporary_path, self._publish, self._steps)

    async def _publish(self, publish: Callable[[Path, str], None], key: str, size: int) -> None:
        path = self._path(key)
        await self._run("put", key, lambda: publish(path, key), size, self._sealing)

    async def replace(self, key: str, data: bytes, etag: str | None) -> str:
        path = self._path(key)
        return await self._run("replace", key, lambda: self._replace(path, key, data, etag), len(data))

    async def get(self, key: str, first: int = 0, end: int | None = None) -> bytes | pa.Buffer:
        path = self._path(key)
        return await self._run("get", key, lambda: _read(path, first, end))

    async def head(self, key: str) -> ObjectMeta:
        path = self._path(key)
        return await self._run("head", key, lambda: _describe(path, key, self._steps), pool=self._sealing)

    async def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[ObjectMeta]:
        return await self._run("list", prefix, lambda: _list(self._root, prefix, after, limit))

    async def delete(self, key: str) -> None:
        path = self._path(key)
        await self._run("delete", key, lambda: _delete(path))

    async def check(self) -> None:
        await self._run("check", "the tier directory", self._check)

    async def close(self) -> None:
        self._pool.close()
        self._sealing.close()

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    async def _run(
        self, verb: str, key: str, call: Callable[[], T], size: int = 0, pool: ObjectPool | None = None
    ) -> T:
        what = f"{verb} {key} in {self._root}"
        try:
            return await (pool or self._pool).run(OBJECT_SECONDS + size / OBJECT_BYTES_PER_SECOND, what, call)
        except FileNotFoundError:
            raise NotFound("object_not_found", f"{what}: there is no such object") from None
        except OSError as error:
            raise _unavailable(what, error) from error

    # -- in threads, from here on

    def _create(self, path: Path, key: str, data: bytes | memoryview) -> None:
        _make_directory(path.parent)
        with self._written(data) as temporary:
            _link(temporary, path, key)

    def _replace(self, path: Path, key: str, data: bytes, etag: str | None) -> str:
        _make_directory(path.parent)
        with self._written(data) as temporary, self._replace_lock():
            try:
                now: str | None = _etag(path.read_bytes())
            except FileNotFoundError:
                now = None
            if now != etag:
                raise Conflict("object_exists", f"{key} is not the version that was read")
            temporary.rename(path)
            _sync_directory(path.parent)
        return _etag(data)

    @contextmanager
    def _written(self, data: bytes | memoryview) -> Iterator[Path]:
        """A temporary file with `data`, fsynced; gone afterwards, whatever happened."""
        temporary = self._temporary_path()
        try:
            with closing(GentleFile(temporary, self._steps, read_back=True)) as file:
                file.write(memoryview(data))
                file.sync()
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _temporary_path(self) -> Path:
        """A name that nobody has."""
        _make_directory(self._temporary)
        return self._temporary / self._random.bytes(16).hex()

    @contextmanager
    def _replace_lock(self) -> Iterator[None]:
        with (self._temporary / "replace.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _check(self) -> None:
        _make_directory(self._root)
        with self._written(b"millpond") as temporary:
            linked = temporary.with_name(temporary.name + ".check")
            try:
                os.link(temporary, linked)
                linked.read_bytes()
            finally:
                linked.unlink(missing_ok=True)
        oldest = self._clock.wall_ms() - OBJECT_TEMPORARY_MS
        for entry in os.scandir(self._temporary):
            with suppress(FileNotFoundError):  # another process sweeps too
                if entry.name != "replace.lock" and entry.stat().st_mtime * 1000 < oldest:
                    Path(entry.path).unlink()


class StagedFile:
    """A `Staged`: a temporary file, which is linked to its name in the end."""

    def __init__(
        self,
        name: Callable[[], Path],
        publish: Callable[[Callable[[Path, str], None], str, int], Awaitable[None]],
        steps: Steps,
    ) -> None:
        """`name()` makes a temporary name; `publish(call, key, bytes)` calls `call(path, key)` in a thread, with the
        store's time limit and in its errors."""
        self._name = name
        self._publish = publish
        self._steps = steps
        self._path: Path | None = None
        self._file: GentleFile | None = None
        self._bytes = 0
        self._turn = threading.Lock()
        self._in_use = self._dropped = False

    def write(self, data: memoryview) -> None:
        try:
            with self._use():
                if self._file is None:
                    self._path = self._name()
                    self._file = GentleFile(self._path, self._steps, read_back=True)
                self._file.write(data)
        except OSError as error:
            raise _unavailable(f"write {self._path or 'a temporary file'}", error) from error
        self._bytes += len(data)

    async def publish(self, key: str, sha256: str) -> None:
        """See `Staged`. `sha256` is not needed here: what was written was compared on its way."""
        await self._publish(self._published, key, self._bytes)

    def _published(self, path: Path, key: str) -> None:
        """In a thread."""
        with self._use():
            assert self._path is not None and self._file is not None, "an object has bytes"
            self._file.sync()
            _make_directory(path.parent)
            _link(self._path, path, key)

    def drop(self) -> None:
        with self._turn:
            self._dropped = True
            if not self._in_use:
                self._end()

    @contextmanager
    def _use(self) -> Iterator[None]:
        """A call whose caller has given up may still run: then what it works with goes when it ends. (A file that was
        closed under it may be another one by then.)"""
        with self._turn:
            if self._dropped or self._in_use:
                raise OSError(errno.EBADF, "nobody wants this object any more")
            self._in_use = True
        try:
            yield
        finally:
            with self._turn:
                self._in_use = False
                if self._dropped:
                    self._end()

    def _end(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()


def _unavailable(what: str, error: OSError) -> Unavailable:
    return Unavailable("tier_unavailable", f"{what}: {_REASONS.get(error.errno or 0, str(error))}")


def _link(temporary: Path, path: Path, key: str) -> None:
    """A synced temporary file gets its name, durably, unless that is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise Conflict("object_exists", f"{key} is already there") from None
    _sync_directory(path.parent)


def _read(path: Path, first: int, end: int | None) -> bytes | pa.Buffer:
    """In steps, and nothing ahead of them: a flush of the log beside it waits for one step, not for 8 MiB that somebody
    may want later."""
    with path.open("rb", buffering=0) as file:
        handle = file.fileno()
        size = os.fstat(handle).st_size
        wanted = max(0, (size if end is None else min(end, size)) - first)
        if wanted <= _READ_BYTES:
            return os.pread(handle, wanted, first)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        data = pa.allocate_buffer(wanted)
        view = memoryview(data)
        done = 0
        while done < wanted:
            got = os.preadv(handle, [view[done : done + _READ_BYTES]], first + done)
            if not got:
                break
            done += got
        return data if done == wanted else data.slice(0, done)


def _describe(path: Path, key: str, steps: Steps) -> ObjectMeta:
    digest, size = hashlib.sha256(), 0
    for piece in read_through(path, steps):
        digest.update(piece)
        size += len(piece)
    return ObjectMeta(key, size, digest.hexdigest())


def _delete(path: Path) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()
        _sync_directory(path.parent)


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _list(root: Path, prefix: str, after: str, limit: int) -> list[ObjectMeta]:
    return [ObjectMeta(key, size, None) for key, size in islice(_walk(root, "", prefix, after), limit)]


def _walk(directory: Path, base: str, prefix: str, after: str) -> Iterator[tuple[str, int]]:
    """Keys and sizes in the order of the keys, without looking into directories that cannot matter."""
    try:
        with os.scandir(directory) as entries:
            children = [(e.name + "/" if e.is_dir() else e.name, e) for e in entries if not e.name.startswith(".")]
    except FileNotFoundError:
        return
    for name, entry in sorted(children, key=lambda child: child[0]):
        key = base + name
        if not name.endswith("/"):
            if key.startswith(prefix) and key > after:
                with suppress(FileNotFoundError):
                    yield key, entry.stat().st_size
        elif (key.startswith(prefix) or prefix.startswith(key)) and (key > after or after.startswith(key)):
            yield from _walk(Path(entry.path), key, prefix, after)


def _make_directory(path: Path) -> None:
    """Make `path` and its parents, each durable in the directory that holds it."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
