"""The lane that writes and deletes: batches that wait share their flushes."""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from attrs import define, field

from kvferry.api import ChunkHeader, ChunkKey, DeleteStatus, ErrorKind, KVFerryError, Span, WriteStatus
from kvferry_backend_ssd.block_io import BlockIO, Piece, Purpose
from kvferry_backend_ssd.bounce import Bounce
from kvferry_backend_ssd.entry import EMPTY
from kvferry_backend_ssd.faults import broken, fault
from kvferry_backend_ssd.index import Place
from kvferry_backend_ssd.jobs import Item, Queue
from kvferry_backend_ssd.layout import GROUP_SLOTS, PAGE, USES_BYTES
from kvferry_backend_ssd.recovery import load_once
from kvferry_backend_ssd.store import Store
from kvferry_backend_ssd.table import Table
from kvferry_backend_ssd.writing import DataPhase, Writing, encode, slots_for

_log = logging.getLogger(__name__)

GROUP_BYTES = 64 << 20
"""As many bytes of values go into one group at most, so that nobody waits long for a flush."""
USES_SECONDS = 30.0
"""How long the order of uses may stay in memory alone."""
_USES_AT_ONCE = 256
_NOT_WRITTEN = "a chunk could not be stored"
_NOT_DELETED = "a chunk could not be deleted"


@define(eq=False)
class _Deleting:
    item: Item
    key: ChunkKey
    place: Place


@define(eq=False)
class _Group:
    """Writes and deletions that become durable together. No key is in it twice."""

    writings: list[Writing] = field(factory=list)
    deletions: list[_Deleting] = field(factory=list)
    cleared: list[tuple[int, int]] = field(factory=list)
    """Rows of slots that are free once the disk knows it."""

    def is_empty(self) -> bool:
        return not (self.writings or self.deletions or self.cleared)

    def frees(self) -> bool:
        """Whether there will be more room once it is durable."""
        return bool(self.deletions or self.cleared)

    def keys(self) -> set[ChunkKey]:
        return {each.header.key for each in self.writings} | {each.key for each in self.deletions}


