"""A TCP proxy between two sides under test: delays, holds back, swallows, damages and cuts what passes.

Standard library alone, and of no use to a product: each connection costs two threads.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from attrs import define

_ABORT = struct.pack("ii", 1, 0)
_JOIN_SECONDS = 5.0
_LOOK_SECONDS = 0.05
"""How soon a connection that is held back notices that it may go on."""


class Direction(enum.Enum):
    TO_TARGET = "to the target"
    """From whoever connected to the proxy."""
    FROM_TARGET = "from the target"


@define
class Faults:
    """What happens to bytes of one direction. May be changed at any time; the next bytes see it."""

    delay_seconds: float = 0.0
    """Each piece waits so long, and those behind it with it."""
    piece_bytes: int = 64 << 10
    """At most so many bytes are passed on at once; 1 tears every header and body apart."""
    held: bool = False
    """Nothing passes, and nobody is told: a network that is cut, or a host that stands still."""
    swallowed: bool = False
    """What comes is thrown away."""
    cut_after: int | None = None
    """So many more bytes pass, then both sides see their connection reset. It counts down."""
    damaged_after: int | None = None
    """So many more bytes pass, then one has a bit changed. It counts down, and then is ``None``."""


class TCPProxy:
    """Listens on loopback and passes on to ``target``. A context manager. Threads: any."""

    def __init__(
        self,
        target: tuple[str, int],
        *,
        host: str = "127.0.0.1",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.target = target
        self.to_target = Faults()
        self.from_target = Faults()
        self.accepted = 0
        """Connections so far."""
        self.received = {Direction.TO_TARGET: 0, Direction.FROM_TARGET: 0}
        """Bytes that came, whether they were passed on or not."""
        self.passed = {Direction.TO_TARGET: 0, Direction.FROM_TARGET: 0}
        """Bytes that were passed on."""
        self.on_bytes: Callable[[int, Direction], None] = lambda connection, direction: None
        """Called before bytes are passed on, with the number of the connection, from 0, in the order in which
        they were made. From the thread that passes them on."""
        self._host = host
        self._sleep = sleep
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._listening: socket.socket | None = None

    def __enter__(self) -> Self:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listening = socket.socket(family, socket.SOCK_STREAM)
        self._listening.bind((self._host, 0))
        self._listening.listen(64)
        self._start(self._accept, self._listening)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        if self._listening is not None:
            with contextlib.suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in tuple(self._threads):
            thread.join(_JOIN_SECONDS)
        if self._listening is not None:
            self._listening.close()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        assert self._listening is not None, "the proxy is used as a context manager"
        host, port = self._listening.getsockname()[:2]
        return str(host), int(port)

    def faults(self, direction: Direction) -> Faults:
        return self.to_target if direction is Direction.TO_TARGET else self.from_target

    def hold(self, *, held: bool = True) -> None:
        """Let nothing pass in either direction, or let it pass again."""
        self.to_target.held = self.from_target.held = held

    def cut(self) -> None:
        """Reset all connections that there are. New ones are let in."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _reset(pair)

    # -- threads ---------------------------------------------------------------------------------

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, name="kvferry-tcp-proxy", daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _accept(self, listening: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                near, _ = listening.accept()
            except OSError:
                return
            number = self.accepted
            self.accepted += 1
            try:
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            pair = (near, far)
            with self._lock:
                self._pairs.append(pair)
            if self._closed.is_set():
                _reset(pair)
            left = _Countdown(2)
            self._start(self._pump, near, far, Direction.TO_TARGET, number, pair, left)
            self._start(self._pump, far, near, Direction.FROM_TARGET, number, pair, left)

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        direction: Direction,
        number: int,
        pair: tuple[socket.socket, socket.socket],
        left: _Countdown,
    ) -> None:
        try:
            with contextlib.suppress(OSError):
                self._pass_on(source, sink, direction, number, pair)
        finally:
            if left.down():  # the last of both closes; before, the other may wait for one of them
                with self._lock:
                    self._pairs = [one for one in self._pairs if one is not pair]
                for sock in pair:
                    sock.close()

    def _pass_on(
        self,
        source: socket.socket,
        sink: socket.socket,
        direction: Direction,
        number: int,
        pair: tuple[socket.socket, socket.socket],
    ) -> None:
        faults = self.faults(direction)
        while data := bytearray(source.recv(faults.piece_bytes)):
            self.received[direction] += len(data)
            if faults.delay_seconds:
                self._sleep(faults.delay_seconds)
            while faults.held and not self._closed.is_set():
                self._sleep(_LOOK_SECONDS)
            if faults.swallowed:
                continue
            if faults.damaged_after is not None:
                faults.damaged_after -= len(data)
                if faults.damaged_after < 0:
                    data[faults.damaged_after] ^= 0x10
                    faults.damaged_after = None
            if faults.cut_after is not None:
                data = data[: faults.cut_after]
                faults.cut_after -= len(data)
            self.on_bytes(number, direction)
            sink.sendall(data)
            self.passed[direction] += len(data)
            if faults.cut_after == 0:
                _reset(pair)
                return
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


class _Countdown:
    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()

    def down(self) -> bool:
        """Whether this call was the last one."""
        with self._lock:
            self._count -= 1
            return self._count == 0


def _reset(pair: tuple[socket.socket, socket.socket]) -> None:
    """Both ends see a reset when the pumps close what is cut here."""
    for sock in pair:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
