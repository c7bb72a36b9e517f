"""Work that was submitted: one result per item, told exactly once."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, final

from attrs import field, frozen

from kvferry.api.errors import ErrorKind, KVFerryError

_log = logging.getLogger(__name__)


class WriteStatus(enum.Enum):
    """What became of one chunk that should be written."""

    STORED = "stored"
    """It will be found, after a restart too if the backend claims to be persistent."""
    EXISTS = "exists"
    """It was there before and stays as it is: the same key means the same bytes."""
    NO_SPACE = "no-space"
    """The capacity does not allow it now. Nothing of it is kept; the caller deletes something first."""
    FAILED = "failed"
    """Nothing of it will ever be found. The result's error says why."""


class ReadStatus(enum.Enum):
    """What became of one chunk that should be read."""

    FOUND = "found"
    """The span holds exactly what was stored under the key."""
    MISS = "miss"
    """There is no such chunk."""
    CORRUPT = "corrupt"
    """There is something under the key which is not what was stored. The span's bytes mean nothing.
    The caller deletes the chunk."""
    FAILED = "failed"
    """It could not be read. The span's bytes mean nothing; the result's error says why."""


class ProbeStatus(enum.Enum):
    """Whether a chunk is there, as far as can be told without reading it."""

    PRESENT = "present"
    ABSENT = "absent"
    FAILED = "failed"


class DeleteStatus(enum.Enum):
    """What became of one chunk that should go. Afterwards, unless it failed, it is not found."""

    DELETED = "deleted"
    ABSENT = "absent"
    """It was not there."""
    FAILED = "failed"


class TransferStatus(enum.Enum):
    """What became of one operation of a channel."""

    DONE = "done"
    """The bytes are in place."""
    FAILED = "failed"
    """The bytes at the destination mean nothing; the result's error says why."""


Status = TypeVar("Status", WriteStatus, ReadStatus, ProbeStatus, DeleteStatus, TransferStatus)


@frozen
class ItemResult(Generic[Status]):
    """The result of one item of a batch.

    ``error`` is there exactly when the status is ``FAILED``: its kind tells a timeout from a
    cancellation or a broken store, and its ``retry`` whether to try again.
    """

    status: Status
    error: KVFerryError | None = field(default=None)

    @error.validator
    def _check_error(self, _attribute: object, error: KVFerryError | None) -> None:
        if (self.status.name == "FAILED") != (error is not None):
            raise ValueError(f"{self.status} {'without' if error is None else 'with'} an error")


@final
class Ticket(Generic[Status]):
    """A batch under way. Made and completed by whoever does the work, watched by whoever asked.

    Until a ticket is done, every span that its batch names belongs to the worker; afterwards the
    worker never touches them again. Threads: every method from any.
    """

    def __init__(self, items: int) -> None:
        self.items = items
        self.completions = 0
        """How often somebody tried to complete it. More than 1 is a defect of the worker."""
        self._results: tuple[ItemResult[Status], ...] | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._cancelled = threading.Event()
        self._callbacks: list[Callable[[Ticket[Status]], None]] = []
        self._cancel_callbacks: list[Callable[[Ticket[Status]], None]] = []

    # -- for those who asked ---------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the end, at most so long; whether it came."""
        return self._done.wait(max(0.0, seconds))

    @property
    def results(self) -> tuple[ItemResult[Status], ...]:
        """One result per item, in the batch's order. Raises :class:`KVFerryError` before the end."""
        if self._results is None:
            raise KVFerryError(
                "the ticket has no results yet",
                kind=ErrorKind.INTERNAL,
                remedy="wait for it, or ask whether it is done",
            )
        return self._results

    def cancel(self) -> None:
        """Say that the results are not wanted any more. The ticket still ends by being completed:
        items that have not begun should fail with the kind ``CANCELLED``. Without effect at the end."""
        with self._lock:
            if self._results is not None:
                return
            self._cancelled.set()
            callbacks, self._cancel_callbacks = self._cancel_callbacks, []
        for callback in callbacks:
            self._tell(callback)

    def on_done(self, callback: Callable[[Ticket[Status]], None]) -> None:
        """Call ``callback`` once, when the ticket is done: from the worker's thread, or at once if it
        is done already. It must not block."""
        with self._lock:
            if self._results is None:
                self._callbacks.append(callback)
                return
        self._tell(callback)

    # -- for those who do the work ---------------------------------------------------------------

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called; worth a look before every item."""
        return self._cancelled.is_set()

    def on_cancel(self, callback: Callable[[Ticket[Status]], None]) -> None:
        """Call ``callback`` once when the ticket is cancelled, from the thread that does it, or at once
        if it was; never after the end. It must not block."""
        with self._lock:
            if self._results is not None:
                return
            if not self.cancelled:
                self._cancel_callbacks.append(callback)
                return
        self._tell(callback)

    def complete(self, results: Sequence[ItemResult[Status]]) -> None:
        """End the ticket with one result per item, in the batch's order.

        Raises :class:`KVFerryError` (``INTERNAL``) for another number of results and when the ticket
        had ended before; what was told first stands.
        """
        with self._lock:
            self.completions += 1
            why = ""
            if self._results is not None:
                why = f"this is attempt {self.completions}"
            elif len(results) != self.items:
                why = f"it got {len(results)} results for {self.items} items"
            if why:
                raise KVFerryError(
                    "a ticket is completed exactly once, with one result per item",
                    kind=ErrorKind.INTERNAL,
                    why=why,
                    remedy="report it to the author of whatever did the work",
                )
            self._results = tuple(results)
            callbacks, self._callbacks = self._callbacks, []
            self._cancel_callbacks.clear()
            self._done.set()
        for callback in callbacks:
            self._tell(callback)

    def _tell(self, callback: Callable[[Ticket[Status]], None]) -> None:
        try:
            callback(self)
        except Exception:  # noqa: BLE001 - a listener's fault must not end the worker's thread
            _log.exception("kvferry: a listener of a ticket raised")
