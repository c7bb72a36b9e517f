"""Least recently used, tails before heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvferry.api import NO_PARENT, Claim, EntryView, Evicted, NotEnough
from kvferry.control.columns import Column
from kvferry.control.heap import Heap

_ABSENT, _IDLE, _QUEUED, _WAITING, _TAKEN = range(5)
_NOBODY = -1


class LRU:
    """Takes the least recently used chunk among those that have nothing behind them.

    Only such *leaves* stand in the order; a touch of a prefix writes one stamp per chunk in bulk and
    moves the one leaf that may be at its end. A leaf that was just used goes to the end of a linked
    list, which is therefore sorted by stamp. A chunk that becomes a leaf because the last one behind
    it went, or that can be claimed again after a lease, keeps its older stamp and waits in a heap;
    the next victim is the older of the two fronts.

    Costs: ``insert``, ``touch`` (apart from the bulk write), ``remove`` of one chunk and a victim take
    constant time, or logarithmic time in the length of the heap where the chunk or the one before it
    waits there. A refused chunk is forgotten until ``release`` or ``touch`` names it, so no chunk is
    asked for twice in vain.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._oldest = _NOBODY
        self._newest = _NOBODY
        self.open(0)

    def open(self, entries: int) -> None:
        self._stamp = Column(entries, np.int64)
        self._size = Column(entries, np.int64)
        self._parent = Column(entries)
        self._successors = Column(entries)
        self._older = Column(entries)
        self._newer = Column(entries)
        self._place = Column(entries, np.uint8)
        self._waiting = Heap(entries)

    def insert(self, entry: EntryView) -> None:
        self._clock += 1
        self._stamp.view[entry.id] = self._clock
        self._size.view[entry.id] = entry.size
        self._parent.view[entry.id] = entry.parent
        self._successors.view[entry.id] = 0
        if entry.parent != NO_PARENT and self._place.view[entry.parent] != _ABSENT:
            self._successors.view[entry.parent] += 1
            self._take_out(entry.parent)
        self._append(entry.id)

    def touch(self, ids: Sequence[int]) -> None:
        self._clock += 1
        rows = np.asarray(ids, np.int64)
        self._stamp.array[rows] = self._clock
        leaves = rows[self._successors.array[rows] == 0]
        for entry in leaves[::-1].tolist():
            if self._place.view[entry] != _ABSENT:
                self._take_out(entry)
                self._append(entry)

    def release(self, ids: Sequence[int]) -> None:
        rows = np.asarray(ids, np.int64)
        forgotten = (self._place.array[rows] == _IDLE) & (self._successors.array[rows] == 0)
        for entry in rows[forgotten].tolist():
            self._wait(entry)

    def remove(self, ids: Sequence[int]) -> None:
        orphaned: list[int] = []
        for entry in ids:
            if self._place.view[entry] != _TAKEN:
                self._take_out(entry)
                orphaned.append(self._parent.view[entry])
            self._place.view[entry] = _ABSENT
        for parent in orphaned:
            if parent != NO_PARENT and self._place.view[parent] != _ABSENT:
                self._lose_successor(parent)

    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        taken: list[int] = []
        size = 0
        while size < need:
            entry = self._front()
            if entry == _NOBODY:
                self._put_back(taken)
                return NotEnough(size)
            answer = claim(entry)
            self._take_out(entry)
            if answer is Claim.TAKEN:
                taken.append(entry)
                size += self._size.view[entry]
                self._place.view[entry] = _TAKEN
                parent = self._parent.view[entry]
                if parent != NO_PARENT and self._place.view[parent] != _ABSENT:
                    self._lose_successor(parent)
        return Evicted(tuple(taken))

    def _put_back(self, taken: list[int]) -> None:
        for entry in reversed(taken):
            self._wait(entry)
            parent = self._parent.view[entry]
            if parent != NO_PARENT and self._place.view[parent] != _ABSENT:
                self._successors.view[parent] += 1
                self._take_out(parent)

    def _lose_successor(self, parent: int) -> None:
        left = self._successors.view[parent] - 1
        self._successors.view[parent] = left
        if left == 0 and self._place.view[parent] == _IDLE:
            self._wait(parent)

    def _wait(self, entry: int) -> None:
        self._place.view[entry] = _WAITING
        self._waiting.add(entry, self._stamp.view[entry])

    def _front(self) -> int:
        """The oldest leaf."""
        oldest = self._oldest
        if not self._waiting:
            return oldest
        stamp, entry = self._waiting.first()
        return entry if oldest == _NOBODY or stamp <= self._stamp.view[oldest] else oldest

    def _append(self, entry: int) -> None:
        self._older.view[entry] = self._newest
        self._newer.view[entry] = _NOBODY
        if self._newest == _NOBODY:
            self._oldest = entry
        else:
            self._newer.view[self._newest] = entry
        self._newest = entry
        self._place.view[entry] = _QUEUED

    def _take_out(self, entry: int) -> None:
        """Out of list or heap."""
        place = self._place.view
        at = place[entry]
        if at == _QUEUED:
            older, newer = self._older.view[entry], self._newer.view[entry]
            if older == _NOBODY:
                self._oldest = newer
            else:
                self._newer.view[older] = newer
            if newer == _NOBODY:
                self._newest = older
            else:
                self._older.view[newer] = older
            place[entry] = _IDLE
        elif at == _WAITING:
            self._waiting.remove(entry)
            place[entry] = _IDLE
