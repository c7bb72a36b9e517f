"""A line to the directory: a socket that connects again by itself, and knows whether it is connected."""

from __future__ import annotations

import contextlib
import enum
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry_sharing_p2p.network.endpoint import Endpoint
from kvferry_sharing_p2p.network.secret import KEY_BYTES, SharedSecret
from kvferry_sharing_p2p.network.sockets import configure, receive

if TYPE_CHECKING:
    import zmq

_RECONNECT_MILLISECONDS = 50
_RECONNECT_MAXIMUM_MILLISECONDS = 1000
_LINGER_MILLISECONDS = 200


class LineState(enum.Enum):
    """How far a line is."""

    NOBODY = "nobody listens there"
    """As far as is known: it is tried again and again."""
    TURNED_AWAY = "somebody listens there and does not let us in: another secret, or no directory"
    CONNECTED = "connected"


class Line:
    """One connection to ``endpoint``, made again whenever it is lost, and begun anew when that did not help
    for ``renew_seconds``. Frames of more than ``most_bytes`` are not taken. Threads: one."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        secret: SharedSecret | None,
        *,
        random: Callable[[int], bytes],
        now: float,
        renew_seconds: float,
        most_bytes: int,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._secret = secret
        self._random = random
        self._renew_seconds = renew_seconds
        self._most_bytes = most_bytes
        self.state = LineState.NOBODY
        self._lost_at = now
        """When it was lost, or tried from the beginning."""
        self._open()

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What to poll for input."""
        return self._socket, self._monitor

    def due(self) -> float:
        """When :meth:`renew_if_due` does something, if nothing happens before."""
        connected = self.state is LineState.CONNECTED
        return float("inf") if connected else self._lost_at + self._renew_seconds

    def renew_if_due(self, now: float) -> bool:
        """Begin anew: ZeroMQ gives up for good after some faults, such as a peer that spoke something else.
        True if the sources are others now."""
        if now < self.due():
            return False
        self._close(0)
        self._lost_at = now
        self._open()
        return True

    def look(self, now: float) -> list[LineState]:
        """Take note of what has become of the connection: each time it was made, or lost, since."""
        import zmq

        changes: list[LineState] = []
        while (frames := receive(self._monitor, 2)) is not None:
            if not frames or len(frames[0]) != 6:
                continue
            (number,) = struct.unpack("=h", frames[0][:2])
            event = zmq.Event(number)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.state = LineState.CONNECTED
                changes.append(self.state)
            elif self.state is LineState.CONNECTED:
                self.state = LineState.NOBODY
                self._lost_at = now
                changes.append(self.state)
            else:
                refused = event == zmq.EVENT_CLOSED
                self.state = LineState.NOBODY if refused else LineState.TURNED_AWAY
        return changes

    def send(self, frame: bytes) -> bool:
        """Never waits. False if it went nowhere: nobody is connected, or has room."""
        import zmq

        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> bytes | None:
        """The next frame, without waiting; empty for what is none. None if there is none."""
        frames = receive(self._socket, 1)
        if frames is None:
            return None
        return frames[0] if frames else b""

    def close(self) -> None:
        """Idempotent. What was sent last has a moment to leave, while the context ends."""
        self._close(_LINGER_MILLISECONDS)

    def _open(self) -> None:
        import zmq

        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket, self._most_bytes)
        # Otherwise messages pile up for a peer that is not there, and are old when it comes.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAXIMUM_MILLISECONDS)
        self._socket.setsockopt(zmq.IPV6, int(self._endpoint.is_version_6))
        if self._secret is not None:
            self._secret.protect_client(self._socket, self._random(KEY_BYTES))
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
        )
        self._socket.connect(self._endpoint.url)
        self.state = LineState.NOBODY

    def _close(self, linger: int) -> None:
        with contextlib.suppress(Exception):
            self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger)
