"""A channel between peers of one process, for tests: what the contract demands, with nothing else to it."""

from __future__ import annotations

import ctypes
import enum
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from attrs import define, field, frozen

from kvferry.api import (
    ChannelContext,
    Connection,
    ErrorKind,
    ItemResult,
    KVFerryError,
    MemoryKind,
    Region,
    RemoteOp,
    RemoteRegion,
    Retry,
    Ticket,
    TransferStatus,
)

_MAGIC = b"kvferry-memory-1\n"
_NAME_BYTES = 20
_PIECE = 1 << 20
"""Bytes that are copied between two looks at deadline, cancelling and closing."""


@define(eq=False)
class MemoryNetwork:
    """Who can be reached: the open channels that were made with this object, by epoch and rank. Threads:
    any."""

    channels: dict[bytes, MemoryChannel] = field(factory=dict)


@frozen(kw_only=True)
class MemoryChannelOptions:
    """What a :class:`MemoryChannel` is made with."""

    network: MemoryNetwork = field(factory=MemoryNetwork)
    """Peers meet in it."""
    max_registered_bytes: int | None = None


@define(eq=False)
class _Registered:
    """A region as long as it is registered. Pieces are copied under the lock, so whoever sets ``gone``
    under it knows that nothing touches the memory any more."""

    region: Region
    gone: bool = False
    lock: threading.Lock = field(factory=threading.Lock)


class MemoryConnection:
    """The way to one peer, in one epoch of it."""

    def __init__(self, owner: MemoryChannel, peer: MemoryChannel) -> None:
        self.owner = owner
        self.peer = peer
        self.closed = False
        self.lock = threading.Lock()
        """Held while a piece is copied."""

    @property
    def alive(self) -> bool:
        return not self.closed and self.peer.is_open

    def regions(self) -> Mapping[str, RemoteRegion]:
        return {
            region.name: RemoteRegion(name=region.name, length=region.length, kind=region.kind)
            for region in self.peer.registered()
        }

    def close(self) -> None:
        with self.lock:
            self.closed = True


class _State(enum.Enum):
    NEW = "not open yet"
    OPEN = "open"
    CLOSING = "being closed"
    CLOSED = "closed"


@define(eq=False)
class _Job:
    verb: str
    connection: MemoryConnection
    operations: tuple[RemoteOp, ...]
    deadline: float
    ticket: Ticket[TransferStatus]


