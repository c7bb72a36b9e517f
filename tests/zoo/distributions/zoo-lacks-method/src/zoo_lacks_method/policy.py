"""Two policies that are not quite policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.api import Claim, EntryView, Evicted, EvictionPolicy, NotEnough


class Forgetful(EvictionPolicy):
    """Inherits the empty body of ``release`` from the contract, which does nothing without a word."""

    def open(self, entries: int) -> None:
        self._ids: list[int] = []

    def insert(self, entry: EntryView) -> None:
        self._ids.append(entry.id)

    def touch(self, ids: Sequence[int]) -> None:
        pass

    def remove(self, ids: Sequence[int]) -> None:
        self._ids = [each for each in self._ids if each not in ids]

    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        return NotEnough(0)


class Boastful(Forgetful):
    """Claims quotas and keeps none."""

    def release(self, ids: Sequence[int]) -> None:
        pass
