"""What became visible and what went, in order, for whoever keeps an index elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection

from attrs import frozen

from kvferry.control.columns import Column


@frozen
class StoredFact:
    """A full chunk can be found. ``parent`` is the digest of the chunk before it in its chain, which
    was told of before, and ``None`` at ``depth`` 0. ``content`` is what the writer handed in."""

    digest: bytes
    parent: bytes | None
    depth: int
    salt: str
    model: str
    content: object


@frozen
class RemovedFact:
    """A chunk that was told of cannot be found any more; nothing that was told of stands behind it."""

    digest: bytes


@frozen
class ClearedFact:
    """More happened than was kept. Whoever listens must forget all it knows of this tier; what is
    stored from now on, or used again, is told of anew."""


CacheFact = StoredFact | RemovedFact | ClearedFact


class EventLog:
    """Up to ``limit`` facts until they are taken. Not thread-safe.

    Full chunks alone are told of: a tail is replaced when its chunk grows, and ends inside a chunk.
    Whoever applies the facts in order never knows a chunk that is gone, nor one whose predecessor it
    does not know. When nobody takes them, all facts give way to a single :class:`ClearedFact`.
    """

    def __init__(self, rows: int, limit: int) -> None:
        self.limit = limit
        self.lost = 0
        """Facts that gave way to a :class:`ClearedFact`."""
        self.told = Column(rows, "u1")
        """Whether a row is known to whoever listens."""
        self.told_count = 0
        self._contents: dict[int, object] = {}
        self._facts: list[CacheFact] = []

    def __len__(self) -> int:
        return len(self._facts)

    def expect(self, row: int, content: object) -> None:
        """Keep what the writer says of a chunk until it is visible or given up."""
        self._contents[row] = content

    def forget(self, row: int) -> None:
        self._contents.pop(row, None)

    def stored(self, row: int, parent: int, fact: Callable[[object], StoredFact]) -> None:
        """A full chunk became visible behind ``parent`` (a row, or negative)."""
        content = self._contents.pop(row, None)
        # Of a chunk that came from another tier nobody here knows the content yet: whoever uses it does.
        if content is not None and (parent < 0 or self.told.view[parent]):
            self.tell(row, fact(content))

    def tell(self, row: int, fact: StoredFact) -> bool:
        """Tell of a visible row whose predecessor was told of; ``False`` if that was one too many."""
        kept = self._append(fact)
        if kept:
            self.told.view[row] = 1
            self.told_count += 1
        return kept

    def removed(self, row: int, digest: bytes) -> None:
        if self.told.view[row]:
            self.told.view[row] = 0
            self.told_count -= 1
            self._append(RemovedFact(digest))

    def _append(self, fact: CacheFact) -> bool:
        if len(self._facts) < self.limit:
            self._facts.append(fact)
            return True
        self.lost += len(self._facts) + 1
        self.told.array.fill(0)
        self.told_count = 0
        self._facts = [ClearedFact()]
        return False

    def waiting(self) -> Collection[int]:
        """Rows whose content is kept until they are visible, for audits."""
        return self._contents.keys()

    def take(self, limit: int) -> list[CacheFact]:
        """The oldest facts, up to ``limit``, told once."""
        taken = self._facts[:limit]
        del self._facts[:limit]
        return taken
