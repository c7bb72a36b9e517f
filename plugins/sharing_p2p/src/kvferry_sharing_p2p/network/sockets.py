"""What both ends of a connection to the directory have in common."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

QUEUED_MESSAGES = 128
"""That a peer has not taken yet; more are dropped. Whatever is lost is asked for, or sent, again."""
PING_SECONDS = 2.0
LOST_SECONDS = 6.0
"""A connection over which nothing came for so long, not even a ping, is given up."""
HANDSHAKE_SECONDS = 5.0


def configure(socket: zmq.Socket[bytes], most_bytes: int) -> None:
    """Bound what a peer can make this socket keep, and notice peers that are gone without a word. Who sends a
    frame of more than ``most_bytes`` loses the connection."""
    import zmq

    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(PING_SECONDS * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(LOST_SECONDS * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))


def receive(socket: zmq.Socket[bytes], frames: int) -> list[bytes] | None:
    """The next message, without waiting; empty if it has another number of frames. None if there is none.
    Of one with too many frames no more than ``frames`` are kept at a time."""
    import zmq

    try:
        found = [socket.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    while socket.getsockopt(zmq.RCVMORE):
        frame = socket.recv()  # the frames of one message are there together
        found = [*found, frame] if len(found) < frames and found else []
    return found if len(found) == frames else []


class Bell:
    """Wakes a thread that polls :attr:`descriptor`. Ringing never waits; any thread, also after the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        # Under a lock: the number of a descriptor that was just closed may be another's already.
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def hush(self) -> None:
        """Take note of all rings so far. From the thread that polls."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)
