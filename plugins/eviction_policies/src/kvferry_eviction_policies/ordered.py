"""Policies that are one order of the leaves: fifo, mru and lfu."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvferry.api import Claim, EntryView, Evicted, NotEnough
from kvferry_eviction_policies.columns import Column, Ids
from kvferry_eviction_policies.heaps import EMPTY, Heaps
from kvferry_eviction_policies.leaves import LeafPolicy


class OrderedPolicy(LeafPolicy):
    """Takes the leaf with the least ``order``, and among equals the least ``stamp``."""

    def _prepare(self, entries: int) -> None:
        self._clock = 0
        self._order = Column(entries, np.int64)
        self._stamp = Column(entries, np.int64)
        self._heaps = Heaps(entries, self._order, self._stamp)
        self._root = EMPTY

    def _add(self, entry: int) -> None:
        self._root = self._heaps.add(self._root, entry)

    def _drop(self, entry: int) -> None:
        self._root = self._heaps.remove(self._root, entry)

    def _front(self) -> int:
        return self._root - 1

    def _gone(self, entry: int) -> None:
        pass

    def _back(self, entry: int) -> None:
        pass

    def _forget(self, entry: int) -> None:
        pass


class FIFO(OrderedPolicy):
    """Takes the leaf that came first. Accesses do not matter."""

    def _arrive(self, entry: EntryView) -> None:
        self._clock += 1
        self._order.view[entry.id] = self._clock

    def _use(self, rows: Ids) -> None:
        pass


class MRU(OrderedPolicy):
    """Takes the leaf that was used last.

    For loops over more than the tier holds, where whatever was used just now is needed last.
    """

    def _arrive(self, entry: EntryView) -> None:
        self._clock += 1
        self._order.view[entry.id] = -self._clock

    def _use(self, rows: Ids) -> None:
        self._clock += 1
        self._order.array[rows] = -self._clock


class LFU(OrderedPolicy):
    """Takes the leaf that was used least often, with dynamic ageing.

    The scheme is LFU-DA (Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating Content
    Management Techniques for Web Proxy Caches", 1999): the order of a chunk is its number of uses
    plus the age of the cache at its last use, and the age is the greatest order of any victim so
    far. What was popular long ago is overtaken by what is used now, and nothing is ever rewritten
    for it. Among equals the least recently used goes first.
    """

    def _prepare(self, entries: int) -> None:
        super()._prepare(entries)
        self._age = 0
        self._uses = Column(entries, np.int64)

    def _arrive(self, entry: EntryView) -> None:
        self._clock += 1
        self._uses.view[entry.id] = 1
        self._order.view[entry.id] = self._age + 1
        self._stamp.view[entry.id] = self._clock

    def _use(self, rows: Ids) -> None:
        self._clock += 1
        self._uses.array[rows] += 1
        self._order.array[rows] = self._uses.array[rows] + self._age
        self._stamp.array[rows] = self._clock

    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        answer = super().evict(need, claim)
        if isinstance(answer, Evicted):
            for entry in answer.ids:
                self._age = max(self._age, self._order.view[entry])
        return answer
