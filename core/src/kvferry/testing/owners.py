"""The plainest policy that keeps owners apart, for tests of what stands around one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvferry.api import Claim, EntryView, Evicted, NotEnough


class OwnersApart:
    """A :class:`kvferry.api.QuotaPolicy` that asks for the chunk that was not used for longest, of all
    or of one owner, and starts over after every victim. Right and slow."""

    def __init__(self, quotas: Mapping[str, int | None], default: int | None) -> None:
        self._quotas = dict(quotas)
        self._default = default
        self._clock = 0
        self._entries: dict[int, EntryView] = {}
        self._stamps: dict[int, int] = {}

    def open(self, entries: int) -> None:
        del entries

    def insert(self, entry: EntryView) -> None:
        self._entries[entry.id] = entry
        self.touch([entry.id])

    def touch(self, ids: Sequence[int]) -> None:
        self._clock += 1
        self._stamps.update(dict.fromkeys(ids, self._clock))

    def release(self, ids: Sequence[int]) -> None:
        assert set(ids) <= set(self._entries)

    def remove(self, ids: Sequence[int]) -> None:
        for entry in ids:
            del self._entries[entry], self._stamps[entry]

    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        return self._take(list(self._entries), need, claim)

    def evict_owned(self, owner: str, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        owned = [entry for entry, view in self._entries.items() if view.owner == owner]
        return self._take(owned, need, claim)

    def _take(self, ids: list[int], need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        taken: list[int] = []
        while len(taken) < need:
            left = sorted((entry for entry in ids if entry not in taken), key=self._stamps.__getitem__)
            chosen = next((entry for entry in left if claim(entry) is Claim.TAKEN), None)
            if chosen is None:
                return NotEnough(len(taken))
            taken.append(chosen)
        return Evicted(tuple(taken))

    def quota(self, owner: str) -> int | None:
        return self._quotas.get(owner, self._default)

    def default_quota(self) -> int | None:
        return self._default

    def set_default_quota(self, quota: int | None) -> None:
        self._default = quota

    def quotas(self) -> Mapping[str, int | None]:
        return self._quotas

    def set_quota(self, owner: str, quota: int | None) -> None:
        self._quotas[owner] = quota

    def forget_quota(self, owner: str) -> bool:
        return self._quotas.pop(owner, 0) != 0
