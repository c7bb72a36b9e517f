"""Batches as they were submitted, and the queues they wait in."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kvferry.api import ErrorKind, ItemResult, KVFerryError, Retry, Ticket


class Job:
    """One batch. ``failed`` is the status of an item that failed. Threads: any."""

    def __init__(self, ticket: Ticket[Any], failed: Any, deadline: float) -> None:
        self.ticket = ticket
        self.failed = failed
        self.deadline = deadline
        self._results: list[ItemResult[Any] | None] = [None] * ticket.items
        self._left = ticket.items
        self._lock = threading.Lock()

    def finish(self, number: int, status: Any, error: KVFerryError | None = None) -> None:
        """The result of one item; the last one ends the ticket. What was told first stands."""
        result = ItemResult(status, error)
        with self._lock:
            if self._results[number] is not None:
                return
            self._results[number] = result
            self._left -= 1
            over = self._left == 0
        if over:
            self.ticket.complete([each for each in self._results if each is not None])

    def fail(self, number: int, error: KVFerryError) -> None:
        self.finish(number, self.failed, error)


class Item(NamedTuple):
    """One item of a job: what it is about is ``what``."""

    job: Job
    number: int
    what: Any

    def finish(self, status: Any) -> None:
        self.job.finish(self.number, status)

    def fail(self, error: KVFerryError) -> None:
        self.job.fail(self.number, error)


class Queue:
    """Items that have not begun, in the order in which they came. Threads: any."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._items: deque[Item] = deque()
        self._open = True
        self._changed = threading.Condition()
        self._idle = 0
        self._called = False
        """Whether a lane is on its way. A second one that finds nothing costs the first one time."""

    def put(self, job: Job, whats: tuple[Any, ...]) -> bool:
        """Append a batch; false when the queue is closed. A batch without items ends at once."""
        with self._changed:
            if not self._open:
                return False
            self._items.extend(Item(job, number, what) for number, what in enumerate(whats))
            self._call()
        if not whats:
            job.ticket.complete([])
        return True

    def wait(self, seconds: float | None = None) -> bool:
        """Until there is an item or the end, or for so long; false when it is the end."""
        with self._changed:
            in_time = True
            while in_time and not self._items and self._open:
                self._idle += 1
                in_time = self._changed.wait(seconds)
                self._idle -= 1
                self._called = False
            return bool(self._items) or self._open

    def share(self) -> None:
        """The caller has as much as it takes: another lane may have what is left."""
        with self._changed:
            if self._items:
                self._call()

    def _call(self) -> None:
        if self._idle and not self._called:
            self._called = True
            self._changed.notify()

    def __len__(self) -> int:
        return len(self._items)

    def take(self) -> Item | None:
        """The next item that may begin; those that may not are failed on the way."""
        while True:
            with self._changed:
                if not self._items:
                    return None
                item = self._items.popleft()
                closed = not self._open
            refusal = self._refusal(item.job, closed)
            if refusal is None:
                return item
            item.fail(refusal)

    def put_back(self, item: Item) -> None:
        """An item that was taken and cannot begin yet. It stays the first."""
        with self._changed:
            self._items.appendleft(item)

    def close(self) -> None:
        """No item begins any more; those that wait fail when they are taken."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _refusal(self, job: Job, closed: bool) -> KVFerryError | None:
        if closed:
            return KVFerryError("the backend was closed first", kind=ErrorKind.CLOSED)
        if job.ticket.cancelled:
            return KVFerryError("the batch was cancelled", kind=ErrorKind.CANCELLED)
        if self._clock() >= job.deadline:
            return KVFerryError("its deadline had passed", kind=ErrorKind.TIMEOUT, retry=Retry.LATER)
        return None
