"""Whom this process lets read its memory, where Yama asks for that."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable

from kvferry_transport_local.options import Readers
from kvferry_transport_local.system import let_read


class Tracers:
    """Yama keeps one exception per process. With :attr:`Readers.PEER` that is the first connected peer, and
    after it the next. Threads: any."""

    def __init__(self, readers: Readers, tell: Callable[[int], bool] = let_read) -> None:
        self._readers = readers
        self._tell = tell
        self._connected: Counter[int] = Counter()
        self._allowed = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        if self._readers is Readers.ANY:
            self._tell(-1)

    def allow(self, pid: int) -> None:
        """A peer is about to connect. Before it is told that it may try."""
        if self._readers is Readers.PEER and pid not in (0, os.getpid()):
            with self._lock:
                self._connected[pid] += 1
                if self._allowed == 0:
                    self._allow(pid)

    def release(self, pid: int) -> None:
        """One connection of that peer is over."""
        with self._lock:
            if self._connected[pid] > 1:
                self._connected[pid] -= 1
                return
            del self._connected[pid]
            if pid == self._allowed != 0:
                self._allow(next(iter(self._connected), 0))

    def close(self) -> None:
        with self._lock:
            self._connected.clear()
            if self._allowed or self._readers is Readers.ANY:
                self._allow(0)

    def _allow(self, pid: int) -> None:
        self._allowed = pid
        self._tell(pid)
