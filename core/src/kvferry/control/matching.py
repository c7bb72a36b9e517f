"""Finding the longest prefix that can be restored, and the leases on what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvferry.control.columns import Ids, as_sequence
from kvferry.control.entries import NOBODY, ROOT
from kvferry.control.leases import LeaseTable, ReadLease
from kvferry.control.outcomes import LeaseOutcome, Match
from kvferry.control.residency import Residency

TailKeys = Callable[[int], Sequence[tuple[bytes, int]]]


class Readers:
    """Everything about reading: matches, their leases, and what was found or missed."""

    def __init__(self, residency: Residency, leases: LeaseTable, lease_seconds: float) -> None:
        self.residency = residency
        self.leases = leases
        self.lease_seconds = lease_seconds
        self.hits = 0
        self.misses = 0
        self.hit_tokens = 0

    def begin(self, number: int) -> LeaseOutcome:
        lease = self.leases.read(number)
        if isinstance(lease, LeaseOutcome):
            return lease
        lease.in_flight = True
        return LeaseOutcome.OK

    def finish(self, number: int) -> LeaseOutcome:
        lease = self.leases.read(number)
        if isinstance(lease, LeaseOutcome):
            return lease
        self.end(lease)
        return LeaseOutcome.OK

    def release(self, number: int) -> LeaseOutcome:
        lease = self.leases.read(number)
        if isinstance(lease, LeaseOutcome):
            return lease
        if lease.in_flight:
            return LeaseOutcome.DEFERRED
        self.end(lease)
        return LeaseOutcome.OK

    def end(self, lease: ReadLease) -> None:
        self.leases.close(lease)
        self.residency.let_go(lease.rows)


class MatchCursor:
    """A match that is driven slice by slice, so that the lock is never held for long.

    Call :meth:`advance` under the manager's lock until it returns ``False``, then read
    :attr:`match`. What earlier slices found is leased and cannot vanish in between. A cursor that is
    left alone needs no clean-up: its lease has a deadline and an owner as any other.
    """

    def __init__(
        self,
        readers: Readers,
        owner: str,
        keys: Sequence[bytes],
        tail_keys: TailKeys,
        limit_tokens: int,
        slice_keys: int,
        lease_seconds: float,
    ) -> None:
        chunk = readers.residency.entries.chunk_tokens
        self._readers = readers
        self._owner = owner
        self._keys = keys
        self._tail_keys = tail_keys
        self._limit = limit_tokens
        self._slice = slice_keys
        self._lease_seconds = lease_seconds
        self._wanted = min(len(keys), max(limit_tokens, 0) // chunk)
        self._count = 0
        self._last = ROOT
        self._lease: ReadLease | None = None
        self._done = False
        self.match = Match(None, (), 0, chunk)
        """What was found; complete once ``advance`` returned ``False``."""

    def advance(self, now: float) -> bool:
        """Look up one slice. ``True`` while there is more to do."""
        if self._done:
            return False
        entries = self._readers.residency.entries
        part = self._keys[self._count : min(self._count + self._slice, self._wanted)]
        rows = entries.chain(entries.digests.find_run(part), self._last)
        deadlines = self._readers.residency.deadlines
        if deadlines.used:
            rows = deadlines.living(rows, now)
        if len(rows) and not self._hold(rows, now):
            self._done = True
            return False
        if len(rows) == len(part) and self._count < self._wanted:
            return True
        self._done = True
        self._finish(now)
        return False

    def _hold(self, rows: Ids, now: float) -> bool:
        """``False`` when the lease expired, or its owner ended, between two slices."""
        readers = self._readers
        if self._lease is None:
            self._lease = readers.leases.open_read(self._owner, now + self._lease_seconds)
        elif readers.leases.read(self._lease.number) is not self._lease:
            return False
        readers.residency.hold(rows)
        before = self._lease.rows
        self._lease.rows = np.concatenate((before, rows)) if len(before) else rows
        self._count += len(rows)
        self._last = int(rows[-1])
        return True

    def _finish(self, now: float) -> None:
        readers = self._readers
        residency = readers.residency
        chunk = residency.entries.chunk_tokens
        full = self._count
        tokens = full * chunk
        readers.misses += self._wanted - full
        if self._limit > tokens:
            tail, more = self._find_tail(tokens, now)
            if more and self._hold(np.array([tail], np.int64), now):
                tokens += more
        lease = self._lease
        if lease is None or readers.leases.read(lease.number) is not lease:
            return
        readers.hits += len(lease.rows)
        readers.hit_tokens += tokens
        visible = residency.visible(lease.rows) if residency.retiring else lease.rows
        residency.tier.policy.touch(as_sequence(visible))
        slots = residency.tier.slot.array[lease.rows].tolist()
        self.match = Match(lease.number, tuple(slots), tokens, chunk)

    def _find_tail(self, tokens: int, now: float) -> tuple[int, int]:
        """The entry that goes furthest beyond ``tokens``, and how many tokens it adds."""
        entries = self._readers.residency.entries
        ended = self._readers.residency.deadlines.has_ended
        for digest, more in self._tail_keys(self._count):
            if tokens + more <= self._limit and more < entries.chunk_tokens:
                row = entries.partials.find(digest)
                if row != NOBODY and entries.parent.view[row] == self._last and not ended(row, now):
                    return row, more
        return NOBODY, 0
