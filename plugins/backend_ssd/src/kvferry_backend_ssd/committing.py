"""The lane that makes writes and deletions durable: what waits shares its flush."""

from __future__ import annotations

import logging
import queue
import sys
from array import array
from typing import NamedTuple

from kvferry.api import DeleteStatus, KVFerryError, WriteStatus
from kvferry_backend_ssd.block_io import BlockIO, Piece, Purpose
from kvferry_backend_ssd.bounce import Bounce
from kvferry_backend_ssd.entry import EMPTY
from kvferry_backend_ssd.faults import fault, told_as
from kvferry_backend_ssd.intake import Intake, Wave
from kvferry_backend_ssd.layout import GROUP_SLOTS, USES_BYTES
from kvferry_backend_ssd.store import Store
from kvferry_backend_ssd.storing import Commits
from kvferry_backend_ssd.table import Table
from kvferry_backend_ssd.writing import NOT_WRITTEN, Writing

_log = logging.getLogger(__name__)

USES_SECONDS = 30.0
"""How long the order of uses may stay in memory alone."""
_USES_AT_ONCE = 256
_NOT_DELETED = "a chunk could not be deleted"


class _Row(NamedTuple):
    """Slots for which the table may still have an entry of ``sequence`` that must not be found."""

    slot: int
    slots: int
    sequence: int


