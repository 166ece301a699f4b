"""From the disk to a fold and an index: the newest checkpoint, then the rest of the log, frame by frame.

Time to start is bounded by what was written since the last checkpoint, not by queues or messages. Closed
segments' indexes are read by their directories alone; a missing one is rebuilt from its segment.
"""

from __future__ import annotations

import errno
from typing import NamedTuple

from millpond.core.frame import COPIED, HEADER_BYTES, MESSAGES, STATE, FrameHeader, unpack_sidecar
from millpond.core.limits import RESERVED_STATE_BYTES
from millpond.store.checkpoint import Checkpoint, Checkpoints
from millpond.store.commitlog import PAGE_BYTES, CommitLog
from millpond.store.directory import Directory
from millpond.store.disk import Disk
from millpond.store.fold.fold import Fold
from millpond.store.identity import DirectoryRefused
from millpond.store.index import OpenIndex
from millpond.store.recovery import Damage, Scanned, cut, recover, scan_segment


class Restored(NamedTuple):
    """`changed`: whether anything was replayed, so that a new checkpoint is worth taking. `complaints`: for people."""

    fold: Fold
    directory: Directory
    last_ts: int
    epoch: int
    epochs: list[tuple[int, int]]
    quarantined: list[tuple[int, int]]
    lost: list[tuple[int, int, int]]
    changed: bool
    complaints: list[str]


def restore(disk: Disk, log: CommitLog, checkpoints: Checkpoints) -> Restored:
    """Bring `log` to where it goes on. Raises DirectoryRefused when what is kept does not suffice. Blocks."""
    checkpoint, complaints = checkpoints.newest()
    try:
        log.open_segments()
    except ValueError as error:
        raise DirectoryRefused(f"log: {error}: restore the missing file from a backup") from error
    if not log.segments and checkpoint is not None:
        raise DirectoryRefused("there is a checkpoint but no log: restore log/ from a backup")
    if not log.segments:
        log.add_segment(log.allocate_segment())
    start = checkpoint.head.position if checkpoint is not None else 0
    if start < log.first_position:
        raise DirectoryRefused(
            "no checkpoint can be read, and the log no longer begins at 0: restore checkpoint/ from a backup"
        )
    if start > log.segments[-1].end:
        raise DirectoryRefused("the checkpoint is newer than the log: a segment is missing; restore it from a backup")
    return _Replay(disk, log, checkpoint, start, complaints).run()


