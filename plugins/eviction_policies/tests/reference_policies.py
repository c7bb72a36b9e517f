"""Every policy once more, in lists and loops, with a search for everything."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from attrs import define

from kvferry.api import Claim, EntryView, Evicted, NotEnough


@define
class Chunk:
    view: EntryView
    came: int
    used: int
    refused: bool = False
    """The manager said no, and has not said since that this changed."""
    order: int = 0
    uses: int = 0
    promoted: bool = False


class Reference(ABC):
    """The contract. Subclasses say which leaf comes first."""

    def __init__(self) -> None:
        self.clock = 0
        self.chunks: dict[int, Chunk] = {}

    def open(self, entries: int) -> None:
        del entries

    def insert(self, entry: EntryView) -> None:
        self.clock += 1
        self.chunks[entry.id] = Chunk(entry, self.clock, self.clock)
        self.arrived(self.chunks[entry.id])

    def touch(self, ids: Sequence[int]) -> None:
        self.clock += 1
        for entry in ids:
            chunk = self.chunks[entry]
            chunk.used = self.clock
            chunk.refused = False
            self.accessed(chunk)

    def release(self, ids: Sequence[int]) -> None:
        for entry in ids:
            self.chunks[entry].refused = False

    def remove(self, ids: Sequence[int]) -> None:
        for entry in ids:
            if entry in self.chunks:
                self.lose(entry)

    def lose(self, entry: int) -> None:
        parent = self.chunks.pop(entry).view.parent
        if parent in self.chunks:
            self.chunks[parent].refused = False

    def leaves(self) -> list[Chunk]:
        inner = {chunk.view.parent for chunk in self.chunks.values()}
        return [chunk for entry, chunk in self.chunks.items() if entry not in inner and not chunk.refused]

    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        return self.take(need, claim, self.first)

    def take(
        self, need: int, claim: Callable[[int], Claim], first: Callable[[], Chunk | None]
    ) -> Evicted | NotEnough:
        before = copy.deepcopy(vars(self))
        taken: list[Chunk] = []
        refused: list[int] = []
        while sum(chunk.view.size for chunk in taken) < need:
            chunk = first()
            if chunk is None:
                vars(self).update(before)
                for entry in refused:
                    self.chunks[entry].refused = True
                return NotEnough(sum(chunk.view.size for chunk in taken))
            if claim(chunk.view.id) is Claim.TAKEN:
                taken.append(chunk)
                self.lose(chunk.view.id)
            else:
                chunk.refused = True
                refused.append(chunk.view.id)
        self.evicted(taken)
        return Evicted(tuple(chunk.view.id for chunk in taken))

    @abstractmethod
    def first(self) -> Chunk | None:
        """The leaf to take next."""

    def arrived(self, chunk: Chunk) -> None:
        return

    def accessed(self, chunk: Chunk) -> None:
        return

    def evicted(self, chunks: list[Chunk]) -> None:
        return


class ReferenceLRU(Reference):
    def first(self) -> Chunk | None:
        return min(self.leaves(), key=lambda chunk: chunk.used, default=None)


class ReferenceFIFO(Reference):
    def first(self) -> Chunk | None:
        return min(self.leaves(), key=lambda chunk: chunk.came, default=None)


class ReferenceMRU(Reference):
    def first(self) -> Chunk | None:
        return max(self.leaves(), key=lambda chunk: chunk.used, default=None)


class ReferenceLFU(Reference):
    def __init__(self) -> None:
        super().__init__()
        self.age = 0

    def arrived(self, chunk: Chunk) -> None:
        self.accessed(chunk)

    def accessed(self, chunk: Chunk) -> None:
        chunk.uses += 1
        chunk.order = chunk.uses + self.age

    def evicted(self, chunks: list[Chunk]) -> None:
        self.age = max([self.age, *(chunk.order for chunk in chunks)])

    def first(self) -> Chunk | None:
        return min(self.leaves(), key=lambda chunk: (chunk.order, chunk.used), default=None)


class ReferenceS3FIFO(Reference):
    def __init__(self) -> None:
        super().__init__()
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[bytes | None] = []

    def size(self, queue: list[int]) -> int:
        return sum(self.chunks[entry].view.size for entry in queue)

    def arrived(self, chunk: Chunk) -> None:
        held = self.size(self.small) + self.size(self.main)
        key, among = chunk.view.key, held - held // 10
        if key in self.ghosts[max(0, len(self.ghosts) - among) :]:
            self.main.append(chunk.view.id)
            chunk.promoted = True
            self.promote(chunk.view.parent)
        else:
            self.small.append(chunk.view.id)
        self.ghosts = [None if ghost == key else ghost for ghost in self.ghosts]

    def accessed(self, chunk: Chunk) -> None:
        chunk.uses = min(chunk.uses + 1, 3)

    def lose(self, entry: int) -> None:
        for queue in (self.small, self.main):
            if entry in queue:
                queue.remove(entry)
        super().lose(entry)

    def evicted(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if not chunk.promoted:
                key = chunk.view.key
                self.ghosts = [None if ghost == key else ghost for ghost in self.ghosts]
                self.ghosts.append(key)

    def promote(self, entry: int) -> None:
        while entry in self.small:
            self.small.remove(entry)
            self.main.append(entry)
            self.chunks[entry].uses = 0
            self.chunks[entry].promoted = True
            entry = self.chunks[entry].view.parent

    def first(self) -> Chunk | None:
        for chances in range(32, -1, -1):
            leaves = [chunk.view.id for chunk in self.leaves()]
            small = [self.chunks[entry] for entry in self.small if entry in leaves]
            main = [self.chunks[entry] for entry in self.main if entry in leaves]
            held = self.size(self.small)
            if small and (held * 10 >= held + self.size(self.main) or not main):
                if small[0].uses <= 1 or not chances:
                    return small[0]
                self.promote(small[0].view.id)
            elif main:
                if not main[0].uses or not chances:
                    return main[0]
                main[0].uses -= 1
                self.main.remove(main[0].view.id)
                self.main.append(main[0].view.id)
            else:
                break
        return None


class ReferenceIsolatedLRU(Reference):
    def __init__(self, default: int | None, own: dict[str, int | None]) -> None:
        super().__init__()
        self.default = default
        self.own = dict(own)
        self.numbers: dict[str, int] = {}

    def arrived(self, chunk: Chunk) -> None:
        free = next(n for n in range(1 << 20) if n not in self.numbers.values())
        self.numbers.setdefault(chunk.view.owner, free)

    def remove(self, ids: Sequence[int]) -> None:
        super().remove(ids)
        left = {chunk.view.owner for chunk in self.chunks.values()}
        self.numbers = {owner: number for owner, number in self.numbers.items() if owner in left}

    def first(self) -> Chunk | None:
        owners = {chunk.view.owner for chunk in self.leaves()}
        return self.first_of(min(owners, key=self.rank)) if owners else None

    def first_of(self, owner: str) -> Chunk | None:
        mine = [chunk for chunk in self.leaves() if chunk.view.owner == owner]
        return min(mine, key=lambda chunk: chunk.used, default=None)

    def rank(self, owner: str) -> tuple[int, float, int]:
        held = sum(chunk.view.size for chunk in self.chunks.values() if chunk.view.owner == owner)
        quota = self.quota(owner)
        if quota is None:
            return 1, -held, self.numbers[owner]
        return (2, -held / quota, self.numbers[owner]) if quota else (0, -held, self.numbers[owner])

    def evict_owned(self, owner: str, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        return self.take(need, claim, lambda: self.first_of(owner))

    def quota(self, owner: str) -> int | None:
        return self.own.get(owner, self.default)

    def default_quota(self) -> int | None:
        return self.default

    def set_default_quota(self, quota: int | None) -> None:
        self.default = quota

    def quotas(self) -> dict[str, int | None]:
        return self.own

    def set_quota(self, owner: str, quota: int | None) -> None:
        self.own[owner] = quota

    def forget_quota(self, owner: str) -> bool:
        return self.own.pop(owner, self) is not self
