"""What requests ask of the manager beyond storing and loading: pins, times to live, and being told of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.control.events import CacheFact
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite, Reservation, WriteOutcome
from kvferry.runtime.events import FACTS_PER_STEP, CacheEvent, ChunkContent, grouped
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.requests import RequestState

_IN_TIER = (WriteOutcome.GRANTED, WriteOutcome.RESIDENT, WriteOutcome.BUSY)
PINNED_AT_ONCE = 128
"""Chunks that one hold of the lock pins, or lets stay longer."""
TOLD_AT_ONCE = 24
"""Chunks that one hold of the lock tells of."""
TAKEN_AT_ONCE = 256
"""Facts that one hold of the lock takes.

``tests/bench/holds.py`` measures what these take. They keep the median below 100 microseconds."""


class Keeper:
    """Hands a request's wishes to the manager. On the scheduler's thread.

    With ``events`` the manager records facts, and :meth:`take_events` must be called every step.
    Nothing here takes the lock for requests that ask for nothing, in a tier whose chunks have no end.
    Whatever grows with the length of a request is done slice by slice, from the head.
    """

    def __init__(
        self, manager: CacheManager, lock: FairLock, clock: Callable[[], float], events: bool
    ) -> None:
        self._manager = manager
        self._lock = lock
        self._clock = clock
        self._events = events

    def prepare(self, state: RequestState, chunks: int, now: float) -> None:
        """Let the first ``chunks`` full chunks of a request stay as long as what will be reserved behind
        them, so that :meth:`reserve` with the same ``now`` finds it so. Takes the lock, slice by slice."""
        ttl = state.options.ttl
        if ttl is None and self._manager.ttl is None:
            return
        for end in _ends(chunks, PINNED_AT_ONCE):
            with self._lock:
                self._manager.prolong(state.chain.keys[end - 1], now, ttl)

    def reserve(self, state: RequestState, writes: Sequence[ChunkWrite], now: float) -> Reservation:
        """Reserve room for ``writes``. Under the lock."""
        chain = state.chain
        return self._manager.reserve(
            state.id,
            state.salt,
            writes,
            now,
            model=state.model,
            ttl=state.options.ttl,
            content=(lambda write: ChunkContent.of(chain, write.depth)) if self._events else None,
        )

    def reserved(self, state: RequestState, writes: Sequence[ChunkWrite], reservation: Reservation) -> None:
        """Pin what of ``writes`` is or will be there, with all before it. Takes the lock, slice by slice."""
        pin = state.options.pin
        if pin is None:
            return
        answers = zip(writes, reservation.items, strict=True)
        there = [write for write, item in answers if item.outcome in _IN_TIER]
        if not there:
            return
        before, last = state.chain.keys[: there[0].depth], there[-1].digest
        if before:
            with self._lock:
                if self._manager.covers(state.salt, pin.name, before[-1]):
                    before = []
        for key in [*(before[end - 1] for end in _ends(len(before), PINNED_AT_ONCE)), last]:
            with self._lock:
                self._manager.pin(state.salt, pin.name, key, pin.seconds, self._clock())

    def matched(self, state: RequestState, chunks: int) -> None:
        """The first ``chunks`` full chunks of a request were found. Takes the lock, slice by slice."""
        pin = state.options.pin
        if pin is None and not self._events:
            return
        keys = state.chain.keys
        if pin is not None:
            for end in _ends(chunks, PINNED_AT_ONCE):
                with self._lock:
                    self._manager.pin(state.salt, pin.name, keys[end - 1], pin.seconds, self._clock())
        if not self._events:
            return
        start = 0
        for end in _ends(chunks, TOLD_AT_ONCE):
            part = keys[:end]
            with self._lock:
                if not self._manager.events_behind:
                    return
                self._manager.tell(part, start, lambda chunk: ChunkContent.of(state.chain, chunk))
            start = end

    def take_events(self) -> list[CacheEvent]:
        """What became of the tier's content since the last call, a bounded part of it at a time."""
        if not self._events:
            return []
        facts: list[CacheFact] = []
        for end in _ends(FACTS_PER_STEP, TAKEN_AT_ONCE):
            with self._lock:
                facts += self._manager.take_events(end - len(facts))
            if len(facts) < end:
                break
        return grouped(facts)


def _ends(chunks: int, at_once: int) -> list[int]:
    """Where the slices of so many chunks end."""
    return [*range(at_once, chunks, at_once), chunks] if chunks else []
