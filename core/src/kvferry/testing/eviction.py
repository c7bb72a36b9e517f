"""Stand-ins for an eviction policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvferry.api import Claim, EntryView, Evicted, EvictionPolicy, NotEnough, QuotaPolicy


class NullEvictionPolicy:
    """Never gives anything up: a full tier stays full."""

    def open(self, entries: int) -> None:
        pass

    def insert(self, entry: EntryView) -> None:
        pass

    def touch(self, ids: Sequence[int]) -> None:
        pass

    def release(self, ids: Sequence[int]) -> None:
        pass

    def remove(self, ids: Sequence[int]) -> None:
        pass

    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        return NotEnough(0)


class ForwardingEvictionPolicy:
    """Passes every call on to ``inner``. Override what a test wants to see or to change."""

    def __init__(self, inner: EvictionPolicy) -> None:
        self.inner = inner

    def open(self, entries: int) -> None:
        self.inner.open(entries)

    def insert(self, entry: EntryView) -> None:
        self.inner.insert(entry)

    def touch(self, ids: Sequence[int]) -> None:
        self.inner.touch(ids)

    def release(self, ids: Sequence[int]) -> None:
        self.inner.release(ids)

    def remove(self, ids: Sequence[int]) -> None:
        self.inner.remove(ids)

    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        return self.inner.evict(need, claim)


class NullQuotaPolicy(NullEvictionPolicy):
    """Keeps quotas and never gives anything up: an owner who has used its quota stores no more."""

    def __init__(self, default: int | None = None) -> None:
        self._default = default
        self._own: dict[str, int | None] = {}

    def quota(self, owner: str) -> int | None:
        return self._own.get(owner, self._default)

    def default_quota(self) -> int | None:
        return self._default

    def set_default_quota(self, quota: int | None) -> None:
        self._default = quota

    def quotas(self) -> Mapping[str, int | None]:
        return dict(self._own)

    def set_quota(self, owner: str, quota: int | None) -> None:
        self._own[owner] = quota

    def forget_quota(self, owner: str) -> bool:
        missing = object()
        return self._own.pop(owner, missing) is not missing

    def evict_owned(self, owner: str, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        return NotEnough(0)


class ForwardingQuotaPolicy(ForwardingEvictionPolicy):
    """Passes every call on to ``inner``. Override what a test wants to see or to change."""

    def __init__(self, inner: QuotaPolicy) -> None:
        super().__init__(inner)
        self._quotas = inner

    def quota(self, owner: str) -> int | None:
        return self._quotas.quota(owner)

    def default_quota(self) -> int | None:
        return self._quotas.default_quota()

    def set_default_quota(self, quota: int | None) -> None:
        self._quotas.set_default_quota(quota)

    def quotas(self) -> Mapping[str, int | None]:
        return self._quotas.quotas()

    def set_quota(self, owner: str, quota: int | None) -> None:
        self._quotas.set_quota(owner, quota)

    def forget_quota(self, owner: str) -> bool:
        return self._quotas.forget_quota(owner)

    def evict_owned(self, owner: str, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        return self._quotas.evict_owned(owner, need, claim)
