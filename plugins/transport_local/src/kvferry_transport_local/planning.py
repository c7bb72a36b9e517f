"""What each operation of a batch stands on, and whether it may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.api import KVFerryError, RemoteOp
from kvferry_transport_local.batches import Batch
from kvferry_transport_local.copying import Piece, check_span
from kvferry_transport_local.failures import outside
from kvferry_transport_local.link import Link
from kvferry_transport_local.regions import Regions, Registered
from kvferry_transport_local.remote import RemoteMemory, Way


class _Found(NamedTuple):
    local: Registered | None
    remote: RemoteMemory | None
    error: KVFerryError | None


class Planner:
    """Threads: any."""

    def __init__(self, regions: Regions, where: str) -> None:
        self._regions = regions
        self._where = where

    def knows(self, link: Link, operations: Sequence[RemoteOp]) -> bool:
        """Whether all regions of the peer are known and current here. If not, it pays to ask the peer what
        it has: it may have said so already, and nobody here has read it yet."""
        names = {operation.region for operation in operations}
        return all((found := link.memory(name)) is not None and found.current for name in names)

    def plan(self, batch: Batch, link: Link, operations: Sequence[RemoteOp], reading: bool) -> list[Piece]:
        """One piece for each operation that moves something. The others are over by this."""
        pieces: list[Piece] = []
        done: list[int] = []
        for number, operation in enumerate(operations):
            local, remote, error = self._find(link, operation)
            if error is None and reading and remote is not None and remote.way is Way.REFUSED:
                error = remote.refusal()
            if error is not None or local is None or remote is None:
                batch.fail(number, error or link.error())
                continue
            batch.sides[number] = (local, remote)
            span = operation.local
            if span.length == 0:
                done.append(number)
            else:
                pieces.append(Piece(number, local, span.offset, remote, operation.offset, span.length))
        batch.advance(done)
        return pieces

    def _find(self, link: Link, operation: RemoteOp) -> _Found:
        span = operation.local
        local = self._regions.find(span.region)
        if local is None:
            why = f"there is no region {span.region!r} here"
            return _Found(None, None, outside("what is registered", self._where, why))
        if (why := check_span(span.offset, span.length, local.region.length)) != "":
            return _Found(local, None, outside(f"our region {span.region!r}", self._where, why))
        remote = link.memory(operation.region)
        if remote is None or not remote.current:
            if link.look():
                return _Found(local, None, link.error())
            why = f"the peer has no region {operation.region!r}"
            return _Found(local, None, outside("what is registered", link.where, why))
        if (why := check_span(operation.offset, span.length, remote.length)) != "":
            return _Found(local, remote, outside(f"the peer's region {remote.name!r}", link.where, why))
        return _Found(local, remote, None)
