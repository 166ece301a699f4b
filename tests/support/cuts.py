"""A small ext4 of its own on a loop device: its power can be cut, and it can be full.

`cut` is FS_IOC_SHUTDOWN without a flush of the journal: from that moment on nothing reaches the device, and what was
not synced is gone after `restore`, as after a power cut of the machine. The processes that use it must be ended
in between. Needs root and a kernel that lets loop devices be made; `unavailable` says why not.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path
from typing import Self

_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN, _IOR('X', 125, u32)
_NO_LOG_FLUSH = 2  # FS_GOING_FLAGS_NOLOGFLUSH
_MIB = 1 << 20
COMMAND_SECONDS = 30
TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")


class SmallDisk:
    """`with SmallDisk(folder, mib) as disk:` a file system mounted at `disk.path`, taken away at the end."""

    def __init__(self, folder: Path, mib: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "mounted"
        self._image = folder / "image"
        self._mib = mib
        self._device = ""
        self._mounted = False

    def __enter__(self) -> Self:
        with self._image.open("wb") as image:
            image.truncate(self._mib * _MIB)
        self.path.mkdir()
        try:
            self._device = _run("losetup", "--find", "--show", str(self._image))
            # No lazy initialisation: it would write in the background. Few reserved blocks: full means full.
            _run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", self._device)
            self._mount()
        except BaseException:
            self._take_away()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._take_away()

    def cut(self) -> None:
        """The power goes. Until `restore` every write fails."""
        where = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(where, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(where)

    def restore(self) -> None:
        """The power is back: mounted anew, its journal replayed. Nobody may have a file open on it."""
        _run("umount", str(self.path))
        self._mounted = False
        self._mount()

    def canary(self) -> Path:
        """A file that was written and never synced: after a real cut it is not what it was."""
        path = self.path / "canary"
        path.write_bytes(os.urandom(64 * 1024))
        return path

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def ballast(self, leave_bytes: int) -> Path:
        """Fill the disk but for so many bytes; remove the file to make room again."""
        path = self.path / "ballast"
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, self.free_bytes - leave_bytes))
        return path

    def _mount(self) -> None:
        _run("mount", "-t", "ext4", self._device, str(self.path))
        self._mounted = True

    def _take_away(self) -> None:
        if self._mounted:
            try:
                _run("umount", str(self.path))
            except AssertionError:  # something still has a file open there: it goes when that ends
                _run("umount", "--lazy", str(self.path))
            self._mounted = False
        if self._device:
            _run("losetup", "--detach", self._device)
            self._device = ""
        self._image.unlink(missing_ok=True)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=COMMAND_SECONDS)  # noqa: S603
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout.strip()


@cache
def unavailable(folder: Path) -> str:
    """Why there can be no such disk here; empty when there can."""
    if os.geteuid() != 0:
        return "loop devices and mounts need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    try:
        with SmallDisk(folder / "trial", 16) as disk:
            disk.cut()
    except (AssertionError, OSError) as error:
        return f"no loop device with a power switch: {error}"
    return ""
