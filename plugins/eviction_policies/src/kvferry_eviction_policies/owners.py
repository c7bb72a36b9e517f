"""Who holds something now, and who holds most for what they may hold."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np
from attrs import define

from kvferry_eviction_policies.columns import Column
from kvferry_eviction_policies.heaps import EMPTY, Heaps

_NOTHING_ALLOWED, _NO_LIMIT, _LIMITED = range(3)


@define(eq=False, slots=True)
class Owner:
    """Somebody with chunks. ``root`` leads to those that may be offered."""

    name: str
    number: int
    held: int = 0
    chunks: int = 0
    root: int = EMPTY
    queued: bool = False


class Owners:
    """The owners that have chunks, by name, by number, and in the order in which they give.

    First those that may hold nothing, then those without a limit, then those with one; within the
    first two who holds most, within the last who holds most of what it may. Among equals it is the
    smaller number. A number is the smallest that is free when its owner's first chunk comes; with
    the last chunk nothing of an owner is left.
    """

    def __init__(self, entries: int, quota: Callable[[str], int | None]) -> None:
        self._quota = quota
        self._by_name: dict[str, Owner] = {}
        self._by_number: dict[int, Owner] = {}
        self._freed: list[int] = []
        self._class = Column(entries, np.uint8)
        self._share = Column(entries, np.float64)
        """Negative, since the least is the front."""
        self._heaps = Heaps(entries, self._class, self._share)
        self._root = EMPTY

    def find(self, name: str) -> Owner | None:
        return self._by_name.get(name)

    def numbered(self, number: int) -> Owner:
        return self._by_number[number]

    def acquire(self, name: str) -> Owner:
        """The owner ``name``, with one chunk more."""
        owner = self._by_name.get(name)
        if owner is None:
            # Freed numbers are smaller than any that was not used yet.
            number = heappop(self._freed) if self._freed else len(self._by_number)
            owner = self._by_name[name] = self._by_number[number] = Owner(name, number)
        owner.chunks += 1
        return owner

    def release(self, owner: Owner) -> None:
        """One chunk less; the last one takes the owner along."""
        owner.chunks -= 1
        if not owner.chunks:
            del self._by_name[owner.name], self._by_number[owner.number]
            heappush(self._freed, owner.number)
            if not self._by_number:
                self._freed.clear()

    def hold(self, owner: Owner, size: int) -> None:
        """``size`` more is held, or less if it is negative."""
        owner.held += size
        self.rank(owner)

    def rank(self, owner: Owner) -> None:
        """Put ``owner`` where it belongs now; out of the order when it has nothing to offer."""
        if owner.queued:
            self._root = self._heaps.remove(self._root, owner.number)
        owner.queued = owner.root != EMPTY
        if owner.queued:
            quota = self._quota(owner.name)
            kind = _NO_LIMIT if quota is None else _LIMITED if quota else _NOTHING_ALLOWED
            self._class.view[owner.number] = kind
            self._share.view[owner.number] = -owner.held / (quota or 1)
            self._root = self._heaps.add(self._root, owner.number)

    def rank_all(self) -> None:
        """After a change that may concern every owner. Takes time for each that holds something."""
        for owner in self._by_number.values():
            self.rank(owner)

    def front(self) -> Owner | None:
        """Who gives next."""
        return self._by_number[self._root - 1] if self._root else None

    def __len__(self) -> int:
        return len(self._by_number)
