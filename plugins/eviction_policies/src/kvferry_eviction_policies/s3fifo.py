"""S3-FIFO: a small queue for what is new, a main queue for what came back, and ghosts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvferry.api import NO_PARENT, Claim, EntryView, Evicted, NotEnough
from kvferry_eviction_policies.columns import Column, Ids
from kvferry_eviction_policies.ghosts import Ghosts, fingerprint
from kvferry_eviction_policies.heaps import EMPTY, Heaps
from kvferry_eviction_policies.leaves import NOBODY, LeafPolicy

_SMALL, _MAIN = 0, 1
_MOST_USES = 3
_SMALL_PART = 10
"""The small queue gives victims while it holds a tenth of what is resident, or more."""
_CHANCES = 32
"""Leaves that may be passed over for one victim."""


class S3FIFO(LeafPolicy):
    """Chunks that nobody asks for again leave soon, whatever their number; others stay.

    The scheme is that of Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache
    eviction" (SOSP 2023). A new chunk enters the small queue, or the main one if it was thrown out of
    the small one not long ago. The front of the small queue goes, unless it was used more than once
    since it came: then it moves to the end of the main queue and starts to count anew. The front of
    the main queue goes if it was not used, else it goes to the end with one use less. Uses are
    counted up to three. As many ghosts are remembered as the main queue holds chunks when the small
    one has its tenth.

    What a tree adds: a chunk has its place in its queue always, but is looked at there when it is a
    leaf. One that moves to the main queue takes those before it along, which were used as often.
    That costs time for each of them, once in the life of each. A victim is preceded by 32 second
    chances at most, so that one eviction after a long quiet time does not look at everything; the
    leaf after that goes whatever its uses.
    """

    def _prepare(self, entries: int) -> None:
        self._clock = 0
        self._queue = Column(entries, np.uint8)
        self._turn = Column(entries, np.int64)
        """Place in the queue: the smallest is the front."""
        self._uses = Column(entries, np.int8)
        self._mark = Column(entries, np.int64)
        self._ghosts = Ghosts(entries)
        self._heaps = Heaps(entries, self._turn, self._turn)
        self._roots = [EMPTY, EMPTY]
        self._held = [0, 0]
        """Sizes of all chunks in each queue, leaves or not."""
        self._moves: list[tuple[int, int, int, int]] = []
        """Entry, queue, turn and uses before each move of this eviction, to undo it."""

    def _arrive(self, entry: EntryView) -> None:
        mark = fingerprint(entry.key)
        self._mark.view[entry.id] = mark
        self._uses.view[entry.id] = 0
        self._clock += 1
        self._turn.view[entry.id] = self._clock
        held = sum(self._held)
        queue = _MAIN if self._ghosts.take(mark, held - held // _SMALL_PART) else _SMALL
        self._queue.view[entry.id] = queue
        self._held[queue] += entry.size
        if queue == _MAIN and entry.parent != NO_PARENT:
            self._promote(entry.parent)
            self._moves.clear()

    def _use(self, rows: Ids) -> None:
        uses = self._uses.array
        uses[rows] = np.minimum(uses[rows] + 1, _MOST_USES)

    def _add(self, entry: int) -> None:
        queue = self._queue.view[entry]
        self._roots[queue] = self._heaps.add(self._roots[queue], entry)

    def _drop(self, entry: int) -> None:
        queue = self._queue.view[entry]
        self._roots[queue] = self._heaps.remove(self._roots[queue], entry)

    def _gone(self, entry: int) -> None:
        self._held[self._queue.view[entry]] -= self._size.view[entry]

    def _back(self, entry: int) -> None:
        self._held[self._queue.view[entry]] += self._size.view[entry]

    def _forget(self, entry: int) -> None:
        pass

    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        clock = self._clock
        answer = super().evict(need, claim)
        if isinstance(answer, NotEnough):
            for entry, queue, turn, uses in reversed(self._moves):
                self._place_at(entry, queue, turn, uses)
            self._clock = clock
        else:
            for entry in answer.ids:
                if self._queue.view[entry] == _SMALL:
                    self._ghosts.add(self._mark.view[entry])
        self._moves.clear()
        return answer

    def _front(self) -> int:
        for _ in range(_CHANCES):
            entry, queue = self._next()
            if entry == NOBODY:
                return entry
            uses = self._uses.view[entry]
            if queue == _SMALL and uses > 1:
                self._promote(entry)
            elif queue == _MAIN and uses > 0:
                self._move(entry, _MAIN, uses - 1)
            else:
                return entry
        return self._next()[0]

    def _next(self) -> tuple[int, int]:
        """The front of the queue whose turn it is, and that queue."""
        small, main = self._roots
        held = self._held[_SMALL]
        if small and (held * _SMALL_PART >= held + self._held[_MAIN] or not main):
            return small - 1, _SMALL
        return main - 1, _MAIN

    def _promote(self, entry: int) -> None:
        """To the main queue, together with what stands before it."""
        while entry != NO_PARENT and self._queue.view[entry] == _SMALL:
            self._move(entry, _MAIN, 0)
            entry = self._parent.view[entry]

    def _move(self, entry: int, queue: int, uses: int) -> None:
        """To the end of ``queue``."""
        self._moves.append((entry, self._queue.view[entry], self._turn.view[entry], self._uses.view[entry]))
        self._clock += 1
        self._place_at(entry, queue, self._clock, uses)

    def _place_at(self, entry: int, queue: int, turn: int, uses: int) -> None:
        queued = self._is_queued(entry)
        if queued:
            self._drop(entry)
        size = self._size.view[entry]
        self._held[self._queue.view[entry]] -= size
        self._held[queue] += size
        self._queue.view[entry] = queue
        self._turn.view[entry] = turn
        self._uses.view[entry] = uses
        if queued:
            self._add(entry)
