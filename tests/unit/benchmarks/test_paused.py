"""Pauses of the disk are told beside what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import paused


def counted(finished: int, in_flight: int) -> bytes:
    """As the kernel counts: so many writes that have ended, so many requests that have not."""
    return f" 7 0 56 3 {finished} 0 800 20 {in_flight} 30 40 1 0 8 2 5 6\n".encode()


def seen(*looks: tuple[int, int], step: float = paused.SAMPLE_SECONDS) -> paused.Pauses:
    """What is found by looks at these counts, one `step` after another."""
    watch = paused.Watch(counted(*looks[0]), 100.0)
    for number, look in enumerate(looks[1:], 1):
        watch.look(counted(*look), 100.0 + number * step)
    return watch.close()


def test_disk_is_paused_while_nothing_that_was_asked_comes_to_an_end() -> None:
    """From the first look at which it was asked to the last at which nothing had ended."""
    found = seen((1, 0), (1, 2), (1, 2), (1, 3), (1, 3), (2, 2), (3, 0))
    assert found.seconds == pytest.approx(0.06)
    assert (found.paused, found.longest) == (pytest.approx(0.03), pytest.approx(0.03))


def test_each_pause_counts_and_the_longest_is_kept() -> None:
    """Whichever of them came first."""
    found = seen(*[(1, 1)] * 6, *[(2, 1)] * 4)
    assert (found.paused, found.longest) == (pytest.approx(0.05 + 0.03), pytest.approx(0.05))


def test_disk_that_is_asked_nothing_does_not_pause() -> None:
    """However long."""
    assert seen(*[(1, 0)] * 50).paused == 0


def test_what_takes_less_than_the_least_is_no_pause() -> None:
    """Two looks at the same request: it may have taken some 10 ms."""
    assert seen((1, 1), (1, 1), (2, 1), (2, 1), (3, 0)).paused == 0


def test_late_look_is_not_the_disks_pause() -> None:
    """The host had the core of who looks for a second each time; what the disk did meanwhile, nobody knows."""
    found = seen((1, 1), (1, 1), (1, 1), (2, 0), step=1.0)
    assert (found.seconds, found.paused) == (3.0, pytest.approx(2 * 2 * paused.SAMPLE_SECONDS))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the kernel counts for whatever folder, with one request that does not come to its end."""
    path = tmp_path / "stat"
    path.write_bytes(counted(1, 1))
    monkeypatch.setattr(paused, "counted_of", lambda _folder: path)
    return path


@pytest.mark.usefixtures("device")
async def test_disk_is_watched_from_the_first_to_the_last_moment_of_the_block() -> None:
    """By a process that has begun when the block does; its lines are a share of that time and the longest."""
    async with paused.watched("") as disk:
        assert disk.under("load") == []
    assert disk.pauses is not None and disk.pauses.seconds >= paused.SAMPLE_SECONDS
    disk.pauses = paused.Pauses(seconds=4.0, paused=0.1, longest=0.06)
    share, longest = disk.under("load")
    assert (share.name, share.unit, share.median) == ("paused: the disk under load", "% of the time", 2.5)
    assert (longest.name, longest.unit, longest.median) == ("longest pause of the disk under load", "ms", 60.0)


async def test_no_lines_where_the_kernel_does_not_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file system that no device holds, or a kernel without such files, is not taken for a disk that never pauses."""
    monkeypatch.setattr(paused, "DEVICES", tmp_path / "none")
    async with paused.watched(str(tmp_path)) as disk:
        pass
    assert disk.under("load") == []


async def test_what_was_measured_is_kept_when_the_watcher_fails(device: Path) -> None:
    """The device is gone, or counts in another way: there is nothing to tell of the disk, and that is all."""
    async with paused.watched("") as disk:
        device.write_bytes(b"nothing that counts")
    assert disk.under("load") == []
