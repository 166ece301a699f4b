"""The fixtures of tests/conftest.py see code of Millpond that blocks the event loop, and only that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blockbuster import BlockingError

import millpond

BLOCKING = {
    "database": "with closing(sqlite3.connect(':memory:')) as database: database.execute('select 1')",
    "sync": "os.fsync(file)",
    "read from the disk": "os.preadv(file, [bytearray(1)], 0)",
    "file": "pathlib.Path(name).read_text()",
}
AT_ONCE = {
    "write into the page cache": "os.pwritev(file, [b'x'], 0)",
    "read from the page cache": "os.preadv(file, [bytearray(1)], 0, os.RWF_NOWAIT)",
}


def as_if_in_millpond(line: str) -> Callable[[int, str], None]:
    """A function of one line whose file is one of Millpond's."""
    scope: dict[str, Callable[[int, str], None]] = {}
    source = f"import os, pathlib, sqlite3\nfrom contextlib import closing\ndef call(file, name):\n    {line}\n"
    exec(compile(source, str(Path(millpond.__path__[0]) / "store" / "made_up.py"), "exec"), scope)  # noqa: S102
    return scope["call"]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_text("content")
    handle = os.open(tmp_path / "file", os.O_RDWR)
    yield handle
    os.close(handle)


@pytest.mark.parametrize("line", BLOCKING.values(), ids=BLOCKING)
async def test_blocking_code_is_an_error(line: str, file: int, tmp_path: Path, never_blocks: list[str]) -> None:
    """It raises, and is remembered even when somebody catches that."""
    call = as_if_in_millpond(line)
    with pytest.raises(BlockingError):
        call(file, str(tmp_path / "file"))
    assert len(never_blocks) == 1
    assert "made_up.py" in never_blocks[0]
    never_blocks.clear()


@pytest.mark.parametrize("line", [*BLOCKING.values(), *AT_ONCE.values()], ids=[*BLOCKING, *AT_ONCE])
async def test_a_thread_may_block(line: str, file: int, tmp_path: Path) -> None:
    """The same calls are fine off the loop."""
    await asyncio.to_thread(as_if_in_millpond(line), file, str(tmp_path / "file"))


@pytest.mark.parametrize("line", AT_ONCE.values(), ids=AT_ONCE)
async def test_the_page_cache_is_not_the_disk(line: str, file: int, tmp_path: Path) -> None:
    """Small appends, and reads that never wait, are done on the loop by design."""
    as_if_in_millpond(line)(file, str(tmp_path / "file"))


async def test_a_test_may_block(tmp_path: Path) -> None:
    """Only Millpond's own code is watched."""
    (tmp_path / "own").write_text("content")
