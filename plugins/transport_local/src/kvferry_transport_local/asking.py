"""The writer's side of writes: asks the owner of the memory, and waits for its answers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry_transport_local.batches import Batch
from kvferry_transport_local.frames import MAXIMUM_ROWS, WriteRequest, WriteStop, Written, pack_rows
from kvferry_transport_local.link import Broken, Link

# What is closed or cancelled over there is, seen from here, a peer that is gone.
_TELLABLE = frozenset(
    (
        ErrorKind.CAPACITY,
        ErrorKind.IO,
        ErrorKind.PROTOCOL,
        ErrorKind.TIMEOUT,
        ErrorKind.UNSUPPORTED,
    )
)

WholeRow = tuple[int, tuple[int, ...]]
"""The number of an operation, and the row that asks for it."""


class Asking:
    """Threads: any."""

    def __init__(self, clock: Callable[[], float], where: str) -> None:
        self._clock = clock
        self._where = where
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Batch, Link, list[int]]] = {}

    def ask(self, batch: Batch, link: Link, rows: Sequence[WholeRow]) -> None:
        """In as many requests as it takes."""
        deadline = time.monotonic() + batch.deadline - self._clock() + link.clock_offset
        for first in range(0, len(rows), MAXIMUM_ROWS):
            lot = rows[first : first + MAXIMUM_ROWS]
            with self._lock:
                number = next(self._numbers)
                self._waiting[number] = (batch, link, [operation for operation, _ in lot])
            link.send(WriteRequest(number, deadline, pack_rows([row for _, row in lot])))

    def answered(self, link: Link, frame: Written) -> None:
        """Raises :class:`Broken` for an answer that does not fit. One that nobody waits for is no fault."""
        with self._lock:
            found = self._waiting.get(frame.number)
            if found is None or found[1] is not link:
                return
            del self._waiting[frame.number]
        batch, _, operations = found
        failed: dict[int, KVFerryError] = {}
        for row, reason in frame.failed:
            if row >= len(operations) or reason >= len(frame.reasons):
                # Somebody waits, and would until the deadline: all of them fail with the connection.
                raise Broken("it answered for a write that it was not asked for")
            failed[operations[row]] = self._told(*frame.reasons[reason])
        for operation, error in failed.items():
            batch.fail(operation, error)
        batch.advance(operation for operation in operations if operation not in failed)
        batch.end_if_over()

    def forget(self, batch: Batch) -> None:
        """The batch has ended: whatever the owner has not begun, it need not begin."""
        with self._lock:
            left = [number for number, (each, _, _) in self._waiting.items() if each is batch]
            links = [self._waiting.pop(number)[1] for number in left]
        for number, link in zip(left, links, strict=True):
            link.send(WriteStop(number))

    def drop(self, link: Link) -> None:
        """The connection is over: no answer comes any more."""
        with self._lock:
            for number in [number for number, (_, each, _) in self._waiting.items() if each is link]:
                del self._waiting[number]

    def _told(self, kind: str, why: str) -> KVFerryError:
        named = next((each for each in _TELLABLE if each.value == kind), ErrorKind.IO)
        return KVFerryError(
            "the peer did not write it",
            kind=named,
            where=self._where,
            why=why,
            remedy="look into the peer's log" if named is ErrorKind.IO else "",
            retry=Retry.LATER,
        )
