"""Faults between core and a keyed backend, to see how core takes them."""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvferry.api import (
    Backend,
    BackendContext,
    ChunkHeader,
    ChunkKey,
    DeleteStatus,
    ItemResult,
    KVFerryError,
    ProbeStatus,
    ReadStatus,
    Span,
    Ticket,
    WriteStatus,
)
from kvferry.testing.faults import (
    Crash,
    Delay,
    DoubleCompletion,
    Effect,
    Fail,
    FaultPlan,
    FaultPlayer,
    FlipBit,
    LoseCompletion,
    NoSpace,
    ReorderCompletion,
    Stall,
    check_applies,
    crash,
)

_TOLD = (Fail, Delay, Stall, LoseCompletion, DoubleCompletion, ReorderCompletion, Crash)
_CALLED = (Fail, Crash)
APPLICABLE: dict[str, tuple[type, ...]] = {
    "open": _CALLED,
    "recover": _CALLED,
    "probe": _TOLD,
    "write": (*_TOLD, NoSpace),
    "read": (*_TOLD, FlipBit),
    "delete": _TOLD,
    "close": _CALLED,
}
"""Which effects each operation can meet."""


class FaultyBackend:
    """A :class:`kvferry.api.Backend` that forwards to ``inner``, except where the plan says otherwise.

    The subject of a batch is its first key as text. The inner backend does its work as ever; what is
    delayed, stalled, lost, doubled or reordered is the telling. Nothing is told by a thread of its own:
    what is delayed waits for :meth:`poll` at or after its time by ``clock``, what stalls for
    :meth:`release`, what is reordered for the next completion. Lost tickets never end.

    Threads: any, like the inner backend. Raises :class:`kvferry.api.KVFerryError` (``CONFIG``) for a
    plan that it cannot carry out.
    """

    def __init__(self, inner: Backend, plan: FaultPlan, clock: Callable[[], float] = time.monotonic) -> None:
        check_applies(plan, APPLICABLE, "FaultyBackend")
        self.inner = inner
        self.player = FaultPlayer(plan)
        self._clock = clock
        self._context: BackendContext | None = None
        self._lock = threading.Lock()
        self._delayed: list[tuple[float, int, Callable[[], None]]] = []
        self._stalled: list[Callable[[], None]] = []
        self._reordered: list[Callable[[], None]] = []
        self._number = 0

    # -- the contract ----------------------------------------------------------------------------

    def open(self, context: BackendContext) -> None:
        self._call("open")
        self.inner.open(context)
        self._context = context

    def recover(self) -> Iterable[ChunkHeader]:
        self._call("recover")
        return self.inner.recover()

    def probe(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[ProbeStatus]:
        effect = self._meet("probe", keys)
        return self._submit(effect, len(keys), lambda: self.inner.probe(keys, deadline), ProbeStatus.FAILED)

    def write(self, batch: Sequence[tuple[ChunkHeader, Span]], deadline: float) -> Ticket[WriteStatus]:
        effect = self._meet("write", [header.key for header, _ in batch])
        if isinstance(effect, NoSpace):
            full: Ticket[WriteStatus] = Ticket(len(batch))
            full.complete([ItemResult(WriteStatus.NO_SPACE)] * len(batch))
            return full
        return self._submit(effect, len(batch), lambda: self.inner.write(batch, deadline), WriteStatus.FAILED)

    def read(self, batch: Sequence[tuple[ChunkKey, Span]], deadline: float) -> Ticket[ReadStatus]:
        effect = self._meet("read", [key for key, _ in batch])
        damage = (lambda: self._flip(batch, effect)) if isinstance(effect, FlipBit) else None
        return self._submit(
            effect, len(batch), lambda: self.inner.read(batch, deadline), ReadStatus.FAILED, damage
        )

    def delete(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[DeleteStatus]:
        effect = self._meet("delete", keys)
        return self._submit(effect, len(keys), lambda: self.inner.delete(keys, deadline), DeleteStatus.FAILED)

    def close(self, deadline: float) -> None:
        """Closes the inner backend. What is still held back is told first, so that only lost tickets
        stay open."""
        self._call("close")
        self.inner.close(deadline)
        self.release()
        self.poll(float("inf"))
        self._tell_reordered()

    # -- for the test ----------------------------------------------------------------------------

    def poll(self, now: float | None = None) -> int:
        """Tell what is due, in the order of its times; how many tickets that were."""
        now = self._clock() if now is None else now
        told = 0
        while True:
            with self._lock:
                if not self._delayed or self._delayed[0][0] > now:
                    return told
                _, _, tell = heapq.heappop(self._delayed)
            tell()
            told += 1

    def release(self) -> int:
        """Tell everything that stalls; how many tickets that were."""
        with self._lock:
            stalled, self._stalled = self._stalled, []
        for tell in stalled:
            tell()
        return len(stalled)

    # -- the work --------------------------------------------------------------------------------

    def _meet(self, operation: str, keys: Sequence[ChunkKey]) -> Effect | None:
        effect = self.player.meet(operation, keys[0].to_text() if keys else "")
        if isinstance(effect, Crash):
            crash(effect, operation)
        return effect

    def _call(self, operation: str) -> None:
        effect = self.player.meet(operation)
        if isinstance(effect, Crash):
            crash(effect, operation)
        if isinstance(effect, Fail):
            raise _error(effect, operation)

    def _submit(
        self,
        effect: Effect | None,
        items: int,
        forward: Callable[[], Ticket[Any]],
        failed: Any,
        damage: Callable[[], None] | None = None,
    ) -> Ticket[Any]:
        outer: Ticket[Any] = Ticket(items)
        if isinstance(effect, Fail):
            outer.complete([ItemResult(failed, _error(effect, "batch"))] * items)
            return outer
        inner = forward()
        outer.on_cancel(lambda _outer: inner.cancel())

        def on_done(done: Ticket[Any]) -> None:
            if damage is not None:
                damage()
            self._told(effect, outer, done.results)

        inner.on_done(on_done)
        return outer

    def _told(self, effect: Effect | None, outer: Ticket[Any], results: Sequence[ItemResult[Any]]) -> None:
        def tell() -> None:
            outer.complete(results)

        if isinstance(effect, LoseCompletion):
            return
        with self._lock:
            if isinstance(effect, Delay):
                self._number += 1
                heapq.heappush(self._delayed, (self._clock() + effect.seconds, self._number, tell))
                return
            if isinstance(effect, Stall):
                self._stalled.append(tell)
                return
            if isinstance(effect, ReorderCompletion):
                self._reordered.append(tell)
                return
        tell()
        if isinstance(effect, DoubleCompletion):
            with contextlib.suppress(KVFerryError):  # a ticket refuses it and counts it
                tell()
        self._tell_reordered()

    def _tell_reordered(self) -> None:
        with self._lock:
            reordered, self._reordered = self._reordered, []
        for tell in reordered:
            tell()

    def _flip(self, batch: Sequence[tuple[ChunkKey, Span]], effect: FlipBit) -> None:
        assert self._context is not None, "open() was not called"
        for _, span in batch:
            with self._context.view(span) as view:
                at = effect.bit // 8 % len(view)
                view[at] ^= 1 << effect.bit % 8


def _error(effect: Fail, where: str) -> KVFerryError:
    return KVFerryError("a fault was injected", kind=effect.kind, where=where, retry=effect.retry)
