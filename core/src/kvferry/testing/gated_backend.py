"""A store whose work a test holds back, breaks and counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from kvferry.api import (
    BackendContext,
    ChunkHeader,
    ChunkKey,
    DeleteStatus,
    ErrorKind,
    ItemResult,
    KVFerryError,
    ReadStatus,
    Span,
    Ticket,
    WriteStatus,
)
from kvferry.testing.keyed_backends import ForwardingBackend, Record, ShelfBackend


@define(eq=False)
class _Held:
    outer: Ticket[Any]
    begin: Callable[[], Ticket[Any]]
    failed: Any

    def go_on(self) -> None:
        self.begin().on_done(lambda done: self.outer.complete(done.results))

    def end(self, kind: ErrorKind) -> None:
        error = KVFerryError("a test says so", kind=kind)
        self.outer.complete([ItemResult(self.failed, error)] * self.outer.items)


@define(eq=False)
class Disk:
    """What one rank holds of a tier, and how it behaves; stays while backends come and go.

    ``held`` names operations (``read``, ``write``, ``delete``) that do not begin before :meth:`release`;
    those that are ``failing`` always fail, and while it is ``broken``, everything does. ``calls`` are keys
    per call, by operation, the opening included.
    """

    records: dict[ChunkKey, Record] = field(factory=dict)
    capacity: int = 1 << 40
    broken: bool = False
    held: set[str] = field(factory=set)
    failing: set[str] = field(factory=set)
    calls: dict[str, list[list[ChunkKey]]] = field(factory=dict)
    cancelled: int = 0
    _waiting: list[_Held] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock)

    def count(self, operation: str) -> int:
        """Keys that were asked for so far."""
        return sum(len(keys) for keys in self.calls.get(operation, []))

    @property
    def waiting(self) -> int:
        """Calls that are held back."""
        with self._lock:
            return len(self._waiting)

    def release(self) -> None:
        """Let everything begin that was held back, and hold nothing back any more."""
        self.held.clear()
        for held in self._taken():
            held.go_on()

    def meet(
        self, operation: str, keys: Sequence[ChunkKey], begin: Callable[[], Ticket[Any]], failed: Any
    ) -> Ticket[Any]:
        """What becomes of a call."""
        self.calls.setdefault(operation, []).append(list(keys))
        broken = self.broken or operation in self.failing
        if not broken and operation not in self.held:
            return begin()
        outer: Ticket[Any] = Ticket(len(keys))
        held = _Held(outer, begin, failed)
        if broken:
            held.end(ErrorKind.IO)
            return outer
        with self._lock:
            self._waiting.append(held)
        outer.on_cancel(lambda _outer: self._cancel(held))
        return outer

    def end_all(self) -> None:
        """The store is closed."""
        for held in self._taken():
            held.end(ErrorKind.CLOSED)

    def _taken(self) -> list[_Held]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting

    def _cancel(self, held: _Held) -> None:
        with self._lock:
            if held not in self._waiting:
                return
            self._waiting.remove(held)
            self.cancelled += 1
        held.end(ErrorKind.CANCELLED)


class GatedBackend(ForwardingBackend):
    """Over a :class:`Disk`. A new one for every opening."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(ShelfBackend(disk.records, disk.capacity))
        self._disk = disk

    def open(self, context: BackendContext) -> None:
        self._disk.calls.setdefault("open", []).append([])
        if self._disk.broken:
            raise KVFerryError("a test says so", kind=ErrorKind.IO)
        super().open(context)

    def write(self, batch: Sequence[tuple[ChunkHeader, Span]], deadline: float) -> Ticket[WriteStatus]:
        keys = [header.key for header, _ in batch]
        return self._disk.meet("write", keys, lambda: self.inner.write(batch, deadline), WriteStatus.FAILED)

    def read(self, batch: Sequence[tuple[ChunkKey, Span]], deadline: float) -> Ticket[ReadStatus]:
        keys = [key for key, _ in batch]
        return self._disk.meet("read", keys, lambda: self.inner.read(batch, deadline), ReadStatus.FAILED)

    def delete(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[DeleteStatus]:
        return self._disk.meet("delete", keys, lambda: self.inner.delete(keys, deadline), DeleteStatus.FAILED)

    def close(self, deadline: float) -> None:
        self._disk.end_all()
        super().close(deadline)
