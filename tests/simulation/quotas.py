"""What owners may hold, and who has to give: a model beside the manager, and a watch on its policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvferry.api import Claim, Evicted, NotEnough, QuotaPolicy
from kvferry.control.clearing import QuotaCursor
from kvferry.control.columns import Ids
from kvferry.control.entries import State
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite, Reservation, WriteAnswer, WriteOutcome
from kvferry.control.residency import Residency
from kvferry.control.writing import _CATCH_UP_CHUNKS
from kvferry.testing.eviction import ForwardingQuotaPolicy
from tests.simulation.coverage import Coverage
from tests.simulation.events import require

SLOT_BYTES = 10
"""Quotas need not be whole slots."""


class QuotaModel:
    """What operators wanted, who holds how much by the table of entries, and who was refused."""

    def __init__(self, coverage: Coverage) -> None:
        self.coverage = coverage
        self.default: int | None = None
        self.own: dict[str, int | None] = {}
        self.refused: Counter[str] = Counter()
        self.refused_others = 0
        self.enforcing = False
        self.made_room = 0
        """Chunks that owners gave up for their own sake, so far."""
        self._claimed: list[int] = []
        self._residency: Residency | None = None

    def watch(self, residency: Residency) -> None:
        self._residency = residency

    # -- what operators want ----------------------------------------------------------------------

    def bytes_of(self, owner: str) -> int | None:
        return self.own.get(owner, self.default)

    def slots(self, owner: str) -> int | None:
        quota = self.bytes_of(owner)
        return None if quota is None else quota // SLOT_BYTES

    def changed(self, before: int | None, after: int | None) -> None:
        lower = after is not None and (before is None or after < before)
        self.coverage.quota("lowered" if lower else "raised")

    # -- what owners hold -------------------------------------------------------------------------

    @property
    def residency(self) -> Residency:
        assert self._residency is not None
        return self._residency

    def owners(self) -> list[str]:
        """Those who hold something."""
        entries = self.residency.entries
        used = np.flatnonzero(entries.state.array != State.FREE)
        return [entries.salts.name(number) for number in np.unique(entries.salt.array[used]).tolist()]

    def _rows(self, owner: str) -> Ids:
        """All slots that an owner holds, whatever state they are in: others cannot have them."""
        entries = self.residency.entries
        mine = entries.salt.array == (entries.salts.find(owner) or -1)
        rows: Ids = np.flatnonzero(mine & (entries.state.array != State.FREE))
        return rows

    def held(self, owner: str) -> int:
        return len(self._rows(owner))

    def _visible(self, owner: str) -> int:
        """Chunks that somebody can find, without those that were claimed just now."""
        entries = self.residency.entries
        rows = self._rows(owner)
        rows = rows[entries.state.array[rows] == State.VISIBLE]
        return len(set(rows.tolist()) - set(self._claimed))

    def idle(self, owner: str) -> set[int]:
        """Chunks of an owner that could go now."""
        residency, rows = self.residency, self._rows(owner)
        free = residency.entries.state.array[rows] == State.VISIBLE
        free &= (residency.leases.array[rows] == 0) & (residency.pins.count.array[rows] == 0)
        return set(residency.entries.leaves(rows[free]).tolist()) - set(self._claimed)

    def is_over(self, owner: str) -> bool:
        allowed = self.slots(owner)
        return allowed is not None and self.held(owner) > allowed

    # -- who gives --------------------------------------------------------------------------------

    def ask(
        self,
        owner: str | None,
        need: int,
        claim: Callable[[int], Claim],
        evict: Callable[[Callable[[int], Claim]], Evicted | NotEnough],
    ) -> Evicted | NotEnough:
        """One eviction, among the chunks of ``owner`` if given."""
        self._claimed = []
        if owner is not None and self.enforcing:
            left = self.held(owner) - need
            allowed = self.slots(owner)
            enough = allowed is None or left < allowed
            require(not enough, "no owner gives more than it must", f"{owner!r} is left with {left}")

        def watched(row: int) -> Claim:
            answer = claim(row)
            if answer is Claim.TAKEN:
                self._taken(row, owner)
            return answer

        answer = evict(watched)
        self._claimed = []
        if owner is not None and isinstance(answer, Evicted):
            self.made_room += len(answer.ids)
        return answer

    def _taken(self, row: int, asked: str | None) -> None:
        entries = self.residency.entries
        victim = entries.salts.name(entries.salt.view[row])
        if asked is not None:
            require(victim == asked, "owners make room among their own", f"{victim!r} for {asked!r}")
        elif (allowed := self.slots(victim)) and self._visible(victim) <= allowed:
            self._check_nobody_else_is_over(victim)
        self._claimed.append(row)

    def _check_nobody_else_is_over(self, victim: str) -> None:
        for other in self.owners():
            allowed = self.slots(other)
            over = other != victim and allowed is not None and self._visible(other) > allowed
            require(
                not (over and self.idle(other)),
                "nobody pays for another's excess",
                f"{victim!r} gives although {other!r} holds more than it may",
            )

    # -- what they are told -----------------------------------------------------------------------

    def answered(
        self,
        owner: str,
        writes: Sequence[ChunkWrite],
        items: Sequence[WriteAnswer],
        held: int,
        made_room: int,
    ) -> None:
        """``held`` was the owner's when it asked; it gave up ``made_room`` chunks for this."""
        outcomes = [item.outcome for item in items]
        granted = outcomes.count(WriteOutcome.GRANTED)
        refused = outcomes.count(WriteOutcome.OVER_QUOTA)
        wanted = granted + refused + outcomes.count(WriteOutcome.NO_ROOM)
        allowed = self.slots(owner)
        over = allowed is not None and held + wanted > allowed
        if allowed is None or not over:
            nothing = not refused and not made_room
            require(nothing, "quotas count when they are reached", f"{refused} refused, {made_room} given")
            return
        after = self.held(owner)
        within = not granted or after <= allowed
        require(within, "nobody gets more than its quota", f"{owner!r} holds {after} of {allowed}")
        surplus = held - max(0, allowed - wanted)
        most = min(surplus, wanted + _CATCH_UP_CHUNKS)
        require(made_room <= most, "no owner gives more than it must", f"{made_room} where {most} are due")
        due = max(0, wanted - max(0, allowed - (held - made_room)))
        require(refused == due, "refusals for a quota are right", f"{refused} where {due} were due")
        if refused:
            first = outcomes.index(WriteOutcome.OVER_QUOTA)
            behind = WriteOutcome.GRANTED in outcomes[first:]
            require(not behind, "refusals for a quota are right", "the end of a batch was granted alone")
            left = self.idle(owner) - self._rows_of(writes)
            tried = most == surplus and left
            require(not tried, "refusals for a quota are right", f"{len(left)} chunks could have gone")
            self._count_refusals(owner, refused)
        if made_room:
            self.coverage.quota("owner made room")

    def _count_refusals(self, owner: str, refused: int) -> None:
        self.coverage.quota("chunks refused")
        if owner in self.own:
            self.refused[owner] += refused
        else:
            self.refused_others += refused

    def _rows_of(self, writes: Sequence[ChunkWrite]) -> set[int]:
        """What a batch has in common with the tier or stands on."""
        find = self.residency.entries.find
        digests = [write.digest for write in writes]
        digests += [write.parent for write in writes if write.parent is not None]
        return {find(digest) for digest in digests}

    def enforced(self, owner: str | None) -> None:
        """Quotas were enforced for ``owner``, or for all, and nothing else happened meanwhile."""
        for each in self.owners() if owner is None else [owner]:
            over = self.is_over(each)
            idle = self.idle(each) if over else set()
            require(not idle, "what is enforced is true", f"{each!r} still has {len(idle)} chunks to give")
            self.coverage.quota("enforced: in use beyond it" if over else "enforced: within it")


