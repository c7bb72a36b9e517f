"""Copies pieces from a peer's memory into ours, and says which of them count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvferry.api import KVFerryError
from kvferry_transport_local.batches import Batch
from kvferry_transport_local.failures import defect, gone, overdue, taken_back, unmoved
from kvferry_transport_local.link import Link
from kvferry_transport_local.moving import Copies, Movement
from kvferry_transport_local.pool import Step
from kvferry_transport_local.regions import Regions, Registered
from kvferry_transport_local.remote import RemoteMemory, Way

LARGEST_STEP = 4 << 20
"""Bytes between two looks at the deadline and the wish to cancel: less than a millisecond's work."""
SMALLEST_STEP = 1 << 20
"""What is worth a thread of its own."""
MOST_PIECES = 256


class Piece(NamedTuple):
    """``length`` bytes from ``source`` of the peer's region to ``to`` of ours, as part of an operation."""

    number: int
    local: Registered
    to: int
    remote: RemoteMemory
    source: int
    length: int


class Copier:
    """Cuts operations into steps and does them. Threads: any."""

    def __init__(
        self, regions: Regions, movement: Movement, threads: int, clock: Callable[[], float], where: str
    ) -> None:
        self._regions = regions
        self._movement = movement
        self._threads = threads
        self._clock = clock
        self._where = where

    def steps(self, batch: Batch, link: Link, whole: Sequence[Piece]) -> list[Step]:
        """Each of ``whole`` is one operation of the batch."""
        total = sum(piece.length for piece in whole)
        room = min(LARGEST_STEP, max(SMALLEST_STEP, -(-total // self._threads)))
        steps: list[Step] = []
        for way in (Way.MAPPED, Way.CROSS_PROCESS):
            cut: list[Piece] = []
            for piece in whole:
                if piece.remote.way is not way:
                    continue
                if piece.length <= room:
                    cut.append(piece)
                    continue
                parts = range(0, piece.length, room)
                batch.expect(piece.number, len(parts))
                cut += (
                    piece._replace(
                        to=piece.to + at, source=piece.source + at, length=min(room, piece.length - at)
                    )
                    for at in parts
                )
            steps += (self._step(batch, link, way, lot) for lot in _lots(cut, room))
        return steps

    def _step(self, batch: Batch, link: Link, way: Way, pieces: Sequence[Piece]) -> Step:
        def run() -> None:
            live = batch.begin({piece.number for piece in pieces})
            try:
                chosen = [piece for piece in pieces if piece.number in live]
                if chosen:
                    self._copy(batch, link, way, chosen)
            except Exception as error:  # noqa: BLE001 - no fault may keep a batch from ending
                batch.abort(defect(error, "copying", self._where))
            finally:
                batch.pause()

        return run

    def _copy(self, batch: Batch, link: Link, way: Way, pieces: Sequence[Piece]) -> None:
        if self._clock() >= batch.deadline:
            batch.abort(overdue(self._where))
            return
        if not link.alive:
            batch.abort(link.error())
            return
        local = self._regions.enter({piece.local for piece in pieces})
        remote = {each for each in {piece.remote for piece in pieces} if each.current and each.enter()}
        try:
            allowed = [piece for piece in pieces if piece.local in local and piece.remote in remote]
            failed = self._move(link.pid, way, allowed)
            self._judge(batch, link, pieces, allowed, failed)
        finally:
            for each in remote:
                each.leave()
            self._regions.leave(local)

    def _move(self, pid: int, way: Way, pieces: Sequence[Piece]) -> dict[int, KVFerryError]:
        """Operations of which the system did not copy a piece."""
        if not pieces:
            return {}
        copies = Copies(
            [piece.local.region.address + piece.to for piece in pieces],
            [piece.remote.base + piece.source for piece in pieces],
            [piece.length for piece in pieces],
        )
        if way is Way.MAPPED:
            self._movement.copy(copies)
            return {}
        moved = self._movement.read(pid, copies)
        return {
            piece.number: unmoved(piece.remote.name, self._where, -result)
            for piece, result in zip(pieces, moved, strict=True)
            if result < 0
        }

    def _judge(
        self,
        batch: Batch,
        link: Link,
        pieces: Sequence[Piece],
        allowed: Sequence[Piece],
        failed: dict[int, KVFerryError],
    ) -> None:
        """Behind the copy, in this order: the memory, the peer, the deadline. Only what nothing speaks
        against is in place."""
        moved = set(allowed)
        stale = {remote for remote in {piece.remote for piece in pieces} if not remote.current}
        if (why := link.look()) != "":
            batch.abort(gone(self._where, why))
            return
        good: list[int] = []
        for piece in pieces:
            if piece.remote in stale:
                batch.fail(piece.number, taken_back(piece.remote.name, self._where))
            elif piece not in moved:
                batch.fail(piece.number, taken_back(piece.local.region.name, self._where))
            elif piece.number in failed:
                batch.fail(piece.number, failed[piece.number])
            else:
                good.append(piece.number)
        if self._clock() >= batch.deadline:
            batch.abort(overdue(self._where))
        batch.advance(good)


def _lots(pieces: Iterable[Piece], room: int) -> Iterable[Sequence[Piece]]:
    """In order, each with at most ``room`` bytes and so many pieces as one call should take."""
    lot: list[Piece] = []
    held = 0
    for piece in pieces:
        if lot and (held + piece.length > room or len(lot) == MOST_PIECES):
            yield lot
            lot, held = [], 0
        lot.append(piece)
        held += piece.length
    if lot:
        yield lot


def check_span(offset: int, length: int, whole: int) -> str:
    """Why a span is not inside of a region of ``whole`` bytes; empty when it is."""
    if offset < 0 or length < 0 or offset + length > whole:
        return f"{length} bytes from {offset} on are asked for, and it has {whole}"
    return ""
