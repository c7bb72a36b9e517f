"""The thread that listens, reads frames and looks at deadlines. It never copies, nor waits for a peer."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from typing import Protocol

from kvferry_transport_local.failures import defect, gone
from kvferry_transport_local.frames import Frame
from kvferry_transport_local.link import Broken, Link, broken

_log = logging.getLogger(__name__)

MOST_LINKS = 1024
_PAUSE_SECONDS = 0.02
_FRAMES_AT_ONCE = 64
"""Of one peer, before the others get their turn."""


class Handler(Protocol):
    """What the channel does for its service thread."""

    def accepted(self, end: socket.socket) -> Link | None:
        """Somebody connected; ``None`` refuses, and the handler has closed the socket."""
        ...

    def handle(self, link: Link, frame: Frame, fd: int) -> None:
        """Takes over ``fd``. Raises :class:`Broken`."""
        ...

    def sweep(self) -> float | None:
        """Fail what is overdue; when the next thing will be, in seconds from now, or ``None``."""
        ...


class Service:
    """Threads: ``open`` and ``close`` from one, the rest from any."""

    def __init__(self, handler: Handler, listener: socket.socket, name: str) -> None:
        self._handler = handler
        self._listener = listener
        self._name = name
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._waking = threading.Lock()
        self._lock = threading.Lock()
        self._fresh: list[Link] = []
        self._links: set[Link] = set()
        self._stopping = False
        self._over = False
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvferry-{name}-service", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def add(self, link: Link) -> None:
        """Read this connection too, until it has ended."""
        link.wake = self.wake
        with self._lock:
            over = self._over
            if not over:
                self._fresh.append(link)
        if over:
            self._drop(link)
        self.wake()

    def wake(self) -> None:
        """Look again at deadlines, ended connections and frames that wait."""
        with self._waking:
            if self._waker >= 0:
                os.eventfd_write(self._waker, 1)

    def close(self, seconds: float) -> bool:
        """End the thread and discard all connections; whether that was over in so many seconds. May be
        called again."""
        self._stopping = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, seconds))
            if self._thread.is_alive():
                return False
        with self._lock:
            links, self._links = {*self._links, *self._fresh}, set()
            self._fresh, self._over = [], True
        for link in links:
            self._drop(link)
        self._selector.close()
        self._listener.close()
        with self._waking:
            if self._waker >= 0:
                os.close(self._waker)
                self._waker = -1
        return True

    def _drop(self, link: Link) -> None:
        link.finish(gone(link.where, "the channel was closed"))
        link.discard()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - one fault must not end the service
                defect(error, "serving", self._name)

    def _turn(self) -> None:
        self._settle()
        for key, _ in self._selector.select(self._handler.sweep()):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj == self._waker:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._waker)
            else:
                self._read(key.data)

    def _settle(self) -> None:
        """Take up new connections, drop those that have ended, and watch for room where frames wait."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
        for link in fresh:
            self._take_up(link)
        for link in [each for each in self._links if not each.alive]:
            self._links.discard(link)
            self._selector.unregister(link.end)
            link.discard()
        for link in self._links:
            link.flush()
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_more else 0)
            if self._selector.get_key(link.end).events != events:
                self._selector.modify(link.end, events, link)

    def _take_up(self, link: Link) -> None:
        self._links.add(link)
        self._selector.register(link.end, selectors.EVENT_READ, link)

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError:  # gone again, or no descriptor is left, which will not change at once
            self._pause.wait(_PAUSE_SECONDS)
            return
        if len(self._links) >= MOST_LINKS:
            end.close()
            return
        link = self._handler.accepted(end)
        if link is not None:
            link.wake = self.wake
            self._take_up(link)

    def _read(self, link: Link) -> None:
        try:
            for _ in range(_FRAMES_AT_ONCE):
                if not link.alive or (found := link.receive()) is None:
                    return
                self._handler.handle(link, *found)
        except Broken as error:
            _log.warning("kvferry: %s: a connection was ended, because %s", self._name, error)
            link.finish(broken(link.where, str(error)))
        except EOFError as error:
            link.finish(gone(link.where, str(error)))
        except Exception as error:  # noqa: BLE001 - what one peer causes must not reach the others
            link.finish(defect(error, "reading a frame", link.where))
