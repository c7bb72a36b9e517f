"""One LRU list per owner, and quotas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from kvferry.api import UNLIMITED, Claim, EntryView, ErrorKind, Evicted, KVFerryError, NotEnough
from kvferry_eviction_policies.columns import Column, Ids
from kvferry_eviction_policies.heaps import Heaps
from kvferry_eviction_policies.leaves import NOBODY, LeafPolicy
from kvferry_eviction_policies.options import IsolatedLRUOptions
from kvferry_eviction_policies.owners import NOWHERE, Owner, Owners


class IsolatedLRU(LeafPolicy):
    """Keeps the owners of chunks apart: what one does cannot push out what another may hold.

    When the tier needs room for anybody, it comes from the owner that holds most relative to its
    quota, and there the least recently used leaf goes first. An owner without a limit has nothing
    promised: such owners give before those with a quota, the one with most first. So while the
    quotas fit into the tier, an owner below its own loses nothing to others as long as somebody
    without a limit has a chunk that is not in use. Whoever holds chunks with a quota of zero, which
    was lowered then, gives before all others.
    """

    def __init__(self, options: IsolatedLRUOptions) -> None:
        self._default = _quota_of(options.default)
        self._quotas = {owner: _quota_of(limit) for owner, limit in options.quotas.items()}
        self._owners = self._no_owners(0)

    def _no_owners(self, entries: int) -> Owners:
        return Owners(entries, self._quotas, self.default_quota)

    def _prepare(self, entries: int) -> None:
        self._clock = 0
        self._stamp = Column(entries, np.int64)
        self._owner = Column(entries)
        self._heaps = Heaps(entries, self._stamp, self._stamp)
        self._owners = self._no_owners(entries)

    # Quotas

    def quota(self, owner: str) -> int | None:
        return self._quotas.get(owner, self._default)

    def default_quota(self) -> int | None:
        return self._default

    def set_default_quota(self, quota: int | None) -> None:
        self._default = _checked(quota)

    def quotas(self) -> Mapping[str, int | None]:
        return MappingProxyType(self._quotas)

    def set_quota(self, owner: str, quota: int | None) -> None:
        self._quotas[owner] = _checked(quota)
        self._rank(owner)

    def forget_quota(self, owner: str) -> bool:
        if owner not in self._quotas:
            return False
        del self._quotas[owner]
        self._rank(owner)
        return True

    def _rank(self, name: str) -> None:
        owner = self._owners.find(name)
        if owner is not None:
            self._owners.rank(owner)

    # Victims

    def evict_owned(self, owner: str, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        def front() -> int:
            found = self._owners.find(owner)
            return NOBODY if found is None else found.root - 1

        return self._evict(need, claim, front)

    def _front(self) -> int:
        owner = self._owners.front()
        return NOBODY if owner is None else owner.root - 1

    # Chunks

    def _arrive(self, entry: EntryView) -> None:
        self._clock += 1
        self._stamp.view[entry.id] = self._clock
        owner = self._owners.acquire(entry.owner)
        self._owner.view[entry.id] = owner.number
        self._owners.hold(owner, entry.size)

    def _use(self, rows: Ids) -> None:
        self._clock += 1
        self._stamp.array[rows] = self._clock

    def _add(self, entry: int) -> None:
        owner = self._owner_of(entry)
        owner.root = self._heaps.add(owner.root, entry)
        if owner.queue == NOWHERE:
            self._owners.rank(owner)

    def _drop(self, entry: int) -> None:
        owner = self._owner_of(entry)
        owner.root = self._heaps.remove(owner.root, entry)
        if not owner.root:
            self._owners.rank(owner)

    def _gone(self, entry: int) -> None:
        self._owners.hold(self._owner_of(entry), -self._size.view[entry])

    def _back(self, entry: int) -> None:
        self._owners.hold(self._owner_of(entry), self._size.view[entry])

    def _forget(self, entry: int) -> None:
        self._owners.release(self._owner_of(entry))

    def _owner_of(self, entry: int) -> Owner:
        return self._owners.numbered(self._owner.view[entry])


def _quota_of(limit: int) -> int | None:
    return None if limit == UNLIMITED else limit


def _checked(quota: int | None) -> int | None:
    if quota is not None and quota < 0:
        raise KVFerryError(
            f"a quota of {quota} bytes",
            kind=ErrorKind.CONFIG,
            why="a quota is zero or more bytes",
            remedy="give zero to refuse the owner's chunks, or None for no limit",
        )
    return quota
