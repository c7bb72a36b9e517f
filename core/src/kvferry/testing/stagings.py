"""Stand-ins for stagings."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.api import (
    ErrorKind,
    ItemResult,
    KVFerryError,
    Region,
    StageCopy,
    Staging,
    StagingContext,
    Ticket,
    TransferStatus,
)


class NullStaging:
    """Has no memory: every copy fails at once with the kind ``CAPACITY``."""

    def open(self, context: StagingContext) -> Region:
        return Region(name=context.name, address=0, length=0)

    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        ticket: Ticket[TransferStatus] = Ticket(len(copies))
        ticket.complete([ItemResult(TransferStatus.FAILED, _no_room())] * len(copies))
        return ticket

    def close(self, deadline: float) -> None:
        pass


class ForwardingStaging:
    """Passes every call on to ``inner``. Override what a test wants to see or to change."""

    def __init__(self, inner: Staging) -> None:
        self.inner = inner

    def open(self, context: StagingContext) -> Region:
        return self.inner.open(context)

    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        return self.inner.stage(copies, deadline)

    def close(self, deadline: float) -> None:
        self.inner.close(deadline)


def _no_room() -> KVFerryError:
    return KVFerryError("there is no memory to stage into", kind=ErrorKind.CAPACITY, where="null staging")
