"""One control connection, seen from either end: its socket, its peer's life, its peer's regions."""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from kvferry.api import ErrorKind, KVFerryError, RemoteRegion
from kvferry_transport_local.failures import gone
from kvferry_transport_local.frames import MAXIMUM_FRAME_BYTES, Announce, Codec, Frame, Withdraw
from kvferry_transport_local.generations import SLOTS, PeerGenerations
from kvferry_transport_local.options import Mechanism
from kvferry_transport_local.remote import RemoteMemory, Way
from kvferry_transport_local.system import Credentials, ended

_log = logging.getLogger(__name__)

_LARGEST_OUTBOX = 32 << 20
"""Bytes that may wait for a peer that does not read."""


class Broken(Exception):
    """The peer said something that no peer says. Ends this connection and nothing else."""


class Link:
    """Threads: any, except for ``receive`` and ``discard``, which the service thread calls."""

    def __init__(self, end: socket.socket, calling: bool, codec: Codec, where: str) -> None:
        self.end = end
        self.calling = calling
        """Whether this side made the connection."""
        self.where = where
        self.pid = 0
        """The peer's process; 0 where it cannot be seen from here."""
        self.hello_by: float | None = None
        """Until when the peer must have introduced itself; ``None`` once it has."""
        self.cross_refusal = "the peer has not introduced itself"
        self.clock_offset = 0.0
        """What is to be added to our monotonic clock for the peer's, in seconds."""
        self.listed = threading.Event()
        """Set when the peer's regions are known, and when the connection has ended."""
        self.on_end: Callable[[Link], None] = lambda _: None
        self.wake: Callable[[], None] = lambda: None
        self._codec = codec
        self._process = -1
        self._page: PeerGenerations | None = None
        self._names: Mapping[str, RemoteMemory] = {}
        self._slots: dict[int, RemoteMemory] = {}
        self._outbox: deque[tuple[bytes, int]] = deque()
        self._outbox_bytes = 0
        self._error: KVFerryError | None = None
        self._told: set[Way] = set()
        self._lock = threading.RLock()

    # -- its life ----------------------------------------------------------------------------------

    def watch(self, credentials: Credentials) -> None:
        """Know the peer's process. Raises ``OSError`` when it is gone already."""
        if credentials.pid <= 0:
            return
        try:
            self._process = os.pidfd_open(credentials.pid)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            # Linux before 5.3, or a sandbox. A number that nobody watches may become another process's.
            return
        self.pid = credentials.pid

    @property
    def alive(self) -> bool:
        return self._error is None

    def error(self) -> KVFerryError:
        """What the connection ended with."""
        return self._error or gone(self.where, "the connection has ended")

    def look(self) -> str:
        """Why the peer is gone; empty while it lives. One look at the system, which does not wait."""
        with self._lock:
            if self._error is not None:
                return self._error.why or self._error.what
            why = ended(self.end.fileno(), self._process)
            if not why and self._page is not None and not self._page.open:
                why = "it closed its channel"
        if why:
            self.finish(gone(self.where, why))
        return why

    def finish(self, error: KVFerryError) -> None:
        """The connection is over, with this. What comes first stands. The service thread discards it."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            with contextlib.suppress(OSError):
                self.end.shutdown(socket.SHUT_RDWR)
        self.listed.set()
        self.on_end(self)
        self.wake()

    def discard(self) -> None:
        """Give everything back. After ``finish``; idempotent."""
        with self._lock:
            self.end.close()
            if self._process >= 0:
                os.close(self._process)
                self._process = -1
            for _, fd in self._outbox:
                if fd >= 0:
                    os.close(fd)
            self._outbox.clear()
            for memory in self._slots.values():
                memory.retire()
            self._slots.clear()
            self._names = {}
            if self._page is not None:
                self._page.close()

    # -- frames ------------------------------------------------------------------------------------

    def send(self, frame: Frame, fd: int = -1) -> None:
        """Without waiting: what the socket does not take now goes out later, in order. A peer that takes
        nothing for long loses the connection. Nothing happens after the end."""
        data = self._codec.encode(frame)
        with self._lock:
            if self._error is not None:
                return
            if not self._outbox and self._put(data, fd):
                return
            if self._error is None:
                self._outbox.append((data, os.dup(fd) if fd >= 0 else -1))
                self._outbox_bytes += len(data)
            full = self._outbox_bytes > _LARGEST_OUTBOX
        if full:
            self.finish(gone(self.where, "it has not read what it was sent for long"))
        self.wake()

    @property
    def has_more(self) -> bool:
        """Whether frames wait for room in the socket."""
        return bool(self._outbox)

    def flush(self) -> None:
        with self._lock:
            while self._outbox and self._error is None:
                data, fd = self._outbox[0]
                if not self._put(data, fd):
                    return
                self._outbox.popleft()
                self._outbox_bytes -= len(data)
                if fd >= 0:
                    os.close(fd)

    def receive(self) -> tuple[Frame, int] | None:
        """The next frame and the descriptor that came with it, or -1; ``None`` when there is none yet.

        Raises :class:`Broken` for what is no frame, and ``EOFError`` at the end.
        """
        try:
            data, fds, flags, _ = socket.recv_fds(
                self.end, MAXIMUM_FRAME_BYTES, 1, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError(error.strerror) from error
        fd = fds[0] if fds else -1
        why = ""
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            why = "it sent a frame that is too long, or more descriptors than one"
        elif data:
            try:
                return self._codec.frame(data), fd
            except msgspec.DecodeError as error:
                why = f"it sent what is no frame: {error}"
        if fd >= 0:
            os.close(fd)
        if why:
            raise Broken(why)
        raise EOFError("it closed the connection")

    def _put(self, data: bytes, fd: int) -> bool:
        """Whether it is out, or never will be. Under the lock."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        try:
            self.end.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            return True  # its end is seen by whoever reads
        return True

    # -- the peer's memory -------------------------------------------------------------------------

    def introduce(self, page_fd: int) -> None:
        """The peer said who it is. Takes over ``page_fd``; raises :class:`Broken` for no page."""
        if page_fd < 0:
            raise Broken("it passed no descriptor of its generations")
        try:
            page = PeerGenerations(page_fd)
        except (OSError, ValueError) as error:
            raise Broken(f"its page of generations cannot be used: {error}") from error
        with self._lock:
            self._page = page
        self.hello_by = None

    def announced(self, frame: Announce, fd: int, mechanism: Mechanism) -> None:
        """Takes over ``fd``. Raises :class:`Broken`."""
        if self._page is None or not 0 < frame.slot < SLOTS or frame.kind != "host":
            if fd >= 0:
                os.close(fd)
            raise Broken("it announced a region that cannot be")
        memory = RemoteMemory(frame, self._page, self.where)
        if frame.in_file < 0 and fd >= 0:
            os.close(fd)
            fd = -1
        memory.attach(fd, mechanism, self.cross_refusal)
        with self._lock:
            old = self._slots.get(frame.slot)
            self._slots[frame.slot] = memory
            self._names = {each.name: each for each in self._slots.values()}
        if old is not None:
            old.retire()
        self._tell(memory, mechanism)

    def withdrawn(self, frame: Withdraw) -> None:
        with self._lock:
            memory = self._slots.get(frame.slot)
            if memory is None or memory.generation != frame.generation:
                return
            del self._slots[frame.slot]
            self._names = {each.name: each for each in self._slots.values()}
        memory.retire()

    def memory(self, name: str) -> RemoteMemory | None:
        """What the peer has under this name, as far as is known here."""
        return self._names.get(name)

    def memory_at(self, slot: int, generation: int) -> RemoteMemory | None:
        found = self._slots.get(slot)
        return found if found is not None and found.generation == generation else None

    def regions(self) -> dict[str, RemoteRegion]:
        return {name: memory.as_region() for name, memory in self._names.items()}

    def _tell(self, memory: RemoteMemory, mechanism: Mechanism) -> None:
        """Once per connection and way."""
        if memory.way is Way.MAPPED or memory.way in self._told:
            return
        self._told.add(memory.way)
        if memory.way is Way.REFUSED:
            _log.warning("%s", memory.refusal())
        elif mechanism is Mechanism.AUTO:
            _log.info(
                "%s: region %r is read across processes and not mapped, because %s",
                *(self.where, memory.name, memory.why),
            )


def broken(where: str, why: str) -> KVFerryError:
    return KVFerryError(
        "the peer said something that no peer says",
        kind=ErrorKind.PROTOCOL,
        where=where,
        why=why,
        remedy="look for a peer of another version, or for another program on its socket",
    )
