"""A workbench for the SSD backend, and I/O that fails on command."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvferry.api import ByteSize
from kvferry.testing.conformance.keyed_subject import Workbench
from kvferry_backend_ssd.backend import SSDBackend
from kvferry_backend_ssd.block_io import BlockIO, BlockIOFactory, ForwardingIO, Piece, Purpose
from kvferry_backend_ssd.options import IOPath, SSDOptions
from kvferry_backend_ssd.threads_io import ThreadsIO

MIB = 1 << 20
Meet = Callable[[str, Purpose | None], int]
"""Told the call and what it is about; the errno that it ends with, or 0."""


def workbench(
    path: Path,
    capacity: int = 8 * MIB,
    make_io: BlockIOFactory | None = None,
    slot: int = 8192,
    **options: Any,
) -> Workbench:
    """Opens backends of ``path``. Each may have another ``capacity``: it is an attribute."""
    kept = SSDOptions(path=str(path), slot=ByteSize(slot), **{"io": IOPath.THREADS} | options)
    bench = Workbench(
        lambda: SSDBackend(kept, bench.capacity, make_io), frozenset({"persistent"}), capacity, 30.0
    )
    return bench


class FaultyIO(ForwardingIO):
    """Fails the calls for which ``meet`` gives an errno, as the system would."""

    def __init__(self, inner: BlockIO, meet: Meet) -> None:
        super().__init__(inner)
        self._meet = meet

    def read(self, fd: int, pieces: Sequence[Piece]) -> list[int]:
        return self._each(self.inner.read, "read", fd, pieces)

    def write(self, fd: int, pieces: Sequence[Piece]) -> list[int]:
        return self._each(self.inner.write, "write", fd, pieces)

    def flush(self, fd: int) -> None:
        self._raise("flush")
        self.inner.flush(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._raise("allocate")
        self.inner.allocate(fd, offset, length)

    def _each(self, call: Any, name: str, fd: int, pieces: Sequence[Piece]) -> list[int]:
        errnos = [self._meet(name, piece.purpose) for piece in pieces]
        good = [piece for piece, number in zip(pieces, errnos, strict=True) if not number]
        done = iter(call(fd, good))
        return [-number if number else next(done) for number in errnos]

    def _raise(self, name: str) -> None:
        number = self._meet(name, None)
        if number:
            raise OSError(number, os.strerror(number))


class Faults:
    """Makes I/O whose calls fail while a fault is set. Threads: any."""

    def __init__(self) -> None:
        self.wrong: dict[tuple[str, Purpose | None], list[int]] = {}
        """By call and purpose: errnos of the next such calls; 0 lets one pass, and after the last one
        everything does."""
        self.seen: list[tuple[str, Purpose | None]] = []
        self.held = threading.Event()
        self.held.set()
        """Flushes wait while it is clear."""
        self.flushing = threading.Event()
        """Set when a flush began."""
        self._lock = threading.Lock()

    def make(self, depth: int) -> BlockIO:
        return FaultyIO(ThreadsIO(depth), self._met)

    def _met(self, call: str, purpose: Purpose | None) -> int:
        with self._lock:
            self.seen.append((call, purpose))
            waiting = self.wrong.get((call, purpose))
            number = waiting.pop(0) if waiting else 0
        if call == "flush":
            self.flushing.set()
            assert self.held.wait(30)
        return number
