"""Checkpoints: a snapshot of the fold at one position of the log.

    checkpoint/<20-digit position>.ckpt      truth below the oldest kept segment, else rebuildable from the log

    offset size  field
         0    4  magic "MPC1"
         4    4  head length  H
         8    4  checksum of the head
        12    4  zero
        16    H  head, msgpack: `Head`
      16+H    .  sections one after another, each an Arrow IPC stream; the head says name, length and checksum

Published by `Disk.write_whole`, and only once the confirmed position has passed it. Two generations are kept; a
segment is recycled only below the *older* one, so that a damaged newest checkpoint costs time, not state.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import google_crc32c
import msgspec
import numpy.ma  # noqa: F401  # else pyarrow loads it at its first array of NumPy's: 20 ms in which the loop stands still
import pyarrow as pa

from millpond.core.gathered import Buffer, Gathered
from millpond.store.disk import Disk
from millpond.store.fold.operations import NewerFormat
from millpond.store.fold.snapshot import Tables

FOLDER = "checkpoint"
MAGIC = b"MPC1"
VERSION = 1
KEPT = 2


class Section(msgspec.Struct, frozen=True):
    name: str
    length: int
    crc: int


class Head(msgspec.Struct, frozen=True):
    """position: of the first frame that is not in it. epochs: (epoch, first position) of all known.
    quarantined: damaged ranges of the log; lost: (queue id, first, end) of offsets that nothing on this disk has."""

    version: int
    position: int
    confirmed: int
    epoch: int
    last_ts: int
    open_base: int
    epochs: list[tuple[int, int]]
    quarantined: list[tuple[int, int]]
    lost: list[tuple[int, int, int]]
    sections: list[Section] = []


class Checkpoint(NamedTuple):
    head: Head
    tables: Tables


def name_of(position: int) -> str:
    return f"{FOLDER}/{position:020d}.ckpt"


def encode(checkpoint: Checkpoint) -> list[Buffer]:
    """The file, in pieces that refer to the columns of `checkpoint`: these must not change until it is written."""
    sections: list[Section] = []
    pieces: list[Buffer] = []
    for name, table in checkpoint.tables.items():
        sink = Gathered()
        with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), table.schema) as writer:
            writer.write_table(table)
        data = sink.whole()
        sections.append(Section(name, sum(map(len, data)), reduce(google_crc32c.extend, data, 0)))
        pieces += data
    head = msgspec.msgpack.encode(msgspec.structs.replace(checkpoint.head, sections=sections))
    start = MAGIC + len(head).to_bytes(4, "little") + google_crc32c.value(head).to_bytes(4, "little") + bytes(4)
    return [start + head, *pieces]


def decode(data: bytes) -> Checkpoint:
    """Raises ValueError when it is damaged, NewerFormat when a newer release wrote it."""
    if data[:4] != MAGIC:
        raise ValueError("not a checkpoint of this format")
    length = int.from_bytes(data[4:8], "little")
    head_bytes = data[16 : 16 + length]
    if len(head_bytes) != length or google_crc32c.value(head_bytes) != int.from_bytes(data[8:12], "little"):
        raise ValueError("checkpoint head damaged")
    head = msgspec.msgpack.decode(head_bytes, type=Head)
    if head.version > VERSION:
        raise NewerFormat(f"the checkpoint has format {head.version}, this release knows {VERSION}")
    tables: Tables = {}
    at = 16 + length
    for section in head.sections:
        body = data[at : at + section.length]
        if len(body) != section.length or google_crc32c.value(body) != section.crc:
            raise ValueError(f"checkpoint section {section.name} damaged")
        tables[section.name] = pa.ipc.open_stream(body).read_all()
        at += section.length
    return Checkpoint(head, tables)


class Checkpoints:
    """The checkpoints of one data directory. All calls block."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.positions: list[int] = []

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest valid one, and what was wrong with those that are not. Damaged ones are removed from the list
        but stay on the disk until two good ones are newer."""
        self._disk.make_folder(FOLDER)
        names = [name for name in self._disk.names(FOLDER) if name.endswith(".ckpt")]
        self.positions = [int(name[:-5]) for name in names]
        complaints: list[str] = []
        for position in sorted(self.positions, reverse=True):
            try:
                return decode(self._disk.read_whole(name_of(position))), complaints
            except NewerFormat:
                raise
            except (ValueError, pa.ArrowInvalid) as error:
                complaints.append(f"{name_of(position)}: {error}")
                self.positions.remove(position)
        return None, complaints

    def publish(self, position: int, data: list[Buffer]) -> None:
        self._disk.write_whole(name_of(position), data)
        if position not in self.positions:
            self.positions.append(position)
        self.positions.sort()
        names = [name for name in self._disk.names(FOLDER) if name.endswith(".ckpt")]
        keep = {name_of(position) for position in self.positions[-KEPT:]}
        for name in names:
            if f"{FOLDER}/{name}" not in keep:
                self._disk.remove(f"{FOLDER}/{name}")
        self.positions = self.positions[-KEPT:]

    @property
    def recyclable_below(self) -> int:
        """Segments that end at or below this position are not needed to recover."""
        return self.positions[0] if len(self.positions) >= KEPT else 0
