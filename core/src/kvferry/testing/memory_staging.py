"""A staging for tests: what the contract demands, with nothing else to it."""

from __future__ import annotations

import ctypes
import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, frozen

from kvferry.api import (
    Arena,
    ArenaOptions,
    ErrorKind,
    ItemResult,
    KVFerryError,
    MemoryKind,
    Region,
    Retry,
    StageCopy,
    StagingContext,
    Ticket,
    TransferStatus,
)

_PIECE = 1 << 20
"""Bytes that are copied between two looks at deadline, cancelling and closing."""


@frozen(kw_only=True)
class MemoryStagingOptions:
    """What a :class:`MemoryStaging` is made with."""

    before_piece: Callable[[], object] = lambda: None
    """Called in its thread before a piece is copied that is going to be."""


class _State(enum.Enum):
    NEW = "not open yet"
    OPEN = "open"
    CLOSING = "being closed"
    CLOSED = "closed"


@define(eq=False)
class _Job:
    copies: tuple[StageCopy, ...]
    deadline: float
    ticket: Ticket[TransferStatus]


class MemoryStaging:
    """A :class:`kvferry.api.Staging`. One thread of its own copies, one batch after the other. Its memory is
    there once it is open, so that tests need not wait for it."""

    def __init__(self, options: MemoryStagingOptions, capacity: int) -> None:
        self._options = options
        self._capacity = capacity
        self._state = _State.NEW
        self._context: StagingContext | None = None
        self._arena: Arena | None = None
        self._region: Region | None = None
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None

    def open(self, context: StagingContext) -> Region:
        if self._state is not _State.NEW:
            raise KVFerryError(
                "a staging is opened once",
                kind=ErrorKind.INTERNAL,
                where=context.name,
                why=f"it is {self._state.value}",
                remedy="make another one",
            )
        arena = context.make_arena(context.name, self._capacity, ArenaOptions())
        region = arena.open()
        deadline = context.clock() + context.operation_seconds
        while arena.ready_bytes() < region.length and context.clock() < deadline:
            time.sleep(0.0005)
        self._context, self._arena, self._region = context, arena, region
        self._state = _State.OPEN
        self._worker = threading.Thread(target=self._work, name=f"kvferry-{context.name}", daemon=True)
        self._worker.start()
        return region

    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        kept = tuple(copies)
        ticket: Ticket[TransferStatus] = Ticket(len(kept))
        with self._changed:
            if self._state is not _State.OPEN:
                raise KVFerryError(
                    f"the staging is {self._state.value}", kind=ErrorKind.CLOSED, remedy="open it first"
                )
            self._jobs.append(_Job(kept, deadline, ticket))
            self._changed.notify_all()
        return ticket

    def close(self, deadline: float) -> None:
        with self._changed:
            if self._state is _State.OPEN:
                self._state = _State.CLOSING
                self._changed.notify_all()
            elif self._state is _State.NEW:
                self._state = _State.CLOSED
        if self._worker is None or self._context is None or self._arena is None:
            return
        self._worker.join(max(0.0, deadline - self._context.clock()))
        if self._worker.is_alive():
            raise KVFerryError(
                "a copy is still under way",
                kind=ErrorKind.TIMEOUT,
                where=self._context.name,
                remedy="leave the memory alone and close again later",
                retry=Retry.LATER,
            )
        self._arena.close()
        self._region = None
        self._state = _State.CLOSED

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._state is not _State.OPEN:
                        return
                    self._changed.wait()
                job = self._jobs.popleft()
            job.ticket.complete([self._result(job, copy) for copy in job.copies])

    def _result(self, job: _Job, copy: StageCopy) -> ItemResult[TransferStatus]:
        try:
            self._demand_going_on(job)
            self._copy(job, copy)
        except KVFerryError as error:
            return ItemResult(TransferStatus.FAILED, error.with_traceback(None))
        return ItemResult(TransferStatus.DONE)

    def _copy(self, job: _Job, copy: StageCopy) -> None:
        assert self._context is not None
        assert self._region is not None
        assert self._arena is not None
        span = copy.source
        source = self._context.regions.get(span.region)
        if source is None:
            raise _outside(copy, f"there is no region {span.region!r}")
        if span.offset < 0 or span.length < 0 or span.offset + span.length > source.length:
            raise _outside(copy, f"the region {span.region!r} has {source.length} bytes")
        if copy.offset < 0 or copy.offset + span.length > self._region.length:
            raise _outside(copy, f"the staging has {self._region.length} bytes")
        if source.kind is not MemoryKind.HOST:
            raise KVFerryError(
                f"the region {span.region!r} is memory of a device",
                kind=ErrorKind.UNSUPPORTED,
                remedy="stage host memory",
            )
        if span.length and copy.offset + span.length > self._arena.ready_bytes():
            raise KVFerryError("the memory is not there yet", kind=ErrorKind.CAPACITY, retry=Retry.LATER)
        target = self._region.address + copy.offset
        for done in range(0, span.length, _PIECE):
            self._demand_going_on(job)
            self._options.before_piece()
            length = min(_PIECE, span.length - done)
            ctypes.memmove(target + done, source.address + span.offset + done, length)

    def _demand_going_on(self, job: _Job) -> None:
        assert self._context is not None
        if self._state is not _State.OPEN:
            raise KVFerryError("the staging was closed first", kind=ErrorKind.CLOSED)
        if job.ticket.cancelled:
            raise KVFerryError("the copies were cancelled", kind=ErrorKind.CANCELLED)
        if self._context.clock() >= job.deadline:
            raise KVFerryError("the deadline had passed", kind=ErrorKind.TIMEOUT, retry=Retry.LATER)


def _outside(copy: StageCopy, why: str) -> KVFerryError:
    return KVFerryError(f"{copy} cannot be made", kind=ErrorKind.PROTOCOL, why=why)
