"""A keyed backend in a few methods: for stores whose calls block."""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from attrs import frozen

from kvferry.api.chunk_header import ChunkHeader
from kvferry.api.errors import ErrorKind, KVFerryError, Retry
from kvferry.api.keys import ChunkKey
from kvferry.api.memory import BackendContext, Span
from kvferry.api.tickets import DeleteStatus, ItemResult, ProbeStatus, ReadStatus, Status, Ticket, WriteStatus


class _State(enum.Enum):
    NEW = "not open yet"
    OPEN = "open"
    CLOSING = "being closed"
    CLOSED = "closed"


@frozen
class _Job:
    """One batch. ``do`` handles the item of a number, ``failed`` is the status of one that could not."""

    ticket: Ticket[Any]
    do: Callable[[int], Any]
    failed: Any
    deadline: float


class ThreadedBackend(ABC):
    """A :class:`kvferry.api.Backend` that does one item at a time, in ``threads`` threads of its own.

    Derive from it and write ``open_store``, ``write_one``, ``read_one``, ``delete_one`` and
    ``close_store``; a persistent one also ``recover``, a shared one also ``probe_one``. Tickets,
    deadlines, cancelling and closing are done here. What a ``*_one`` raises fails its item alone: a
    :class:`kvferry.api.KVFerryError` as it is, an ``OSError`` as kind ``IO``, anything else as kind
    ``INTERNAL``.

    With one thread, the ``*_one`` methods are never called at the same time. A deadline is looked at
    before each item, so a call that may block for long needs a limit of its own.
    """

    threads: ClassVar[int] = 1
    max_value_bytes: int | None = None
    """As the spec claims it: larger values fail before ``write_one`` is called."""

    def __init__(self) -> None:
        self._state = _State.NEW
        self._context: BackendContext | None = None
        self._jobs: deque[_Job] = deque()
        self._active = 0
        self._changed = threading.Condition()
        self._workers: list[threading.Thread] = []

    # -- for the author --------------------------------------------------------------------------

    @abstractmethod
    def open_store(self, context: BackendContext) -> None:
        """Make the store ready, or raise and leave nothing open."""

    @abstractmethod
    def write_one(self, header: ChunkHeader, value: memoryview) -> WriteStatus:
        """Store ``value``, of ``header.size`` bytes. It must not be kept beyond the call."""

    @abstractmethod
    def read_one(self, key: ChunkKey, into: memoryview) -> ReadStatus:
        """Fill ``into``. Nothing may write into it after the call."""

    @abstractmethod
    def delete_one(self, key: ChunkKey) -> DeleteStatus:
        """Remove the chunk."""

    @abstractmethod
    def close_store(self) -> None:
        """Give everything back. Called once after a successful ``open_store``, when no thread works."""

    def probe_one(self, key: ChunkKey) -> ProbeStatus:
        """Whether the chunk is there; for shared stores."""
        raise _unsupported("probe", "shared")

    def recover(self) -> Iterable[ChunkHeader]:
        """See :meth:`kvferry.api.Backend.recover`; for persistent stores."""
        raise _unsupported("recover", "persistent")

    # -- the contract ----------------------------------------------------------------------------

    def open(self, context: BackendContext) -> None:
        if self._state is not _State.NEW:
            raise KVFerryError(
                "a backend is opened once",
                kind=ErrorKind.INTERNAL,
                where=context.name,
                why=f"it is {self._state.value}",
                remedy="make another one",
            )
        self.open_store(context)
        self._context = context
        self._state = _State.OPEN
        for number in range(self.threads):
            worker = threading.Thread(target=self._work, name=f"kvferry-{context.name}-{number}", daemon=True)
            worker.start()
            self._workers.append(worker)

    def probe(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[ProbeStatus]:
        if type(self).probe_one is ThreadedBackend.probe_one:
            raise _unsupported("probe", "shared")
        return self._submit(keys, self.probe_one, ProbeStatus.FAILED, deadline)

    def write(self, batch: Sequence[tuple[ChunkHeader, Span]], deadline: float) -> Ticket[WriteStatus]:
        return self._submit(batch, self._write, WriteStatus.FAILED, deadline)

    def read(self, batch: Sequence[tuple[ChunkKey, Span]], deadline: float) -> Ticket[ReadStatus]:
        return self._submit(batch, self._read, ReadStatus.FAILED, deadline)

    def delete(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[DeleteStatus]:
        return self._submit(keys, self.delete_one, DeleteStatus.FAILED, deadline)

    def close(self, deadline: float) -> None:
        with self._changed:
            if self._state in (_State.NEW, _State.CLOSED):
                self._state = _State.CLOSED
                return
            self._state = _State.CLOSING
            left, self._jobs = self._jobs, deque()
            self._changed.notify_all()
        for job in left:
            self._run(job)  # nothing begins any more, so this only says so
        context = self._opened()
        with self._changed:
            while self._active:
                if not self._changed.wait(max(0.0, deadline - context.clock())) and self._active:
                    raise KVFerryError(
                        f"{self._active} batches are still under way",
                        kind=ErrorKind.TIMEOUT,
                        where=context.name,
                        remedy="leave their memory alone and close again later",
                        retry=Retry.LATER,
                    )
        for worker in self._workers:
            worker.join()
        self.close_store()
        self._state = _State.CLOSED

    # -- the work --------------------------------------------------------------------------------

    def _submit(
        self, items: Sequence[Any], one: Callable[[Any], Status], failed: Status, deadline: float
    ) -> Ticket[Status]:
        kept = tuple(items)
        ticket: Ticket[Status] = Ticket(len(kept))
        with self._changed:
            if self._state is not _State.OPEN:
                raise KVFerryError(
                    f"the backend is {self._state.value}", kind=ErrorKind.CLOSED, remedy="open it first"
                )
            self._jobs.append(_Job(ticket, lambda number: one(kept[number]), failed, deadline))
            self._changed.notify()
        return ticket

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._state is not _State.OPEN:
                        return
                    self._changed.wait()
                job = self._jobs.popleft()
                self._active += 1
            try:
                self._run(job)
            finally:
                with self._changed:
                    self._active -= 1
                    self._changed.notify_all()

    def _run(self, job: _Job) -> None:
        job.ticket.complete([self._item(job, number) for number in range(job.ticket.items)])

    def _item(self, job: _Job, number: int) -> ItemResult[Any]:
        refusal = self._refusal(job)
        if refusal is None:
            try:
                return ItemResult(job.do(number))
            except KVFerryError as error:
                refusal = error
            except OSError as error:
                refusal = KVFerryError(
                    "the store failed", kind=ErrorKind.IO, why=repr(error), retry=Retry.LATER
                )
            except Exception as error:  # noqa: BLE001 - one broken item stays one broken item
                refusal = KVFerryError(
                    "the backend failed",
                    kind=ErrorKind.INTERNAL,
                    why=repr(error),
                    remedy="report it to the author of the backend",
                )
        return ItemResult(job.failed, refusal)

    def _refusal(self, job: _Job) -> KVFerryError | None:
        """Why an item does not begin."""
        if self._state is not _State.OPEN:
            return KVFerryError("the backend was closed first", kind=ErrorKind.CLOSED)
        if job.ticket.cancelled:
            return KVFerryError("the batch was cancelled", kind=ErrorKind.CANCELLED)
        if self._opened().clock() >= job.deadline:
            return KVFerryError("its deadline had passed", kind=ErrorKind.TIMEOUT, retry=Retry.LATER)
        return None

    def _write(self, item: tuple[ChunkHeader, Span]) -> WriteStatus:
        header, span = item
        if span.length != header.size:
            raise KVFerryError(
                f"a value of {header.size} bytes is not written from a span of {span.length}",
                kind=ErrorKind.INTERNAL,
            )
        if self.max_value_bytes is not None and header.size > self.max_value_bytes:
            raise KVFerryError(
                f"a value of {header.size} bytes is above the limit of {self.max_value_bytes}",
                kind=ErrorKind.CAPACITY,
                remedy="use smaller chunks, or another backend",
            )
        with self._opened().view(span) as value:
            return self.write_one(header, value)

    def _read(self, item: tuple[ChunkKey, Span]) -> ReadStatus:
        key, span = item
        with self._opened().view(span) as into:
            return self.read_one(key, into)

    def _opened(self) -> BackendContext:
        assert self._context is not None, "open() was not called"
        return self._context


def _unsupported(what: str, ability: str) -> KVFerryError:
    return KVFerryError(
        f"this backend has no {what}()",
        kind=ErrorKind.UNSUPPORTED,
        why=f"its spec does not claim to be {ability}",
        remedy="look at the capabilities first",
    )
