"""When rows end, the earliest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.control.columns import Column, Ids

NEVER = float("inf")


class Deadlines:
    """An end, in monotonic seconds, for some of the rows below ``rows``; the others have none.

    A heap that knows where each row stands, so there is never more than one record per row and never
    any garbage. A row whose end moves to a later time keeps its record, which is put right when its
    old time comes: a later end costs one assignment. Takes no memory before the first end is set.
    Not thread-safe.
    """

    def __init__(self, rows: int) -> None:
        self.used = False
        """Whether any row was ever given an end; while not, there is nothing to look at."""
        self._rows = rows
        self._ends: npt.NDArray[np.float64] = np.zeros(0)
        self._end: memoryview[Any] = self._ends.data
        """Zero stands for no end."""
        self._place = Column(0)
        """Place in the heap plus one; zero for rows without a record."""
        self._heap: list[int] = []
        self._times: list[float] = []

    def end(self, row: int) -> float:
        """The end of ``row``, or infinity."""
        end: float = self._end[row] if self.used else NEVER
        return end or NEVER

    def set(self, row: int, end: float) -> None:
        """``row`` ends at ``end``; infinity takes its end away."""
        if not self.used:
            if end == NEVER:
                return
            self.used = True
            self._ends = np.zeros(self._rows)
            self._end = self._ends.data
            self._place = Column(self._rows)
        self._end[row] = 0.0 if end == NEVER else end
        place = self._place.view[row] - 1
        if end == NEVER:
            return
        if place < 0:
            self._heap.append(row)
            self._times.append(end)
            self._rise(len(self._heap) - 1)
        elif end < self._times[place]:
            self._times[place] = end
            self._rise(place)

    def has_ended(self, row: int, now: float) -> bool:
        return self.used and self.end(row) <= now

    def living(self, rows: Ids, now: float) -> Ids:
        """The beginning of ``rows`` before the first that has ended."""
        ends = self._ends[rows]
        ended = (ends > 0.0) & (ends <= now)
        return rows[: int(ended.argmax())] if ended.any() else rows

    def next_time(self) -> float:
        """No row ends before this time; infinity when none ends."""
        return self._times[0] if self._times else NEVER

    def due(self, now: float, looks: int) -> int:
        """A row that has ended, told until its end is taken away; -1 if none is found after ``looks``
        looks at records whose rows end later by now."""
        while self._heap and self._times[0] <= now:
            end = self._end[self._heap[0]]
            if 0.0 < end <= now:
                return self._heap[0]
            if looks <= 0:
                break
            looks -= 1
            if end:
                self._times[0] = end
                self._sink(0)
            else:
                self._remove_first()
        return -1

    def records(self) -> Sequence[tuple[float, int]]:
        """(time, row) in the order of the heap, for audits; slow."""
        return list(zip(self._times, self._heap, strict=True))

    def places(self) -> dict[int, int]:
        """Where each row with a record believes to stand, for audits; slow."""
        return {int(row): self._place.view[row] - 1 for row in np.flatnonzero(self._place.array).tolist()}

    def _remove_first(self) -> None:
        self._place.view[self._heap[0]] = 0
        last, time = self._heap.pop(), self._times.pop()
        if self._heap:
            self._heap[0], self._times[0] = last, time
            self._sink(0)

    def _rise(self, place: int) -> None:
        heap, times, places = self._heap, self._times, self._place.view
        row, time = heap[place], times[place]
        while place:
            above = (place - 1) // 2
            if times[above] <= time:
                break
            heap[place], times[place] = heap[above], times[above]
            places[heap[place]] = place + 1
            place = above
        heap[place], times[place] = row, time
        places[row] = place + 1

    def _sink(self, place: int) -> None:
        heap, times, places = self._heap, self._times, self._place.view
        row, time = heap[place], times[place]
        count = len(heap)
        while (below := 2 * place + 1) < count:
            if below + 1 < count and times[below + 1] < times[below]:
                below += 1
            if times[below] >= time:
                break
            heap[place], times[place] = heap[below], times[below]
            places[heap[place]] = place + 1
            place = below
        heap[place], times[place] = row, time
        places[row] = place + 1
