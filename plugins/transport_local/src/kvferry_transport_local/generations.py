"""The page by which readers notice that memory was taken back while they copied."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

SLOTS = 4096
"""How many words a page has. The first is the channel's own."""
_BYTES = SLOTS * 8
_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1; the module fcntl lacks the name
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Generations:
    """A word per slot. An odd one is a region in use, an even one is none; it only ever grows.

    The owner's page; peers get ``fd`` and can map it for reading alone. Threads: whoever holds the lock of
    the regions; ``close`` last.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvferry:generations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, _BYTES)
            self._mapping = mmap.mmap(self.fd, _BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            with contextlib.suppress(OSError):  # an older kernel; peers are of the same user anyway
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        except OSError:
            os.close(self.fd)
            raise
        self._words = memoryview(self._mapping).cast("Q")

    def raise_word(self, slot: int) -> int:
        """The new word."""
        word = self._words[slot] + 1
        self._words[slot] = word
        return word

    def close(self) -> None:
        """Idempotent. Peers that mapped the page keep what it said last."""
        if self.fd >= 0:
            self._words.release()
            self._mapping.close()
            os.close(self.fd)
            self.fd = -1


class PeerGenerations:
    """The page of a peer. Takes over ``fd``, also when it raises: ``OSError`` or ``ValueError`` for a
    descriptor that is no such page. Threads: any."""

    def __init__(self, fd: int) -> None:
        try:
            # A file that shrinks would end this process with SIGBUS.
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < _BYTES:
                raise ValueError("it passed a page that could shrink, or is too small")
            self._mapping = mmap.mmap(fd, _BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        self._words = memoryview(self._mapping).cast("Q")

    @property
    def open(self) -> bool:
        """Whether the peer's channel is, and this page too."""
        return self.holds(0, 1)

    def holds(self, slot: int, generation: int) -> bool:
        """Whether the slot still has this word and the channel is open; false once closed here."""
        try:
            return self._words[slot] == generation and self._words[0] == 1
        except ValueError:  # released by close
            return False

    def close(self) -> None:
        """Idempotent."""
        self._words.release()
        if not self._mapping.closed:
            self._mapping.close()
