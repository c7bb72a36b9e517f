"""A queue of numbers that any of them can leave."""

from __future__ import annotations

from kvferry.control.columns import Column

_BITS = 32
_MASK = (1 << _BITS) - 1
_NONE = -1


class Heap:
    """Numbers below ``rows``, each at most once, in the order of what they were added with: zero or more,
    and among equals the smaller number first.

    A binary heap that knows where each number stands. Every operation takes logarithmic time, also at
    worst: nothing stale stays behind to be cleared away later, under the manager's lock. A number that
    comes before all others waits in front of the heap, so that one which leaves soon after it came
    takes constant time. Not thread-safe.
    """

    def __init__(self, rows: int) -> None:
        self._front = _NONE
        """A key that comes before all of the heap; or none, and then the heap's own first comes first."""
        self._keys: list[int] = []
        """What the number was added with, and the number, in one integer."""
        self._place = Column(rows)

    def __len__(self) -> int:
        return len(self._keys) + (self._front != _NONE)

    def add(self, number: int, order: int) -> None:
        """``number``, which is not in the heap."""
        key = (order << _BITS) | number
        if self._front == _NONE:
            if not self._keys or key < self._keys[0]:
                self._front = key
                return
        elif key < self._front:
            key, self._front = self._front, key
        self._keys.append(key)
        self._rise(len(self._keys) - 1, key)

    def first(self) -> tuple[int, int]:
        """(order, number) of the front. Not to be called while the heap is empty."""
        key = self._keys[0] if self._front == _NONE else self._front
        return key >> _BITS, key & _MASK

    def remove(self, number: int) -> None:
        """``number``, which is in the heap, leaves it."""
        if self._front != _NONE and self._front & _MASK == number:
            self._front = _NONE
            return
        keys = self._keys
        place = self._place.view[number]
        last = keys.pop()
        if place < len(keys):
            self._rise(self._dig(place), last)

    def _dig(self, place: int) -> int:
        """Fill a hole from below until it is at the bottom; where it is then. What filled the hole is
        no smaller than what left it, so only the key that comes there may have to rise."""
        keys, places = self._keys, self._place.view
        count = len(keys)
        while (below := 2 * place + 1) < count:
            key = keys[below]
            if below + 1 < count and keys[below + 1] < key:
                below += 1
                key = keys[below]
            keys[place] = key
            places[key & _MASK] = place
            place = below
        return place

    def _rise(self, place: int, key: int) -> None:
        keys, places = self._keys, self._place.view
        while place:
            above = (place - 1) >> 1
            other = keys[above]
            if other <= key:
                break
            keys[place] = other
            places[other & _MASK] = place
            place = above
        keys[place] = key
        places[key & _MASK] = place
