"""What requests ask of the manager beyond storing and loading: pins, times to live, and being told of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.control.manager import SLICE_KEYS, CacheManager
from kvferry.control.outcomes import ChunkWrite, Reservation, WriteOutcome
from kvferry.runtime.events import FACTS_PER_STEP, CacheEvent, ChunkContent, grouped
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.requests import RequestState

_IN_TIER = (WriteOutcome.GRANTED, WriteOutcome.RESIDENT, WriteOutcome.BUSY)
_PINNED_AT_ONCE = SLICE_KEYS
"""Chunks that one hold of the lock pins or tells of: 50 to 90 microseconds where it was measured."""


class Keeper:
    """Hands a request's wishes to the manager. On the scheduler's thread.

    With ``events`` the manager records facts, and :meth:`take_events` must be called every step.
    Nothing here takes the lock for requests that ask for nothing.
    """

    def __init__(
        self, manager: CacheManager, lock: FairLock, clock: Callable[[], float], events: bool
    ) -> None:
        self._manager = manager
        self._lock = lock
        self._clock = clock
        self._events = events

    def reserve(self, state: RequestState, writes: Sequence[ChunkWrite], now: float) -> Reservation:
        """Reserve room for ``writes`` and pin what of them is or will be there. Under the lock."""
        chain = state.chain
        reservation = self._manager.reserve(
            state.id,
            state.salt,
            writes,
            now,
            model=state.model,
            ttl=state.options.ttl,
            content=(lambda write: ChunkContent.of(chain, write.depth)) if self._events else None,
        )
        pin = state.options.pin
        if pin is not None:
            there = [
                write
                for write, item in zip(writes, reservation.items, strict=True)
                if item.outcome in _IN_TIER
            ]
            if there:
                self._manager.pin(state.salt, pin.name, there[-1].digest, pin.seconds, now)
        return reservation

    def matched(self, state: RequestState, chunks: int) -> None:
        """The first ``chunks`` full chunks of a request were found. Takes the lock, slice by slice."""
        pin = state.options.pin
        if pin is None and not self._events:
            return
        keys = state.chain.keys[:chunks]
        for start in range(0, chunks, _PINNED_AT_ONCE):
            part = keys[: start + _PINNED_AT_ONCE]
            with self._lock:
                if pin is not None:
                    self._manager.pin(state.salt, pin.name, part[-1], pin.seconds, self._clock())
                if self._manager.events_behind:
                    self._manager.tell(part, start, lambda chunk: ChunkContent.of(state.chain, chunk))

    def take_events(self) -> list[CacheEvent]:
        """What became of the tier's content since the last call, a bounded part of it at a time."""
        if not self._events:
            return []
        with self._lock:
            facts = self._manager.take_events(FACTS_PER_STEP)
        return grouped(facts)
