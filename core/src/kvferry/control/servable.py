"""Which full chunks can be found, told to whoever keeps a directory of them."""

from __future__ import annotations

from itertools import islice

from attrs import define, field

from kvferry.api import ServableChanges

ROWS_AT_ONCE = 4096
"""Rows that one step of a walk looks at."""


@define(eq=False)
class ServableLog:
    """Up to ``limit`` chunks that came or went, until they are taken. Not thread-safe.

    Of a chunk that came and went, or went and came, the end counts: who follows may be told of the going of
    a chunk that it never knew, and of the coming of one that it knows.
    """

    limit: int
    _changes: dict[bytes, bool] = field(factory=dict)
    _lost: bool = False

    def __bool__(self) -> bool:
        return bool(self._changes) or self._lost

    def note(self, digest: bytes, there: bool) -> None:
        if self._lost:
            return
        self._changes[digest] = there
        if len(self._changes) > self.limit:
            self._changes.clear()
            self._lost = True

    def take(self, limit: int) -> ServableChanges:
        """Up to ``limit`` of them."""
        if self._lost:
            self._lost = False
            return ServableChanges(lost=True)
        taken = dict(islice(self._changes.items(), limit))
        for digest in taken:
            del self._changes[digest]
        return ServableChanges(
            tuple(digest for digest, there in taken.items() if there),
            tuple(digest for digest, there in taken.items() if not there),
        )
