"""From digests to rows: a hash table that takes, finds and forgets many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.api import DIGEST_BYTES

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
"""Digests, four words each."""

_Number = TypeVar("_Number", bound=np.generic)

_CELLS = 8
_ROW = np.uint64(0xFFFF_FFFF)
_TAG = np.uint64(0xFFFF_FFFF_0000_0000)
_FULL = 4
"""Keys per bucket, on average, above which there are twice as many buckets."""
_SLICE = 1 << 15
"""Keys that are worked on at a time, so that what is needed meanwhile stays in the processor's cache."""


def as_words(digests: bytes) -> Words:
    """One digest behind the other, as rows of words. Raises ``ValueError`` unless they are whole."""
    return np.frombuffer(digests, np.uint64).reshape(-1, DIGEST_BYTES // 8)


class KeyTable:
    """Gives every digest a row number of its own, for as long as it is known. Grows; never shrinks.

    A bucket is one cache line of eight cells, each with 32 bits of the digest and a row; the few digests
    whose bucket is full live in a dictionary. Digests are cryptographic, so their bits need no further
    mixing, and ones that are not only make the dictionary larger. Not thread-safe.
    """

    def __init__(self) -> None:
        self._words: Words = np.zeros((256, DIGEST_BYTES // 8), np.uint64)
        self._cells: Words = np.zeros((64, _CELLS), np.uint64)
        self._overflow: dict[bytes, int] = {}
        self._begun = 0
        """Rows from here on were never used."""
        self._free: npt.NDArray[np.uint32] = np.zeros(256, np.uint32)
        self._free_count = 0

    def __len__(self) -> int:
        return self._begun - self._free_count

    @property
    def rows(self) -> int:
        """Row numbers are below this."""
        return len(self._words)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, but for the dictionary's."""
        return self._words.nbytes + self._cells.nbytes + self._free.nbytes

    def find(self, words: Words) -> Ids:
        """The row of each digest; -1 for one that is not known."""
        rows = np.empty(len(words), np.int64)
        for at in range(0, len(words), _SLICE):
            part = words[at : at + _SLICE]
            found, sure, best = self._probe(part)
            if not self._overflow:
                sure |= best > _ROW
            for place in np.flatnonzero(~sure).tolist():
                found[place] = self._find_one(part[place])
            rows[at : at + _SLICE] = found
        return rows

    def find_run(self, words: Words) -> Ids:
        """The rows of the longest known beginning."""
        rows, sure, _ = self._probe(words)
        for place in np.flatnonzero(~sure).tolist():
            row = self._find_one(words[place])
            if row < 0:
                return rows[:place]
            rows[place] = row
        return rows

    def add(self, words: Words) -> Ids:
        """The row of each digest, a new one where it was not known."""
        rows = self.find(words)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            fresh, places = _distinct(words[missing])
            new = self._take(len(fresh))
            self._words[new] = fresh
            self._list(new)
            rows[missing] = new[places]
        return rows

    def remove(self, rows: Ids) -> None:
        """Forget the digests of these rows, all different and all in use."""
        for at in range(0, len(rows), _SLICE):
            part = rows[at : at + _SLICE]
            buckets = self._buckets(self._words[part])
            hits = (self._cells[buckets] & _ROW) == (part + 1).astype(np.uint64)[:, None]
            listed = hits.any(axis=1)
            self._cells[buckets[listed], hits.argmax(axis=1)[listed]] = 0
            for row in part[~listed].tolist():
                del self._overflow[self._words[row].tobytes()]
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)

    def digests(self, rows: Ids) -> bytes:
        """The digests of these rows, one behind the other."""
        return self._words[rows].tobytes()

    def used_rows(self) -> Ids:
        """Every row that has a digest, in ascending order."""
        used = np.ones(self._begun, np.bool_)
        used[self._free[: self._free_count]] = False
        return np.flatnonzero(used)

    def listed(self) -> Iterator[tuple[bytes, int]]:
        """Every digest that can be found, with its row, for audits; slow."""
        for cell in (self._cells[self._cells != 0] & _ROW).tolist():
            yield self._words[cell - 1].tobytes(), cell - 1
        yield from self._overflow.items()

    def _buckets(self, words: Words) -> Ids:
        return (words[:, 0] & np.uint64(len(self._cells) - 1)).astype(np.int64)

    def _probe(self, words: Words) -> tuple[Ids, npt.NDArray[np.bool_], Words]:
        """Rows, which of them are certain, and the best cell without its tag: no row if above ``_ROW``."""
        tags = words[:, 1] & _TAG
        # The cell with the wanted tag is the smallest after the tag has been cancelled out.
        best: Words = (self._cells[self._buckets(words)] ^ tags[:, None]).min(axis=1)
        rows: Ids = best.astype(np.int64) - 1
        rows[best > _ROW] = -1
        sure = (self._words[rows] == words).all(axis=1)
        sure &= rows >= 0
        rows[~sure] = -1
        return rows, sure, best

    def _find_one(self, words: Words) -> int:
        """One digest whose cell was not the first with its tag; -1 if it is not known."""
        overflow = self._overflow.get(words.tobytes())
        if overflow is not None:
            return overflow
        tag = int(words[1] & _TAG)
        for cell in self._cells[int(words[0]) & (len(self._cells) - 1)].tolist():
            row: int = (cell ^ tag) - 1
            if 0 <= row < self.rows and (self._words[row] == words).all():
                return row
        return -1

    def _take(self, count: int) -> Ids:
        """Rows for ``count`` more digests."""
        self._make_room(count)
        again = min(count, self._free_count)
        self._free_count -= again
        rows = np.empty(count, np.int64)
        rows[:again] = self._free[self._free_count : self._free_count + again]
        rows[again:] = np.arange(self._begun, self._begun + count - again)
        self._begun += count - again
        return rows

    def _make_room(self, count: int) -> None:
        need = self._begun + max(0, count - self._free_count)
        if need > self.rows:
            more = max(need, self.rows + self.rows // 4)
            self._words = grown(self._words, more)
            self._free = grown(self._free, more)
        while len(self) + count > _FULL * len(self._cells):
            self._split()

    def _split(self) -> None:
        """Twice as many buckets: what was in one is in two, each cell in the place that it had."""
        rows = (self._cells & _ROW).astype(np.int64) - 1
        upper = (self._words[rows, 0] & np.uint64(len(self._cells))) != 0
        none = np.uint64(0)
        self._cells = np.concatenate([np.where(upper, none, self._cells), np.where(upper, self._cells, none)])
        waiting = np.fromiter(self._overflow.values(), np.int64, len(self._overflow))
        self._overflow.clear()
        self._list(waiting)

    def _list(self, rows: Ids) -> None:
        """Let the digests of these rows be found."""
        for at in range(0, len(rows), _SLICE):
            part = rows[at : at + _SLICE]
            buckets = self._buckets(self._words[part])
            order = np.argsort(buckets, kind="stable")
            part, buckets = part[order], buckets[order]
            # The how-manieth of its bucket each is takes the so-manieth empty cell.
            places = np.arange(len(part))
            first = np.ones(len(part), np.bool_)
            first[1:] = buckets[1:] != buckets[:-1]
            turn = places - np.maximum.accumulate(np.where(first, places, 0))
            empty = self._cells[buckets] == 0
            chosen = empty & (np.cumsum(empty, axis=1, dtype=np.int8) == (turn + 1)[:, None])
            fits = chosen.any(axis=1)
            cells = (self._words[part, 1] & _TAG) | (part + 1).astype(np.uint64)
            self._cells[buckets[fits], chosen.argmax(axis=1)[fits]] = cells[fits]
            for row in part[~fits].tolist():
                self._overflow[self._words[row].tobytes()] = row


def grown(array: npt.NDArray[_Number], length: int) -> npt.NDArray[_Number]:
    """The same with zeros behind it."""
    longer = np.zeros((length, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer


def _distinct(words: Words) -> tuple[Words, Ids]:
    """Each digest once, and where among them each of ``words`` is."""
    if len(np.unique(words[:, 0])) == len(words):
        return words, np.arange(len(words))
    order = np.lexsort(words.T)
    ordered = words[order]
    first = np.ones(len(words), np.bool_)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    places = np.empty(len(words), np.int64)
    places[order] = np.cumsum(first) - 1
    return ordered[first], places
