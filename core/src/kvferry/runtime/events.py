"""What a tier's content became, told in an order that an index elsewhere can follow."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable

from attrs import frozen

from kvferry.control.events import CacheFact, ClearedFact, RemovedFact, StoredFact
from kvferry.control.keys import KeyChain, MediaItem

FACTS_KEPT = 16_384
"""Facts that wait while the engine takes no step: about a kilobyte each with chunks of 256 tokens."""
FACTS_PER_STEP = 1_024
"""Facts that one step publishes: some milliseconds of the scheduler's time."""


@frozen
class ChunkContent:
    """What a chunk holds: token ids, 4 bytes each, little-endian, and the media items within it."""

    tokens: bytes
    media: tuple[MediaItem, ...] = ()

    @classmethod
    def of(cls, chain: KeyChain, chunk: int) -> ChunkContent:
        return cls(chain.packed_tokens(chunk), chain.media_in(chunk))

    @property
    def token_ids(self) -> list[int]:
        ids = array.array("I", self.tokens)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tolist()


@frozen
class StoredRun:
    """Neighbouring full chunks of one chain, which can be found from now on.

    ``parent`` is the chunk before the first of them, which was told of before; ``None`` at the start
    of a chain. ``depth`` is the place of the first in its chain. One item of ``contents`` per chunk.
    """

    digests: tuple[bytes, ...]
    parent: bytes | None
    depth: int
    salt: str
    model: str
    contents: tuple[ChunkContent, ...]


@frozen
class RemovedChunks:
    """Chunks that cannot be found any more, none before those that stood behind it."""

    digests: tuple[bytes, ...]


@frozen
class ForgetAll:
    """More happened than was kept: forget all that was told. What is stored or used from now on is
    told of anew."""


CacheEvent = StoredRun | RemovedChunks | ForgetAll


def grouped(facts: Iterable[CacheFact]) -> list[CacheEvent]:
    """Neighbouring facts of one kind as one event; chunks only where each stands on the one before."""
    events: list[CacheEvent] = []
    run: list[StoredFact] = []
    gone: list[bytes] = []

    def close() -> None:
        if run:
            events.append(_stored(run))
        if gone:
            events.append(RemovedChunks(tuple(gone)))
        run.clear()
        gone.clear()

    for fact in facts:
        if isinstance(fact, StoredFact):
            if gone or (run and run[-1].digest != fact.parent):
                close()
            run.append(fact)
        elif isinstance(fact, RemovedFact):
            if run:
                close()
            gone.append(fact.digest)
        else:
            assert isinstance(fact, ClearedFact)
            close()
            events.append(ForgetAll())
    close()
    return events


def _stored(run: list[StoredFact]) -> StoredRun:
    first = run[0]
    contents = tuple(fact.content for fact in run if isinstance(fact.content, ChunkContent))
    assert len(contents) == len(run), "a chunk was stored without its content"
    digests = tuple(fact.digest for fact in run)
    return StoredRun(digests, first.parent, first.depth, first.salt, first.model, contents)
