"""What may begin of the writes and deletions that wait, and what of them is under way."""

from __future__ import annotations

import threading
from collections.abc import Collection

from attrs import define, field

from kvferry.api import ChunkHeader, ChunkKey, DeleteStatus, ErrorKind, KVFerryError, Span, WriteStatus
from kvferry_backend_ssd.block_io import BlockIO
from kvferry_backend_ssd.faults import broken, fault
from kvferry_backend_ssd.index import Place
from kvferry_backend_ssd.jobs import Item, Queue
from kvferry_backend_ssd.layout import PAGE
from kvferry_backend_ssd.store import Store
from kvferry_backend_ssd.writing import NOT_WRITTEN, Writing, encode, slots_for

WAVE_BYTES = 16 << 20
"""As many bytes of values one lane takes on at once."""


@define(eq=False)
class Deleting:
    """A chunk that is to be found no longer."""

    item: Item
    key: ChunkKey
    place: Place


@define(eq=False)
class Wave:
    """Writes and deletions that began together. No key is under way twice."""

    writings: list[Writing] = field(factory=list)
    deletions: list[Deleting] = field(factory=list)

    def __bool__(self) -> bool:
        return bool(self.writings or self.deletions)

    def fail(self, error: KVFerryError) -> None:
        """Tell all of them."""
        for writing in self.writings:
            writing.item.fail(error)
        for deletion in self.deletions:
            deletion.item.fail(error)


class Intake:
    """Takes items out of ``queue`` for the lanes that write, in the order in which they came.

    A key is under way once at a time, and a write that finds no room waits for the deletions under way.
    Threads: any; those who gather wait for each other.
    """

    def __init__(self, store: Store, queue: Queue) -> None:
        self._store = store
        self._queue = queue
        self._gate = threading.Lock()
        self._changed = threading.Condition()
        self._ended = 0
        """How often something under way has ended."""
        self._busy: set[ChunkKey] = set()
        self._sequences: set[int] = set()
        self._doubtful: Collection[int] = ()
        self._deletions = 0

    def settled(self) -> int:
        """Every entry below this sequence is durable with its value, or certainly gone."""
        with self._changed:
            return min((self._store.floor, *self._sequences, *self._doubtful))

    def over(self, wave: Wave, doubtful: Collection[int] | None = None) -> None:
        """What became of these is known, and told. Where ``doubtful`` is given, entries of these sequences,
        and of no others, may still be in the file without their values."""
        with self._changed:
            self._busy.difference_update(each.header.key for each in wave.writings)
            self._busy.difference_update(each.key for each in wave.deletions)
            self._sequences.difference_update(each.sequence for each in wave.writings)
            if doubtful is not None:
                self._doubtful = doubtful
            self._deletions -= len(wave.deletions)
            self._ended += 1
            self._changed.notify_all()

    def gather(self, io: BlockIO) -> Wave:
        """What may begin now. Empty when nothing waits, or all that did was answered at once.

        Raises :class:`KVFerryError` when the store is gone.
        """
        with self._gate:
            while True:
                gone = self._store.file.gone()
                if gone is not None:
                    raise gone
                with self._changed:
                    ended = self._ended
                wave = Wave()
                if self._fill(wave, io):
                    self._queue.share()
                    return wave
                if wave:
                    return wave
                self._await_an_end(ended)

    def _await_an_end(self, ended: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended != ended)

    def _fill(self, wave: Wave, io: BlockIO) -> bool:
        """False when the next item has to wait for something under way: for its key, or for room."""
        length = 0
        while length < WAVE_BYTES and (item := self._queue.take()) is not None:
            deletes = isinstance(item.what, ChunkKey)
            key = item.what if deletes else item.what[0].key
            if key in self._busy:
                self._queue.put_back(item)
                return False
            try:
                began = self._deletion(item, wave) if deletes else self._write(item, wave, io)
            except KVFerryError as error:
                item.fail(error)
                continue
            except Exception as error:  # noqa: BLE001 - one broken item stays one broken item
                item.fail(broken(error))
                continue
            if not began:
                self._queue.put_back(item)
                return False
            length += PAGE if deletes else item.what[0].size
        return True

    def _deletion(self, item: Item, wave: Wave) -> bool:
        with self._store.lock:
            place = self._store.index.find(item.what)
        if place is None:
            item.finish(DeleteStatus.ABSENT)
            return True
        wave.deletions.append(Deleting(item, item.what, place))
        with self._changed:
            self._busy.add(item.what)
            self._deletions += 1
        return True

    def _write(self, item: Item, wave: Wave, io: BlockIO) -> bool:
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
        with self._changed:
            room_comes = self._deletions > 0
        slot = self._room(count, io)
        if slot is None:
            if room_comes:
                return False
            item.finish(WriteStatus.NO_SPACE)
            return True
        with store.lock:
            sequence = store.next_tick()
        with self._changed:
            self._busy.add(header.key)
            self._sequences.add(sequence)
        address = store.context.regions[span.region].address + span.offset
        wave.writings.append(Writing(item, header, encoded, view, address, slot, count, sequence))
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

    def _room(self, count: int, io: BlockIO) -> int | None:
        """The first of so many free slots that the file has on the disk."""
        store = self._store
        with store.lock:
            slot = store.space.take(count, store.file.slots)
        if slot is None:
            return None
        try:
            covered = store.file.cover(slot + count, io)
        except OSError as error:
            with store.lock:
                store.space.give_back(slot, count)
            raise fault(error, NOT_WRITTEN, store.file.path) from error
        if covered:
            return slot
        with store.lock:
            store.space.give_back(slot, count)
            return store.space.take(count, store.file.covered)
