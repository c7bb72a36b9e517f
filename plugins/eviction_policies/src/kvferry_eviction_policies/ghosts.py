"""What was thrown out not long ago, by fingerprint."""

from __future__ import annotations

import numpy as np

from kvferry_eviction_policies.columns import Column

_WAYS = 8
"""Cells of a bucket."""
_LEAST = 64
"""Cells of the smallest table."""


def fingerprint(key: bytes) -> int:
    """A signed number of 64 bits from the digest of a chunk. The digest is uniform already."""
    return int.from_bytes(key[:8], "little", signed=True)


class Ghosts:
    """The last fingerprints that were added, without a chunk behind them.

    As in the paper on S3-FIFO, a table of buckets with a fingerprint and a time in each cell, where
    time counts additions: whatever is too old is not found, and its cell is taken by the next one
    that comes. When a bucket is full the oldest of it goes, a little early. Every operation looks at
    one bucket; nothing grows.
    """

    def __init__(self, entries: int) -> None:
        cells = 1 << max(_LEAST - 1, entries + entries // 4).bit_length()
        self._buckets = cells // _WAYS
        self._prints = Column(cells, np.int64)
        self._times = Column(cells, np.int64)
        """When it was added; 0 for an empty cell."""
        self._now = 0

    def add(self, mark: int) -> None:
        """Remember ``mark`` as the newest."""
        self._now += 1
        prints, times = self._prints.view, self._times.view
        start = mark % self._buckets * _WAYS
        chosen = start
        for cell in range(start, start + _WAYS):
            if times[cell] and prints[cell] == mark:
                chosen = cell
                break
            if times[cell] < times[chosen]:
                chosen = cell
        prints[chosen] = mark
        times[chosen] = self._now

    def take(self, mark: int, among: int) -> bool:
        """Whether ``mark`` is one of the last ``among`` additions. It is forgotten then."""
        prints, times = self._prints.view, self._times.view
        start = mark % self._buckets * _WAYS
        for cell in range(start, start + _WAYS):
            if times[cell] and prints[cell] == mark:
                fresh = self._now - times[cell] < among
                times[cell] = 0
                return bool(fresh)
        return False
