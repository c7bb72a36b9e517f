"""How much each owner may hold."""

from __future__ import annotations

from collections import Counter

from attrs import frozen

from kvferry.api import QuotaPolicy
from kvferry.control.salts import SaltBook


@frozen
class OwnerUsage:
    """What one owner holds, in slots and bytes, against its quota (``None``: without limit).

    ``over_quota`` counts its chunks that were refused since it got a quota of its own.
    """

    owner: str
    quota: int | None
    held_slots: int
    held_bytes: int
    over_quota: int


@frozen
class QuotaReport:
    """``owners`` have quotas of their own. All others stand in one sum, however many they are."""

    default: int | None
    owners: tuple[OwnerUsage, ...]
    other_slots: int
    other_bytes: int
    other_over_quota: int


class Quotas:
    """Turns a policy's bytes into slots and counts refusals. Not thread-safe."""

    def __init__(self, policy: QuotaPolicy, slot_bytes: int, salts: SaltBook) -> None:
        self.policy = policy
        self._slot_bytes = slot_bytes
        self._salts = salts
        self._refused: Counter[str] = Counter()
        self._refused_others = 0

    def slots(self, owner: str) -> int | None:
        """Slots that ``owner`` may hold; ``None`` is without limit."""
        quota = self.policy.quota(owner)
        return None if quota is None else quota // self._slot_bytes

    def excess(self, owner: str) -> int:
        """Slots that ``owner`` holds beyond its quota."""
        allowed = self.slots(owner)
        return 0 if allowed is None else max(0, self._salts.count(owner) - allowed)

    def refuse(self, owner: str, chunks: int) -> None:
        """Count chunks that were refused. Only owners with a quota of their own are named, so that the
        names cannot grow without bound."""
        if owner in self.policy.quotas():
            self._refused[owner] += chunks
        else:
            self._refused_others += chunks

    def set(self, owner: str, quota: int | None) -> None:
        self.policy.set_quota(owner, quota)

    def set_default(self, quota: int | None) -> None:
        self.policy.set_default_quota(quota)

    def forget(self, owner: str) -> bool:
        self._refused_others += self._refused.pop(owner, 0)
        return self.policy.forget_quota(owner)

    def take(self, other: Quotas) -> None:
        """Be as ``other`` is: what was changed since the start, and what was refused."""
        for owner in set(self.policy.quotas()) - set(other.policy.quotas()):
            self.policy.forget_quota(owner)
        for owner, quota in other.policy.quotas().items():
            self.policy.set_quota(owner, quota)
        self.policy.set_default_quota(other.policy.default_quota())
        self._refused, self._refused_others = Counter(other._refused), other._refused_others

    def report(self, held: int) -> QuotaReport:
        """``held`` slots are in use by all owners together."""
        owners = tuple(
            OwnerUsage(
                owner,
                quota,
                self._salts.count(owner),
                self._salts.count(owner) * self._slot_bytes,
                self._refused[owner],
            )
            for owner, quota in sorted(self.policy.quotas().items())
        )
        others = held - sum(owner.held_slots for owner in owners)
        return QuotaReport(
            self.policy.default_quota(),
            owners,
            others,
            others * self._slot_bytes,
            self._refused_others,
        )
