"""First touch: makes the pages of a mapping present before anyone waits for them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable

from kvferry.api import Region
from kvferry.data.mapping import region_view
from kvferry.data.native import NativeStatus

_MADV_POPULATE_WRITE = 23  # Linux 5.14

Populate = Callable[[int, int, bool], object]
"""``populate(address, length, allow_touch)``: make the pages present and keep their content, without
the GIL. Raises ``OSError``; with ``EOPNOTSUPP`` when the system has no call for it and the pages may
not be touched one by one."""


def choose_populate(status: NativeStatus) -> Populate:
    """kvferry-native's, or the same call from Python."""
    return status.module.populate if status.module is not None else _populate_from_python()


def touch(populate: Populate, region: Region, offset: int, length: int) -> None:
    """First touch of a piece of a memory file. Raises ``OSError`` when the memory is not there.

    Touching a page that the system cannot provide ends the process with SIGBUS. The system call
    reports it instead; where that is missing, the piece is reserved in the file first, which reports
    it too. It is not reserved otherwise: a reservation brings small pages where advice to the mapping
    would bring huge ones.
    """
    try:
        populate(region.address + offset, length, False)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        os.posix_fallocate(region.fd, offset, length)
        populate(region.address + offset, length, True)


def touch_pages(address: int, length: int) -> None:
    """Read and write back one byte of every page. Not for memory that others write to meanwhile."""
    begin = address - address % mmap.PAGESIZE
    pages = region_view(Region(name="touch", address=begin, length=address + length - begin))
    pages[:: mmap.PAGESIZE] |= 0


def _populate_from_python() -> Populate:
    library = ctypes.CDLL(None, use_errno=True)  # a CDLL lets go of the GIL
    madvise = library.madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def populate(address: int, length: int, allow_touch: bool) -> None:
        begin = address - address % mmap.PAGESIZE
        whole = address + length - begin
        while madvise(begin, whole, _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code in (errno.EINTR, errno.EAGAIN):
                continue
            if code != errno.EINVAL:
                raise OSError(code, os.strerror(code))
            if not allow_touch:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            touch_pages(begin, whole)
            return

    return populate
