"""What the control plane asks of the tiers below the first, and what comes back."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from attrs import frozen

from kvferry.control.grants import ARENA
from kvferry.control.outcomes import ChunkFacts


class ItemFault(enum.Enum):
    """Why one chunk of an order was not stored or fetched. Of several ranks, the worst counts: the
    order of the members."""

    GONE = "gone"
    """The tier has no such chunk."""
    NO_SPACE = "no-space"
    CANCELLED = "cancelled"
    """It was called off, or the tier was being closed."""
    CORRUPT = "corrupt"
    """What the tier has under the key is not what was stored."""
    TIMEOUT = "timeout"
    FAILED = "failed"
    """The store could not be asked."""


@frozen
class StoreOrder:
    """Copy the chunks in these slots of the first tier down. What was ``evicted`` goes first: its room
    is needed. ``seconds`` is how long it may take."""

    id: int
    tier: str
    opening: int
    evicted: tuple[bytes, ...]
    chunks: tuple[ChunkFacts, ...]
    slots: tuple[int, ...]
    seconds: float


@frozen
class FetchOrder:
    """Copy chunks up into these slots of the first tier."""

    id: int
    tier: str
    opening: int
    chunks: tuple[ChunkFacts, ...]
    slots: tuple[int, ...]
    seconds: float


@frozen
class DeleteOrder:
    """Forget these chunks."""

    id: int
    tier: str
    opening: int
    digests: tuple[bytes, ...]
    seconds: float


@frozen
class CancelOrder:
    """Nobody waits for the order ``id`` any more. Its result comes all the same."""

    id: int
    tier: str


@frozen
class PullOrder:
    """Copy chunks out of a peer's memory into our first tier: on every rank, out of these slots of the same
    rank of the peer, in a region of that name. ``deadline`` is a time of the manager's clock, from which a
    guard interval has been taken off already: the peer's lease ends later."""

    id: int
    peer: str
    epoch: bytes
    """Of the peer. What another epoch of it lent is void."""
    chunks: tuple[ChunkFacts, ...]
    from_slots: tuple[int, ...]
    slots: tuple[int, ...]
    deadline: float
    region: str = ARENA


@frozen
class StageOrder:
    """Copy chunks of so many ``tokens`` out of slots of the first tier into slots of the staging, on every
    rank, the first ones first. ``seconds`` is how long it may take."""

    id: int
    tokens: tuple[int, ...]
    from_slots: tuple[int, ...]
    slots: tuple[int, ...]
    seconds: float


@frozen
class MeetOrder:
    """A peer said hello. ``exports`` are those of its channels, rank by rank."""

    peer: str
    epoch: bytes
    exports: tuple[bytes, ...]


@frozen
class ForgetOrder:
    """Nothing is read from this epoch of a peer any more; what is under way fails."""

    peer: str
    epoch: bytes


@frozen
class OpenOrder:
    """Open the tier, the ``opening``-th time, and say what it holds."""

    tier: str
    opening: int


@frozen
class CloseOrder:
    """Close the tier and give everything back. What was under way in it ends first."""

    tier: str
    opening: int


TierOrder = StoreOrder | FetchOrder | DeleteOrder | CancelOrder | OpenOrder | CloseOrder
PeerOrder = PullOrder | MeetOrder | ForgetOrder | CancelOrder
"""What is asked of the ways to peers. A pull is cancelled as an order of the tier ``""``."""
Order = TierOrder | PeerOrder


@frozen
class OrderResult:
    """What all ranks together made of an order: the chunks that failed, by their place in it."""

    id: int
    faults: Mapping[int, ItemFault]
    reason: str = ""
