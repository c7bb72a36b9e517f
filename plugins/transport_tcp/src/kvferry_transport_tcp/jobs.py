"""Batches under way, and the frames into which they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.api import ItemResult, KVFerryError, RemoteOp, Ticket, TransferStatus
from kvferry_transport_tcp.faults import DONE, failed
from kvferry_transport_tcp.registry import Registered
from kvferry_transport_tcp.wire import (
    MAX_BODY_BYTES,
    MAX_PIECES,
    NAME_OVERHEAD_BYTES,
    PIECE_BYTES,
    RemotePiece,
)

LEAST_FRAME_BYTES = 256 << 10
MOST_FRAME_BYTES = 4 << 20
"""Below, the work of Python for each frame shows; above, what several connections do at the same time is
too uneven. Measured over loopback."""
_LEAST_PIECE_BYTES = 64 << 10
"""A span is not cut for the sake of less room in a frame than this."""
_LARGEST_OFFSET = (1 << 64) - 1


class Piece(NamedTuple):
    """Part of one operation."""

    item: int
    """Of which operation of the batch."""
    memory: Registered
    start: int
    """Where it begins in the local region."""
    remote: RemotePiece

    @property
    def view(self) -> memoryview:
        return self.memory.view[self.start : self.start + self.remote.length]


class Job:
    """One batch. Everything but ``deadline`` and the ticket is touched under the connection's lock."""

    def __init__(self, ticket: Ticket[TransferStatus], deadline: float, *, writing: bool) -> None:
        self.ticket = ticket
        self.deadline = deadline
        self.writing = writing
        self.results: list[ItemResult[TransferStatus] | None] = [None] * ticket.items
        self.left = [0] * ticket.items
        """Pieces of each item that are not done."""
        self.open = ticket.items
        """Items without a result."""
        self.flying = 0
        """Frames that lanes have; while there is one, local spans may be touched."""
        self.completed = False
        self.watched: object = None

    @property
    def over(self) -> bool:
        """Whether nothing more needs to be sent."""
        return not self.open

    def done(self, item: int) -> None:
        """One piece of the item is done."""
        self.left[item] -= 1
        if not self.left[item]:
            self._set(item, DONE)

    def fail(self, item: int, error: KVFerryError) -> None:
        """The item has failed, unless it has a result."""
        self._set(item, failed(error))

    def fail_all(self, error: KVFerryError) -> None:
        """All items without a result have failed."""
        result = failed(error)
        for item in range(len(self.results)):
            self._set(item, result)

    def _set(self, item: int, result: ItemResult[TransferStatus]) -> None:
        if self.results[item] is None:
            self.results[item] = result
            self.open -= 1

    def to_complete(self) -> bool:
        """True once: when all items have results, and no lane has a frame."""
        if self.open or self.flying or self.completed:
            return False
        self.completed = True
        return True

    def complete(self) -> None:
        """Tell whoever asked. Not under a lock: listeners are called."""
        self.ticket.complete([result for result in self.results if result is not None])


class Frame:
    """Pieces of one job that go over one lane together."""

    def __init__(self, job: Job, pieces: list[Piece]) -> None:
        self.job = job
        self.pieces = pieces
        self.number = 0
        """Given when it is sent."""

    def wanted(self) -> list[Piece]:
        """Pieces whose items have no result yet."""
        return [piece for piece in self.pieces if self.job.results[piece.item] is None]


def frame_bytes(total: int, lanes: int) -> int:
    """How large the frames of a batch of ``total`` bytes should be."""
    return min(MOST_FRAME_BYTES, max(LEAST_FRAME_BYTES, -(-total // (2 * lanes))))


def remote_fits(operation: RemoteOp) -> bool:
    """Whether a frame can name the remote span at all; whether it exists knows its owner."""
    return 0 <= operation.offset <= _LARGEST_OFFSET - operation.local.length


def cut_into_frames(
    job: Job, operations: Sequence[tuple[int, RemoteOp, Registered]], size: int
) -> list[Frame]:
    """Frames of about ``size`` bytes each. Items are those of the job's batch."""
    frames: list[Frame] = []
    pieces: list[Piece] = []
    names: set[str] = set()
    room, body = size, 0

    def end() -> None:
        nonlocal pieces, names, room, body
        if pieces:
            frames.append(Frame(job, pieces))
        pieces, names, room, body = [], set(), size, 2 * NAME_OVERHEAD_BYTES

    end()
    for item, operation, memory in operations:
        at, left = 0, operation.local.length
        name_bytes = len(operation.region.encode()) + NAME_OVERHEAD_BYTES
        while left or not at:
            more = PIECE_BYTES + (0 if operation.region in names else name_bytes)
            full = len(pieces) == MAX_PIECES or body + more > MAX_BODY_BYTES
            if full or room < min(left, _LEAST_PIECE_BYTES):
                end()
            length = min(left, room)
            remote = RemotePiece(operation.region, operation.offset + at, length)
            pieces.append(Piece(item, memory, operation.local.offset + at, remote))
            job.left[item] += 1
            body += PIECE_BYTES + (0 if operation.region in names else name_bytes)
            names.add(operation.region)
            at, left, room = at + length, left - length, room - length
            if not left:
                break
    end()
    return frames
