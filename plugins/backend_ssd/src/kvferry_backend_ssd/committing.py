"""Writes and deletions become durable: what waits shares its flush."""

from __future__ import annotations

import logging
import sys
import threading
from array import array
from collections import deque
from typing import NamedTuple

from kvferry.api import DeleteStatus, KVFerryError, WriteStatus
from kvferry_backend_ssd.block_io import BlockIO, Piece, Purpose
from kvferry_backend_ssd.bounce import Bounce
from kvferry_backend_ssd.entry import EMPTY
from kvferry_backend_ssd.faults import fault, told_as
from kvferry_backend_ssd.intake import Intake, Wave
from kvferry_backend_ssd.layout import GROUP_SLOTS, USES_BYTES
from kvferry_backend_ssd.store import Store
from kvferry_backend_ssd.table import Table
from kvferry_backend_ssd.writing import NOT_WRITTEN, Writing

_log = logging.getLogger(__name__)

_USES_AT_ONCE = 256
_NOT_DELETED = "a chunk could not be deleted"


class _Row(NamedTuple):
    """Slots for which the table may still have an entry of ``sequence`` that must not be found."""

    slot: int
    slots: int
    sequence: int


class Committing:
    """Makes waves durable, with one flush behind each group of them, and tells what became of them.

    The lanes that write have written values, heads and entries, in no order. One flush stands behind them
    all, and only then is anything told. What a power cut leaves of writes before their flush may be entries
    without values: each entry says from which ``sequence`` on that may be so, and a restart looks.

    Threads: any. One of them commits at a time, what all of them have brought, through its own ``io``.
    """

    def __init__(self, store: Store, intake: Intake, table: Table) -> None:
        self._store = store
        self._intake = intake
        self._table = table
        self._waiting: deque[Wave] = deque()
        self._one = threading.Lock()
        """Held by whoever commits. What it guards is all below."""
        self._doubtful: list[_Row] = []

    def put(self, wave: Wave, io: BlockIO) -> None:
        """The wave is committed by the caller, or by who is at it already. Also an empty one, when the
        table has to forget something."""
        if not (wave or self._doubtful or self._store.repairs):
            return
        self._waiting.append(wave)
        self._commit_waiting(io)

    def _commit_waiting(self, io: BlockIO) -> None:
        """Also for who held the lock for something else: whoever came meanwhile went away again."""
        while self._waiting and self._one.acquire(blocking=False):
            try:
                self._commit(self._gather(), io)
            finally:
                self._one.release()

    def _gather(self) -> Wave:
        """All that waits, as one."""
        group = Wave()
        while self._waiting:
            wave = self._waiting.popleft()
            group.writings += wave.writings
            group.deletions += wave.deletions
        return group

    def _commit(self, group: Wave, io: BlockIO) -> None:
        told = Wave(list(group.writings), list(group.deletions))
        refused = [each for each in group.writings if each.error is not None]
        group.writings = [each for each in group.writings if each.error is None]
        self._withdraw(refused)
        cleared, self._doubtful = self._doubtful, []
        try:
            self._take_out(group, cleared, io)
            if group or cleared:
                self._settle(group, cleared, io)
        except Exception as error:  # noqa: BLE001 - the lane lives on, and nobody waits for ever
            self._abandon(group, cleared, error)
        for writing in refused:
            assert writing.error is not None
            writing.item.fail(self._told(writing.error))
        self._intake.over(told, [row.sequence for row in self._doubtful])

    def _withdraw(self, refused: list[Writing]) -> None:
        """What was refused may have an entry in the table all the same."""
        for writing in refused:
            if writing.entered:
                self._doubt(writing)
            else:
                with self._store.lock:
                    self._store.space.give_back(writing.slot, writing.slots)

    def _take_out(self, group: Wave, cleared: list[_Row], io: BlockIO) -> None:
        """Nothing in the table where the group deletes, nor in the place of ``cleared``, which is free once
        the disk knows it. What fails leaves both."""
        entries = {row.slot: EMPTY for row in cleared}
        entries |= {each.place.slot: EMPTY for each in group.deletions}
        if not entries and not self._store.repairs:
            return  # the table may be another lane's for as long as its values take
        failed = self._table.put(entries, io)
        if not failed:
            return
        for deletion in [each for each in group.deletions if each.place.slot in failed]:
            group.deletions.remove(deletion)
            deletion.item.fail(fault(failed[deletion.place.slot], _NOT_DELETED, self._store.file.path))
        self._doubtful += [row for row in cleared if row.slot in failed]
        cleared[:] = [row for row in cleared if row.slot not in failed]

    def _settle(self, group: Wave, cleared: list[_Row], io: BlockIO) -> None:
        """Flush behind a group, and tell what became of it."""
        store = self._store
        error = self._flush(io)
        told = store.file.gone() if error is None else self._told(error)
        if told is not None:
            self._fail(group, cleared, told, io)
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

    def _flush(self, io: BlockIO) -> OSError | None:
        self._store.counters.flushes += 1
        try:
            io.flush(self._store.file.fd)
        except OSError as error:
            return error
        return None

    # -- failures --------------------------------------------------------------------------------

    def _told(self, error: OSError | KVFerryError) -> KVFerryError:
        return error if isinstance(error, KVFerryError) else fault(error, NOT_WRITTEN, self._store.file.path)

    def _doubt(self, writing: Writing) -> None:
        with self._store.lock:
            self._store.space.doubt(writing.slot, writing.slots)
        self._doubtful.append(_Row(writing.slot, writing.slots, writing.sequence))

    def _forget(self, rows: list[_Row]) -> None:
        """The disk has no entry for these any more."""
        with self._store.lock:
            for row in rows:
                self._store.space.give_back(row.slot, row.slots)

    def _fail(self, group: Wave, cleared: list[_Row], told: KVFerryError, io: BlockIO) -> None:
        """Entries of the group may be in the file, and may not be found: take them out at once. Where
        the disk refuses that, too, their slots stay out of use, and it is tried with every later group."""
        for writing in group.writings:
            self._doubt(writing)
        self._doubtful += cleared
        if not self._table.put({row.slot: EMPTY for row in self._doubtful}, io) and self._flush(io) is None:
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

    def write_uses(self, io: BlockIO) -> bool:
        """Put the uses of groups that changed into the file; whether there were any. They matter to the
        order of eviction alone, so nothing waits for them, and what fails is tried with the next."""
        with self._one:
            any_written = self._write_uses(io)
        self._commit_waiting(io)
        return any_written

    def finish(self, io: BlockIO) -> None:
        """The last that is done before the file is closed."""
        with self._one:
            if self._write_uses(io):
                self._flush(io)
        self._commit_waiting(io)

    def _write_uses(self, io: BlockIO) -> bool:
        store = self._store
        with store.lock:
            groups = sorted(store.dirty)
            store.dirty.clear()
            pages = [store.index.used[group * GROUP_SLOTS : (group + 1) * GROUP_SLOTS] for group in groups]
        for at in range(0, len(groups), _USES_AT_ONCE):
            self._put_uses(groups[at : at + _USES_AT_ONCE], pages[at : at + _USES_AT_ONCE], io)
        return bool(groups)

    def _put_uses(self, groups: list[int], pages: list[array[int]], io: BlockIO) -> None:
        bounce = Bounce(_USES_AT_ONCE * USES_BYTES)
        pieces = []
        for group, uses in zip(groups, pages, strict=True):
            if sys.byteorder == "big":
                uses.byteswap()
            view, address = bounce.take(USES_BYTES)
            view[:] = uses.tobytes().ljust(USES_BYTES, b"\x00")
            pieces.append(Piece(self._store.file.layout.uses_at(group), address, USES_BYTES, Purpose.USES))
        results = io.write(self._store.file.fd, pieces)
        if any(result != USES_BYTES for result in results):
            _log.debug("kvferry: the order of uses of %s could not be written", self._store.file.path)
