"""What all policies here have in common: they order leaves, chunks with nothing behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.api import NO_PARENT, Claim, EntryView, Evicted, NotEnough
from kvferry_eviction_policies.columns import Column, Ids

NOBODY = -1
_ABSENT, _IDLE, _QUEUED, _TAKEN = range(4)


class LeafPolicy(ABC):
    """An eviction policy over the leaves of the tree that chunks form.

    Only leaves are ever offered, so tails go before heads and nothing is searched. A leaf that the
    manager refuses is forgotten until ``release`` or ``touch`` names it, or the last chunk behind it
    goes: however many chunks are in use, none of them is asked for twice in vain. What order the
    leaves are in is said by the methods that subclasses give.
    """

    def open(self, entries: int) -> None:
        self._size = Column(entries, np.int64)
        self._parent = Column(entries)
        self._successors = Column(entries)
        self._place = Column(entries, np.uint8)
        self._prepare(entries)

    def insert(self, entry: EntryView) -> None:
        self._size.view[entry.id] = entry.size
        self._parent.view[entry.id] = entry.parent
        self._successors.view[entry.id] = 0
        if entry.parent != NO_PARENT:
            self._successors.view[entry.parent] += 1
            self._withdraw(entry.parent)
        self._arrive(entry)
        self._offer(entry.id)

    def touch(self, ids: Sequence[int]) -> None:
        rows = np.asarray(ids, np.int64)
        leaves = rows[self._successors.array[rows] == 0].tolist()
        for entry in leaves:
            self._withdraw(entry)
        self._use(rows)
        for entry in leaves:
            self._offer(entry)

    def release(self, ids: Sequence[int]) -> None:
        rows = np.asarray(ids, np.int64)
        forgotten = (self._place.array[rows] == _IDLE) & (self._successors.array[rows] == 0)
        for entry in rows[forgotten].tolist():
            self._offer(entry)

    def remove(self, ids: Sequence[int]) -> None:
        orphaned: list[int] = []
        for entry in ids:
            if self._place.view[entry] != _TAKEN:
                self._withdraw(entry)
                self._gone(entry)
                orphaned.append(self._parent.view[entry])
            self._place.view[entry] = _ABSENT
            self._forget(entry)
        for parent in orphaned:
            if parent != NO_PARENT and self._place.view[parent] != _ABSENT:
                self._lose_successor(parent)

    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        return self._evict(need, claim, self._front)

    def _evict(
        self, need: int, claim: Callable[[int], Claim], front: Callable[[], int]
    ) -> Evicted | NotEnough:
        taken: list[int] = []
        size = 0
        while size < need:
            entry = front()
            if entry == NOBODY:
                for entry in reversed(taken):
                    self._put_back(entry)
                return NotEnough(size)
            answer = claim(entry)
            self._withdraw(entry)
            if answer is Claim.TAKEN:
                taken.append(entry)
                size += self._size.view[entry]
                self._place.view[entry] = _TAKEN
                self._gone(entry)
                parent = self._parent.view[entry]
                if parent != NO_PARENT:
                    self._lose_successor(parent)
        return Evicted(tuple(taken))

    def _put_back(self, entry: int) -> None:
        self._back(entry)
        self._offer(entry)
        parent = self._parent.view[entry]
        if parent != NO_PARENT:
            self._successors.view[parent] += 1
            self._withdraw(parent)

    def _lose_successor(self, parent: int) -> None:
        left = self._successors.view[parent] - 1
        self._successors.view[parent] = left
        if left == 0:
            self._offer(parent)

    def _offer(self, entry: int) -> None:
        self._place.view[entry] = _QUEUED
        self._add(entry)

    def _withdraw(self, entry: int) -> None:
        if self._place.view[entry] == _QUEUED:
            self._place.view[entry] = _IDLE
            self._drop(entry)

    def _is_queued(self, entry: int) -> bool:
        return bool(self._place.view[entry] == _QUEUED)

    @abstractmethod
    def _prepare(self, entries: int) -> None:
        """Make room for ids below ``entries``."""

    @abstractmethod
    def _arrive(self, entry: EntryView) -> None:
        """A new chunk, in no queue yet. Those before it are in none either."""

    @abstractmethod
    def _use(self, rows: Ids) -> None:
        """An access to these chunks, none of which is in a queue now."""

    @abstractmethod
    def _add(self, entry: int) -> None:
        """The chunk is a leaf and may be offered."""

    @abstractmethod
    def _drop(self, entry: int) -> None:
        """Undo :meth:`_add`."""

    @abstractmethod
    def _front(self) -> int:
        """The leaf to take next, or :data:`NOBODY`."""

    @abstractmethod
    def _gone(self, entry: int) -> None:
        """A victim, for the time being, or removed."""

    @abstractmethod
    def _back(self, entry: int) -> None:
        """Undo :meth:`_gone` of a victim."""

    @abstractmethod
    def _forget(self, entry: int) -> None:
        """The id may come back for another chunk."""
