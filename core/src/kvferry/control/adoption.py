"""What a store held when it was opened, taken into an index a part at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from attrs import define

from kvferry.control.copying import Copying
from kvferry.control.outcomes import ChunkFacts

ADOPTED_AT_ONCE = 5
"""Chunks that are taken in under one hold of the lock."""
USED_AT_ONCE = 24
"""Chunks whose place in the order of use is found under one."""
NAMED_AT_ONCE = 64
"""Names that are noted under one."""


T = TypeVar("T")


@define(eq=False)
class Adoption:
    """Lists are emptied from their ends; :meth:`of` makes them without a lock, :meth:`step` takes from them
    under it."""

    chunks: list[ChunkFacts]
    """Each behind the one before it, the heads last."""
    used: list[bytes]
    """In the order of their use, the least recent last."""
    useless: list[bytes]
    """Nobody can ever load them."""
    foreign: deque[bytes]
    """Full keys of chunks of other namespaces."""
    adopted: int = 0

    @classmethod
    def of(
        cls, chunks: Sequence[ChunkFacts], useless: Iterable[bytes], foreign: Sequence[bytes], room: int
    ) -> Adoption:
        """``chunks`` were all found, the least recently used first. Of more than ``room``, those used last
        stay, each with all before it. ``useless`` are digests to be deleted."""
        fit, rest = _fitting(chunks, room)
        fit.sort(key=lambda facts: (facts.depth, facts.tokens), reverse=True)
        used = [facts.digest for facts in reversed(chunks)]
        return cls(fit, used, [*useless, *rest], deque(foreign))

    def step(
        self,
        into: Copying,
        now: float,
        doomed: dict[bytes, None],
        kept: deque[bytes],
        stale: Callable[[ChunkFacts], bool] = lambda _facts: False,
    ) -> bool:
        """Take a part in; whether there is more. What has no place or is ``stale`` goes to ``doomed``; full
        keys of others go to ``kept`` as long as there is room that nobody needs."""
        if self.chunks:
            for facts in _last(self.chunks, ADOPTED_AT_ONCE):
                if facts.end > now and not stale(facts) and into.adopt(facts):
                    self.adopted += 1
                else:
                    doomed[facts.digest] = None
        elif self.used:
            into.used(_last(self.used, USED_AT_ONCE))
        elif self.useless:
            doomed.update(dict.fromkeys(_last(self.useless, NAMED_AT_ONCE)))
        elif self.foreign:
            for key in [self.foreign.popleft() for _ in range(min(len(self.foreign), NAMED_AT_ONCE))]:
                if into.withhold(1):
                    kept.append(key)
                else:
                    doomed[key] = None
        return bool(self.chunks or self.used or self.useless or self.foreign)


def _last(items: list[T], count: int) -> list[T]:
    """The last ``count`` items, the very last first; they leave the list."""
    part = items[: -count - 1 : -1]
    del items[-count:]
    return part


def _fitting(chunks: Sequence[ChunkFacts], room: int) -> tuple[list[ChunkFacts], list[bytes]]:
    """What stays, and the digests of the rest: what stands behind something that was not found, too."""
    found = {facts.digest: facts for facts in chunks}
    stays: dict[bytes, bool] = {}
    for facts in reversed(chunks):
        path: list[ChunkFacts] = []
        at: ChunkFacts | None = facts
        whole = False
        while at is not None and at.digest not in stays:
            path.append(at)
            if at.parent is None:
                whole = True
                break
            before = found.get(at.parent)
            at = before if before is not None and before.depth == at.depth - 1 else None
        else:
            whole = at is not None and stays[at.digest]
        for each in reversed(path):
            whole = whole and room > 0
            stays[each.digest] = whole
            room -= whole
    fit = [facts for facts in found.values() if stays[facts.digest]]
    return fit, [digest for digest, stay in stays.items() if not stay]
