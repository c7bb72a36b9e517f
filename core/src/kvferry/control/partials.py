"""Beginnings of chunks that can be found on their own: tails, and aliases of longer chunks."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.control.columns import Column
from kvferry.control.index import DigestTable
from kvferry.control.slots import SlotPool


class PartialIndex:
    """Digests of fewer tokens than a chunk, each pointing at an entry that begins with them.

    An entry has at most ``per_entry`` such digests. They are attached when the entry is reserved,
    found from :meth:`publish` to :meth:`hide`, and forgotten by :meth:`detach`. When two entries
    share one, the later publication has it. Not thread-safe.
    """

    def __init__(self, entries: int, per_entry: int) -> None:
        records = entries * per_entry
        self.table = DigestTable(records)
        self._pool = SlotPool(records, records)
        self._holder = Column(records)
        self._tokens = Column(records)
        self._next = Column(records)
        self._first = Column(entries)
        """Record number plus one, so that untouched zeros mean none."""

    def attach(self, entry: int, digest: bytes, tokens: int) -> None:
        record = self._pool.take()
        self.table.store(record, digest)
        self._tokens.view[record] = tokens
        self._holder.view[record] = entry
        self._next.view[record] = self._first.view[entry]
        self._first.view[entry] = record + 1

    def publish(self, entry: int) -> None:
        for record in self._records(entry):
            self.table.list_row(record)

    def hide(self, entry: int) -> None:
        for record in self._records(entry):
            self.table.unlist_row(record)

    def detach(self, entry: int) -> None:
        """Forget the digests of an entry that was never published or is hidden."""
        for record in list(self._records(entry)):
            self._pool.give(record)
        self._first.view[entry] = 0

    def find(self, digest: bytes) -> int:
        """The entry that begins with these tokens, or -1."""
        record = self.table.find(digest)
        return -1 if record < 0 else self._holder.view[record]

    def digests(self, entry: int) -> list[bytes]:
        return [self.table.digest(record) for record in self._records(entry)]

    def pairs(self, entry: int) -> list[tuple[bytes, int]]:
        """The digests of an entry and the tokens that each stands for, in the order of their attachment."""
        found = [(self.table.digest(record), self._tokens.view[record]) for record in self._records(entry)]
        found.reverse()
        return found

    def holders(self) -> Iterator[tuple[bytes, int]]:
        """Every digest that can be found, with its entry, for audits; slow."""
        for digest, record in self.table.listed():
            yield digest, self._holder.view[record]

    @property
    def attached(self) -> int:
        return self._pool.capacity - self._pool.free

    def _records(self, entry: int) -> Iterator[int]:
        record = self._first.view[entry] - 1
        while record >= 0:
            yield record
            record = self._next.view[record] - 1
