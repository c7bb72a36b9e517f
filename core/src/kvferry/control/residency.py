"""Steps between the states of a chunk, each of which keeps the invariants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvferry.api import Claim, EntryView, Evicted, EvictionPolicy, NotEnough
from kvferry.control.columns import Column, Ids, as_sequence
from kvferry.control.entries import ROOT, EntryTable, State
from kvferry.control.outcomes import Removed
from kvferry.control.tier import Tier


class Residency:
    """Entries, their slots and the number of leases on each.

    After every method: a visible entry's predecessors are visible; an entry with leases keeps its
    slot; every usable slot is free or belongs to exactly one entry. Not thread-safe.
    """

    def __init__(self, slots: int, chunk_tokens: int, block_tokens: int, policy: EvictionPolicy) -> None:
        self.entries = EntryTable(slots, chunk_tokens, block_tokens)
        self.tier = Tier(slots, slots, policy)
        self.leases = Column(slots)
        self.leased = 0
        self.count = [slots, *[0] * (len(State) - 1)]
        """Rows by state."""
        self.evictions = 0
        self.dropped = 0
        self.stored = 0
        self.aborted = 0

    @property
    def retiring(self) -> int:
        return self.count[State.RETIRING]

    def visible(self, rows: Ids) -> Ids:
        """Those of ``rows`` that can be found."""
        found: Ids = rows[self.entries.state.array[rows] == State.VISIBLE]
        return found

    # Leases on entries

    def hold(self, rows: Ids) -> None:
        """One more lease on each of these distinct entries."""
        before = self.leases.array[rows]
        self.leases.array[rows] = before + 1
        self.leased += len(rows) - int(np.count_nonzero(before))

    def let_go(self, rows: Ids) -> None:
        """One lease less on each; retiring entries that nobody else reads are freed."""
        after = self.leases.array[rows] - 1
        self.leases.array[rows] = after
        idle = rows[after == 0]
        self.leased -= len(idle)
        if self.retiring:
            retiring = self.entries.state.array[idle] == State.RETIRING
            for row in idle[retiring].tolist():
                self._free(row)
            idle = idle[~retiring]
        claimable = self.entries.leaves(idle)
        if len(claimable):
            self.tier.policy.release(as_sequence(claimable))

    # Writes

    def admit(
        self,
        digest: bytes,
        parent: int,
        depth: int,
        tokens: int,
        aliases: tuple[tuple[bytes, int], ...],
        salt: str,
    ) -> int:
        """A reserved entry in a free slot; the caller knows that there is one."""
        row = self.entries.add(digest, parent, depth, tokens, aliases, salt)
        self.tier.slot.view[row] = self.tier.pool.take()
        self.count[State.FREE] -= 1
        self.count[State.RESERVED] += 1
        return row

    def written(self, row: int) -> None:
        """The bytes of a reserved entry are there: publish it, and what waited for it, if all
        before it is visible."""
        self._move(row, State.WRITTEN)
        ready = [row]
        for row in ready:
            parent = self.entries.parent.view[row]
            complete = parent == ROOT or self.entries.state.view[parent] == State.VISIBLE
            if complete and self._publish(row):
                ready += [
                    behind
                    for behind in self.entries.successors(row)
                    if self.entries.state.view[behind] == State.WRITTEN
                ]

    def _publish(self, row: int) -> bool:
        entries = self.entries
        digest = entries.digests.digest(row)
        if not entries.is_full(row) and entries.partials.find(digest) >= 0:
            # A longer chunk with the same beginning came first, so this tail adds nothing.
            self.cut([row])
            return False
        del entries.pending[digest]
        for alias in entries.partials.digests(row):
            present = entries.partials.find(alias)
            if present >= 0 and entries.digests.digest(present) == alias:
                self.cut([present])
        entries.partials.publish(row)
        if entries.is_full(row):
            entries.digests.list_row(row)
        self._move(row, State.VISIBLE)
        self.stored += 1
        self.tier.policy.insert(
            EntryView(
                row,
                entries.parent.view[row],
                entries.depth.view[row],
                1,
                entries.salts.name(entries.salt.view[row]),
            )
        )
        return True

    def write_ended(self, row: int) -> None:
        """Nobody writes this quarantined entry any more."""
        self._free(row)

    # Removal

    def cut(self, rows: Iterable[int], *, written_by_nobody: bool = False) -> Removed:
        """Remove entries and everything behind them, at once and for every reader to come.

        Visible ones with leases retire. Reserved ones go to quarantine, since somebody may write
        them still, unless ``written_by_nobody`` says that the given ones have had their result.
        """
        removed = kept = doomed = 0
        for root in rows:
            if self.entries.state.view[root] not in (
                State.RESERVED,
                State.WRITTEN,
                State.VISIBLE,
            ):
                continue
            parent = self.entries.unlink(root)
            branch = self.entries.behind(root)
            branch.reverse()
            visible = [r for r in branch if self.entries.state.view[r] == State.VISIBLE]
            if visible:
                self.tier.policy.remove(visible)
            for row in branch:
                state = self.entries.state.view[row]
                self.entries.clear_successors(row)
                if state == State.VISIBLE:
                    self._conceal(row)
                    if self.leases.view[row]:
                        self._move(row, State.RETIRING)
                        kept += 1
                    else:
                        self._free(row)
                        removed += 1
                    continue
                doomed += 1
                self.aborted += 1
                del self.entries.pending[self.entries.digests.digest(row)]
                if state == State.WRITTEN or (written_by_nobody and row == root):
                    self._free(row)
                else:
                    self._move(row, State.QUARANTINED)
            self._bared([parent])
        return Removed(removed, kept, doomed)

    def drop(self, rows: Iterable[int]) -> Removed:
        """:meth:`cut`, counted as a loss."""
        gone = self.cut(rows)
        self.dropped += gone.removed + gone.kept
        return gone

    def evict(self, need: int) -> int:
        """Free up to ``need`` slots of entries that nobody uses; how many were freed."""
        if need <= 0:
            return 0
        claimed: list[int] = []

        def claim(row: int) -> Claim:
            if self.entries.state.view[row] != State.VISIBLE or self.leases.view[row]:
                return Claim.LEASED
            if self.entries.has_successors(row):
                return Claim.HAS_SUCCESSORS
            self.entries.unlink(row)
            claimed.append(row)
            return Claim.TAKEN

        answer = self.tier.policy.evict(need, claim)
        if isinstance(answer, NotEnough):
            for row in reversed(claimed):
                self.entries.link(row, self.entries.parent.view[row])
            claimed.clear()
            if answer.available <= 0:
                return 0
            answer = self.tier.policy.evict(answer.available, claim)
        assert isinstance(answer, Evicted)
        self.tier.policy.remove(answer.ids)
        parents = [self.entries.parent.view[row] for row in answer.ids]
        for row in answer.ids:
            self._conceal(row)
            self._free(row)
        self.evictions += len(answer.ids)
        self._bared(parents)
        return len(answer.ids)

    def _bared(self, parents: Sequence[int]) -> None:
        """Tell the policy which of these can be claimed now that nothing stands behind them."""
        free = [
            row
            for row in parents
            if row != ROOT
            and self.entries.state.view[row] == State.VISIBLE
            and not self.entries.has_successors(row)
            and not self.leases.view[row]
        ]
        if free:
            self.tier.policy.release(free)

    def _conceal(self, row: int) -> None:
        if self.entries.is_full(row):
            self.entries.digests.unlist_row(row)
        self.entries.partials.hide(row)

    def _free(self, row: int) -> None:
        self._move(row, State.FREE)
        self.tier.pool.give(self.tier.slot.view[row])
        self.entries.discard(row)

    def _move(self, row: int, state: State) -> None:
        self.count[self.entries.state.view[row]] -= 1
        self.count[state] += 1
        self.entries.state.view[row] = state
