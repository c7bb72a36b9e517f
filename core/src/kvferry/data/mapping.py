"""Memory files and their mappings: memory with a descriptor that another process can map too."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvferry.api import ErrorKind, KVFerryError, Region, Retry
from kvferry.api.units import round_up

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL = 8  # Linux 6.3; newer systems may insist on it, older ones refuse it
_LABEL_BYTES = 200  # the kernel takes 249


class MappedRegion:
    """Owns a descriptor and its shared mapping; ``region`` describes them.

    Made by :func:`create_region` and :func:`map_region`. Closing is idempotent and single-threaded;
    the caller guarantees that nobody uses an address of the region any more.
    """

    def __init__(self, region: Region, mapping: mmap.mmap) -> None:
        self.region = region
        self._mapping = mapping

    def advise_huge_pages(self) -> bool:
        """Ask for transparent huge pages. True when the system accepted, which promises nothing."""
        try:
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without them
            return False
        return True

    def leave_out_of_core_dumps(self) -> None:
        """Spare a crashing process the time and disk that a dump of the cache would take."""
        self._mapping.madvise(mmap.MADV_DONTDUMP)

    def close(self) -> None:
        if not self._mapping.closed:
            self._mapping.close()
            os.close(self.region.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def create_region(
    name: str, length: int, *, page_bytes: int = mmap.PAGESIZE, reserved: bool = False
) -> MappedRegion:
    """A new memory file of at least ``length`` bytes, sealed at its size, mapped and untouched.

    The file ends at a multiple of ``page_bytes``. With ``reserved`` it is made of huge pages an
    administrator set aside. Raises :class:`KVFerryError` of kind CAPACITY when the system refuses.
    """
    size = round_up(length, page_bytes)
    try:
        fd = _memory_file(f"kvferry:{name}", reserved)
    except OSError as error:
        raise _refused(name, length, error) from error
    try:
        os.ftruncate(fd, size)
        # Whoever maps the file can then trust its size: an access past the end of a file that shrank
        # ends the process with SIGBUS, which Python cannot catch.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return _mapped(fd, size, length, name)
    except OSError as error:
        os.close(fd)
        raise _refused(name, length, error) from error


def map_region(fd: int, length: int, name: str) -> MappedRegion:
    """Map a memory file that another process made and passed on.

    Takes over ``fd``, also when it raises. Raises :class:`KVFerryError`: of kind PROTOCOL when the
    file is shorter than ``length`` or could still shrink, of kind CAPACITY when the system refuses.
    """
    try:
        _demand_trust(fd, length, name)
        # The whole file: a mapping of huge pages can only be undone in whole pages.
        return _mapped(fd, os.fstat(fd).st_size, length, name)
    except OSError as error:
        os.close(fd)
        raise _refused(name, length, error) from error
    except KVFerryError:
        os.close(fd)
        raise


def region_view(region: Region) -> NDArray[np.uint8]:
    """The bytes of a host region as an array without a copy. Keeps ``region.keep_alive`` alive, but is
    invalid once the region's owner was closed."""
    return np.asarray(_Bytes(region))


class _Bytes:
    """Speaks NumPy's array interface, so that an array can stand on a bare address."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.__array_interface__ = {
            "version": 3,
            "data": (region.address, False),
            "shape": (region.length,),
            "typestr": "|u1",
        }


def _memory_file(label: str, reserved: bool) -> int:
    short = label.encode("utf-8", "replace")[:_LABEL_BYTES].decode("utf-8", "ignore")
    flags = os.MFD_CLOEXEC | (os.MFD_HUGETLB if reserved else 0)
    try:
        return os.memfd_create(short, flags | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(short, flags | os.MFD_ALLOW_SEALING)


def _mapped(fd: int, size: int, length: int, name: str) -> MappedRegion:
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    region = Region(name=name, address=address, length=length, fd=fd, keep_alive=mapping)
    return MappedRegion(region, mapping)


def _demand_trust(fd: int, length: int, name: str) -> None:
    problem = _distrust(fd, length)
    if problem:
        raise KVFerryError(
            f"the descriptor for region {name} cannot be mapped",
            kind=ErrorKind.PROTOCOL,
            where=name,
            why=problem,
        )


def _distrust(fd: int, length: int) -> str:
    if length < 1:
        return f"a region of {length} bytes was announced"
    size = os.fstat(fd).st_size
    if size < length:
        return f"the file has {size} bytes, and {length} were announced"
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return "it is no memory file"
    return "" if seals & fcntl.F_SEAL_SHRINK else "the file is not sealed against shrinking"


def _refused(name: str, length: int, error: OSError) -> KVFerryError:
    why, remedy = f"{error.strerror} (errno {error.errno})", "give the tier less capacity"
    if error.errno == errno.EAGAIN:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        why = f"this process locks its memory, and may lock {limit} bytes"
        remedy = f"raise the limit on locked memory (ulimit -l) above {length} bytes"
    elif error.errno == errno.ENOMEM:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            why = f"the address space of this process is limited to {limit} bytes"
            remedy = f"raise the limit (ulimit -v) well above {length} bytes"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "raise the limit on open files (ulimit -n)"
    return KVFerryError(
        f"the system refuses {length} bytes of memory",
        kind=ErrorKind.CAPACITY,
        where=name,
        why=why,
        remedy=remedy,
        retry=Retry.AFTER_CHANGE,
    )