class CommitLane:
    """Works on ``commits`` until ``lanes`` lanes that write have ended.

    Values and heads are written before an entry is, with one flush behind them all, and only then is
    anything told. What a power cut leaves of writes before their flush may be entries without values: each
    entry says from which ``sequence`` on that may be so, and a restart looks.
    """

    def __init__(self, store: Store, intake: Intake, commits: Commits, lanes: int, io: BlockIO) -> None:
        self._store = store
        self._intake = intake
        self._commits = commits
        self._lanes = lanes
        self._io = io
        self._table = Table(store, io)
        self._doubtful: list[_Row] = []

    def run(self) -> None:
        try:
            while self._lanes:
                try:
                    first = self._commits.get(timeout=USES_SECONDS)
                except queue.Empty:
                    self._write_uses()
                    continue
                self._commit(self._gather(first))
            if self._write_uses():
                self._flush()
        finally:
            self._io.close()

    def _gather(self, first: Wave | None) -> Wave:
        """All that waits, as one."""
        group = Wave()
        wave = first
        while True:
            if wave is None:
                self._lanes -= 1
            else:
                group.writings += wave.writings
                group.deletions += wave.deletions
            try:
                wave = self._commits.get_nowait()
            except queue.Empty:
                return group

    def _commit(self, group: Wave) -> None:
        told = Wave(list(group.writings), list(group.deletions))
        cleared, self._doubtful = self._doubtful, []
        try:
            self._write_entries(group, cleared)
            if group or cleared:
                self._settle(group, cleared, self._flush())
        except Exception as error:  # noqa: BLE001 - the lane lives on, and nobody waits for ever
            self._abandon(group, cleared, error)
        self._intake.over(told, [row.sequence for row in self._doubtful])

    def _write_entries(self, group: Wave, cleared: list[_Row]) -> None:
        """Put what the group changes into the table, and what the table should have had before: nothing in
        the place of ``cleared``, which is free once the disk knows it. What fails leaves both."""
        store = self._store
        with store.lock:
            entries, store.repairs = store.repairs, {}
        entries |= {row.slot: EMPTY for row in cleared}
        entries |= {each.place.slot: EMPTY for each in group.deletions}
        entries |= {each.slot: each.entry.to_bytes(store.tag) for each in group.writings}
        failed = self._table.put(entries)
        if not failed:
            return
        for writing in [each for each in group.writings if each.slot in failed]:
            group.writings.remove(writing)
            self._doubt(writing)
            writing.item.fail(fault(failed[writing.slot], NOT_WRITTEN, store.file.path))
        for deletion in [each for each in group.deletions if each.place.slot in failed]:
            group.deletions.remove(deletion)
            deletion.item.fail(fault(failed[deletion.place.slot], _NOT_DELETED, store.file.path))
        self._doubtful += [row for row in cleared if row.slot in failed]
        cleared[:] = [row for row in cleared if row.slot not in failed]

    def _settle(self, group: Wave, cleared: list[_Row], error: OSError | None) -> None:
        """The flush behind a group has ended: tell what became of it."""
        store = self._store
        told = None if error is None else fault(error, NOT_WRITTEN, store.file.path)
        told = told or store.file.gone()
        if told is not None:
            self._fail(group, cleared, told)
            return
        with store.lock:
            for deletion in group.deletions:
                store.index.remove(deletion.key)
                store.space.give_back(deletion.place.slot, deletion.place.slots)
            for writing in group.writings:
                store.index.insert(writing.header.key, writing.place, writing.sequence)
        self._forget(cleared)
        for deletion in group.deletions:
            deletion.item.finish(DeleteStatus.DELETED)
        for writing in group.writings:
            writing.item.finish(WriteStatus.STORED)

    def _flush(self) -> OSError | None:
        self._store.counters.flushes += 1
        try:
            self._io.flush(self._store.file.fd)
        except OSError as error:
            return error
        return None

    # -- failures --------------------------------------------------------------------------------

    def _doubt(self, writing: Writing) -> None:
        with self._store.lock:
            self._store.space.doubt(writing.slot, writing.slots)
        self._doubtful.append(_Row(writing.slot, writing.slots, writing.sequence))

    def _forget(self, rows: list[_Row]) -> None:
        """The disk has no entry for these any more."""
        with self._store.lock:
            for row in rows:
                self._store.space.give_back(row.slot, row.slots)

    def _fail(self, group: Wave, cleared: list[_Row], told: KVFerryError) -> None:
        """Entries of the group may be in the file, and may not be found: take them out at once. Where
        the disk refuses that, too, their slots stay out of use, and it is tried with every later group."""
        for writing in group.writings:
            self._doubt(writing)
        self._doubtful += cleared
        if not self._table.put({row.slot: EMPTY for row in self._doubtful}) and self._flush() is None:
            undone, self._doubtful = self._doubtful, []
            self._forget(undone)
        group.fail(told)

    def _abandon(self, group: Wave, cleared: list[_Row], error: Exception) -> None:
        """We have a defect: fail all that is under way."""
        doubted = {row.slot for row in self._doubtful}
        for writing in group.writings:
            if writing.slot not in doubted:
                self._doubt(writing)
        self._doubtful += [row for row in cleared if row.slot not in doubted]
        group.fail(told_as(error, "writing"))

    # -- the order of uses -----------------------------------------------------------------------

    def _write_uses(self) -> bool:
        """Put the uses of groups that changed into the file; whether there were any. They matter to the
        order of eviction alone, so nothing waits for them, and what fails is tried with the next."""
        store = self._store
        with store.lock:
            groups = sorted(store.dirty)
            store.dirty.clear()
            pages = [store.index.used[group * GROUP_SLOTS : (group + 1) * GROUP_SLOTS] for group in groups]
        for at in range(0, len(groups), _USES_AT_ONCE):
            self._put_uses(groups[at : at + _USES_AT_ONCE], pages[at : at + _USES_AT_ONCE])
        return bool(groups)

    def _put_uses(self, groups: list[int], pages: list[array[int]]) -> None:
        bounce = Bounce(_USES_AT_ONCE * USES_BYTES)
        pieces = []
        for group, uses in zip(groups, pages, strict=True):
            if sys.byteorder == "big":
                uses.byteswap()
            view, address = bounce.take(USES_BYTES)
            view[:] = uses.tobytes().ljust(USES_BYTES, b"\x00")
            pieces.append(Piece(self._store.file.layout.uses_at(group), address, USES_BYTES))
        results = self._io.write(self._store.file.fd, pieces, Purpose.USES)
        if any(result != USES_BYTES for result in results):
            _log.debug("kvferry: the order of uses of %s could not be written", self._store.file.path)
