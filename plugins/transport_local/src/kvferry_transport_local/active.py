"""The batches that have not ended."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.api import KVFerryError
from kvferry_transport_local.batches import Batch
from kvferry_transport_local.failures import overdue, taken_back
from kvferry_transport_local.regions import Registered

_LONGEST_SECONDS = 0.1
"""Between two looks at the clock, which may be another than the system's."""


class Active:
    """Threads: any."""

    def __init__(self, clock: Callable[[], float], where: str) -> None:
        self._clock = clock
        self._where = where
        self._lock = threading.Lock()
        self._batches: set[Batch] = set()
        self._closed: KVFerryError | None = None
        self._next_look: float | None = None
        self.wake: Callable[[], None] = lambda: None

    def add(self, batch: Batch) -> None:
        with self._lock:
            closed = self._closed
            self._batches.add(batch)
            early = self._next_look is None or batch.deadline < self._next_look
            if early:
                self._next_look = batch.deadline
        if closed is not None:
            batch.abort(closed)
        elif early:
            self.wake()

    def remove(self, batch: Batch) -> None:
        with self._lock:
            self._batches.discard(batch)

    def all(self) -> tuple[Batch, ...]:
        with self._lock:
            return tuple(self._batches)

    def sweep(self) -> float | None:
        """Fail what is overdue. Seconds until the next look, ``None`` for none."""
        now = self._clock()
        for batch in self.all():
            if now >= batch.deadline:
                batch.abort(overdue(self._where))
        with self._lock:
            # Overdue ones wait for a piece that is under way; whoever moves it ends them.
            left = [batch.deadline for batch in self._batches if batch.deadline > now]
            self._next_look = min(left, default=None)
            return min(_LONGEST_SECONDS, self._next_look - now) if self._next_look is not None else None

    def end_with(self, owner: object, error: KVFerryError) -> None:
        """The connection is over."""
        for batch in self.all():
            if batch.owner is owner:
                batch.abort(error)

    def revoke(self, taken: Registered, seconds: float) -> None:
        """No operation on this region of ours ends as done from here on."""
        error = taken_back(taken.region.name, self._where)
        for batch in self.all():
            numbers = [
                number for number, sides in enumerate(batch.sides) if sides is not None and sides[0] is taken
            ]
            if numbers and not batch.revoke(numbers, error) and batch.ticket is not None:
                batch.ticket.wait(seconds)  # it had ended; what is left is to tell so

    def close(self, error: KVFerryError) -> None:
        """Abort all, and whatever comes later."""
        with self._lock:
            self._closed = error
        for batch in self.all():
            batch.abort(error)
