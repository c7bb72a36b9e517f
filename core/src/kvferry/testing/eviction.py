"""Stand-ins for an eviction policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.api import Claim, EntryView, Evicted, EvictionPolicy, NotEnough


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
