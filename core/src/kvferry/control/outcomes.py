"""What the control plane is asked and what it answers: frozen values and closed enums."""

from __future__ import annotations

import enum
from typing import NamedTuple

from attrs import frozen


class LeaseOutcome(enum.Enum):
    """Answer to whoever holds the number of a lease or of a reservation."""

    OK = "ok"
    DEFERRED = "deferred"
    """Workers may still be at the slots; the lease ends with their result."""
    LATE = "late"
    """The reservation had expired or was given up. Its slots are free now; nothing became visible."""
    ENDED = "ended"
    """It had ended before. Nothing changed."""
    UNKNOWN = "unknown"
    """Never handed out. Nothing changed."""


@frozen
class Match:
    """The longest prefix that can be restored, leased to whoever asked.

    ``slots`` in chunk order, all of ``chunk_tokens`` tokens except perhaps the last. ``tokens`` in
    total, a whole number of blocks. ``lease`` is ``None`` exactly when ``tokens`` is 0.
    """

    lease: int | None
    slots: tuple[int, ...]
    tokens: int
    chunk_tokens: int

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(slot, tokens to use of it) in chunk order."""
        if not self.slots:
            return ()
        last = self.tokens - (len(self.slots) - 1) * self.chunk_tokens
        full = tuple((slot, self.chunk_tokens) for slot in self.slots[:-1])
        return (*full, (self.slots[-1], last))


@frozen
class ChunkWrite:
    """One chunk that somebody wants to store.

    ``parent`` is the digest of the full chunk before it, ``None`` at ``depth`` 0. ``tokens`` is a
    whole number of blocks; fewer than a full chunk make it a tail. ``aliases`` are the digests of its
    leading blocks with their tokens, so that a prompt which ends inside the chunk hits too.
    """

    digest: bytes
    parent: bytes | None
    depth: int
    tokens: int
    aliases: tuple[tuple[bytes, int], ...] = ()


@frozen
class ChunkFacts:
    """All that is known of a chunk in some tier: what another tier needs to keep it, too.

    ``end`` is when its time to live ends, in the manager's seconds; infinity if never. The rest is as
    for :class:`ChunkWrite`, with the salt and the model (empty for the base model) that it belongs to.
    """

    digest: bytes
    parent: bytes | None
    depth: int
    tokens: int
    aliases: tuple[tuple[bytes, int], ...]
    salt: str
    model: str
    end: float

    @property
    def write(self) -> ChunkWrite:
        return ChunkWrite(self.digest, self.parent, self.depth, self.tokens, self.aliases)


@frozen
class Lent:
    """Chunks that somebody copies elsewhere: their slots stay as they are until the lease ends by
    :meth:`CacheManager.finish_load`."""

    lease: int
    chunks: tuple[ChunkFacts, ...]
    slots: tuple[int, ...]


class WriteOutcome(enum.Enum):
    GRANTED = "granted"
    RESIDENT = "resident"
    """Can be found already; nothing to do."""
    BUSY = "busy"
    """Somebody else is writing it."""
    NO_ROOM = "no-room"
    """The tier is full of chunks in use; so are all behind it in its chain."""
    NO_PARENT = "no-parent"
    """The chunk before it is neither resident nor being written for this salt."""
    OVER_QUOTA = "over-quota"
    """Its owner holds all that it may, and all of that is in use; so are all behind it in its chain."""


class PinOutcome(enum.Enum):
    PINNED = "pinned"
    """The chunk and all before it stay until the pin ends, or somebody clears or drops them."""
    ABSENT = "absent"
    """The chunk is neither resident nor being written. Nothing changed."""
    NO_ROOM = "no-room"
    """As much as may be pinned, is. What fitted, from the head, is pinned."""


class WriteAnswer(NamedTuple):
    outcome: WriteOutcome
    slot: int = -1
    """Where to write; -1 unless granted."""


@frozen
class Reservation:
    """``items`` answer the writes one by one. ``id`` is ``None`` when nothing was granted."""

    id: int | None
    items: tuple[WriteAnswer, ...]


@frozen
class Completion:
    """What a result of writes led to, in chunks.

    ``visible`` can be found from now on (chunks of other reservations that waited for these
    included), ``waiting`` are written but wait for a chunk before them, ``freed`` were given up.
    """

    outcome: LeaseOutcome
    visible: int = 0
    waiting: int = 0
    freed: int = 0


@frozen
class Removed:
    """``removed`` chunks are gone. ``kept`` cannot be found any more either, but stay where they are
    until the last lease on them ends. ``doomed`` writes under way will not become visible."""

    removed: int
    kept: int
    doomed: int

    @property
    def chunks(self) -> int:
        """All of them."""
        return self.removed + self.kept + self.doomed

    def __add__(self, other: Removed) -> Removed:
        return Removed(self.removed + other.removed, self.kept + other.kept, self.doomed + other.doomed)


@frozen
class OwnerEnded:
    """Leases and reservations of an owner, by what became of them."""

    released: int
    deferred: int
    quarantined: int


@frozen
class WorkersLost:
    """Leases that ended because nobody is left who could read or write their slots."""

    reads: int
    writes: int


@frozen
class Expired:
    """Numbers of leases and reservations that ran past their deadline, pins that did, each as (salt,
    name), and what became of chunks whose time to live ended."""

    leases: tuple[int, ...]
    reservations: tuple[int, ...]
    pins: tuple[tuple[str, str], ...] = ()
    ended: Removed = Removed(0, 0, 0)


@frozen
class PinView:
    """A pin: the salt it belongs to, its name, when it ends, and how many chunks it came to cover, those
    included that were cleared meanwhile."""

    salt: str
    name: str
    end: float
    chunks: int


@frozen(kw_only=True)
class Stats:
    """Slots by state (free + resident + retiring + reserved + quarantined = capacity) and counters
    since the start.

    ``retiring`` chunks cannot be found any more and wait for their last lease. ``leased`` slots are
    among the resident and retiring ones. ``hits`` and ``misses`` count chunks asked for.
    """

    capacity: int
    free: int
    resident: int
    retiring: int
    reserved: int
    quarantined: int
    leased: int
    leases: int
    reservations: int
    hits: int
    misses: int
    hit_tokens: int
    evictions: int
    dropped: int
    granted: int
    already_resident: int
    busy: int
    no_room: int
    no_parent: int
    over_quota: int
    stored: int
    aborted: int
    expired: int
    ended: int
    """Chunks whose time to live ended."""
    pins: int
    pinned: int
    """Slots of chunks that some pin covers."""
    pins_refused: int
    """Chunks that were not pinned because of a limit."""
