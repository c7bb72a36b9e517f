"""Reads values through the page cache in huge pages, which leave it again afterwards."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from mmap import MAP_SHARED, PROT_READ
from pathlib import Path

HUGE_PAGE_FACT = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
LARGEST_HUGE_PAGE = 4 << 20
"""Above it (512 MiB where a page has 64 KiB) no value fills one."""
MADV_RANDOM, MADV_DONTNEED, MADV_HUGEPAGE, MADV_POPULATE_READ = 1, 4, 14, 22
"""``linux/mman.h``; the last is there since Linux 5.14. ``mmap.madvise`` knows neither it nor how to let go
of the GIL."""


class HugeReads:
    """Reads a file's stretches into the page cache, in huge pages where a stretch fills them.

    Left alone, the cache takes pages of 4 KiB from all over the memory, and a disk is slow with those. What
    was read this way leaves the cache at once: it lies in the first tier now, and the next stretch gets the
    same memory, where others would have to be found for it (``tests/bench/disk.py``).
    A fault in a mapping with ``MADV_HUGEPAGE`` is the one thing that asks a file system for huge pages; those
    that have none to give fill the same stretch with small ones. The mapping is never looked into, so a file
    that was cut off, or a block that cannot be read, is no signal: the read that follows tells of it.

    Made for ``length`` bytes, which the file may have later. Threads: any, but ``close`` comes last.
    """

    def __init__(self, fd: int, length: int, huge_page: int | None = None) -> None:
        self.huge_page = find_huge_page() if huge_page is None else huge_page
        self._fd = fd
        self._length = length
        self._madvise, self._munmap, mmap = _calls()
        self._base: int | None = None
        if 0 < self.huge_page <= LARGEST_HUGE_PAGE:
            base = mmap(None, length, PROT_READ, MAP_SHARED, fd, 0)
            # Not every file system maps files; then reads go without.
            self._base = None if base in (None, ctypes.c_void_p(-1).value) else base
        if self._base is not None:
            self._madvise(self._base, length, MADV_HUGEPAGE)
            # Or the kernel reads as much again behind each huge page: another chunk, maybe not wanted.
            self._madvise(self._base, length, MADV_RANDOM)

    @property
    def works(self) -> bool:
        return self._base is not None

    @contextmanager
    def around(self, stretches: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Have these in the cache while they are read, and no longer. Offsets and lengths in the file, in
        bytes."""
        whole = [inner for each in stretches if (inner := self._inner(*each)) is not None]
        try:
            for at, length in whole:
                self._fill(at, length)
            yield
        finally:
            for at, length in whole:
                self._advise(at, length, MADV_DONTNEED)  # the cache keeps what somebody has mapped
                os.posix_fadvise(self._fd, at, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Idempotent."""
        if self._base is not None:
            self._munmap(self._base, self._length)
            self._base = None

    def _inner(self, offset: int, length: int) -> tuple[int, int] | None:
        """The huge pages that lie inside a stretch; those around it would be read for others."""
        if self._base is None:
            return None
        begin = -(-offset // self.huge_page) * self.huge_page
        end = min(offset + length, self._length) // self.huge_page * self.huge_page
        return (begin, end - begin) if end > begin else None

    def _fill(self, at: int, length: int) -> None:
        while self._advise(at, length, MADV_POPULATE_READ) in (errno.EINTR, errno.EAGAIN):
            pass

    def _advise(self, at: int, length: int, advice: int) -> int:
        if self._base is None or self._madvise(self._base + at, length, advice) == 0:
            return 0
        return ctypes.get_errno()


def find_huge_page(fact: Path = HUGE_PAGE_FACT) -> int:
    """Bytes of a huge page; 0 where the kernel has none."""
    try:
        return int(fact.read_text())
    except (OSError, ValueError):
        return 0


def _calls() -> tuple[Callable[..., int], Callable[..., int], Callable[..., int | None]]:
    library = ctypes.CDLL(None, use_errno=True)  # a CDLL lets go of the GIL
    madvise, munmap, mmap = library.madvise, library.munmap, library.mmap
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    )
    mmap.restype = ctypes.c_void_p
    return madvise, munmap, mmap
