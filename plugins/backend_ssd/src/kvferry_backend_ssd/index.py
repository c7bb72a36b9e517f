"""Which slot holds which chunk, in memory: columns of plain bytes and a hash table over them."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.api import ChunkKey
from kvferry_backend_ssd.entry import SUM_BYTES, Rows
from kvferry_backend_ssd.layout import PAGE

_DIGEST = 32
_FREE = 0xFFFFFFFF


class Place(NamedTuple):
    """Where a chunk lies, and what its value must be."""

    slot: int
    slots: int
    head_pages: int
    size: int
    checksum: bytes

    @property
    def head_bytes(self) -> int:
        return self.head_pages * PAGE


class Index:
    """Chunks by key, at most one for each of ``slots`` slots. About 90 bytes for each slot.

    The table is open-addressed: a key is looked for from its own place onwards until a gap, and a
    removal closes the gap behind it. Threads: the caller's lock.
    """

    def __init__(self, slots: int) -> None:
        self.count = 0
        self._namespaces: dict[bytes, int] = {}
        self._mask = (1 << max(3, (2 * slots - 1).bit_length())) - 1
        self._table = array("I", [_FREE]) * (self._mask + 1)
        self._digests = bytearray(_DIGEST * slots)
        self._sums = bytearray(SUM_BYTES * slots)
        self._spaces = array("I", bytes(4 * slots))
        self._sizes = array("Q", bytes(8 * slots))
        self._runs = array("H", bytes(2 * slots))
        self._heads = array("H", bytes(2 * slots))
        self.used = array("Q", bytes(8 * slots))
        """When the chunk of each slot was used last: a count that grows with every use."""

    def find(self, key: ChunkKey) -> Place | None:
        at = self._look(key)
        return None if at < 0 else self._place(self._table[at])

    def insert(self, key: ChunkKey, place: Place, used: int) -> None:
        """Add a chunk that is not there."""
        slot = place.slot
        self._digests[_DIGEST * slot : _DIGEST * (slot + 1)] = key.digest
        self._sums[SUM_BYTES * slot : SUM_BYTES * (slot + 1)] = place.checksum
        self._spaces[slot] = self._space(key.namespace)
        self._sizes[slot] = place.size
        self._runs[slot] = place.slots
        self._heads[slot] = place.head_pages
        self.used[slot] = used
        linked = self.link(slot)
        assert linked, "the caller has looked for it"

    def fill(self, rows: Rows, used: NDArray[np.uint64]) -> None:
        """Put the facts of many entries into the columns. None can be found before :meth:`link`."""
        slots = rows["slot"]
        bytes_of = np.frombuffer(self._digests, dtype=np.uint8).reshape(-1, _DIGEST)
        bytes_of[slots] = rows["digest"]
        bytes_of = np.frombuffer(self._sums, dtype=np.uint8).reshape(-1, SUM_BYTES)
        bytes_of[slots] = rows["checksum"]
        names = rows["namespace"].tobytes()
        spaces = [self._space(names[at : at + _DIGEST]) for at in range(0, len(names), _DIGEST)]
        np.frombuffer(self._spaces, dtype=np.uint32)[slots] = spaces
        np.frombuffer(self._sizes, dtype=np.uint64)[slots] = rows["size"]
        np.frombuffer(self._runs, dtype=np.uint16)[slots] = rows["slots"]
        np.frombuffer(self._heads, dtype=np.uint16)[slots] = rows["head_pages"]
        np.frombuffer(self.used, dtype=np.uint64)[slots] = used

    def link(self, slot: int) -> bool:
        """Make the chunk of a slot findable, unless another slot has its key already."""
        table, digests, spaces = self._table, self._digests, self._spaces
        digest, space = digests[_DIGEST * slot : _DIGEST * (slot + 1)], spaces[slot]
        at = (int.from_bytes(digest[:8], "little") + space) & self._mask
        while (other := table[at]) != _FREE:
            if spaces[other] == space and digests[_DIGEST * other : _DIGEST * (other + 1)] == digest:
                return False
            at = (at + 1) & self._mask
        table[at] = slot
        self.count += 1
        return True

    def holds(self, slot: int, key: ChunkKey, size: int) -> bool:
        """Whether the facts of a slot are those of such a chunk."""
        return (
            self._sizes[slot] == size
            and self._namespaces.get(key.namespace) == self._spaces[slot]
            and self._digests[_DIGEST * slot : _DIGEST * (slot + 1)] == key.digest
        )

    def remove(self, key: ChunkKey) -> None:
        """Take out a chunk that is there."""
        gap = self._look(key)
        assert gap >= 0, "the caller has found it"
        self._close(gap)

    def unlink(self, slot: int) -> Place:
        """Take out the chunk of a slot, whatever its key is."""
        at = self._home(slot)
        while self._table[at] != slot:
            at = (at + 1) & self._mask
        self._close(at)
        return self._place(slot)

    def _place(self, slot: int) -> Place:
        return Place(
            slot,
            self._runs[slot],
            self._heads[slot],
            self._sizes[slot],
            bytes(self._sums[SUM_BYTES * slot : SUM_BYTES * (slot + 1)]),
        )

    def _close(self, gap: int) -> None:
        """Free a place of the table, and keep every other chunk findable."""
        at = gap
        while True:
            at = (at + 1) & self._mask
            slot = self._table[at]
            if slot == _FREE:
                break
            # An entry may move into the gap unless its own place lies between the gap and itself.
            if (at - self._home(slot)) & self._mask >= (at - gap) & self._mask:
                self._table[gap] = slot
                gap = at
        self._table[gap] = _FREE
        self.count -= 1

    def _space(self, namespace: bytes) -> int:
        return self._namespaces.setdefault(namespace, len(self._namespaces))

    def _home(self, slot: int) -> int:
        digest = self._digests[_DIGEST * slot : _DIGEST * slot + 8]
        return (int.from_bytes(digest, "little") + self._spaces[slot]) & self._mask

    def _look(self, key: ChunkKey) -> int:
        """Where in the table a chunk stands, or -1. Keys are compared in full."""
        space = self._namespaces.get(key.namespace)
        if space is None:
            return -1
        at = (int.from_bytes(key.digest[:8], "little") + space) & self._mask
        while (slot := self._table[at]) != _FREE:
            if (
                self._spaces[slot] == space
                and self._digests[_DIGEST * slot : _DIGEST * (slot + 1)] == key.digest
            ):
                return at
            at = (at + 1) & self._mask
        return -1
