"""Channels with one mistake each, over the one of the kit that has none."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvferry.api import (
    ChannelContext,
    Connection,
    ErrorKind,
    ItemResult,
    KVFerryError,
    Region,
    RemoteOp,
    RemoteRegion,
    Ticket,
    TransferStatus,
)
from kvferry.testing.memory_channel import MemoryChannel, MemoryConnection

Results = Sequence[ItemResult[TransferStatus]]


class WritesAfterCancelling(MemoryChannel):
    """What was cancelled is written all the same, when it is too late."""

    late: tuple[Any, ...] = ()

    def _result(self, job: Any, operation: RemoteOp) -> ItemResult[TransferStatus]:
        result = super()._result(job, operation)
        if result.error is not None and result.error.kind is ErrorKind.CANCELLED:
            self.late = (job.verb, operation, self.find(*operation.local))
        return result

    def _submit(self, *arguments: Any) -> Ticket[TransferStatus]:
        if self.late:
            verb, operation, region = self.late
            self.late = ()
            if verb == "read":
                ctypes.memset(region.region.address + operation.local.offset, 0, operation.local.length)
        return super()._submit(*arguments)


class IgnoresTheirBounds(MemoryChannel):
    """Of an operation that leaves the peer's region, moves the part that lies inside."""

    def _move(self, job: Any, operation: RemoteOp) -> None:
        length = operation.local.length
        self.find(*operation.local)
        known = {region.name: region.length for region in job.connection.peer.registered()}
        inside = known.get(operation.region, 0) - operation.offset
        if operation.offset >= 0 and 0 <= inside < length:
            operation = cut(operation, inside)
        super()._move(job, operation)


class IgnoresOurBounds(MemoryChannel):
    """Of an operation that leaves our region, moves the part that lies inside."""

    def _move(self, job: Any, operation: RemoteOp) -> None:
        _, offset, length = operation.local
        job.connection.peer.find(operation.region, operation.offset, 0)
        known = {region.name: region.length for region in self.registered()}
        inside = known.get(operation.local.region, 0) - offset
        if offset >= 0 and 0 <= inside < length:
            operation = cut(operation, inside)
        super()._move(job, operation)


def cut(operation: RemoteOp, length: int) -> RemoteOp:
    offset = operation.local.offset if length else 0
    local = operation.local._replace(length=length, offset=offset)
    return RemoteOp(local, operation.region, operation.offset if length else 0)


class IgnoresTheEpoch(MemoryChannel):
    """Knows a peer by its instance alone, and so takes its successor for it."""

    def open(self, context: ChannelContext) -> None:
        known = hashlib.blake2b(context.instance.encode(), digest_size=16).digest()
        super().open(ChannelContext(name=context.name, instance=context.instance, epoch=known))

    def connect(self, peer: bytes, deadline: float) -> MemoryConnection:
        found = super().connect(peer, deadline)
        return ToWhoeverIsThere(found.owner, found.peer, peer[-16:])


class ToWhoeverIsThere(MemoryConnection):
    def __init__(self, owner: MemoryChannel, peer: MemoryChannel, known: bytes) -> None:
        self.known = known
        super().__init__(owner, peer)

    @property
    def peer(self) -> MemoryChannel:
        return self.owner._network.channels.get(self.known, self.first)

    @peer.setter
    def peer(self, first: MemoryChannel) -> None:
        self.first = first


class IgnoresCancelling(MemoryChannel):
    """Does everything first."""

    def _demand_going_on(self, job: Any) -> None:
        try:
            super()._demand_going_on(job)
        except KVFerryError as error:
            if error.kind is not ErrorKind.CANCELLED:
                raise


class IgnoresDeadlines(MemoryChannel):
    """Does what comes too late."""

    def _demand_going_on(self, job: Any) -> None:
        try:
            super()._demand_going_on(job)
        except KVFerryError as error:
            if error.kind is not ErrorKind.TIMEOUT:
                raise


class MissesOddOffsets(MemoryChannel):
    """Takes the peer's byte before the one that is named, unless that is even."""

    def _move(self, job: Any, operation: RemoteOp) -> None:
        super()._move(job, operation)  # or what is wrong would be refused for another reason
        super()._move(job, operation._replace(offset=operation.offset & ~1))


class WritesWholeWords(MemoryChannel):
    """Writes some bytes more than were asked for, as long as the regions have them."""

    def _move(self, job: Any, operation: RemoteOp) -> None:
        super()._move(job, operation)
        local = operation.local._replace(length=operation.local.length + 7 & ~7)
        with suppress(KVFerryError):
            super()._move(job, operation._replace(local=local))


