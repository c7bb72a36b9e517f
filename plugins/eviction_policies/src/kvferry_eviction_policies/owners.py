"""Who holds something now, and who holds most for what they may hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush

import numpy as np
from attrs import define

from kvferry_eviction_policies.columns import Column
from kvferry_eviction_policies.heaps import EMPTY, Heaps

_NOTHING_ALLOWED, _NO_LIMIT, _LIMITED = range(3)
NOWHERE, _OWN, _DEFAULT = -1, 0, 1


@define(eq=False, slots=True)
class Owner:
    """Somebody with chunks. ``root`` leads to those that may be offered."""

    name: str
    number: int
    held: int = 0
    chunks: int = 0
    root: int = EMPTY
    queue: int = NOWHERE
    """Which of the two orders it stands in."""


class Owners:
    """The owners that have chunks, by name, by number, and in the order in which they give.

    First those that may hold nothing, then those without a limit, then those with one; within the
    first two who holds most, within the last who holds most of what it may. Among equals it is the
    smaller number. A number is the smallest that is free when its owner's first chunk comes; with
    the last chunk nothing of an owner is left.

    ``own`` are the quotas of single owners, and ``default()`` is that of all others. The others stand
    in an order of their own, by what they hold: it is the same whatever the default is, so a new
    default costs nothing.
    """

    def __init__(
        self, entries: int, own: Mapping[str, int | None], default: Callable[[], int | None]
    ) -> None:
        self._own = own
        self._default = default
        self._by_name: dict[str, Owner] = {}
        self._by_number: dict[int, Owner] = {}
        self._freed: list[int] = []
        self._class = Column(entries, np.uint8)
        self._share = Column(entries, np.float64)
        """Negative, since the least is the front."""
        self._heaps = Heaps(entries, self._class, self._share)
        self._roots = [EMPTY, EMPTY]

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
        number = owner.number
        if owner.queue != NOWHERE:
            self._roots[owner.queue] = self._heaps.remove(self._roots[owner.queue], number)
            owner.queue = NOWHERE
        if owner.root == EMPTY:
            return
        if owner.name in self._own:
            owner.queue = _OWN
            self._class.view[number], self._share.view[number] = _place(owner.held, self._own[owner.name])
        else:
            owner.queue = _DEFAULT
            self._class.view[number], self._share.view[number] = _NO_LIMIT, -owner.held
        self._roots[owner.queue] = self._heaps.add(self._roots[owner.queue], number)

    def front(self) -> Owner | None:
        """Who gives next."""
        own, other = self._roots
        if not own or not other:
            return self._by_number[(own or other) - 1] if own or other else None
        mine, theirs = own - 1, other - 1
        other_place = _place(self._by_number[theirs].held, self._default())
        first = (self._class.view[mine], self._share.view[mine], mine) < (*other_place, theirs)
        return self._by_number[mine if first else theirs]

    def __len__(self) -> int:
        return len(self._by_number)


def _place(held: int, quota: int | None) -> tuple[int, float]:
    """Where somebody stands who holds so much of what it may; the least gives first."""
    kind = _NO_LIMIT if quota is None else _LIMITED if quota else _NOTHING_ALLOWED
    return kind, -held / (quota or 1)
