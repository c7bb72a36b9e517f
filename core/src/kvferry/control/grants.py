"""What a peer was lent, and how it is told of it."""

from __future__ import annotations

from attrs import define

from kvferry.api import Grant, LentChunk, PeerId
from kvferry.control.outcomes import ChunkFacts

ARENA, STAGING = "arena", "staging"
"""The names under which each rank registers its first tier, or its staging in place of it."""


@define(eq=False)
class Lent:
    """What one peer may read, and until when."""

    peer: PeerId
    lease: int | None
    """The manager's number; ``None`` for slots of the staging."""
    chunks: tuple[ChunkFacts, ...]
    slots: tuple[int, ...]
    tokens: int
    deadline: float
    last_end: float
    """It is not renewed beyond this time."""

    def grant(self, number: int, now: float) -> Grant:
        """The answer to the ask of that number, with the time that is left."""
        return Grant(
            number=number,
            chunks=tuple(_told(chunk, now) for chunk in self.chunks),
            slots=self.slots,
            tokens=self.tokens,
            seconds=self.deadline - now,
            region=STAGING if self.lease is None else ARENA,
        )


def _told(chunk: ChunkFacts, now: float) -> LentChunk:
    return LentChunk(
        digest=chunk.digest,
        parent=chunk.parent,
        depth=chunk.depth,
        tokens=chunk.tokens,
        aliases=chunk.aliases,
        model=chunk.model,
        seconds=max(0.0, chunk.end - now),
    )