class CommitLane:
    """Works on ``queue`` until it is closed.

    The order of one group: values and heads, a flush, entries, a flush, and only then is anything told.
    While more work waits, the second flush of a group is the first of the next.
    """

    def __init__(self, store: Store, queue: Queue, io: BlockIO) -> None:
        self._store = store
        self._queue = queue
        self._io = io
        self._summing = ThreadPoolExecutor(1, thread_name_prefix=f"kvferry-{store.context.name}-sum")
        self._data = DataPhase(store, io, self._summing)
        self._table = Table(store, io)
        self._doubtful: list[tuple[int, int]] = []
        """Rows of slots for which the table may still have an entry that must not be found."""

    def run(self) -> None:
        try:
            while self._queue.wait(USES_SECONDS):
                if len(self._queue):
                    self._work()
                else:
                    self._write_uses()
            if self._write_uses():
                self._flush()
        finally:
            self._summing.shutdown()
            self._io.close()

    def _work(self) -> None:
        """Until nothing waits and everything is told."""
        pending: _Group | None = None
        while pending is not None or len(self._queue):
            group = _Group()
            try:
                load_once(self._store, self._io)
                self._gather(group, pending)
                self._write_values(group)
                if pending is not None or group.writings:
                    error = self._flush()
                    if pending is not None:
                        self._settle(pending, error)
                        pending = None
                    if error is not None:
                        self._fail_early(group, fault(error, _NOT_WRITTEN, self._store.file.path))
                        continue
                self._write_entries(group)
            except Exception as error:  # noqa: BLE001 - the lane lives on, and nobody waits for ever
                self._abandon((group, pending), error)
                pending = None
                continue
            if group.is_empty():
                continue
            if len(self._queue):
                pending = group
            else:
                self._settle(group, self._flush())

    # -- gathering -------------------------------------------------------------------------------

    def _gather(self, group: _Group, pending: _Group | None) -> None:
        """Take what may go into one group. It ends before an item that has to wait for the flush of
        ``pending`` or of this group: for its key, or for room."""
        gone = self._store.file.gone()
        if gone is not None:
            raise gone
        busy = set() if pending is None else pending.keys()
        length = 0
        while length < GROUP_BYTES and (item := self._queue.take()) is not None:
            deletes = isinstance(item.what, ChunkKey)
            key = item.what if deletes else item.what[0].key
            if key in busy:
                self._queue.put_back(item)
                return
            try:
                if deletes:
                    taken = self._take_deletion(item, group)
                    length += PAGE
                else:
                    room_comes = group.frees() or (pending is not None and pending.frees())
                    taken = self._take_write(item, group, room_comes)
                    length += item.what[0].size
            except KVFerryError as error:
                item.fail(error)
                continue
            except Exception as error:  # noqa: BLE001 - one broken item stays one broken item
                item.fail(broken(error))
                continue
            if not taken:
                self._queue.put_back(item)
                return
            busy.add(key)

    def _take_deletion(self, item: Item, group: _Group) -> bool:
        with self._store.lock:
            place = self._store.index.find(item.what)
        if place is None:
            item.finish(DeleteStatus.ABSENT)
        else:
            group.deletions.append(_Deleting(item, item.what, place))
        return True

    def _take_write(self, item: Item, group: _Group, room_comes: bool) -> bool:
        """False when there is no room yet."""
        store = self._store
        header: ChunkHeader = item.what[0]
        span: Span = item.what[1]
        view = self._checked(header, span)
        with store.lock:
            there = store.index.find(header.key) is not None
        if there:
            item.finish(WriteStatus.EXISTS)
            return True
        encoded = encode(header)
        count = slots_for(header, encoded, store)
        slot = self._room(count)
        if slot is None:
            if room_comes:
                return False
            item.finish(WriteStatus.NO_SPACE)
            return True
        with store.lock:
            sequence = store.next_tick()
        address = store.context.regions[span.region].address + span.offset
        group.writings.append(Writing(item, header, encoded, view, address, slot, count, sequence))
        return True

    def _checked(self, header: ChunkHeader, span: Span) -> memoryview:
        if span.length != header.size:
            raise KVFerryError(
                f"a value of {header.size} bytes is not written from a span of {span.length}",
                kind=ErrorKind.INTERNAL,
            )
        limit = self._store.context.max_value_bytes
        if limit is not None and header.size > limit:
            raise KVFerryError(
                f"a value of {header.size} bytes is above the limit of {limit}",
                kind=ErrorKind.CAPACITY,
                remedy="use smaller chunks",
            )
        return self._store.context.view(span)

    def _room(self, count: int) -> int | None:
        """The first of so many free slots that the file has on the disk."""
        store = self._store
        with store.lock:
            slot = store.space.take(count, store.file.slots)
        if slot is None:
            return None
        try:
            covered = store.file.cover(slot + count, self._io)
        except OSError as error:
            with store.lock:
                store.space.give_back(slot, count)
            raise fault(error, _NOT_WRITTEN, store.file.path) from error
        if covered:
            return slot
        with store.lock:
            store.space.give_back(slot, count)
            return store.space.take(count, store.file.covered)

    # -- the steps of a group --------------------------------------------------------------------

    def _write_values(self, group: _Group) -> None:
        if not group.writings:
            return
        self._data.run(group.writings)
        for writing in [each for each in group.writings if each.error is not None]:
            group.writings.remove(writing)
            assert writing.error is not None
            self._release(writing, fault(writing.error, _NOT_WRITTEN, self._store.file.path))

    def _write_entries(self, group: _Group) -> None:
        """Put what the group changes into the table, and what the table should have had before."""
        store = self._store
        with store.lock:
            entries, store.repairs = store.repairs, {}
        group.cleared, self._doubtful = self._doubtful, []
        entries |= {slot: EMPTY for slot, _ in group.cleared}
        entries |= {each.place.slot: EMPTY for each in group.deletions}
        entries |= {each.slot: each.entry.to_bytes(store.tag) for each in group.writings}
        failed = self._table.put(entries)
        if not failed:
            return
        for writing in [each for each in group.writings if each.slot in failed]:
            group.writings.remove(writing)
            self._doubt(writing.slot, writing.slots)
            writing.item.fail(fault(failed[writing.slot], _NOT_WRITTEN, store.file.path))
        for deletion in [each for each in group.deletions if each.place.slot in failed]:
            group.deletions.remove(deletion)
            deletion.item.fail(fault(failed[deletion.place.slot], _NOT_DELETED, store.file.path))
        self._doubtful += [row for row in group.cleared if row[0] in failed]
        group.cleared = [row for row in group.cleared if row[0] not in failed]

    def _settle(self, group: _Group, error: OSError | None) -> None:
        """The flush behind a group's entries has ended: tell what became of it."""
        store = self._store
        told = None if error is None else fault(error, _NOT_WRITTEN, store.file.path)
        told = told or store.file.gone()
        if told is not None:
            self._fail_late(group, told)
            return
        with store.lock:
            for deletion in group.deletions:
                store.index.remove(deletion.key)
                store.space.give_back(deletion.place.slot, deletion.place.slots)
            for slot, slots in group.cleared:
                store.space.give_back(slot, slots)
            for writing in group.writings:
                store.index.insert(writing.header.key, writing.place, writing.sequence)
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

    def _release(self, writing: Writing, told: KVFerryError) -> None:
        """Fail a write that has no entry in the table."""
        with self._store.lock:
            self._store.space.give_back(writing.slot, writing.slots)
        writing.item.fail(told)

    def _doubt(self, slot: int, slots: int) -> None:
        with self._store.lock:
            self._store.space.doubt(slot, slots)
        self._doubtful.append((slot, slots))

    def _fail_early(self, group: _Group, told: KVFerryError) -> None:
        """No entry of the group was written."""
        for writing in group.writings:
            self._release(writing, told)
        for deletion in group.deletions:
            deletion.item.fail(told)

    def _fail_late(self, group: _Group, told: KVFerryError) -> None:
        """Entries of the group may be in the file, and may not be found: take them out at once. Where
        the disk refuses that, too, their slots stay out of use, and it is tried with every later group."""
        for writing in group.writings:
            self._doubt(writing.slot, writing.slots)
        self._doubtful += group.cleared
        undone = list(self._doubtful)
        if not self._table.put({slot: EMPTY for slot, _ in undone}) and self._flush() is None:
            with self._store.lock:
                for slot, slots in undone:
                    self._store.space.give_back(slot, slots)
            self._doubtful.clear()
        for writing in group.writings:
            writing.item.fail(told)
        for deletion in group.deletions:
            deletion.item.fail(told)

    def _abandon(self, groups: Iterable[_Group | None], error: Exception) -> None:
        """The store cannot be asked, or we have a defect: fail all that is under way or waits."""
        told = error
        if not isinstance(told, KVFerryError):
            _log.error("kvferry: the SSD backend failed while writing", exc_info=error)
            told = broken(error)
        for group in groups:
            if group is None:
                continue
            for writing in group.writings:
                self._doubt(writing.slot, writing.slots)
                writing.item.fail(told)
            for deletion in group.deletions:
                deletion.item.fail(told)
            self._doubtful += [row for row in group.cleared if row not in self._doubtful]
        for _ in range(len(self._queue)):
            item = self._queue.take()
            if item is None:
                break
            item.fail(told)

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