class WatchedQuotas(ForwardingQuotaPolicy):
    """The policy, whose every victim the model looks at."""

    def __init__(self, inner: QuotaPolicy, model: QuotaModel) -> None:
        super().__init__(inner)
        self._apart = inner
        self._model = model

    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        return self._model.ask(None, need, claim, lambda watched: self._apart.evict(need, watched))

    def evict_owned(self, owner: str, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        return self._model.ask(
            owner, need, claim, lambda watched: self._apart.evict_owned(owner, need, watched)
        )


class QuotaManager(CacheManager):
    """The manager, whose answers about quotas are compared with the model's. Without quotas in the policy
    it is an ordinary one."""

    def __init__(self, model: QuotaModel, **more: Any) -> None:
        super().__init__(**more)
        self.quota_model = model
        model.watch(self._residency)

    def reserve(
        self, owner: str, salt: str, writes: Sequence[ChunkWrite], now: float, **more: Any
    ) -> Reservation:
        model = self.quota_model
        if not self.has_quotas:
            return super().reserve(owner, salt, writes, now, **more)
        held, made_room = model.held(salt), model.made_room
        answer = super().reserve(owner, salt, writes, now, **more)
        model.answered(salt, writes, answer.items, held, model.made_room - made_room)
        return answer

    def set_quota(self, owner: str, quota: int | None) -> None:
        model = self.quota_model
        super().set_quota(owner, quota)
        model.changed(model.bytes_of(owner), quota)
        model.own[owner] = quota

    def set_default_quota(self, quota: int | None) -> None:
        super().set_default_quota(quota)
        self.quota_model.coverage.quota("default changed")
        self.quota_model.default = quota

    def forget_quota(self, owner: str) -> bool:
        model = self.quota_model
        known = owner in model.own
        answer = super().forget_quota(owner)
        require(answer == known, "quotas are what operators said", f"{owner!r} was known: {answer}")
        model.coverage.quota("forgotten" if known else "forgotten: unknown")
        model.own.pop(owner, None)
        model.refused_others += model.refused.pop(owner, 0)
        return answer

    def enforce_quotas(self, owner: str | None = None) -> WatchedQuotaCursor:  # type: ignore[override]
        return WatchedQuotaCursor(super().enforce_quotas(owner), self.quota_model)

    def check_quotas(self) -> None:
        """What operators are told is what they said, and what is there."""
        if not self.has_quotas:
            return
        model, report = self.quota_model, self.quota_report()
        told = {usage.owner: (usage.quota, usage.held_slots, usage.over_quota) for usage in report.owners}
        due = {owner: (quota, model.held(owner), model.refused[owner]) for owner, quota in model.own.items()}
        require(told == due, "quotas are reported as they are", f"{told} where {due} were due")
        others = sum(model.held(owner) for owner in model.owners() if owner not in model.own)
        sums = (report.default, report.other_slots, report.other_over_quota)
        expected = (model.default, others, model.refused_others)
        require(sums == expected, "quotas are reported as they are", f"{sums} where {expected} were due")


class WatchedQuotaCursor:
    """Enforces quotas, and no more than that."""

    def __init__(self, inner: QuotaCursor, model: QuotaModel) -> None:
        self._inner = inner
        self._model = model

    def advance(self, chunks: int) -> bool:
        self._model.enforcing = True
        more = self._inner.advance(chunks)
        self._model.enforcing = False
        return more
