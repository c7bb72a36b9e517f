"""The holder's half of reads between instances, beside a scheduler that goes on."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.api import Answer, PeerAsk, PeerId, Refusal, Refused
from kvferry.control.serving import Serving
from kvferry.runtime.fair_lock import FairLock


class Lending:
    """A :class:`kvferry.api.PeerDesk` over the scheduler's manager.

    ``lock`` guards the manager, and is held for a slice at a time, so that the scheduler never waits for more
    than one. ``clock`` is the manager's. :meth:`expire` has to be called at :meth:`next_deadline`, which
    ``wake`` announces when it may be sooner. Threads: any.
    """

    def __init__(
        self, serving: Serving, lock: FairLock, clock: Callable[[], float], wake: Callable[[], None]
    ) -> None:
        self._serving = serving
        self._lock = lock
        self._clock = clock
        self._wake = wake
        self._retired = False

    def retire(self) -> None:
        """Lend nothing any more. Under the lock. What is lent stays until it is given back."""
        self._retired = True

    def ask(self, peer: PeerId, ask: PeerAsk) -> Answer | None:
        with self._lock:
            if self._retired:
                return Refused(ask.number, Refusal.NOTHING)
            asking = self._serving.ask(peer, ask, self._clock())
        more = True
        while more:
            with self._lock:
                more = asking.advance(self._clock())
        self._wake()  # also for what has to be copied before there is an answer
        return asking.answer

    def renew(self, peer: PeerId, number: int) -> float:
        with self._lock:
            return self._serving.renew(peer, number, self._clock())

    def done(self, peer: PeerId, number: int) -> None:
        with self._lock:
            self._serving.done(peer, number, self._clock())

    def expire(self) -> None:
        """End what is over."""
        with self._lock:
            self._serving.expire(self._clock())

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do next; infinity if never."""
        with self._lock:
            return self._serving.next_deadline()