class SaysDoneBefore(MemoryChannel):
    """Says that a large operation is done when all but its last byte is."""

    def _move(self, job: Any, operation: RemoteOp) -> None:
        length = operation.local.length
        self.find(*operation.local)
        job.connection.peer.find(operation.region, operation.offset, length)
        super()._move(job, cut(operation, length - (length > 60_000)))


class KeepsWhatWasTakenBack(MemoryChannel):
    """A region that is deregistered can be named all the same."""

    def deregister(self, name: str) -> None:
        pass


class RemembersRegions(MemoryChannel):
    """A connection goes on with the regions that were there when it was made."""

    def connect(self, peer: bytes, deadline: float) -> MemoryConnection:
        connection = super().connect(peer, deadline)
        connection.known = dict(connection.peer._regions)  # type: ignore[attr-defined]
        return connection

    def _move(self, job: Any, operation: RemoteOp) -> None:
        peer = job.connection.peer
        now = dict(peer._regions)
        peer._regions.update(job.connection.known)
        for region in job.connection.known.values():
            region.gone = False
        try:
            super()._move(job, operation)
        finally:
            peer._regions.clear()
            peer._regions.update(now)


class ReplacesRegions(MemoryChannel):
    """A second region of a name takes the place of the first."""

    def register(self, region: Region) -> None:
        self._regions.pop(region.name, None)
        super().register(region)


class FailsTheWholeCall(MemoryChannel):
    """One operation that is refused takes its whole call along."""

    def _submit(self, *arguments: Any) -> Ticket[TransferStatus]:
        return retold(
            super()._submit(*arguments),
            lambda results: next(
                ([result] * len(results) for result in results if result.error is not None), results
            ),
        )


class SortsResults(MemoryChannel):
    """Tells of failures first."""

    def _submit(self, *arguments: Any) -> Ticket[TransferStatus]:
        return retold(
            super()._submit(*arguments),
            lambda results: sorted(results, key=lambda result: result.error is None),
        )


def retold(inner: Ticket[TransferStatus], change: Callable[[Results], Results]) -> Ticket[TransferStatus]:
    outer: Ticket[TransferStatus] = Ticket(inner.items)
    outer.on_cancel(lambda _ticket: inner.cancel())
    inner.on_done(lambda done: outer.complete(change(done.results)))
    return outer


class TakesAnyConnection(MemoryChannel):
    """Works over the connection of another channel."""

    def _submit(
        self, verb: str, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        if isinstance(connection, MemoryConnection) and connection.owner is not self:
            connection = MemoryConnection(self, connection.peer)
        return super()._submit(verb, connection, operations, deadline)


class LeavesTicketsOpen(MemoryChannel):
    """Forgets what has not begun when it is closed."""

    def close(self, deadline: float) -> None:
        with self._changed:
            self._jobs.clear()
        super().close(deadline)


class ConnectsToAnything(MemoryChannel):
    """Takes what begins like an export for one."""

    def connect(self, peer: bytes, deadline: float) -> MemoryConnection:
        return super().connect(peer[: len(self.export())], deadline)


class RegistersWithoutLimit(MemoryChannel):
    """Has no limit, whatever it claims."""

    def open(self, context: ChannelContext) -> None:
        self._limit = None
        super().open(context)


class ShowsNoRegions(MemoryChannel):
    """Its connections do not know what the peer registered."""

    def connect(self, peer: bytes, deadline: float) -> MemoryConnection:
        found = super().connect(peer, deadline)
        return WithoutRegions(found.owner, found.peer)


class WithoutRegions(MemoryConnection):
    def regions(self) -> Mapping[str, RemoteRegion]:
        return {}


class ReadsItself(MemoryChannel):
    """Takes our region for the peer's, if it bears the same name."""

    def _move(self, job: Any, operation: RemoteOp) -> None:
        super()._move(job, cut(operation, 0))
        if operation.region == operation.local.region:
            job = type(job)(job.verb, MemoryConnection(self, self), (), job.deadline, job.ticket)
        super()._move(job, operation)


class MixesUpOffsets(MemoryChannel):
    """Takes our offset for the peer's."""

    def _move(self, job: Any, operation: RemoteOp) -> None:
        job.connection.peer.find(operation.region, operation.offset, operation.local.length)
        super()._move(job, operation._replace(offset=operation.local.offset))
