"""What one instance and others have of each other, in numbers."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from attrs import frozen

from kvferry.api import PeerId, Refusal

BORROW_COUNTS = (
    "quests",
    "nobody",
    "granted",
    "chunks",
    "refused",
    "late",
    "untrue",
    "fetched",
    "failed",
    "paused",
)
"""What :attr:`kvferry.control.borrowing.Borrowing.counts` may have."""
LEND_COUNTS = (
    "granted",
    "chunks",
    "renewed",
    "done",
    "expired",
    "staged",
    "not_staged",
    *(each.value for each in Refusal),
)
"""What :attr:`kvferry.control.serving.Serving.counts` may have, written as one word."""


class SharingState(enum.Enum):
    """Whether an instance shares anything."""

    OPENING = "opening"
    """Not every rank has an open channel."""
    OPEN = "open"
    RETIRED = "retired"
    """The engine's cache was reset: nothing is shared any more."""


@frozen(kw_only=True)
class PeerState:
    """How a peer is that something was wanted of lately."""

    id: PeerId
    standing: str
    """A value of :class:`kvferry.control.loans.Standing`."""
    reason: str
    """Why it is not as it should be, or why a read from it failed last."""


@frozen(kw_only=True)
class SharingStatistics:
    """Totals since the start, except ``loans``, ``leases`` and ``slots``, which are so now."""

    id: PeerId
    channel: str
    state: SharingState
    reason: str
    """Why a rank's channel is not open, or was not at last."""
    peers: tuple[PeerState, ...]
    """By name."""
    borrowed_tokens: int
    """Of the tokens that were hit, those that were read from peers for it."""
    loans: int
    """What peers have granted, and is still held."""
    borrowed: Mapping[str, int]
    """By the names of :data:`BORROW_COUNTS`, all of them."""
    leases: int
    """What peers were granted, and have not given back."""
    slots: int
    """That they hold with it."""
    lent: Mapping[str, int]
    """By the names of :data:`LEND_COUNTS`, all of them."""
