"""From digests to rows: a hash table of fixed size made of columns."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.api import DIGEST_BYTES
from kvferry.control.columns import Ids

_CELLS = 8
_ROW = 0xFFFF_FFFF
_TAG = 0xFFFF_FFFF_0000_0000
_HEAD = struct.Struct("=QQ")


class DigestTable:
    """Maps 32-byte digests to rows below ``rows``, which the caller numbers.

    A digest is *stored* at a row (:meth:`store`) and, apart from that, *listed* or not
    (:meth:`list_row`); only listed digests are found. One digest is listed at most once.

    A bucket is one cache line of eight cells, each with 32 bits of the digest and a row. The few
    digests whose bucket is full live in a small dictionary. Digests are cryptographic, so their
    bits need no further mixing. The table never grows, moves or leaves tombstones: no call is slow
    because of what came before it. Not thread-safe.
    """

    def __init__(self, rows: int) -> None:
        if rows >= _ROW:
            raise ValueError(f"a digest table has fewer than {_ROW} rows, not {rows}")
        buckets = 1 << ((max(rows, 1) + 3) // 4 - 1).bit_length()
        self._mask = buckets - 1
        # One row at the least, so that gathers with a stand-in row stay inside.
        self._words: npt.NDArray[np.uint64] = np.zeros((max(rows, 1), 4), np.uint64)
        self._keys = self._words.reshape(-1).data.cast("B")
        self._cells: npt.NDArray[np.uint64] = np.zeros((buckets, _CELLS), np.uint64)
        self._cell = self._cells.reshape(-1).data
        self._overflow: dict[bytes, int] = {}
        self._listed = 0

    def __len__(self) -> int:
        return self._listed

    def store(self, row: int, digest: bytes) -> None:
        """Keep ``digest`` at ``row``. The row must not be listed."""
        self._keys[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES] = digest

    def digest(self, row: int) -> bytes:
        """What was stored at ``row``."""
        return bytes(self._keys[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES])

    def list_row(self, row: int) -> None:
        """Let the digest of ``row`` be found; another row that had it is found no longer."""
        digest = self.digest(row)
        head, second = _HEAD.unpack_from(digest)
        start = (head & self._mask) * _CELLS
        cell = (second & _TAG) | (row + 1)
        empty = -1
        for place, present in enumerate(self._cell[start : start + _CELLS].tolist(), start):
            if not present:
                if empty < 0:
                    empty = place
            elif (present ^ cell) <= _ROW and self.digest((present & _ROW) - 1) == digest:
                self._cell[place] = cell
                return
        if digest in self._overflow:
            self._overflow[digest] = row
            return
        self._listed += 1
        if empty >= 0:
            self._cell[empty] = cell
        else:
            self._overflow[digest] = row

    def unlist_row(self, row: int) -> bool:
        """Let the digest of ``row`` be found no longer; ``False`` if ``row`` was not listed."""
        digest = self.digest(row)
        start = (_HEAD.unpack_from(digest)[0] & self._mask) * _CELLS
        for place, cell in enumerate(self._cell[start : start + _CELLS].tolist(), start):
            if cell & _ROW == row + 1:
                self._cell[place] = 0
                self._listed -= 1
                return True
        if self._overflow.get(digest) == row:
            del self._overflow[digest]
            self._listed -= 1
            return True
        return False

    def find(self, digest: bytes) -> int:
        """The row of a listed digest, or -1."""
        head, second = _HEAD.unpack_from(digest)
        start = (head & self._mask) * _CELLS
        tag = second & _TAG
        for cell in self._cell[start : start + _CELLS].tolist():
            if cell and (cell ^ tag) <= _ROW:
                row = (cell & _ROW) - 1
                if self.digest(row) == digest:
                    return row
        return self._overflow.get(digest, -1)

    def find_run(self, digests: Sequence[bytes]) -> Ids:
        """The rows of the longest listed beginning of ``digests``.

        Raises ``ValueError`` unless their length adds up to whole digests.
        """
        if not digests:
            return np.empty(0, np.int64)
        wanted = np.frombuffer(b"".join(digests), np.uint64).reshape(len(digests), 4)
        buckets = (wanted[:, 0] & np.uint64(self._mask)).astype(np.int64)
        tags = wanted[:, 1] & np.uint64(_TAG)
        # The cell with the wanted tag is the smallest after the tag has been cancelled out.
        best = (self._cells[buckets] ^ tags[:, None]).min(axis=1)
        rows: Ids = best.astype(np.int64) - 1
        rows[best > np.uint64(len(self._words))] = -1
        same = (self._words[rows] == wanted).all(axis=1)
        same &= rows >= 0
        if same.all():
            return rows
        # Full buckets and equal tags are rare enough to be looked up one by one.
        for place in np.flatnonzero(~same).tolist():
            row = self.find(bytes(digests[place]))
            if row < 0:
                return rows[:place]
            rows[place] = row
        return rows

    def listed(self) -> Iterator[tuple[bytes, int]]:
        """Every listed digest with its row, for audits; slow."""
        for cell in self._cells[self._cells != 0].tolist():
            row = (cell & _ROW) - 1
            yield self.digest(row), row
        yield from self._overflow.items()
