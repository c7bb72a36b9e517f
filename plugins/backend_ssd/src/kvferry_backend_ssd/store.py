"""What the lanes of one open backend share."""

from __future__ import annotations

import threading

from attrs import define, field

from kvferry.api import BackendContext, ChunkKey
from kvferry_backend_ssd.entry import EMPTY
from kvferry_backend_ssd.index import Index, Place
from kvferry_backend_ssd.layout import ENTRIES_PER_PAGE, GROUP_SLOTS
from kvferry_backend_ssd.space import Space
from kvferry_backend_ssd.store_file import StoreFile

NO_FLOOR = 1 << 63
PAD = b"\xa5"
"""Behind a value, to the end of its last page. Part of the checksum, so that a value which goes on
behind its end is noticed."""


@define
class Counters:
    """What happened since the backend was opened, and could interest whoever looks after it."""

    recovered: int = 0
    healed: int = 0
    """Chunks whose entry in the table was damaged and was found again in their slot."""
    dropped: int = 0
    """Entries that could not be used: damaged, cut off, or beyond a lowered capacity."""
    corrupt: int = 0
    """Chunks whose bytes were not what was stored. Their slots are out of use until they are deleted."""
    flushes: int = 0


@define(eq=False)
class Store:
    """The chunks of one store file. ``lock`` guards all that changes but for the file itself; it is
    held for lookups alone, never during I/O."""

    file: StoreFile
    tag: bytes
    context: BackendContext
    lock: threading.Lock = field(factory=threading.Lock)
    index: Index = field(init=False)
    space: Space = field(init=False)
    counters: Counters = field(factory=Counters)
    tick: int = 1
    """The number of the next use. Grows over restarts."""
    dirty: set[int] = field(factory=set)
    """Groups with uses that are not in the file yet."""
    repairs: dict[int, bytes] = field(factory=dict)
    """Entries that the table should have, by slot: written together with the next ones."""
    floor: int = NO_FLOOR
    """Entries from this sequence on are looked at by the next restart in any case: one that this opening
    had to drop may still be in the file."""
    loaded: bool = False
    load_lock: threading.Lock = field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        self.empty()

    def empty(self) -> None:
        """As if nothing were in the file."""
        self.index = Index(self.file.slots)
        self.space = Space(self.file.slots)
        self.repairs.clear()

    def next_tick(self) -> int:
        """The caller holds the lock."""
        tick = self.tick
        self.tick += 1
        return tick

    def forget(self, slot: int) -> None:
        """A chunk that was recovered has no header that could be read."""
        with self.lock:
            place = self.index.unlink(slot)
            self.space.give_back(slot, place.slots)
            self.repairs[slot] = EMPTY
            self.counters.dropped += 1
            self.counters.recovered -= 1

    def touch(self, key: ChunkKey, place: Place) -> None:
        """A chunk was read."""
        with self.lock:
            if self.index.find(key) == place:
                self.index.used[place.slot] = self.next_tick()
                self.dirty.add(place.slot // GROUP_SLOTS)

    def condemn(self, key: ChunkKey, place: Place) -> bool:
        """The bytes at a place are not what was stored; false when the chunk is not there any more."""
        with self.lock:
            if self.index.find(key) != place:
                return False
            if not self.space.is_quarantined(place.slot):
                self.space.quarantine(place.slot, place.slots)
                self.counters.corrupt += 1
            return True


def page_of(slot: int) -> int:
    """Number of the table's page that holds the entry of a slot. A group begins with a page."""
    return slot // ENTRIES_PER_PAGE
