"""Sockets: how they are set up, filled, emptied and cut."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence

_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
)
"""A peer whose host or network is gone is noticed within half a minute even where nothing is sent."""
_LONGEST_UNACKNOWLEDGED_MS = 25_000
_ABORT = struct.pack("ii", 1, 0)

Clock = Callable[[], float]


class Ended(ConnectionError):
    """The other side closed the connection, or ours was cut."""


def set_up(sock: socket.socket) -> None:
    """What every connection gets. Sizes of buffers are left to the system, which adapts them."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LONGEST_UNACKNOWLEDGED_MS)


class Cuttable:
    """A socket that any thread can cut while another waits for it. Whoever waits closes it in the end;
    ``cut`` never meets a descriptor that is somebody else's by then."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()
        self._closed = False

    def cut(self) -> None:
        """Wake whoever waits for the socket, and let nothing pass any more. What lay ready to be sent is
        thrown away when it is closed. Idempotent; never blocks."""
        with self._lock:
            if self._closed:
                return
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        """Tell the other side that nothing more comes from here. What it sends is still received."""
        with self._lock, contextlib.suppress(OSError):
            if not self._closed:
                self.sock.shutdown(socket.SHUT_WR)

    def ended(self) -> bool:
        """Whether the other side has ended, as far as it is known. Never blocks, takes nothing away."""
        with self._lock:
            if self._closed:
                return True
            try:
                return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True

    def close(self) -> None:
        """For the thread that used it. Idempotent."""
        with self._lock:
            self._closed = True
            self.sock.close()


def receive_into(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill ``views``, in their order. Blocks; raises :class:`Ended` when the connection ends before."""
    left = [view for view in views if len(view)]
    while left:
        received = sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
        if not received:
            raise Ended("the connection has ended")
        left = _behind(left, received)


def send_all(sock: socket.socket, views: Sequence[memoryview | bytes]) -> None:
    """Send ``views``, in their order. Blocks."""
    left: list[memoryview] = [memoryview(view) for view in views if len(view)]
    while left:
        left = _behind(left, sock.sendmsg(left, (), socket.MSG_NOSIGNAL))


def _behind(views: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of ``views`` after their first ``moved`` bytes."""
    for number, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[number + 1 :]]
        moved -= len(view)
    return []


def receive_by(sock: socket.socket, length: int, deadline: float, clock: Clock) -> bytes:
    """So many bytes, however slowly they come, but by the deadline. Raises ``TimeoutError`` and
    :class:`Ended`. The socket's own timeout is changed."""
    buffer = bytearray(length)
    view = memoryview(buffer)
    while view:
        _limit(sock, deadline, clock)
        received = sock.recv_into(view)
        if not received:
            raise Ended("the connection has ended")
        view = view[received:]
    return bytes(buffer)


def send_by(sock: socket.socket, data: bytes, deadline: float, clock: Clock) -> None:
    """Send a few bytes by the deadline. Raises ``TimeoutError``."""
    _limit(sock, deadline, clock)
    sock.sendall(data)


def _limit(sock: socket.socket, deadline: float, clock: Clock) -> None:
    left = deadline - clock()
    if left <= 0:
        raise TimeoutError("the time is over")
    sock.settimeout(left)
