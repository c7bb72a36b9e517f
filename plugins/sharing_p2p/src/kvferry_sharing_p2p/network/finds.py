"""Questions to the directory that are under way."""

from __future__ import annotations

import enum
import heapq
import logging
import math
from collections.abc import Callable

from kvferry_sharing_p2p.directory.answers import Found

logger = logging.getLogger(__name__)

MOST_FINDS = 1024
"""Under way at the same time."""


class Unanswered(enum.Enum):
    """Why there is no answer. Each is a miss."""

    DEADLINE = "deadline"
    GONE = "gone"
    """The directory is not connected, or has not answered anything for a while."""
    BUSY = "busy"
    """More is under way than this instance, or the connection, has room for."""
    CLOSED = "closed"


OnAnswer = Callable[[Found | Unanswered], None]


class Finds:
    """Calls back for each exactly once. What a callback raises is logged. Threads: one."""

    def __init__(self) -> None:
        self._number = 0
        self._pending: dict[int, OnAnswer] = {}
        self._deadlines: list[tuple[float, int]] = []

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def full(self) -> bool:
        return len(self._pending) >= MOST_FINDS

    def add(self, deadline: float, on_answer: OnAnswer) -> int:
        """A new one; its number, which is never used again."""
        self._number += 1
        self._pending[self._number] = on_answer
        heapq.heappush(self._deadlines, (deadline, self._number))
        return self._number

    def refuse(self, on_answer: OnAnswer, outcome: Unanswered) -> None:
        """End one that was never added."""
        _call(on_answer, outcome)

    def end(self, number: int, outcome: Found | Unanswered) -> None:
        """One that has ended already is no error: its answer was late, or came twice."""
        on_answer = self._pending.pop(number, None)
        if on_answer is not None:
            _call(on_answer, outcome)
        self._forget_ended()

    def end_overdue(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            self.end(heapq.heappop(self._deadlines)[1], Unanswered.DEADLINE)

    def end_all(self, outcome: Unanswered) -> None:
        for number in tuple(self._pending):
            self.end(number, outcome)

    def due(self) -> float:
        """When the first deadline is over; infinity if there is none."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _forget_ended(self) -> None:
        # One far deadline in front must not let all that have ended pile up behind it.
        if len(self._deadlines) > 2 * MOST_FINDS:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._pending]
            heapq.heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][1] not in self._pending:
            heapq.heappop(self._deadlines)


def _call(on_answer: OnAnswer, outcome: Found | Unanswered) -> None:
    try:
        on_answer(outcome)
    except Exception:
        logger.exception("kvferry: whoever asked the directory could not take the answer")
