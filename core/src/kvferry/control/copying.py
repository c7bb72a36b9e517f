"""Chunks on their way between tiers: what one tier lends, and what another takes in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.api import ServableChanges
from kvferry.control.columns import Ids, as_sequence
from kvferry.control.deadlines import NEVER
from kvferry.control.entries import NOBODY, ROOT, State
from kvferry.control.leases import LeaseTable
from kvferry.control.outcomes import ChunkFacts, LeaseOutcome, Lent
from kvferry.control.residency import Residency
from kvferry.control.servable import ROWS_AT_ONCE, ServableLog


class Copying:
    """The side of a manager that other tiers see. Nothing here costs anything before it is used.

    Digests are those of the chunks themselves, tails included; a digest under which a chunk's beginning
    is found is no name for it here.
    """

    def __init__(self, residency: Residency, leases: LeaseTable) -> None:
        self._residency = residency
        self._leases = leases

    # What happens

    def watch_published(self) -> None:
        """Note every chunk that becomes visible from now on, for :meth:`take_published`."""
        if self._residency.published is None:
            self._residency.published = deque()

    def watch_freed(self) -> None:
        """Note every chunk that goes from now on, for :meth:`take_freed`."""
        if self._residency.freed is None:
            self._residency.freed = {}

    def take_published(self, limit: int) -> list[bytes]:
        """Up to ``limit`` chunks that became visible, the first one first. Some may be gone again."""
        return _taken(self._residency.published, limit)

    @property
    def has_published(self) -> bool:
        """Whether :meth:`take_published` has something to tell."""
        return bool(self._residency.published)

    @property
    def has_freed(self) -> bool:
        """Whether :meth:`take_freed` has something to tell."""
        return bool(self._residency.freed)

    def freed(self, digest: bytes) -> bool:
        """Whether :meth:`take_freed` will tell of the chunk, perhaps once nobody reads it any more."""
        residency = self._residency
        return residency.freed is not None and (digest in residency.freed or digest in residency.parting)

    def take_freed(self, limit: int) -> list[bytes]:
        """Up to ``limit`` chunks, in any order, whose slots became free: nobody reads or writes their bytes
        any more, whether they were visible once or not."""
        freed = self._residency.freed
        return [freed.popitem()[0] for _ in range(min(limit, len(freed)))] if freed else []

    # For a directory

    def watch_servable(self, limit: int) -> None:
        """Note full chunks that can be found, or cannot any more, from now on: up to ``limit`` of them, for
        :meth:`take_servable`."""
        if self._residency.servable is None:
            self._residency.servable = ServableLog(limit)

    def take_servable(self, limit: int) -> ServableChanges:
        """Up to ``limit`` changes."""
        log = self._residency.servable
        return ServableChanges() if log is None else log.take(limit)

    @property
    def has_servable(self) -> bool:
        """Whether :meth:`take_servable` has something to tell."""
        return bool(self._residency.servable)

    def walk_servable(self, cursor: int, limit: int) -> tuple[list[bytes], int | None]:
        """Some full chunks that can be found, ``limit`` at the most, and where to go on; ``None`` when that
        was all. A walk begins at 0; a chunk that is there from its beginning to its end is told once."""
        entries = self._residency.entries
        end = min(entries.rows, cursor + ROWS_AT_ONCE)
        rows = cursor + np.flatnonzero(entries.state.array[cursor:end] == State.VISIBLE)
        found: list[bytes] = []
        for row in rows.tolist():
            if len(found) == limit:
                return found, row
            if entries.is_full(row):
                found.append(entries.digests.digest(row))
        return found, end if end < entries.rows else None

    # What is there

    @property
    def free(self) -> int:
        """Slots that nobody uses."""
        return self._residency.tier.pool.free

    @property
    def usable(self) -> int:
        """Slots that there are."""
        return self._residency.tier.pool.usable

    @property
    def resident(self) -> int:
        """Chunks that can be found."""
        return self._residency.count[State.VISIBLE]

    @property
    def going(self) -> int:
        """Chunks that cannot be found any more, and whose slots somebody still reads or writes."""
        count = self._residency.count
        return count[State.RETIRING] + count[State.QUARANTINED]

    def pending(self, digest: bytes) -> bool:
        """Whether somebody is writing the chunk."""
        return digest in self._residency.entries.pending

    def holds(self, digest: bytes) -> bool:
        """Whether the chunk is visible or on its way."""
        entries = self._residency.entries
        return digest in entries.pending or self._visible(digest) != NOBODY

    def missing_before(
        self, digest: bytes, elsewhere: Callable[[bytes], bool], limit: int
    ) -> tuple[list[bytes], bool]:
        """A visible chunk and those before it, the head first, as far as ``elsewhere`` does not know them:
        the last ``limit`` of them, and whether that is all. Nothing if it is not visible."""
        entries = self._residency.entries
        row = self._visible(digest)
        found: list[bytes] = []
        every = True
        while row not in (NOBODY, ROOT):
            name = entries.digests.digest(row)
            if elsewhere(name):
                break
            if len(found) == limit:
                every = False
                break
            found.append(name)
            row = entries.parent.view[row]
        found.reverse()
        return found, every

    def lend(self, owner: str, digests: Sequence[bytes]) -> Lent | None:
        """Keep these visible chunks as they are until :meth:`CacheManager.finish_load` of the lease;
        ``None`` if one of them is not visible."""
        rows = [self._visible(digest) for digest in digests]
        if NOBODY in rows or not rows:
            return None
        return self._lent(owner, [(row, self._residency.describe(row)) for row in rows], held=False)

    def set_aside(self, owner: str, count: int) -> Lent | None:
        """Evict up to ``count`` chunks that nobody uses, but keep their bytes until
        :meth:`CacheManager.finish_load` of the lease frees their slots. ``None`` if there are none."""
        chosen = self._residency.set_aside(count)
        return self._lent(owner, chosen, held=True) if chosen else None

    def leased(self, lease: int, start: int, stop: int) -> list[ChunkFacts]:
        """Chunks ``start`` to ``stop`` of a read lease, as it was matched; none if it has ended. Those
        that were removed since have left the list."""
        found = self._leases.read(lease)
        if isinstance(found, LeaseOutcome):
            return []
        rows = self._residency.visible(found.rows[start:stop])
        return [self._residency.describe(row) for row in rows.tolist()]

    # What comes in

    def adopt(self, facts: ChunkFacts) -> bool:
        """Take in a chunk whose bytes are in the store already. ``False``, and no change, if the chunk
        before it is not here, it is here itself, or there is no room."""
        residency = self._residency
        entries = residency.entries
        parent = ROOT if facts.parent is None else entries.digests.find(facts.parent)
        fits = not self.holds(facts.digest) and bool(residency.tier.pool.free)
        if fits and facts.parent is not None:
            fits = (
                parent != NOBODY and entries.is_full(parent) and entries.depth.view[parent] == facts.depth - 1
            )
            fits = fits and entries.salts.name(entries.salt.view[parent]) == facts.salt
        if not fits:
            return False
        row = residency.admit(
            facts.digest, parent, facts.depth, facts.tokens, facts.aliases, facts.salt, facts.model, facts.end
        )
        residency.written(row)
        return bool(entries.state.view[row] == State.VISIBLE)

    def used(self, digests: Sequence[bytes]) -> None:
        """These chunks were used one after the other. What stands before them was not."""
        rows = [row for digest in digests if (row := self._visible(digest)) != NOBODY]
        for row in rows:
            self._residency.tier.policy.touch((row,))

    def used_run(self, digests: Sequence[bytes]) -> int:
        """These full chunks, a part of one chain, were used together. How many of them are here."""
        rows = self._residency.entries.digests.find_run(digests)
        if len(rows):
            self._residency.tier.policy.touch(as_sequence(rows))
        return len(rows)

    def withhold(self, slots: int) -> int:
        """The store has no room for so many chunks as was thought: up to ``slots`` of those that are free
        are not handed out any more. How many."""
        return self._residency.withhold(slots)

    def restore(self, slots: int) -> None:
        """Hand out up to ``slots`` of those that were withheld again."""
        self._residency.restore(slots)

    def _visible(self, digest: bytes) -> int:
        """The row that bears the digest itself."""
        entries = self._residency.entries
        row = entries.find(digest)
        return row if row == NOBODY or entries.digests.digest(row) == digest else NOBODY

    def _lent(self, owner: str, chosen: list[tuple[int, ChunkFacts]], *, held: bool) -> Lent:
        rows: Ids = np.array([row for row, _ in chosen], np.int64)
        if not held:
            self._residency.hold(rows)
        lease = self._leases.open_read(owner, NEVER)
        lease.rows = rows
        lease.in_flight = True
        slots = self._residency.tier.slot.array[rows].tolist()
        return Lent(lease.number, tuple(facts for _, facts in chosen), tuple(slots))


def _taken(journal: deque[bytes] | None, limit: int) -> list[bytes]:
    if journal is None:
        return []
    return [journal.popleft() for _ in range(min(limit, len(journal)))]
