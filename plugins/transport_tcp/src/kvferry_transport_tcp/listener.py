"""Lets peers in: listens, opens connections, and gives each one that was opened a thread that serves it."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry_transport_tcp.address import Address
from kvferry_transport_tcp.faults import error_text
from kvferry_transport_tcp.handshake import Refused, Side, examine, stamp
from kvferry_transport_tcp.rare_log import RareLog
from kvferry_transport_tcp.registry import Registry
from kvferry_transport_tcp.serving import Served, ServedControl, ServedLane
from kvferry_transport_tcp.sockets import Clock, Cuttable, Ended, set_up
from kvferry_transport_tcp.watch import Watch
from kvferry_transport_tcp.wire import NONCE_BYTES, Header, Hello, Kind, Refusal, Role, WireError

_log = logging.getLogger(__name__)

OPENING_SECONDS = 5.0
"""How long a peer may take from its connection to its proof."""
MOST_OPENINGS = 64
"""Openings at the same time. Of more, the one that takes longest has to go: a peer takes milliseconds."""
MOST_SERVED = 1024
"""Connections after their opening."""
TELL_TIME_SECONDS = 5.0
_BACKLOG = 512
_CONTROL_BUFFER_BYTES = 1 << 20
_BREATH_SECONDS = 0.1

Start = Callable[[Callable[[], None], str], None]


def listen_at(address: Address) -> socket.socket:
    """A socket that listens. Raises :class:`KVFerryError` (``IO``), with the reason."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, where = found[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(_BACKLOG)
            sock.settimeout(None)  # whatever the process has as its default
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise KVFerryError(
            f"the TCP channel cannot listen at {address}",
            kind=ErrorKind.IO,
            where="channel.listen",
            why=error_text(error),
            remedy="choose an address of this machine and a port that nobody uses, or the port 0",
            retry=Retry.AFTER_CHANGE,
        ) from error
    return sock


class Listener:
    """Threads: ``tell`` from any; the rest from one."""

    def __init__(
        self, sock: socket.socket, *, epoch: bytes, secret: bytes, clock: Clock, watch: Watch, start: Start
    ) -> None:
        self._line = Cuttable(sock)
        self._epoch = epoch
        self._secret = secret
        self._clock = clock
        self._watch = watch
        self._start = start
        self._rare = RareLog(_log, clock)
        self._lock = threading.Lock()
        self._openings: dict[Cuttable, None] = {}
        """In the order in which they came."""
        self._controls: dict[bytes, ServedControl] = {}
        self._lanes: dict[bytes, set[ServedLane]] = {}
        """By the connection to which they belong; for each control there is a set."""
        self._closed = threading.Event()
        self.registry = Registry(clock, self.tell)

    def open(self) -> None:
        self._start(self._accept, "accept")
        self._tell_time()

    def close(self) -> None:
        """Let nobody in any more, and cut everybody who is. Does not wait for their threads."""
        self._closed.set()
        self._line.cut()
        with self._lock:
            for line in self._openings:
                line.cut()
            for control in self._controls.values():
                control.cut()
            for lanes in self._lanes.values():
                for lane in lanes:
                    lane.cut()

    def tell(self, frames: bytes) -> None:
        """Have all peers hear this. Never blocks."""
        with self._lock:
            for control in self._controls.values():
                control.tell(frames)

    def _tell_time(self) -> None:
        if self._closed.is_set():
            return
        self.tell(Header(Kind.TIME, time=stamp(self._clock)).to_bytes())
        self._watch.add(self._clock() + TELL_TIME_SECONDS, self._tell_time)

    # -- letting in ------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            while not self._closed.is_set():
                try:
                    sock, where = self._line.sock.accept()
                except OSError as error:
                    if not self._closed.is_set():
                        self._rare.warning(
                            "kvferry: the TCP channel could not let a peer in: %s", error_text(error)
                        )
                        self._closed.wait(_BREATH_SECONDS)  # out of descriptors: the next one may not fail
                    continue
                self._begin(Cuttable(sock), f"{where[0]}:{where[1]}")
        finally:
            self._line.close()

    def _begin(self, line: Cuttable, peer: str) -> None:
        with self._lock:
            if self._closed.is_set():
                line.cut()
            if len(self._openings) >= MOST_OPENINGS:
                oldest = next(iter(self._openings))
                del self._openings[oldest]
                oldest.cut()
            self._openings[line] = None
        self._start(lambda: self._attend(line, peer), "serve")

    def _attend(self, line: Cuttable, peer: str) -> None:
        """One connection, from its opening to its end."""
        served: Served | None = None
        try:
            set_up(line.sock)
            deadline = self._clock() + OPENING_SECONDS
            side = Side(clock=self._clock, deadline=deadline, secret=self._secret)
            hello = examine(line.sock, side, secrets.token_bytes(NONCE_BYTES), self._welcome)
            line.sock.settimeout(None)
            served = self._admit(line, hello)
            served.run()
        except (Ended, Refused, KVFerryError) as error:
            if served is None:
                self._rare.warning("kvferry: the TCP channel did not let %s in: %s", peer, error)
        except (WireError, OSError) as error:
            if served is None or isinstance(error, WireError):
                self._rare.warning("kvferry: the TCP channel ends a connection from %s: %s", peer, error)
        except Exception:  # noqa: BLE001 - a defect must not end the thread without a word
            _log.exception("kvferry: a connection from %s failed", peer)
        finally:
            self._leave(line, served)
            line.cut()
            line.close()

    def _welcome(self, hello: Hello) -> Refusal | None:
        """What stands against a peer that has proved the secret."""
        if hello.wanted_epoch != self._epoch:
            return Refusal.EPOCH
        with self._lock:
            if len(self._controls) + sum(map(len, self._lanes.values())) >= MOST_SERVED:
                return Refusal.BUSY
            if (hello.role is Role.LANE) != (hello.connection in self._controls):
                return Refusal.UNKNOWN_CONNECTION
        return None

    def _admit(self, line: Cuttable, hello: Hello) -> Served:
        if hello.role is Role.CONTROL:
            return self._admit_control(ServedControl(line, hello))
        lane = ServedLane(line, hello, self.registry, self._watch, self._clock)
        with self._lock:
            self._openings.pop(line, None)
            lanes = self._lanes.get(hello.connection)
            if lanes is None or self._closed.is_set():
                raise Ended("the connection is over")
            lanes.add(lane)
        return lane

    def _admit_control(self, control: ServedControl) -> Served:
        with contextlib.suppress(OSError):
            control.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CONTROL_BUFFER_BYTES)

        def join(frames: bytes) -> None:
            with self._lock:
                self._openings.pop(control.line, None)
                if self._closed.is_set() or control.hello.connection in self._controls:
                    raise Ended("the connection is over")
                self._controls[control.hello.connection] = control
                self._lanes[control.hello.connection] = set()
                control.tell(frames + Header(Kind.TIME, time=stamp(self._clock)).to_bytes())

        self.registry.tell_all(join)
        return control

    def _leave(self, line: Cuttable, served: Served | None) -> None:
        lanes: set[ServedLane] = set()
        with self._lock:
            self._openings.pop(line, None)
            if isinstance(served, ServedControl):
                # The peer has given the connection up, or is gone: its lanes have nothing to do any more.
                del self._controls[served.hello.connection]
                lanes = self._lanes.pop(served.hello.connection)
                for lane in lanes:
                    lane.cut()
            elif isinstance(served, ServedLane):
                self._lanes.get(served.hello.connection, set()).discard(served)
        for lane in lanes:
            lane.over.wait()  # the peer takes the end of its control connection for a sign of this