def _make_room(log: CommitLog) -> None:
    """A store that ended just before its next segment was made needs room for what a start writes."""
    if log.has_room(HEADER_BYTES, min(RESERVED_STATE_BYTES, log.segment_bytes // 4)):
        return
    try:
        log.add_segment(log.allocate_segment(written=False))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not log.has_room(PAGE_BYTES):
            raise


class _Replay:
    """One restore: the fold and the open index as they grow."""

    def __init__(
        self, disk: Disk, log: CommitLog, checkpoint: Checkpoint | None, start: int, complaints: list[str]
    ) -> None:
        self._log = log
        self._checkpoint = checkpoint
        self._start = start
        self._complaints = complaints
        self.fold = Fold()
        self.directory = Directory(disk, log.segment_bytes, self._rebuild_index)

    def run(self) -> Restored:
        log, head = self._log, self._checkpoint.head if self._checkpoint is not None else None
        base = self._start - self._start % log.segment_bytes
        self.directory.open = OpenIndex(base)
        if self._checkpoint is not None:
            self.fold.load(self._checkpoint.tables)
            if self._checkpoint.head.open_base == base:
                self.directory.open = OpenIndex.load(base, self._checkpoint.tables)
        self.directory.load([segment.base for segment in log.segments if segment.base < base])
        found = recover(log, self._start, head.confirmed if head else 0, head.epoch if head else 0, self._fold_group)
        cut(log, found.end, found.last_header)
        log.tail = log.written = log.flushing = log.flushed = log.confirmed = found.end
        _make_room(log)
        lost = self._account_for(found.damage, head.lost if head else [])
        for queue in self.fold.queues:
            queue.flushing_end = queue.confirmed_end = queue.next_offset
        for old in self.directory.closing():
            self.directory.close_segment_now(old)
        self._complaints += [f"mended one bit of the frame header at {position}" for position in found.mended]
        epochs = [*(head.epochs if head else []), *found.epochs]
        return Restored(
            self.fold,
            self.directory,
            max(found.last_ts, head.last_ts if head else 0),
            max((epoch for epoch, _ in epochs), default=0),
            epochs,
            [*(head.quarantined if head else []), *((damage.position, damage.end) for damage in found.damage)],
            lost,
            found.frames > 0 or bool(found.damage),
            self._complaints,
        )

    # -- folding ---------------------------------------------------------------------------------------------

    def _fold_group(self, group: list[Scanned]) -> None:
        for header, sidecar, payload in group:
            base = header.position - header.position % self._log.segment_bytes
            if base != self.directory.open.base:
                self.directory.roll(base)
            if header.kind == MESSAGES:
                self._fold_messages(header, sidecar)
            elif header.kind == STATE:
                self.fold.apply_state(payload, header.rows)
            if not header.flags & COPIED:
                self.directory.open.note_time(header.store_ts, header.position)

    def _fold_messages(self, header: FrameHeader, sidecar_bytes: bytes) -> None:
        sidecar = unpack_sidecar(sidecar_bytes, header.rows, header.columns)
        _index(self.directory.open, header, sidecar_bytes)
        if not header.flags & COPIED:
            self.fold.messages(header.queue_id, header.first_offset, header.rows, header.store_ts, sidecar)

    def _rebuild_index(self, base: int) -> OpenIndex:
        """The index of one segment from its frames; damaged ones are left out."""
        self._complaints.append(f"rebuilt the index of segment {base}")
        return rebuild_index(self._log, base)

    # -- damage ----------------------------------------------------------------------------------------------

    def _account_for(self, damage: list[Damage], lost: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Which offsets stood in damaged ranges. No offset of theirs may ever be given again."""
        lost = list(lost)
        for position, end, header in damage:
            if header is None:
                lost += self._skip_possible(position, end)
                text = "frames whose headers cannot be read; messages of any queue may be lost there"
            elif header.kind == MESSAGES:
                last = header.first_offset + header.rows
                lost.append((header.queue_id, header.first_offset, last))
                if self.fold.queues.get(header.queue_id) is not None:
                    self.fold.queues.appended(header.queue_id, last, header.store_ts)
                text = f"messages {header.first_offset} to {last - 1} of queue {header.queue_id}"
            elif header.kind == STATE:
                text = f"{header.rows} changes of groups: acks or leases of that moment are lost, expect redelivery"
            else:
                text = "no messages"
            self._complaints.append(f"log damaged at {position}..{end}: {text}")
        return lost

    def _skip_possible(self, position: int, end: int) -> list[tuple[int, int, int]]:
        """An unreadable range may have held messages of any queue: skip as many offsets as it can have held in every
        queue that has none above it, rather than give one of them twice. A row takes at least 8 bytes of sidecar."""
        most = (end - position) // 8
        lost: list[tuple[int, int, int]] = []
        for queue in self.fold.queues:
            last = self.directory.last_entry_now(queue.ref.queue_id, queue.next_offset - 1)
            if not len(last) or int(last["position"][0]) < position:
                lost.append((queue.ref.queue_id, queue.next_offset, queue.next_offset + most))
                self.fold.queues.appended(queue.ref.queue_id, queue.next_offset + most, queue.last_ts)
        return lost


def _index(index: OpenIndex, header: FrameHeader, sidecar_bytes: bytes) -> None:
    sidecar = unpack_sidecar(sidecar_bytes, header.rows, header.columns)
    index.add(
        header.queue_id,
        header.first_offset,
        header.rows,
        header.position,
        header.length,
        header.payload_size,
        sidecar.tag_hash,
        sidecar.key_hash,
    )


def rebuild_index(log: CommitLog, base: int) -> OpenIndex:
    """The index of the segment at `base`, from its frames."""
    index = OpenIndex(base)
    segment = log.segment_of(base)
    assert segment is not None
    for header, sidecar, _ in scan_segment(log, segment):
        if header.kind == MESSAGES:
            _index(index, header, sidecar)
        if not header.flags & COPIED:
            index.note_time(header.store_ts, header.position)
    return index
