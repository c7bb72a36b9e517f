"""A batch of operations under way, each with an outcome of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from kvferry.api import KVFerryError, Ticket, TransferStatus
from kvferry_transport_local.regions import Registered
from kvferry_transport_local.remote import RemoteMemory

Outcome = KVFerryError | None
"""Why an operation failed; ``None`` for one that is done."""
Sides = tuple[Registered, RemoteMemory]
"""What an operation stands on, here and at the peer."""


class Batch:
    """``count`` operations that end together, by ``finish(outcomes)``, exactly once.

    An operation is over when it failed, or when all its pieces are done. The batch ends when all are over
    *and* no piece is under way: after that nothing touches its memory. ``still(number)`` is asked at the
    end for every operation that is done, and takes that back with an error. Threads: any.
    """

    def __init__(
        self,
        count: int,
        deadline: float,
        finish: Callable[[Sequence[Outcome]], None],
        still: Callable[[int], Outcome],
        owner: object,
    ) -> None:
        self.deadline = deadline
        self.owner = owner
        """The connection that the batch ends with."""
        self._finish = finish
        self._still = still
        self.ticket: Ticket[TransferStatus] | None = None
        """What the end completes, where somebody here waits for it."""
        self.sides: list[Sides | None] = [None] * count
        """Known for operations that were in order."""
        # Asking ``still`` may find out that the peer is gone, which aborts its batches, this one included.
        self._lock = threading.RLock()
        self._pieces = [1] * count
        self._over = [False] * count
        self._outcomes: list[Outcome] = [None] * count
        self._left = count
        self._busy = 0
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def expect(self, number: int, pieces: int) -> None:
        """An operation has so many pieces instead of one. Before any of them begins."""
        with self._lock:
            self._pieces[number] = pieces

    def begin(self, numbers: Iterable[int]) -> set[int]:
        """A thread is about to move pieces of these; the ones that are not over. Then :meth:`pause`."""
        with self._lock:
            self._busy += 1
            return {number for number in numbers if not self._over[number]}

    def pause(self) -> None:
        """The thread is out of the batch's memory."""
        with self._lock:
            self._busy -= 1
        self.end_if_over()

    def advance(self, numbers: Iterable[int]) -> None:
        """One piece more is in place, of each of these."""
        with self._lock:
            for number in numbers:
                if not self._over[number]:
                    self._pieces[number] -= 1
                    if self._pieces[number] == 0:
                        self._over[number] = True
                        self._left -= 1

    def fail(self, number: int, error: KVFerryError) -> None:
        """Unless it is over. Call :meth:`end_if_over` after the last."""
        with self._lock:
            self._fail(number, error)

    def revoke(self, numbers: Iterable[int], error: KVFerryError) -> bool:
        """Fail these, also those that are done. False when the batch had ended before."""
        with self._lock:
            if self._ended:
                return False
            for number in numbers:
                if self._over[number]:
                    self._outcomes[number] = self._outcomes[number] or error
                else:
                    self._fail(number, error)
        self.end_if_over()
        return True

    def abort(self, error: KVFerryError) -> None:
        """Fail whatever is not over; the batch ends as soon as nothing is under way."""
        with self._lock:
            for number, over in enumerate(self._over):
                if not over:
                    self._fail(number, error)
        self.end_if_over()

    def end_if_over(self) -> None:
        with self._lock:
            if self._ended or self._left or self._busy:
                return
            self._ended = True
            outcomes = [
                self._still(number) if outcome is None else outcome
                for number, outcome in enumerate(self._outcomes)
            ]
        self._finish(outcomes)

    def _fail(self, number: int, error: KVFerryError) -> None:
        if not self._over[number]:
            self._over[number] = True
            self._outcomes[number] = error
            self._left -= 1
