"""Steps between the states of a chunk, each of which keeps the invariants."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvferry.api import Claim, EntryView, Evicted, EvictionPolicy, NotEnough, QuotaPolicy
from kvferry.control.columns import Column, Ids, as_sequence
from kvferry.control.deadlines import NEVER, Deadlines
from kvferry.control.entries import ROOT, EntryTable, State
from kvferry.control.events import EventLog, StoredFact
from kvferry.control.outcomes import ChunkFacts, Removed
from kvferry.control.pins import Pins
from kvferry.control.servable import ServableLog
from kvferry.control.tier import Tier

STEPS_AT_ONCE = 512
"""Entries that one slice passes on its way to the end of a chain."""


class Residency:
    """Entries, their slots and the number of leases on each.

    After every method: a visible entry's predecessors are visible; an entry with leases keeps its
    slot; every usable slot is free or belongs to exactly one entry; an entry ends no later than any
    before it. Not thread-safe.
    """

    def __init__(
        self,
        slots: int,
        chunk_tokens: int,
        block_tokens: int,
        policy: EvictionPolicy,
        *,
        quota_policy: QuotaPolicy | None = None,
        max_pinned: int = 0,
        events: EventLog | None = None,
    ) -> None:
        self.entries = EntryTable(slots, chunk_tokens, block_tokens)
        self.tier = Tier(slots, slots, policy)
        self.leases = Column(slots)
        self.leased = 0
        self.deadlines = Deadlines(slots)
        self.pins = Pins(slots, max_pinned)
        self.events = events
        self._quota_policy = quota_policy
        self.count = [slots, *[0] * (len(State) - 1)]
        """Rows by state."""
        self._ending = ROOT
        """Where to go on with removing what has ended, perhaps."""
        self.evictions = 0
        self.dropped = 0
        self.stored = 0
        self.aborted = 0
        self.withheld: list[int] = []
        """Slots that nobody gets, because the store behind them has no room for so many."""
        self.servable: ServableLog | None = None
        self.published: deque[bytes] | None = None
        """Digests of chunks that became visible, in order, for whoever copies them elsewhere."""
        self.freed: dict[bytes, None] | None = None
        """Digests of chunks whose slot became free, for whoever keeps their bytes."""
        self.parting: set[bytes] = set()
        """Digests of chunks that will be among them once the last lease ends."""

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
        if self.pins.pinned:
            idle = idle[self.pins.count.array[idle] == 0]
        claimable = self.entries.leaves(idle)
        if len(claimable):
            self.tier.policy.release(as_sequence(claimable))

    # Pins and ends

    def unpin(self, limit: int | None) -> None:
        """Up to ``limit`` entries, or all, leave pins that have ended; the policy is told of those that
        can be claimed now."""
        rows = self.pins.let_go(limit)
        rows = rows[(self.entries.state.array[rows] == State.VISIBLE) & (self.leases.array[rows] == 0)]
        claimable = self.entries.leaves(rows)
        if len(claimable):
            self.tier.policy.release(as_sequence(claimable))

    def prolong(self, row: int, end: float) -> None:
        """The entry, and so everything before it, ends no earlier than ``end``."""
        deadlines, parent = self.deadlines, self.entries.parent.view
        while row != ROOT and deadlines.end(row) < end:
            deadlines.set(row, end)
            row = parent[row]

    # Writes

    def admit(
        self,
        digest: bytes,
        parent: int,
        depth: int,
        tokens: int,
        aliases: tuple[tuple[bytes, int], ...],
        salt: str,
        model: str = "",
        end: float = NEVER,
    ) -> int:
        """A reserved entry in a free slot; the caller knows that there is one."""
        row = self.entries.add(digest, parent, depth, tokens, aliases, salt, model)
        if end != NEVER or self.deadlines.used:
            self.deadlines.set(row, end)
            self.prolong(parent, end)
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
        if not entries.is_full(row) and (longer := entries.partials.find(digest)) >= 0:
            # A longer chunk with the same beginning came first, so this tail adds nothing.
            self._replace(row, longer)
            return False
        del entries.pending[digest]
        for alias in entries.partials.digests(row):
            present = entries.partials.find(alias)
            if present >= 0 and entries.digests.digest(present) == alias:
                self._replace(present, row)
        entries.partials.publish(row)
        full = entries.is_full(row)
        if full:
            entries.digests.list_row(row)
        self._move(row, State.VISIBLE)
        self.stored += 1
        if self.published is not None:
            self.published.append(digest)
        if full and self.servable is not None:
            self.servable.note(digest, True)
        if full and self.events is not None:
            self.events.stored(row, entries.parent.view[row], lambda content: self.fact(row, content))
        self.tier.policy.insert(
            EntryView(
                row,
                entries.parent.view[row],
                entries.depth.view[row],
                1,
                entries.salts.name(entries.salt.view[row]),
                digest,
            )
        )
        return True

    def _replace(self, tail: int, longer: int) -> None:
        """A tail gives way to a chunk that begins with it, which takes over what was asked for it."""
        if self.deadlines.used:
            self.prolong(longer, self.deadlines.end(tail))
        holders = self.pins.holders_of_tail(tail)
        self.cut([tail])
        for pin in holders:
            if not self.pins.covers(pin, longer):
                self.pins.cover(pin, [longer], tail=not self.entries.is_full(longer))

    def fact(self, row: int, content: object) -> StoredFact:
        """What is told of a visible full chunk."""
        entries = self.entries
        parent = entries.parent.view[row]
        return StoredFact(
            entries.digests.digest(row),
            None if parent == ROOT else entries.digests.digest(parent),
            entries.depth.view[row],
            entries.salts.name(entries.salt.view[row]),
            entries.model_name(row),
            content,
        )

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
        mortal = self.deadlines.used
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
                if self.pins.count.view[row]:
                    self.pins.leave(row)
                if mortal:
                    self.deadlines.set(row, NEVER)
                if state == State.VISIBLE:
                    self._conceal(row)
                    if self.leases.view[row]:
                        self._move(row, State.RETIRING)
                        if self.freed is not None:
                            self.parting.add(self.entries.digests.digest(row))
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
        return self._lost(self.cut(rows))

    def drop_from_end(self, row: int, limit: int, steps: int) -> tuple[int, Removed]:
        """:meth:`cut_from_end`, counted as a loss."""
        before, gone = self.cut_from_end(row, limit, steps)
        return before, self._lost(gone)

    def _lost(self, gone: Removed) -> Removed:
        self.dropped += gone.removed + gone.kept
        return gone

    def cut_from_end(
        self, row: int, limit: int, steps: int, ended: float | None = None
    ) -> tuple[int, Removed]:
        """:meth:`cut` up to ``limit`` entries at the end of some chain through ``row``, going towards
        its head: no further than what has ended at that time, if one is given.

        Answers with the entry before them, too; with none removed it is one that is ``steps`` nearer to
        the end of the chain, from which the next call goes on.
        """
        entries = self.entries
        cut = entries.towards_end(row, steps)
        if entries.has_successors(cut):
            return cut, Removed(0, 0, 0)
        for _ in range(limit - 1):
            parent = entries.parent.view[cut]
            if parent == ROOT or not entries.only_successor(cut):
                break
            if ended is not None and not self.deadlines.has_ended(parent, ended):
                break
            cut = parent
        return entries.parent.view[cut], self.cut([cut])

    def end_due(self, now: float, limit: int | None) -> Removed:
        """Remove entries whose time to live has ended, tails before heads: all, or up to ``limit``, and
        then fewer, or none, says nothing about what is left: ``deadlines.next_time`` does."""
        total = Removed(0, 0, 0)
        rows = 2 * self.entries.rows
        left = rows if limit is None else limit
        steps = rows if limit is None else STEPS_AT_ONCE
        while left > 0:
            row = self._ending
            if row == ROOT or not self.entries.in_tree(row) or not self.deadlines.has_ended(row, now):
                row = self.deadlines.due(now, left)
                if row < 0:
                    break
            self._ending, gone = self.cut_from_end(row, left, steps, now)
            if not gone.chunks:
                break
            total += gone
            left -= gone.chunks
        return total

    def evict(self, need: int, owner: str | None = None) -> int:
        """Free up to ``need`` slots of entries that nobody uses, all of them ``owner``'s if given (the
        policy then keeps owners apart); how many were freed."""
        victims = self._choose(need, owner)
        parents = [self.entries.parent.view[row] for row in victims]
        mortal = self.deadlines.used
        for row in victims:
            if mortal:
                self.deadlines.set(row, NEVER)
            self._conceal(row)
            self._free(row)
        self._bared(parents)
        return len(victims)

    def set_aside(self, need: int) -> list[tuple[int, ChunkFacts]]:
        """As :meth:`evict`, but the entries keep their slots: they retire under a lease of the caller's,
        which :meth:`let_go` ends. What was known of each stands beside it."""
        victims = [(row, self.describe(row)) for row in self._choose(need, None)]
        parents = [self.entries.parent.view[row] for row, _ in victims]
        mortal = self.deadlines.used
        for row, _ in victims:
            if mortal:
                self.deadlines.set(row, NEVER)
            self._conceal(row)
            self._move(row, State.RETIRING)
        self.hold(np.array([row for row, _ in victims], np.int64))
        self._bared(parents)
        return victims

    def describe(self, row: int) -> ChunkFacts:
        """What is known of an entry that is visible, or was until now."""
        return self.entries.facts(row, self.deadlines.end(row))

    def _choose(self, need: int, owner: str | None) -> Sequence[int]:
        """Up to ``need`` entries that nobody uses, tails before heads, out of the tree and the policy."""
        if need <= 0:
            return ()
        claimed: list[int] = []
        pins = self.pins.count.view

        def claim(row: int) -> Claim:
            if self.entries.state.view[row] != State.VISIBLE or self.leases.view[row] or pins[row]:
                return Claim.LEASED
            if self.entries.has_successors(row):
                return Claim.HAS_SUCCESSORS
            self.entries.unlink(row)
            claimed.append(row)
            return Claim.TAKEN

        answer = self._ask(owner, need, claim)
        if isinstance(answer, NotEnough):
            for row in reversed(claimed):
                self.entries.link(row, self.entries.parent.view[row])
            claimed.clear()
            if answer.available <= 0:
                return ()
            answer = self._ask(owner, answer.available, claim)
        assert isinstance(answer, Evicted)
        self.tier.policy.remove(answer.ids)
        self.evictions += len(answer.ids)
        return answer.ids

    def withhold(self, slots: int) -> int:
        """Let up to ``slots`` free slots be nobody's from now on; how many."""
        pool = self.tier.pool
        taken = [pool.take() for _ in range(min(slots, pool.free))]
        self.withheld += taken
        return len(taken)

    def restore(self, slots: int) -> None:
        """Up to ``slots`` of the slots that were withheld are free again."""
        for _ in range(min(slots, len(self.withheld))):
            self.tier.pool.give(self.withheld.pop())

    def _ask(self, owner: str | None, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        if owner is None:
            return self.tier.policy.evict(need, claim)
        assert self._quota_policy is not None, "the policy does not keep owners apart"
        return self._quota_policy.evict_owned(owner, need, claim)

    def _bared(self, parents: Sequence[int]) -> None:
        """Tell the policy which of these can be claimed now that nothing stands behind them."""
        free = [
            row
            for row in parents
            if row != ROOT
            and self.entries.state.view[row] == State.VISIBLE
            and not self.entries.has_successors(row)
            and not self.leases.view[row]
            and not self.pins.count.view[row]
        ]
        if free:
            self.tier.policy.release(free)

    def _conceal(self, row: int) -> None:
        if self.entries.is_full(row):
            self.entries.digests.unlist_row(row)
            if self.servable is not None:
                self.servable.note(self.entries.digests.digest(row), False)
            if self.events is not None:
                self.events.removed(row, self.entries.digests.digest(row))
        self.entries.partials.hide(row)

    def _free(self, row: int) -> None:
        self._move(row, State.FREE)
        self.tier.pool.give(self.tier.slot.view[row])
        if self.events is not None:
            self.events.forget(row)
        if self.freed is not None:
            digest = self.entries.digests.digest(row)
            self.freed[digest] = None
            self.parting.discard(digest)
        self.entries.discard(row)

    def _move(self, row: int, state: State) -> None:
        self.count[self.entries.state.view[row]] -= 1
        self.count[state] += 1
        self.entries.state.view[row] = state
