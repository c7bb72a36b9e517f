"""Who has which keys of one namespace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry_sharing_p2p.directory.key_table import Ids, KeyTable, Words, as_words, grown

_BITS = 64


class Run(NamedTuple):
    """``slots`` have the first ``length`` of the digests asked for, and no more of them."""

    length: int
    slots: tuple[int, ...]


class Shelf:
    """Sets of keys, one per slot, over one table: a key costs its memory once, however many have it.

    Each key has one bit per slot, in words of 64 slots; a word more is kept while there are slots in it.
    Keys are handed in as digests, one behind the other. What a slot holds is found only while it is served.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self._table = KeyTable()
        self._holders: list[Words] = []
        """By word, then by row of the table: a bit for each slot that has the key."""
        self._served: list[int] = []
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        """How many different keys there are."""
        return len(self._table)

    @property
    def slots(self) -> int:
        """How many sets there are."""
        return len(self._counts)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the columns take."""
        return self._table.nbytes + sum(column.nbytes for column in self._holders)

    def count(self, slot: int) -> int:
        """How many keys the set has."""
        return self._counts[slot]

    def open_slot(self) -> int:
        """Begin an empty set, not served yet."""
        slot = next(number for number in range(len(self._counts) + 1) if number not in self._counts)
        if slot // _BITS == len(self._holders):
            self._holders.append(np.zeros(self._table.rows, np.uint64))
            self._served.append(0)
        self._counts[slot] = 0
        return slot

    def serve(self, slot: int) -> None:
        """Let :meth:`longest` find what the set has."""
        self._served[slot // _BITS] |= 1 << slot % _BITS

    def close_slot(self, slot: int) -> int:
        """End a set; how many keys it had. Takes milliseconds per hundred thousand."""
        word, bit = slot // _BITS, np.uint64(1 << slot % _BITS)
        self._served[word] &= ~(1 << slot % _BITS)
        self._clear(np.flatnonzero(self._holders[word] & bit), word, bit)
        keys = self._counts.pop(slot)
        words = max(self._counts, default=-1) // _BITS + 1
        del self._holders[words:], self._served[words:]
        return keys

    def hold(self, digests: bytes, slots: Iterable[int]) -> None:
        """Put keys into sets. Those that are there already stay."""
        rows = self._table.add(as_words(digests))
        for word, column in enumerate(self._holders):
            if len(column) < self._table.rows:
                self._holders[word] = grown(column, self._table.rows)
        for slot in slots:
            column, bit = self._holders[slot // _BITS], np.uint64(1 << slot % _BITS)
            self._counts[slot] += len(np.unique(rows[(column[rows] & bit) == 0]))
            column[rows] |= bit

    def drop(self, digests: bytes, slots: Iterable[int]) -> None:
        """Take keys out of sets. Those that are not there are no error."""
        rows = self._table.find(as_words(digests))
        rows = np.unique(rows[rows >= 0])
        for slot in slots:
            word, bit = slot // _BITS, np.uint64(1 << slot % _BITS)
            held = rows[(self._holders[word][rows] & bit) != 0]
            self._counts[slot] -= len(held)
            self._clear(held, word, bit)

    def longest(self, digests: bytes, wanted: int, but: int | None = None) -> list[Run]:
        """Who is served and has the most of ``digests``, from the first on without a gap; then who has
        fewer, until there are ``wanted`` of them or no more. Never the set ``but``."""
        rows = self._table.find_run(as_words(digests))
        served = list(self._served)
        if but is not None:
            served[but // _BITS] &= ~(1 << but % _BITS)
        # Bit by bit, who has everything up to here.
        so_far = [
            np.bitwise_and.accumulate(column[rows] & np.uint64(mask))
            for column, mask in zip(self._holders, served, strict=True)
        ]
        runs: list[Run] = []
        found = 0
        while found < wanted:
            length = max((int(np.count_nonzero(column)) for column in so_far), default=0)
            if not length:
                break
            slots = []
            for word, column in enumerate(so_far):
                bits = int(column[length - 1])
                slots += [word * _BITS + place for place in _places(bits)]
                so_far[word] = column & np.uint64(~bits & (1 << _BITS) - 1)
            runs.append(Run(length, tuple(slots)))
            found += len(slots)
        return runs

    def keys(self, slot: int) -> Iterator[bytes]:
        """Everything the set has, in no order; slow."""
        word, bit = slot // _BITS, np.uint64(1 << slot % _BITS)
        for row in np.flatnonzero(self._holders[word] & bit).tolist():
            yield self._table.digests(np.array([row]))

    def audit(self) -> None:
        """Raise ``AssertionError`` with the first contradiction found."""
        used = self._table.used_rows()
        assert len(used) == len(self._table), "the keys are miscounted"
        listed = list(self._table.listed())
        assert len(listed) == len(used), f"{len(listed)} keys are listed, {len(used)} are stored"
        assert sorted(row for _, row in listed) == used.tolist(), "a row is listed twice, or not at all"
        assert len({digest for digest, _ in listed}) == len(listed), "a key has two rows"
        found = self._table.find(as_words(b"".join(digest for digest, _ in listed)))
        assert found.tolist() == [row for _, row in listed], "a key is not found at its row"
        assert self._held(used).all(), "a key is kept that nobody has"
        words = max(self._counts, default=-1) // _BITS + 1
        assert len(self._holders) == len(self._served) == words, "words are kept for sets that ended"
        for word, column in enumerate(self._holders):
            assert len(column) == self._table.rows, "a column of holders has another length than the table"
            assert np.count_nonzero(column) == np.count_nonzero(column[used]), "a free row has holders"
            of_word = {slot for slot in self._counts if slot // _BITS == word}
            known = sum(1 << slot % _BITS for slot in of_word)
            assert not np.any(column & np.uint64(~known & (1 << _BITS) - 1)), "a set that ended has keys"
            assert not self._served[word] & ~known, "a set that ended is served"
            for slot in of_word:
                real = np.count_nonzero(column & np.uint64(1 << slot % _BITS))
                assert real == self._counts[slot], f"set {slot} has {real} keys, not {self._counts[slot]}"

    def _held(self, rows: Ids) -> npt.NDArray[np.bool_]:
        held = np.zeros(len(rows), np.bool_)
        for column in self._holders:
            held |= column[rows] != 0
        return held

    def _clear(self, rows: Ids, word: int, bit: np.uint64) -> None:
        """Take different rows out of a set, and forget keys that nobody has any more."""
        self._holders[word][rows] &= ~bit
        self._table.remove(rows[~self._held(rows)])


def _places(bits: int) -> Iterator[int]:
    """Which bits are set, the lowest first."""
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1
