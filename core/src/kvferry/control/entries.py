"""The table of chunks: one row per chunk, one column per fact, and the tree that keys form."""

from __future__ import annotations

import enum

from kvferry.api import NO_PARENT
from kvferry.control.columns import Column, Ids
from kvferry.control.index import DigestTable
from kvferry.control.outcomes import ChunkFacts
from kvferry.control.partials import PartialIndex
from kvferry.control.salts import SaltBook
from kvferry.control.slots import SlotPool

ROOT = NO_PARENT
NOBODY = -1


class State(enum.IntEnum):
    """Life of a row. Stored as a small integer per row."""

    FREE = 0
    RESERVED = 1
    """A worker may be writing it."""
    WRITTEN = 2
    """Written; waits for the chunk before it to become visible."""
    VISIBLE = 3
    RETIRING = 4
    """Found no more; somebody may still read it."""
    QUARANTINED = 5
    """Given up, but a worker may still write it."""


class EntryTable:
    """Rows, their columns, and who stands behind whom. Knows nothing of slots, leases or policies.

    The successors of a row form a doubly linked list through three columns, so that whatever stands
    behind a chunk is found without a search. Rows that are retiring or in quarantine are out of the
    tree. There is no object per row: a million rows cost the garbage collector nothing.
    """

    def __init__(self, rows: int, chunk_tokens: int, block_tokens: int) -> None:
        self.rows = rows
        self.chunk_tokens = chunk_tokens
        self.block_tokens = block_tokens
        self.state = Column(rows, "u1")
        self.tokens = Column(rows)
        self.depth = Column(rows)
        self.salt = Column(rows)
        self.model = Column(rows)
        """Number of the adapter's name; 0 is the served base model."""
        self.parent = Column(rows)
        self._first = Column(rows, fill=NOBODY)
        self._next = Column(rows)
        self._previous = Column(rows)
        self.digests = DigestTable(rows)
        """Stores the digest of every row; lists the visible full chunks."""
        self.partials = PartialIndex(rows, chunk_tokens // block_tokens - 1)
        self.pending: dict[bytes, int] = {}
        """Reserved and written rows, full or not, by digest."""
        self.salts = SaltBook()
        self.models = SaltBook()
        self._numbers = SlotPool(rows, rows)

    def add(
        self,
        digest: bytes,
        parent: int,
        depth: int,
        tokens: int,
        aliases: tuple[tuple[bytes, int], ...],
        salt: str,
        model: str = "",
    ) -> int:
        """A new reserved row behind ``parent``; the caller knows that there is room for it."""
        row = self._numbers.take()
        self.state.view[row] = State.RESERVED
        self.tokens.view[row] = tokens
        self.depth.view[row] = depth
        self.salt.view[row] = self.salts.acquire(salt)
        if model:
            self.model.view[row] = self.models.acquire(model)
        self.digests.store(row, digest)
        if tokens < self.chunk_tokens:
            self.partials.attach(row, digest, tokens)
        for alias, held in aliases:
            self.partials.attach(row, alias, held)
        self.pending[digest] = row
        self.link(row, parent)
        return row

    def discard(self, row: int) -> None:
        """The row is free again. It is out of the tree and the indexes already."""
        self.partials.detach(row)
        self.salts.release(self.salt.view[row])
        if self.model.view[row]:
            self.models.release(self.model.view[row])
            self.model.view[row] = 0
        self.state.view[row] = State.FREE
        self._numbers.give(row)

    def link(self, row: int, parent: int) -> None:
        self.parent.view[row] = parent
        if parent == ROOT:
            return
        first = self._first.view[parent]
        self._next.view[row] = first
        self._previous.view[row] = NOBODY
        if first != NOBODY:
            self._previous.view[first] = row
        self._first.view[parent] = row

    def unlink(self, row: int) -> int:
        """Take a row out of the list of its parent, whose number is the answer."""
        parent = self.parent.view[row]
        if parent != ROOT:
            following, previous = self._next.view[row], self._previous.view[row]
            if previous == NOBODY:
                self._first.view[parent] = following
            else:
                self._next.view[previous] = following
            if following != NOBODY:
                self._previous.view[following] = previous
        return parent

    def clear_successors(self, row: int) -> None:
        """For a row whose successors leave the tree together with it."""
        self._first.view[row] = NOBODY

    def has_successors(self, row: int) -> bool:
        return self._first.view[row] != NOBODY

    def leaves(self, rows: Ids) -> Ids:
        """Those of ``rows`` with nothing behind them."""
        found: Ids = rows[self._first.array[rows] == NOBODY]
        return found

    def chain(self, rows: Ids, after: int) -> Ids:
        """``rows`` as far as the first stands behind ``after`` and each behind the one before it."""
        if not len(rows):
            return rows
        parents = self.parent.array[rows]
        if parents[0] != after:
            return rows[:0]
        broken = parents[1:] != rows[:-1]
        return rows[: int(broken.argmax()) + 1] if broken.any() else rows

    def ancestors(self, row: int) -> list[int]:
        """Rows before this one, the head first."""
        found = []
        row = self.parent.view[row]
        while row != ROOT:
            found.append(row)
            row = self.parent.view[row]
        found.reverse()
        return found

    def successors(self, row: int) -> list[int]:
        """Rows directly behind this one, visible or pending."""
        found = []
        row = self._first.view[row]
        while row != NOBODY:
            found.append(row)
            row = self._next.view[row]
        return found

    def behind(self, row: int) -> list[int]:
        """The row and everything behind it, each row after the one before it in its chain."""
        found = [row]
        for at in found:
            if self._first.view[at] != NOBODY:
                found.extend(self.successors(at))
        return found

    def is_full(self, row: int) -> bool:
        return self.tokens.view[row] == self.chunk_tokens

    def in_tree(self, row: int) -> bool:
        """Whether the row is reserved, written or visible."""
        return State.RESERVED <= self.state.view[row] <= State.VISIBLE

    def model_name(self, row: int) -> str:
        number = self.model.view[row]
        return self.models.name(number) if number else ""

    def only_successor(self, row: int) -> bool:
        """Whether nothing else stands directly behind the chunk before it."""
        first = self._first.view[self.parent.view[row]]
        return first == row and self._next.view[row] == NOBODY

    def facts(self, row: int, end: float) -> ChunkFacts:
        """All that must be known of the chunk to find it again elsewhere. The row before it must not
        have been discarded."""
        digest = self.digests.digest(row)
        parent = self.parent.view[row]
        aliases = self.partials.pairs(row)
        return ChunkFacts(
            digest=digest,
            parent=None if parent == ROOT else self.digests.digest(parent),
            depth=self.depth.view[row],
            tokens=self.tokens.view[row],
            aliases=tuple(aliases if self.is_full(row) else aliases[1:]),
            salt=self.salts.name(self.salt.view[row]),
            model=self.model_name(row),
            end=end,
        )

    def towards_end(self, row: int, steps: int) -> int:
        """Some end of a chain that goes through ``row``, or the row so many steps nearer to it."""
        first = self._first.view
        while steps > 0 and first[row] != NOBODY:
            row = first[row]
            steps -= 1
        return row

    def find_any(self, digest: bytes) -> int:
        """As :meth:`find`, among reserved and written rows too."""
        row = self.find(digest)
        return row if row >= 0 else self.pending.get(digest, NOBODY)

    def find(self, digest: bytes) -> int:
        """The visible row of a full chunk, of a tail, or of a chunk that begins so; or -1."""
        row = self.digests.find(digest)
        return row if row >= 0 else self.partials.find(digest)

    def free_rows(self) -> set[int]:
        """For audits; slow."""
        return self._numbers.free_numbers()