class MemoryChannel:
    """A :class:`kvferry.api.Channel` whose peers are other ``MemoryChannel`` of the same
    :class:`MemoryNetwork`. One thread of its own does the operations, one after the other."""

    def __init__(self, options: MemoryChannelOptions) -> None:
        self._network = options.network
        self._limit = options.max_registered_bytes
        self._state = _State.NEW
        self._context: ChannelContext | None = None
        self._regions: dict[str, _Registered] = {}
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None

    # -- the contract ----------------------------------------------------------------------------

    def open(self, context: ChannelContext) -> None:
        with self._changed:
            if self._state is not _State.NEW:
                raise KVFerryError(
                    "a channel is opened once",
                    kind=ErrorKind.INTERNAL,
                    where=context.name,
                    why=f"it is {self._state.value}",
                    remedy="make another one",
                )
            self._context = context
            self._state = _State.OPEN
        self._worker = threading.Thread(target=self._work, name=f"kvferry-{context.name}", daemon=True)
        self._worker.start()
        self._network.channels[_name(context)] = self

    def register(self, region: Region) -> None:
        with self._changed:
            self._demand_open()
            if region.name in self._regions:
                raise KVFerryError(
                    f"the region {region.name!r} is registered already",
                    kind=ErrorKind.INTERNAL,
                    remedy="deregister it first, or use another name",
                )
            if region.kind is not MemoryKind.HOST:
                raise KVFerryError(
                    f"the region {region.name!r} is memory of a device",
                    kind=ErrorKind.UNSUPPORTED,
                    remedy="register host memory",
                )
            used = sum(each.region.length for each in self._regions.values())
            if self._limit is not None and used + region.length > self._limit:
                raise KVFerryError(
                    f"{region.length} bytes cannot be registered",
                    kind=ErrorKind.CAPACITY,
                    why=f"{used} bytes of at most {self._limit} are registered",
                    remedy="register less, or stage through a smaller region",
                )
            self._regions[region.name] = _Registered(region)

    def deregister(self, name: str) -> None:
        with self._changed:
            found = self._regions.pop(name, None)
        if found is not None:
            with found.lock:
                found.gone = True

    def export(self) -> bytes:
        with self._changed:
            return _MAGIC + _name(self._demand_open())

    def connect(self, peer: bytes, deadline: float) -> MemoryConnection:
        with self._changed:
            context = self._demand_open()
        if not peer.startswith(_MAGIC) or len(peer) != len(_MAGIC) + _NAME_BYTES:
            raise KVFerryError("no memory channel exported this", kind=ErrorKind.PROTOCOL)
        if context.clock() >= deadline:
            raise KVFerryError("the deadline had passed", kind=ErrorKind.TIMEOUT, retry=Retry.LATER)
        found = self._network.channels.get(peer[len(_MAGIC) :])
        if found is None:
            raise KVFerryError("nobody is there", kind=ErrorKind.IO, retry=Retry.LATER)
        return MemoryConnection(self, found)

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        return self._submit("read", connection, operations, deadline)

    def write(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        return self._submit("write", connection, operations, deadline)

    def close(self, deadline: float) -> None:
        with self._changed:
            if self._state is _State.OPEN:
                self._state = _State.CLOSING
                self._changed.notify_all()
            elif self._state is _State.NEW:
                self._state = _State.CLOSED
            worker, context = self._worker, self._context
        if worker is None or context is None:
            return
        self._network.channels.pop(_name(context), None)
        worker.join(max(0.0, deadline - context.clock()))
        if worker.is_alive():
            raise KVFerryError(
                "an operation is still under way",
                kind=ErrorKind.TIMEOUT,
                where=context.name,
                remedy="leave the memory alone and close again later",
                retry=Retry.LATER,
            )
        for name in list(self._regions):
            self.deregister(name)
        self._state = _State.CLOSED

    # -- for peers -------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._state is _State.OPEN

    def registered(self) -> list[Region]:
        with self._changed:
            return [each.region for each in self._regions.values()]

    def find(self, region: str, offset: int, length: int) -> _Registered:
        """The region that has these bytes. Raises :class:`KVFerryError` (``PROTOCOL``)."""
        with self._changed:
            found = self._regions.get(region)
        why = ""
        if found is None:
            why = f"there is no region {region!r}"
        elif offset < 0 or length < 0 or offset + length > found.region.length:
            why = f"the region {region!r} has {found.region.length} bytes"
        if found is None or why:
            raise KVFerryError(
                f"{length} bytes at {offset} of {region!r} cannot be named", kind=ErrorKind.PROTOCOL, why=why
            )
        return found

    # -- the work --------------------------------------------------------------------------------

    def _demand_open(self) -> ChannelContext:
        if self._state is not _State.OPEN or self._context is None:
            raise KVFerryError(
                f"the channel is {self._state.value}", kind=ErrorKind.CLOSED, remedy="open it first"
            )
        return self._context

    def _submit(
        self, verb: str, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        kept = tuple(operations)
        ticket: Ticket[TransferStatus] = Ticket(len(kept))
        with self._changed:
            self._demand_open()
            if not isinstance(connection, MemoryConnection) or connection.owner is not self:
                raise KVFerryError("the connection is another channel's", kind=ErrorKind.INTERNAL)
            self._jobs.append(_Job(verb, connection, kept, deadline, ticket))
            self._changed.notify_all()
        return ticket

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._state is not _State.OPEN:
                        return
                    self._changed.wait()
                job = self._jobs.popleft()
            job.ticket.complete([self._result(job, operation) for operation in job.operations])

    def _result(self, job: _Job, operation: RemoteOp) -> ItemResult[TransferStatus]:
        try:
            try:
                self._demand_going_on(job)
                self._move(job, operation)
            except KVFerryError:
                self._demand_going_on(job)  # of a peer that has gone meanwhile the regions are gone too
                raise
        except KVFerryError as error:
            return ItemResult(TransferStatus.FAILED, error.with_traceback(None))
        return ItemResult(TransferStatus.DONE)

    def _move(self, job: _Job, operation: RemoteOp) -> None:
        """One operation. Raises :class:`KVFerryError`, the bytes of both sides being left alone from then
        on."""
        span = operation.local
        near = self.find(span.region, span.offset, span.length)
        far = job.connection.peer.find(operation.region, operation.offset, span.length)
        ours, theirs = near.region.address + span.offset, far.region.address + operation.offset
        target, source = (ours, theirs) if job.verb == "read" else (theirs, ours)
        for done in range(0, span.length, _PIECE):
            with _held(near, far), job.connection.lock:
                self._demand_going_on(job)
                if near.gone or far.gone:
                    raise KVFerryError("a region was deregistered", kind=ErrorKind.PROTOCOL)
                ctypes.memmove(target + done, source + done, min(_PIECE, span.length - done))

    def _demand_going_on(self, job: _Job) -> None:
        context = self._context
        assert context is not None
        if self._state is not _State.OPEN:
            raise KVFerryError("the channel was closed first", kind=ErrorKind.CLOSED)
        if job.connection.closed:
            raise KVFerryError("the connection was closed", kind=ErrorKind.CLOSED)
        if job.ticket.cancelled:
            raise KVFerryError("the call was cancelled", kind=ErrorKind.CANCELLED)
        if context.clock() >= job.deadline:
            raise KVFerryError("the deadline had passed", kind=ErrorKind.TIMEOUT, retry=Retry.LATER)
        if not job.connection.alive:
            raise KVFerryError("the peer is gone", kind=ErrorKind.IO, retry=Retry.LATER)


@contextmanager
def _held(*regions: _Registered) -> Iterator[None]:
    """Hold the locks of regions, always in the same order."""
    ordered = sorted(set(regions), key=id)
    for region in ordered:
        region.lock.acquire()
    try:
        yield
    finally:
        for region in ordered:
            region.lock.release()


def _name(context: ChannelContext) -> bytes:
    """Of one rank in one epoch."""
    return context.rank.to_bytes(4, "big") + context.epoch


def make_memory_channels(
    network: MemoryNetwork | None = None, max_registered_bytes: int | None = None
) -> Callable[[], MemoryChannel]:
    """Makes channels that reach each other."""
    options = MemoryChannelOptions(
        network=network or MemoryNetwork(), max_registered_bytes=max_registered_bytes
    )
    return lambda: MemoryChannel(options)
