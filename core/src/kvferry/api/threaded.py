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
    BARE = "not made completely"
    """The constructor of this class has not run."""
    NEW = "not open yet"
    OPEN = "open"
    CLOSING = "being closed"
    CLOSED = "closed"


@frozen
class _Job:
    """One batch. ``do`` handles the item of a number, ``failed`` is the status of one that could not;
    ``method`` is what the author wrote, for messages."""

    method: str
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
    ``INTERNAL``; what was raised is then the error's ``__cause__``. A value above the context's
    ``max_value_bytes`` fails before ``write_one`` is called.

    Threads: ``open_store``, ``recover`` and ``close_store`` run in the caller's, one after the other,
    while no ``*_one`` does; the ``*_one`` methods run in the backend's own. With one such thread they
    are never called at the same time. A deadline is looked at before each item, so a call that may
    block for long needs a limit of its own.
    """

    threads: ClassVar[int] = 1
    _state = _State.BARE

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
        if self._state is _State.BARE:
            raise self._not_made()
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
        return self._submit("probe_one", keys, self.probe_one, ProbeStatus.FAILED, deadline)

    def write(self, batch: Sequence[tuple[ChunkHeader, Span]], deadline: float) -> Ticket[WriteStatus]:
        return self._submit("write_one", batch, self._write, WriteStatus.FAILED, deadline)

    def read(self, batch: Sequence[tuple[ChunkKey, Span]], deadline: float) -> Ticket[ReadStatus]:
        return self._submit("read_one", batch, self._read, ReadStatus.FAILED, deadline)

    def delete(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[DeleteStatus]:
        return self._submit("delete_one", keys, self.delete_one, DeleteStatus.FAILED, deadline)

    def close(self, deadline: float) -> None:
        if self._state is _State.BARE:
            return
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
        self,
        method: str,
        items: Sequence[Any],
        one: Callable[[Any], Status],
        failed: Status,
        deadline: float,
    ) -> Ticket[Status]:
        if self._state is _State.BARE:
            raise self._not_made()
        kept = tuple(items)
        ticket: Ticket[Status] = Ticket(len(kept))
        with self._changed:
            if self._state is not _State.OPEN:
                raise KVFerryError(
                    f"the backend is {self._state.value}", kind=ErrorKind.CLOSED, remedy="open it first"
                )
            self._jobs.append(_Job(method, ticket, lambda number: one(kept[number]), failed, deadline))
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
        if refusal is not None:
            return ItemResult(job.failed, refusal)
        # No name of this frame holds an error: its traceback holds the frame, and the two would stay.
        try:
            status = job.do(number)
        except KVFerryError as error:
            return ItemResult(job.failed, error)
        except Exception as error:  # noqa: BLE001 - one broken item stays one broken item
            return ItemResult(job.failed, _failure(error))
        wrong = _wrong_status(job, status)
        return ItemResult(status) if wrong is None else ItemResult(job.failed, wrong)

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
        limit = self._opened().max_value_bytes
        if limit is not None and header.size > limit:
            raise KVFerryError(
                f"a value of {header.size} bytes is above the limit of {limit}",
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

    def _not_made(self) -> KVFerryError:
        name = type(self).__qualname__
        return KVFerryError(
            f"{name} is not made completely",
            kind=ErrorKind.INTERNAL,
            where=type(self).__module__,
            why=f"{name}.__init__ does not call the constructor of ThreadedBackend",
            remedy=f"begin {name}.__init__ with  super().__init__()",
        )


def _failure(error: Exception) -> KVFerryError:
    """The fault of an item whose method raised something of another kind."""
    if isinstance(error, OSError):
        fault = KVFerryError("the store failed", kind=ErrorKind.IO, why=repr(error), retry=Retry.LATER)
    else:
        fault = KVFerryError(
            "the backend failed",
            kind=ErrorKind.INTERNAL,
            why=repr(error),
            remedy="report it to the author of the backend",
        )
    fault.__cause__ = error
    return fault


def _wrong_status(job: _Job, status: object) -> KVFerryError | None:
    """The fault of an item whose method returned what it must not."""
    expected = type(job.failed)
    good = [f"{expected.__name__}.{member.name}" for member in expected if member is not job.failed]
    if status is job.failed:
        what, remedy = f"{job.method} returned {status}", "raise a KVFerryError that says what went wrong"
    elif not isinstance(status, expected):
        what = f"{job.method} returned {_brief(status)}, not a {expected.__name__}"
        remedy = f"return {' or '.join(good)}, and raise what goes wrong"
    else:
        return None
    return KVFerryError(what, kind=ErrorKind.INTERNAL, remedy=remedy)


def _brief(value: object) -> str:
    """``None`` and ``True`` as they are; of anything else the type, because it may be a chunk's bytes."""
    return repr(value) if value is None or isinstance(value, bool) else f"a {type(value).__name__}"


def _unsupported(what: str, ability: str) -> KVFerryError:
    return KVFerryError(
        f"this backend has no {what}()",
        kind=ErrorKind.UNSUPPORTED,
        why=f"its spec does not claim to be {ability}",
        remedy="look at the capabilities first",
    )
