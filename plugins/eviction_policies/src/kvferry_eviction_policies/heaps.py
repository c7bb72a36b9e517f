"""Many priority queues in the same columns."""

from __future__ import annotations

import numpy as np

from kvferry_eviction_policies.columns import Column

EMPTY = 0
"""The root of a queue without elements."""


class Heaps:
    """Leftist heaps over the numbers below ``length``, each number in one heap at most.

    A heap is known by its *root*, a number that the caller keeps: :data:`EMPTY`, or one more than
    its least element. ``first`` orders the elements, ``then`` decides among equals, at last the
    smaller number. Both columns belong to the caller, who must not write the values of an element
    that is in a heap.

    Every operation takes time logarithmic in the size of the heap, also at worst, and any element
    can leave: nothing stale stays behind to be cleared away later, under the manager's lock.
    """

    def __init__(self, length: int, first: Column, then: Column) -> None:
        self._first = first
        self._then = then
        # Nodes are numbers plus one, so that untouched zeros mean none.
        self._left = Column(length + 1)
        self._right = Column(length + 1)
        self._up = Column(length + 1)
        self._rank = Column(length + 1, np.uint8)
        """Nodes on the shortest way down to a missing child; 0 for none."""

    def add(self, root: int, number: int) -> int:
        """The root of the heap with ``number`` in it, which is in none so far."""
        node = number + 1
        self._left.view[node] = self._right.view[node] = self._up.view[node] = EMPTY
        self._rank.view[node] = 1
        return self._merge(root, node)

    def remove(self, root: int, number: int) -> int:
        """The root of the heap without ``number``, which is in it."""
        node = number + 1
        up = self._up.view
        above = up[node]
        rest = self._merge(self._left.view[node], self._right.view[node])
        if rest:
            up[rest] = above
        if not above:
            return rest
        if self._left.view[above] == node:
            self._left.view[above] = rest
        else:
            self._right.view[above] = rest
        self._settle(above, stop_early=True)
        return root

    def _merge(self, one: int, other: int) -> int:
        """The root of both together; its ``up`` is none."""
        if not one or not other:
            root = one or other
            if root:
                self._up.view[root] = EMPTY
            return root
        right, up = self._right.view, self._up.view
        if self._before(other, one):
            one, other = other, one
        up[one] = EMPTY
        root = one
        while True:
            below = right[one]
            if not below:
                right[one] = other
                up[other] = one
                break
            if self._before(other, below):
                right[one] = other
                up[other] = one
                other, below = below, other
            one = below
        self._settle(one, stop_early=False)
        return root

    def _settle(self, node: int, *, stop_early: bool) -> None:
        """Mend ranks from ``node`` upwards. A node whose rank stays ends it, if only one changed."""
        left, right, up, rank = self._left.view, self._right.view, self._up.view, self._rank.view
        while node:
            one, other = left[node], right[node]
            if rank[one] < rank[other]:
                left[node], right[node] = other, one
                other = one
            now = rank[other] + 1
            if stop_early and now == rank[node]:
                return
            rank[node] = now
            node = up[node]

    def _before(self, one: int, other: int) -> bool:
        first = self._first.view
        mine, theirs = first[one - 1], first[other - 1]
        if mine == theirs:
            mine, theirs = self._then.view[one - 1], self._then.view[other - 1]
            if mine == theirs:
                return one < other
        return bool(mine < theirs)
