"""Memory of this process alone, in huge pages where the kernel has some."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from kvferry.api import ErrorKind, KVFerryError, Region, Retry
from kvferry.api.units import round_up
from kvferry.data.native import find_native
from kvferry.data.touch import choose_populate, touch

HUGE_PAGE_BYTES = 2 << 20


class PrivateArena:
    """``capacity`` bytes that no other process can map: for what passes through and is shared with nobody.

    Memory files rarely get huge pages, and copies between many small pages are half as fast. ``open`` touches
    all of it, some ten milliseconds for each 128 MiB. Threads: ``open`` and ``close`` once each, from one.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self._name = name
        self._capacity = capacity
        self._mapping: mmap.mmap | None = None

    def open(self) -> Region:
        """Raises :class:`KVFerryError` of kind ``CAPACITY`` when the system refuses."""
        # Room for one more page, so that the region can begin where a huge page does.
        size = round_up(self._capacity, HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES
        try:
            mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise self._refused(error) from error
        with contextlib.suppress(OSError):  # a kernel built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTDUMP)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        address = round_up(begin, HUGE_PAGE_BYTES)
        region = Region(name=self._name, address=address, length=self._capacity, keep_alive=mapping)
        try:
            touch(choose_populate(find_native()), region, 0, self._capacity)
        except OSError as error:
            mapping.close()
            raise self._refused(error) from error
        self._mapping = mapping
        return region

    def ready_bytes(self) -> int:
        return 0 if self._mapping is None else self._capacity

    def close(self) -> None:
        """Give the memory back. The caller guarantees that nobody uses it any more. Idempotent."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.close()

    def _refused(self, error: OSError) -> KVFerryError:
        return KVFerryError(
            f"the system refuses {self._capacity} bytes of memory",
            kind=ErrorKind.CAPACITY,
            where=self._name,
            why=f"{error.strerror} (errno {error.errno})",
            remedy="make p2p.buffer smaller, or free memory",
            retry=Retry.LATER,
        )
