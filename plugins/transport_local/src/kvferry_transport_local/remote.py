"""Memory of a peer, as it announced it, and how it is reached from here."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import mmap
import os
import threading

import numpy as np

from kvferry.api import KVFerryError, MemoryKind, RemoteRegion
from kvferry_transport_local.failures import errno_text, unreadable
from kvferry_transport_local.frames import Announce
from kvferry_transport_local.generations import PeerGenerations
from kvferry_transport_local.options import Mechanism


class Way(enum.Enum):
    MAPPED = "mapped"
    CROSS_PROCESS = "cross-process"
    REFUSED = "refused"


class RemoteMemory:
    """One region of a peer. ``base`` is where it begins: here if it is mapped, else in the peer.

    Threads: any. The mapping lives until the region is retired and nobody is inside any more.
    """

    def __init__(self, announced: Announce, page: PeerGenerations, where: str) -> None:
        self.name = announced.name
        self.length = announced.length
        self.slot = announced.slot
        self.generation = announced.generation
        self.way = Way.REFUSED
        self.base = announced.address
        self.why = ""
        """Why it is not mapped; of a refused one, why it cannot be reached at all."""
        self._in_file = announced.in_file
        self._page = page
        self._where = where
        self._lock = threading.Lock()
        self._mapping: mmap.mmap | None = None
        self._users = 0
        self._retired = False

    def attach(self, fd: int, mechanism: Mechanism, cross_refusal: str) -> None:
        """Choose the way, once. Takes over ``fd``, which is -1 where the peer passed none."""
        self.why = "its memory has no memory file" if fd < 0 else ""
        if mechanism is Mechanism.CROSS_PROCESS:
            self.why = "the option mechanism forbids to map it"
            if fd >= 0:
                os.close(fd)
        elif fd >= 0:
            self.why = self._map(fd)
        if not self.why:
            self.way = Way.MAPPED
        elif mechanism is Mechanism.MAPPED:
            self.why += ", and the option mechanism forbids to read it across processes"
        elif cross_refusal:
            self.why += f", and it cannot be read across processes: {cross_refusal}"
        else:
            self.way = Way.CROSS_PROCESS

    def as_region(self) -> RemoteRegion:
        return RemoteRegion(name=self.name, length=self.length, kind=MemoryKind.HOST)

    @property
    def current(self) -> bool:
        """Whether the peer still has it and is open. Behind a copy this tells whether it was torn."""
        return self._page.holds(self.slot, self.generation)

    def refusal(self) -> KVFerryError:
        return unreadable(self.name, self._where, self.why)

    def enter(self) -> bool:
        """Keep the mapping until :meth:`leave`; false when it is gone."""
        with self._lock:
            if self._retired:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            self._drop()

    def retire(self) -> None:
        """Nobody enters any more; the last one to leave unmaps it. Idempotent."""
        with self._lock:
            self._retired = True
            self._drop()

    def _drop(self) -> None:
        if self._retired and self._users == 0 and self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def _map(self, fd: int) -> str:
        """Why not; empty when it is mapped. Only for reading: nothing of ours can write to it."""
        try:
            size = os.fstat(fd).st_size
            sealed = False
            with contextlib.suppress(OSError):  # no memory file
                sealed = bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
            if not sealed:
                return "its memory file could shrink"  # and end this process with SIGBUS
            if self._in_file + self.length > size:
                return "its memory file is too short"
            mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            number = error.errno if isinstance(error, OSError) and error.errno else 0
            return f"its memory file cannot be mapped: {errno_text(number) if number else error}"
        finally:
            os.close(fd)
        self._mapping = mapping
        self.base = np.frombuffer(mapping, np.uint8).ctypes.data + self._in_file
        return ""
