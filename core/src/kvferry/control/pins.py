"""Pins: chunks that stay because somebody asked for it, until a given time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from attrs import define, field

from kvferry.control.columns import Column, Ids
from kvferry.control.deadlines import NEVER

MAXIMUM_PINS = 4096
"""Names at one time. A client that pins every request under a name of its own meets it first."""


@define(eq=False)
class Pin:
    """``rows`` are what it came to cover, each with the generation that it had then: a row of another
    generation is another chunk."""

    salt: str
    name: str
    end: float
    number: int
    rows: dict[int, int] = field(factory=dict)
    ended: bool = False


class Pins:
    """Which rows are pinned, how often, and by which names. No more than ``limit`` rows at one time.

    A pin covers chains from their heads: with a row also all before it. A row that goes for another
    reason (cleared, dropped, ended) leaves every pin at once. Costs two numbers per row and, per
    pin, an entry for each row that it covers. Not thread-safe.
    """

    def __init__(self, rows: int, limit: int) -> None:
        self.limit = limit
        self.count = Column(rows)
        """Pins that cover a row."""
        self.pinned = 0
        """Rows that some pin covers."""
        self.refused = 0
        """Chunks that were not pinned because of a limit."""
        self._generation = Column(rows)
        self._pins: dict[tuple[str, str], Pin] = {}
        self._due: list[tuple[float, int, Pin]] = []
        self._ending: list[Pin] = []
        self._tails: dict[int, list[Pin]] = {}
        """Who covers a tail: a longer chunk may take its place, and then takes its pins over."""
        self._last = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        """Pins that have not ended."""
        return iter(self._pins.values())

    def find(self, salt: str, name: str) -> Pin | None:
        return self._pins.get((salt, name))

    def open(self, salt: str, name: str, end: float) -> Pin | None:
        """The pin of this name, which lasts until ``end`` at the least; ``None`` beyond the limit."""
        pin = self._pins.get((salt, name))
        if pin is not None:
            # Its record is put right when its old time comes.
            pin.end = max(pin.end, end)
            return pin
        if len(self._pins) >= MAXIMUM_PINS:
            return None
        self._last += 1
        pin = self._pins[salt, name] = Pin(salt, name, end, self._last)
        heapq.heappush(self._due, (end, pin.number, pin))
        return pin

    def covers(self, pin: Pin, row: int) -> bool:
        return pin.rows.get(row) == self._generation.view[row]

    def cover(self, pin: Pin, rows: list[int], *, tail: bool) -> int:
        """Let ``pin`` cover ``rows`` too, none of which it covers yet, from the head as many as there
        is room for. How many it covers now. ``tail`` says that the last of them is one."""
        room = self.limit - self.pinned
        taken = []
        for row in rows:
            if not self.count.view[row]:
                if room <= 0:
                    break
                room -= 1
            taken.append(row)
        for row in taken:
            self.pinned += not self.count.view[row]
            self.count.view[row] += 1
            pin.rows[row] = self._generation.view[row]
        if tail and taken and len(taken) == len(rows):
            self._tails.setdefault(rows[-1], []).append(pin)
        self.refused += len(rows) - len(taken)
        return len(taken)

    def leave(self, row: int) -> None:
        """A pinned chunk goes, whoever wanted it to stay."""
        self.count.view[row] = 0
        self._generation.view[row] += 1
        self.pinned -= 1
        self._tails.pop(row, None)

    def holders_of_tail(self, row: int) -> list[Pin]:
        """Who covers this tail."""
        return list(self._tails.get(row, ()))

    def end(self, pin: Pin) -> None:
        """Its rows are let go by :meth:`let_go`, a few at a time."""
        pin.ended = True
        del self._pins[pin.salt, pin.name]
        self._ending.append(pin)

    def end_due(self, now: float) -> list[Pin]:
        """End the pins whose time has come."""
        due = []
        while self._due and self._due[0][0] <= now:
            time, number, pin = self._due[0]
            if pin.ended:
                heapq.heappop(self._due)
            elif pin.end > time:
                heapq.heapreplace(self._due, (pin.end, number, pin))
            else:
                heapq.heappop(self._due)
                self.end(pin)
                due.append(pin)
        return due

    def let_go(self, limit: int | None) -> Ids:
        """Up to ``limit`` rows, or all, leave pins that have ended; those that nobody pins any more."""
        free = []
        left = NEVER if limit is None else limit
        while left > 0 and self._ending:
            pin = self._ending[-1]
            while left > 0 and pin.rows:
                row, generation = pin.rows.popitem()
                left -= 1
                if generation != self._generation.view[row]:
                    continue
                self.count.view[row] -= 1
                if row in self._tails:
                    self._tails[row].remove(pin)
                    if not self._tails[row]:
                        del self._tails[row]
                if not self.count.view[row]:
                    self.pinned -= 1
                    free.append(row)
            if not pin.rows:
                self._ending.pop()
        return np.array(free, np.int64)

    def next_time(self) -> float:
        """When there is something to do next; infinity if never."""
        if self._ending:
            return -NEVER
        return self._due[0][0] if self._due else NEVER

    def covered(self) -> dict[int, list[Pin]]:
        """Every pinned row with those who pin it, for audits; slow."""
        found: dict[int, list[Pin]] = {}
        for pin in (*self._pins.values(), *self._ending):
            for row, generation in pin.rows.items():
                if generation == self._generation.view[row]:
                    found.setdefault(row, []).append(pin)
        return found
