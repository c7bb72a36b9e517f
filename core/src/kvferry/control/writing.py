"""Reserving room for chunks, and what becomes of them when results arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvferry.api import DIGEST_BYTES, ErrorKind, KVFerryError
from kvferry.control.entries import NOBODY, ROOT, State
from kvferry.control.leases import LeaseTable, WriteLease
from kvferry.control.outcomes import (
    ChunkWrite,
    Completion,
    LeaseOutcome,
    Reservation,
    WriteAnswer,
    WriteOutcome,
)
from kvferry.control.quotas import Quotas
from kvferry.control.residency import Residency

ChunkContent = Callable[[ChunkWrite], object]
"""What a writer says of a chunk to those who are told of it."""

_CATCH_UP_CHUNKS = 4
"""Chunks that a reservation evicts, beyond those it needs, of an owner whose quota was lowered."""


class Writers:
    """Everything about writing: reservations, their results, and their failures."""

    def __init__(
        self, residency: Residency, leases: LeaseTable, write_seconds: float, quotas: Quotas | None
    ) -> None:
        self.quotas = quotas
        self.residency = residency
        self.leases = leases
        self.write_seconds = write_seconds
        self.outcomes: Counter[WriteOutcome] = Counter()

    def reserve(
        self,
        owner: str,
        salt: str,
        writes: Sequence[ChunkWrite],
        now: float,
        model: str,
        end: float,
        content: ChunkContent | None,
    ) -> Reservation:
        for write in writes:
            self._check(write)
        plan = self._judge(writes, salt, now, end)
        wanted = plan.count(None)
        if wanted:
            self._make_room(writes, plan, salt, wanted)
        residency = self.residency
        events = residency.events if content is not None else None
        answers: list[WriteAnswer] = []
        granted: dict[int, int] = {}
        for item, (write, outcome) in enumerate(zip(writes, plan, strict=True)):
            answer = WriteAnswer(outcome) if outcome else self._place(write, salt, model, end)
            if answer.outcome is WriteOutcome.GRANTED:
                row = granted[item] = residency.entries.pending[write.digest]
                if events is not None and content is not None and residency.entries.is_full(row):
                    events.expect(row, content(write))
            answers.append(answer)
        self.outcomes.update(answer.outcome for answer in answers)
        if not granted:
            return Reservation(None, tuple(answers))
        lease = self.leases.open_write(owner, now + self.write_seconds, granted)
        return Reservation(lease.number, tuple(answers))

    def _judge(
        self, writes: Sequence[ChunkWrite], salt: str, now: float, end: float
    ) -> list[WriteOutcome | None]:
        """What is known before room is made; ``None`` for writes that only need room.

        A chunk that is there, or on its way, stays until ``end`` from now on. One that has ended and
        is still there is what the writer would write, so it lives again.
        """
        entries = self.residency.entries
        mortal = self.residency.deadlines.used
        planned: dict[bytes, ChunkWrite] = {}
        plan: list[WriteOutcome | None] = []
        for write in writes:
            outcome = None
            if (row := self._resident(write)) != NOBODY:
                outcome = WriteOutcome.RESIDENT
            elif (row := entries.pending.get(write.digest, NOBODY)) != NOBODY or write.digest in planned:
                outcome = WriteOutcome.BUSY
            elif write.parent is not None:
                before = planned.get(write.parent)
                if before is not None:
                    fits = before.tokens == entries.chunk_tokens
                    fits = fits and before.depth == write.depth - 1
                else:
                    fits = self._fits(write, self._parent(write), salt, now)
                outcome = None if fits else WriteOutcome.NO_PARENT
            if mortal and row != NOBODY:
                if self._stands(row, now):
                    self.residency.prolong(row, end)
                else:
                    outcome = WriteOutcome.NO_PARENT
            if outcome is None:
                planned[write.digest] = write
            plan.append(outcome)
        return plan

    def _stands(self, row: int, now: float) -> bool:
        """Whether what is before the row has not ended."""
        parent = self.residency.entries.parent.view[row]
        return parent == ROOT or not self.residency.deadlines.has_ended(parent, now)

    def _resident(self, write: ChunkWrite) -> int:
        entries = self.residency.entries
        full = write.tokens == entries.chunk_tokens
        return (entries.digests if full else entries.partials).find(write.digest)

    def _parent(self, write: ChunkWrite) -> int:
        """The row of the chunk before it, visible or pending; ``NOBODY`` also stands for the root,
        which the caller tells apart by the depth."""
        if write.parent is None:
            return ROOT
        entries = self.residency.entries
        row = entries.digests.find(write.parent)
        return row if row != NOBODY else entries.pending.get(write.parent, NOBODY)

    def _fits(self, write: ChunkWrite, parent: int, salt: str, now: float) -> bool:
        entries = self.residency.entries
        return (
            parent != NOBODY
            and not self.residency.deadlines.has_ended(parent, now)
            and entries.is_full(parent)
            and entries.depth.view[parent] == write.depth - 1
            and entries.salts.name(entries.salt.view[parent]) == salt
        )

    def _make_room(
        self, writes: Sequence[ChunkWrite], plan: list[WriteOutcome | None], salt: str, wanted: int
    ) -> None:
        """Evict for what is wanted, but nothing that this batch stands on or has in common. Writes
        beyond the owner's quota are refused in ``plan``."""
        residency = self.residency
        allowed = self.quotas.slots(salt) if self.quotas is not None else None
        held = residency.entries.salts.count(salt)
        over = allowed is not None and held + wanted > allowed
        if not over and wanted <= residency.tier.pool.free:
            return
        rows: set[int] = set()
        states = residency.entries.state.view
        for write in writes:
            rows.add(self._resident(write))
            rows.add(self._parent(write))
        rows.discard(NOBODY)
        protected = np.array(sorted(row for row in rows if states[row] == State.VISIBLE), np.int64)
        residency.hold(protected)
        if over and allowed is not None:
            surplus = held - max(0, allowed - wanted)
            residency.evict(min(surplus, wanted + _CATCH_UP_CHUNKS), salt)
            wanted = self._refuse(plan, salt, allowed - residency.entries.salts.count(salt))
        residency.evict(wanted - residency.tier.pool.free)
        residency.let_go(protected)

    def _refuse(self, plan: list[WriteOutcome | None], salt: str, left: int) -> int:
        """Let the first ``left`` writes of a plan stand; how many stand."""
        open_items = [item for item, outcome in enumerate(plan) if outcome is None]
        over = open_items[max(0, left) :]
        for item in over:
            plan[item] = WriteOutcome.OVER_QUOTA
        if over and self.quotas is not None:
            self.quotas.refuse(salt, len(over))
        return len(open_items) - len(over)

    def _place(self, write: ChunkWrite, salt: str, model: str, end: float) -> WriteAnswer:
        """Grant a slot. Writes come in chain order, so a parent of this batch has its row already."""
        residency = self.residency
        parent = self._parent(write)
        if not residency.tier.pool.free or (write.depth and parent == NOBODY):
            return WriteAnswer(WriteOutcome.NO_ROOM)
        row = residency.admit(
            write.digest, parent, write.depth, write.tokens, write.aliases, salt, model, end
        )
        return WriteAnswer(WriteOutcome.GRANTED, residency.tier.slot.view[row])

    def complete(self, number: int, succeeded: Collection[int]) -> Completion:
        lease = self.leases.write(number)
        if isinstance(lease, LeaseOutcome):
            return Completion(lease)
        strangers = [item for item in succeeded if item not in lease.rows]
        if strangers:
            raise KVFerryError(
                f"a result names items {strangers} that reservation {number} was not granted",
                kind=ErrorKind.INTERNAL,
                remedy="report only items whose outcome was granted",
            )
        residency = self.residency
        stored = residency.stored
        waiting = freed = 0
        states = residency.entries.state.view
        for item, row in sorted(lease.rows.items()):
            if states[row] == State.QUARANTINED:
                residency.write_ended(row)
                freed += 1
            elif item in succeeded:
                residency.written(row)
                waiting += states[row] == State.WRITTEN
                freed += states[row] == State.FREE
            else:
                residency.cut([row], written_by_nobody=True)
                freed += 1
        self.leases.close(lease)
        return Completion(
            LeaseOutcome.LATE if lease.given_up else LeaseOutcome.OK,
            residency.stored - stored,
            waiting,
            freed,
        )

    def abandon(self, lease: WriteLease) -> None:
        """Nothing of it becomes visible, and its slots wait for the result."""
        lease.given_up = True
        self.leases.disown(lease)
        self.residency.cut(lease.rows.values())

    def _check(self, write: ChunkWrite) -> None:
        """Refuse what no honest caller asks for, before anything has changed."""
        chunk = self.residency.entries.chunk_tokens
        block = self.residency.entries.block_tokens
        sizes = [tokens for _, tokens in write.aliases]
        digests = [write.digest, *(digest for digest, _ in write.aliases)]
        why = ""
        if not 0 < write.tokens <= chunk or write.tokens % block:
            why = f"{write.tokens} tokens are not 1 to {chunk // block} blocks of {block}"
        elif any(not 0 < size < write.tokens or size % block for size in sizes):
            why = f"aliases of {sizes} tokens are not whole blocks inside {write.tokens} tokens"
        elif len(set(sizes)) < len(sizes) or len(set(digests)) < len(digests):
            why = "two aliases are the same"
        elif any(len(digest) != DIGEST_BYTES for digest in digests):
            why = f"a digest has not {DIGEST_BYTES} bytes"
        elif (write.parent is None) != (write.depth == 0) or write.depth < 0:
            why = f"depth {write.depth} and the presence of a parent contradict each other"
        if why:
            raise KVFerryError(
                "a chunk cannot be stored as it was described",
                kind=ErrorKind.INTERNAL,
                why=why,
                remedy="describe chunks with the geometry that the manager was built for",
            )
