"""Stand-ins for channels and connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.api import (
    Channel,
    ChannelContext,
    Connection,
    ErrorKind,
    ItemResult,
    KVFerryError,
    Region,
    RemoteOp,
    RemoteRegion,
    Retry,
    Ticket,
    TransferStatus,
)


class NullConnection:
    """Leads to nobody."""

    @property
    def alive(self) -> bool:
        return False

    def regions(self) -> Mapping[str, RemoteRegion]:
        return {}

    def close(self) -> None:
        pass


class NullChannel:
    """Reaches nobody: connecting raises the kind ``IO``, and every operation fails at once, likewise. Needs
    no opening."""

    def open(self, context: ChannelContext) -> None:
        pass

    def register(self, region: Region) -> None:
        pass

    def deregister(self, name: str) -> None:
        pass

    def export(self) -> bytes:
        return b"null"

    def connect(self, peer: bytes, deadline: float) -> Connection:
        raise _nobody()

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        return _failed(len(operations))

    def write(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        return _failed(len(operations))

    def close(self, deadline: float) -> None:
        pass


class ForwardingConnection:
    """Passes every call on to ``inner``. Override what a test wants to see or to change."""

    def __init__(self, inner: Connection) -> None:
        self.inner = inner

    @property
    def alive(self) -> bool:
        return self.inner.alive

    def regions(self) -> Mapping[str, RemoteRegion]:
        return self.inner.regions()

    def close(self) -> None:
        self.inner.close()


class ForwardingChannel:
    """Passes every call on to ``inner``. Override what a test wants to see or to change."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner

    def open(self, context: ChannelContext) -> None:
        self.inner.open(context)

    def register(self, region: Region) -> None:
        self.inner.register(region)

    def deregister(self, name: str) -> None:
        self.inner.deregister(name)

    def export(self) -> bytes:
        return self.inner.export()

    def connect(self, peer: bytes, deadline: float) -> Connection:
        return self.inner.connect(peer, deadline)

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        return self.inner.read(connection, operations, deadline)

    def write(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        return self.inner.write(connection, operations, deadline)

    def close(self, deadline: float) -> None:
        self.inner.close(deadline)


def _failed(items: int) -> Ticket[TransferStatus]:
    ticket: Ticket[TransferStatus] = Ticket(items)
    ticket.complete([ItemResult(TransferStatus.FAILED, _nobody())] * items)
    return ticket


def _nobody() -> KVFerryError:
    return KVFerryError(
        "there is no peer to reach",
        kind=ErrorKind.IO,
        where="null channel",
        remedy="choose another channel",
        retry=Retry.AFTER_CHANGE,
    )
