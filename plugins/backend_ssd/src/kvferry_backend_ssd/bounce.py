"""Aligned memory of our own, for what a disk cannot read or write in place."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

from kvferry_backend_ssd.block_io import Piece, Purpose, cut
from kvferry_backend_ssd.layout import PAGE, round_up


class Bounce:
    """``length`` bytes in pages, handed out from the front and taken back all at once.

    Pages that were never used take no memory. Threads: one at a time.
    """

    def __init__(self, length: int) -> None:
        self.length = round_up(length)
        self._map = mmap.mmap(-1, self.length)
        self._view = memoryview(self._map)
        self._address = ctypes.addressof((ctypes.c_ubyte * self.length).from_buffer(self._map))
        self._edge = 0

    @property
    def free(self) -> int:
        return self.length - self._edge

    def take(self, length: int) -> tuple[memoryview, int]:
        """A window of ``length`` bytes at a page's beginning, and its address. Its bytes are whatever
        they were. The caller has looked at :attr:`free`."""
        at = self._edge
        assert length <= self.free, "the caller looks at what is free first"
        self._edge = at + round_up(length)
        return self._view[at : at + length], self._address + at

    def reset(self) -> None:
        """Everything handed out is free again."""
        self._edge = 0


def window(address: int, length: int) -> memoryview:
    """The bytes at an address, writable."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def value_pieces(begin: int, address: int, size: int, direct: bool) -> Iterable[tuple[int, Piece, bool]]:
    """A value of ``size`` bytes at ``begin`` of the file and ``address`` of memory: offset in the value,
    piece, and whether it needs no memory of ours. Whole pages do not, unless direct I/O finds the memory at
    an odd address; what is left of the last page always does."""
    straight = not direct or address % PAGE == 0
    whole = size // PAGE * PAGE
    for piece in cut(begin, address, whole):
        yield piece.offset - begin, piece, straight
    if whole < size:
        yield whole, Piece(begin + whole, 0, PAGE, Purpose.VALUE), False
