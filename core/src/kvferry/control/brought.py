"""Where chunks came from that were brought into the first tier lately."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from kvferry.control.outcomes import ChunkFacts

KEPT = 16384
"""Names of chunks. A chunk is asked for soon after it came: by those who waited for it."""


class Source(enum.Enum):
    """Where a chunk came from."""

    TIER = "tier"
    """A tier below the first."""
    PEER = "peer"
    """The memory of another instance."""


class Brought:
    """The last chunks that came up, by all names under which they can be found. For statistics.

    Noted under the manager's lock, and asked from any thread.
    """

    def __init__(self) -> None:
        self._sources: dict[bytes, Source] = {}

    def note(self, chunks: Iterable[ChunkFacts], source: Source) -> None:
        """These have come. What was noted of them before is forgotten."""
        for chunk in chunks:
            for name in (chunk.digest, *(alias for alias, _tokens in chunk.aliases)):
                self._sources.pop(name, None)
                self._sources[name] = source
        while len(self._sources) > KEPT:
            del self._sources[next(iter(self._sources))]

    def source(self, digest: bytes) -> Source | None:
        """Where the chunk came from, ``None`` if it did not come lately."""
        return self._sources.get(digest)
