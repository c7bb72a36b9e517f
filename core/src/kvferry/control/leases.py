"""Rights to read or fill slots: their numbers, owners and deadlines."""

from __future__ import annotations

import heapq

import numpy as np
from attrs import define, field

from kvferry.control.columns import Ids
from kvferry.control.outcomes import LeaseOutcome


@define(eq=False)
class ReadLease:
    """The right to read the slots of ``rows``."""

    number: int
    owner: str
    deadline: float
    rows: Ids = field(factory=lambda: np.empty(0, np.int64))
    in_flight: bool = False
    """Workers have the plan. The deadline counts no more; their result ends the lease."""


@define(eq=False)
class WriteLease:
    """The right to fill the slots of ``rows``, which the reservation's item numbers lead to."""

    number: int
    owner: str
    deadline: float
    rows: dict[int, int]
    given_up: bool = False
    """Expired or abandoned: nothing becomes visible. Waits for the result that frees the slots."""


AnyLease = ReadLease | WriteLease


class LeaseTable:
    """Open leases by number, by owner and by deadline. Numbers are never used twice, so a late or
    repeated message cannot end somebody else's lease. Not thread-safe."""

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[int, AnyLease] = {}
        self._owned: dict[str, set[int]] = {}
        self._due: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._open)

    def open_read(self, owner: str, deadline: float) -> ReadLease:
        lease = ReadLease(self._next(), owner, deadline)
        self._enter(lease)
        return lease

    def open_write(self, owner: str, deadline: float, rows: dict[int, int]) -> WriteLease:
        lease = WriteLease(self._next(), owner, deadline, rows)
        self._enter(lease)
        return lease

    def read(self, number: int) -> ReadLease | LeaseOutcome:
        lease = self._open.get(number)
        return lease if isinstance(lease, ReadLease) else self._why_not(number)

    def write(self, number: int) -> WriteLease | LeaseOutcome:
        lease = self._open.get(number)
        return lease if isinstance(lease, WriteLease) else self._why_not(number)

    def extend(self, number: int, deadline: float) -> LeaseOutcome:
        """Move the deadline of a lease of either kind; never to an earlier time."""
        lease = self._open.get(number)
        if lease is None:
            return self._why_not(number)
        if isinstance(lease, WriteLease) and lease.given_up:
            return LeaseOutcome.LATE
        # The record in the heap is put right when its old time comes.
        lease.deadline = max(lease.deadline, deadline)
        return LeaseOutcome.OK

    def close(self, lease: AnyLease) -> None:
        del self._open[lease.number]
        self.disown(lease)

    def disown(self, lease: AnyLease) -> None:
        """The end of its owner no longer concerns this lease."""
        owned = self._owned.get(lease.owner)
        if owned is not None:
            owned.discard(lease.number)
            if not owned:
                del self._owned[lease.owner]

    def of(self, owner: str) -> list[AnyLease]:
        return [self._open[number] for number in sorted(self._owned.get(owner, ()))]

    def all(self) -> list[AnyLease]:
        return list(self._open.values())

    def take_due(self, now: float) -> list[AnyLease]:
        """Leases whose deadline has come, each told once."""
        due = []
        while self.next_deadline() <= now and self._due:
            due.append(self._open[heapq.heappop(self._due)[1]])
        return due

    def next_deadline(self) -> float:
        """When the next lease expires; infinity if none does."""
        while self._due:
            time, number = self._due[0]
            lease = self._open.get(number)
            if lease is None or not _expires(lease):
                heapq.heappop(self._due)
            elif lease.deadline > time:
                heapq.heapreplace(self._due, (lease.deadline, number))
            else:
                return time
        return float("inf")

    def _next(self) -> int:
        self._last += 1
        return self._last

    def _enter(self, lease: AnyLease) -> None:
        self._open[lease.number] = lease
        self._owned.setdefault(lease.owner, set()).add(lease.number)
        heapq.heappush(self._due, (lease.deadline, lease.number))

    def _why_not(self, number: int) -> LeaseOutcome:
        if number in self._open or not 0 < number <= self._last:
            return LeaseOutcome.UNKNOWN
        return LeaseOutcome.ENDED


def _expires(lease: AnyLease) -> bool:
    return not (lease.in_flight if isinstance(lease, ReadLease) else lease.given_up)
