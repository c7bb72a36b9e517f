"""How a deadline of ours reads on the clock of a peer."""

from __future__ import annotations

import threading

from kvferry_transport_tcp.handshake import MICROSECONDS
from kvferry_transport_tcp.sockets import Clock

_WINDOW_SECONDS = 10.0
"""Clocks of two machines drift apart: what was seen longer ago than two of these counts no more."""
_LAST_SECOND = float(1 << 40)
"""Later moments do not fit into a frame."""


class PeerClock:
    """Never later than the truth.

    A peer puts its time on whatever it sends. When that arrives, its clock shows this or more; so a moment of
    ours is, on its clock, at least as far from the stamp as from the arrival. The best of the recent ones is
    wrong by the time of one way. Threads: any.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since = clock()
        self._best: float | None = None
        self._before: float | None = None

    def seen(self, stamp: int) -> None:
        """A frame with this stamp, in microseconds, has just arrived."""
        now = self._clock()
        ahead = stamp / MICROSECONDS - now
        with self._lock:
            if now - self._since > _WINDOW_SECONDS:
                self._since, self._before, self._best = now, self._best, None
            self._best = ahead if self._best is None else max(self._best, ahead)

    def at(self, moment: float) -> int:
        """``moment`` of our clock, in microseconds of the peer's; 0 before anything was seen."""
        with self._lock:
            known = [ahead for ahead in (self._best, self._before) if ahead is not None]
        if not known:
            return 0
        return max(0, int(min(moment + max(known), _LAST_SECOND) * MICROSECONDS))
