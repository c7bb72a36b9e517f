"""Virtual time: one queue of events, one source of randomness, and a log that says what happened."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, deque
from collections.abc import Callable
from random import Random

from attrs import define, field

LAST_EVENTS = 40
"""How many events a failure shows."""


class SimulationFailure(AssertionError):
    """Something happened that must never happen. ``check`` names the invariant."""

    def __init__(self, check: str, what: str) -> None:
        super().__init__(f"{check}: {what}")
        self.check = check


def require(condition: object, check: str, what: str) -> None:
    """Raise :class:`SimulationFailure` unless ``condition`` holds."""
    if not condition:
        raise SimulationFailure(check, what)


@define(order=True)
class _Event:
    time: float
    number: int
    kind: str = field(order=False)
    fault: str = field(order=False)
    action: Callable[[], object] = field(order=False)


class EventLoop:
    """Runs events in the order of their virtual time, in seconds.

    Everything that is random comes from :attr:`random`, so one seed is one history. Every event, and
    what is told with :meth:`note`, goes into a running digest. ``fault`` is the name of the fault that an
    event is; each event counts as one fault at the most.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.count = 0
        self.kinds: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.last: deque[str] = deque(maxlen=LAST_EVENTS)
        self._log = hashlib.blake2b(digest_size=16)
        self._queue: list[_Event] = []
        self._made = 0
        self._line = ""
        self._fault = ""

    def after(self, seconds: float, kind: str, action: Callable[[], object], *, fault: str = "") -> None:
        """Let ``action()`` happen in ``seconds``."""
        self._made += 1
        heapq.heappush(self._queue, _Event(self.now + seconds, self._made, kind, fault, action))

    def step(self) -> None:
        """Let the next event happen. The caller knows that there is one: the clock never stops."""
        event = heapq.heappop(self._queue)
        self.now = event.time
        self.count += 1
        self.kinds[event.kind] += 1
        self._fault = event.fault
        self._line = f"{self.count} {self.now:.6f} {event.kind}"
        try:
            event.action()
        finally:
            if self._fault:
                self.faults[self._fault] += 1
                self._line += f" !{self._fault}"
            self.last.append(self._line)
            self._log.update(self._line.encode())

    def note(self, text: str) -> None:
        """Say more about the event that happens now."""
        self._line += f" {text}"

    def fault(self, name: str) -> None:
        """The event that happens now is a fault."""
        self._fault = self._fault or name

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def leap(self, seconds: float) -> None:
        """The clock jumps, as after a pause of the whole machine: everything that was due is overdue."""
        self.now += seconds
        for event in self._queue:
            event.time = max(event.time, self.now)
        heapq.heapify(self._queue)

    @property
    def digest(self) -> str:
        """Of everything that happened so far."""
        return self._log.hexdigest()
