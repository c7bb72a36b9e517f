"""A staging in host memory."""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Sequence

from kvferry.api import (
    Arena,
    ArenaOptions,
    ErrorKind,
    KVFerryError,
    MemoryKind,
    Region,
    Retry,
    StageCopy,
    StagingContext,
    Ticket,
    TransferStatus,
)
from kvferry_host_staging.batch import Batch
from kvferry_host_staging.moving import Movement, choose_movement
from kvferry_host_staging.options import HostStagingOptions

_log = logging.getLogger(__name__)

BYTES_AT_ONCE = 32 << 20
"""Copied between two looks at deadlines, cancelling and closing: some milliseconds' work. Getting the
interpreter's lock back while another thread computes may take about as long, so less would cost more."""


class _State(enum.Enum):
    NEW = "not open yet"
    OPEN = "open"
    CLOSING = "being closed"
    CLOSED = "closed"


class HostStaging:
    """A :class:`kvferry.api.Staging`. One thread of its own begins every copy; kvferry-native shares it out
    among ``options.threads``. Batches take turns, so a large one does not shut out a small one. Whoever is
    told of an end is told by that thread, which touches nothing of the batch any more.

    ``movement`` copies; the fastest that there is unless it is handed in.
    """

    def __init__(
        self, options: HostStagingOptions, capacity: int, *, movement: Movement | None = None
    ) -> None:
        self._options = options
        self._capacity = capacity
        self._movement = movement
        self._state = _State.NEW
        self._context: StagingContext | None = None
        self._arena: Arena | None = None
        self._region: Region | None = None
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._thread: threading.Thread | None = None

    def open(self, context: StagingContext) -> Region:
        if self._state is not _State.NEW:
            raise KVFerryError(
                "a staging is opened once",
                kind=ErrorKind.INTERNAL,
                where=context.name,
                why=f"it is {self._state.value}",
                remedy="make another one",
            )
        arena = context.make_arena(
            context.name, self._capacity, ArenaOptions(huge_pages=self._options.huge_pages)
        )
        region = arena.open()
        chosen = choose_movement()
        movement = self._movement or chosen.movement
        thread = threading.Thread(
            target=self._run, args=(movement,), name=f"kvferry-{context.name}", daemon=True
        )
        self._context, self._arena, self._region = context, arena, region
        try:
            thread.start()
        except RuntimeError as error:
            arena.close()
            raise KVFerryError(
                "the system gives no thread to copy with",
                kind=ErrorKind.CAPACITY,
                where=context.name,
                why=str(error),
                remedy="raise the limit of threads (ulimit -u)",
                retry=Retry.AFTER_CHANGE,
            ) from error
        self._thread = thread
        self._state = _State.OPEN
        if self._movement is None and chosen.movement.name != "native":
            _log.info("kvferry: %s is filled by one thread, because %s", context.name, chosen.why)
        return region

    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        batch = Batch(tuple(copies), deadline, self._locate)
        with self._changed:
            if self._state is not _State.OPEN:
                raise KVFerryError(
                    f"the staging is {self._state.value}", kind=ErrorKind.CLOSED, remedy="open it first"
                )
            self._batches.append(batch)
            self._changed.notify_all()
        return batch.ticket

    def close(self, deadline: float) -> None:
        with self._changed:
            if self._state is _State.NEW:
                self._state = _State.CLOSED
            elif self._state is _State.OPEN:
                self._state = _State.CLOSING
                self._changed.notify_all()
        if self._state is _State.CLOSED or self._thread is None:
            return
        context, arena = self._opened()
        self._thread.join(max(0.0, deadline - context.clock()))
        if self._thread.is_alive():
            raise KVFerryError(
                "the staging did not end by the deadline",
                kind=ErrorKind.TIMEOUT,
                where=context.name,
                why="a copy is under way",
                remedy="keep the memory, and close it again",
                retry=Retry.LATER,
            )
        arena.close()
        self._region = None
        self._state = _State.CLOSED

    # -- the thread --------------------------------------------------------------------------------

    def _run(self, movement: Movement) -> None:
        while (batch := self._next()) is not None:
            if not self._goes_on(batch, movement):
                batch.complete()
                continue
            with self._changed:
                self._batches.append(batch)

    def _next(self) -> Batch | None:
        """Whose turn it is; ``None`` at the end."""
        with self._changed:
            while not self._batches:
                if self._state in (_State.CLOSING, _State.CLOSED):
                    return None
                self._changed.wait()
            return self._batches.popleft()

    def _goes_on(self, batch: Batch, movement: Movement) -> bool:
        """Copy a part of a batch; whether there is more of it."""
        refusal = self._refusal(batch)
        if refusal is None:
            try:
                copies = batch.take(BYTES_AT_ONCE)
                if copies.to:
                    movement.copy(copies, self._options.threads)
                batch.advance()
            except Exception as error:  # noqa: BLE001 - a batch ends whatever happens
                refusal = _defect(error)
        if refusal is not None:
            batch.fail_rest(refusal)
        return not batch.over

    def _refusal(self, batch: Batch) -> KVFerryError | None:
        """Why nothing more of a batch begins."""
        context, _ = self._opened()
        if self._state is _State.CLOSING:
            return KVFerryError("the staging was closed first", kind=ErrorKind.CLOSED, where=context.name)
        if batch.ticket.cancelled:
            return KVFerryError("the copies were cancelled", kind=ErrorKind.CANCELLED, where=context.name)
        if context.clock() >= batch.deadline:
            return KVFerryError(
                "their deadline had passed",
                kind=ErrorKind.TIMEOUT,
                where=context.name,
                retry=Retry.LATER,
            )
        return None

    def _locate(self, copy: StageCopy) -> tuple[int, int]:
        context, arena = self._opened()
        region = self._region
        assert region is not None, "nothing is copied once the memory is given back"
        span = copy.source
        source = context.regions.get(span.region)
        if source is None:
            raise _outside(copy, context.name, f"there is no region {span.region!r}")
        if span.offset < 0 or span.length < 0 or span.offset + span.length > source.length:
            raise _outside(copy, context.name, f"the region {span.region!r} has {source.length} bytes")
        if copy.offset < 0 or copy.offset + span.length > region.length:
            raise _outside(copy, context.name, f"the staging has {region.length} bytes")
        if source.kind is not MemoryKind.HOST:
            raise KVFerryError(
                f"the region {span.region!r} is memory of a device",
                kind=ErrorKind.UNSUPPORTED,
                where=context.name,
                remedy="keep the first tier in host memory",
                retry=Retry.AFTER_CHANGE,
            )
        if span.length and copy.offset + span.length > (ready := arena.ready_bytes()):
            raise KVFerryError(
                "the memory is not there yet",
                kind=ErrorKind.CAPACITY,
                where=context.name,
                why=f"{ready} of {region.length} bytes have been touched since the start",
                remedy="wait a moment",
                retry=Retry.LATER,
            )
        return region.address + copy.offset, source.address + span.offset

    def _opened(self) -> tuple[StagingContext, Arena]:
        assert self._context is not None, "open() was not called"
        assert self._arena is not None, "open() was not called"
        return self._context, self._arena


def _outside(copy: StageCopy, where: str, why: str) -> KVFerryError:
    return KVFerryError(
        f"{copy.source} cannot be copied to {copy.offset}",
        kind=ErrorKind.PROTOCOL,
        where=where,
        why=why,
        remedy="name bytes inside of both regions",
    )


def _defect(error: Exception) -> KVFerryError:
    fault = KVFerryError(
        "copying failed",
        kind=ErrorKind.INTERNAL,
        why=repr(error),
        remedy="report it to the author of the staging",
    )
    fault.__cause__ = error
    return fault
