"""A peer as an origin of chunks, and what it has lent."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from attrs import define, frozen

from kvferry.api import LentChunk, PeerId
from kvferry.control.brought import Source
from kvferry.control.deadlines import NEVER
from kvferry.control.grants import ARENA
from kvferry.control.orders import CancelOrder, Order, OrderResult, PullOrder
from kvferry.control.outcomes import ChunkFacts

CHUNKS_PER_ORDER = 32
BYTES_PER_ORDER = 64 << 20


@frozen(kw_only=True)
class BorrowSettings:
    """Times are seconds, sizes bytes of one rank."""

    slot_bytes: int
    in_flight: int = 256 << 20
    """On its way from one peer at once."""
    load_deadline: float = 5.0
    """How long a request waits for what a peer has, from the search on."""
    guard_seconds: float = 1.0
    """Nothing is read so shortly before a lease ends: clocks drift, and a read may be under way."""
    min_load_tokens: int = 0
    pause_seconds: float = 10.0
    """How long a peer that failed is asked nothing."""
    failures: int = 2
    """How often in a row a peer may fail before it is paused."""
    delay: bool = False
    """What a peer lends goes into the engine's blocks, and not before the request has them."""

    @property
    def chunks_in_flight(self) -> int:
        return max(1, self.in_flight // self.slot_bytes)

    @property
    def chunks_per_order(self) -> int:
        return max(1, min(CHUNKS_PER_ORDER, BYTES_PER_ORDER // self.slot_bytes, self.chunks_in_flight))


class Standing(enum.Enum):
    """How a peer is."""

    GREETING = "greeting"
    AGREED = "agreed"
    PAUSED = "paused"
    """It failed, or has refused to agree: nothing is asked of it for a while."""


@define(eq=False)
class Peer:
    """One life of a peer, as an origin of chunks."""

    id: PeerId
    address: bytes
    settings: BorrowSettings
    orders: list[Order]
    """Those of all peers."""
    standing: Standing = Standing.GREETING
    until: float = NEVER
    """When the pause ends, or the greeting is given up."""
    reason: str = ""
    fetching: int = 0
    failures: int = 0

    def failed_once(self, reason: str) -> None:
        self.failures += 1
        self.reason = reason


class LoanOwner(Protocol):
    """Who hears of the end of a loan's parts."""

    def fetched(self, loan: Loan, chunks: Sequence[ChunkFacts], result: OrderResult, now: float) -> None:
        """An order to pull has ended."""
        ...

    def release(self, loan: Loan) -> None:
        """Nothing is read under it any more."""
        ...


@define(eq=False)
class Loan:
    """A grant of a peer as a segment of a rise."""

    owner: LoanOwner
    peer: Peer
    number: int
    chunks: tuple[ChunkFacts, ...]
    slots: dict[bytes, int]
    deadline: float
    """When the peer's lease ends at the earliest, by our clock."""
    lasts: float
    """Seconds, as they were granted."""
    renew_at: float
    turn: int = 0
    """Number of the last renewal that was asked for. What answers an earlier one may be about a time that
    is long over."""
    asked_at: float = NEVER
    """When that was; never once it is answered."""
    at: int = 0
    region: str = ARENA
    """Of the peer's ranks."""
    first: int = 0
    """How many chunks of the prefix come before those of the loan."""
    tokens: int = 0
    """From the start of the prefix to the end of what was asked for and is lent."""

    @property
    def stop(self) -> int:
        return len(self.chunks)

    @property
    def origin(self) -> Peer:
        return self.peer

    @property
    def source(self) -> Source:
        return Source.PEER

    def stands(self, now: float) -> bool:
        return self.peer.standing is Standing.AGREED and self.seconds_left(now) > 0

    def facts(self, count: int) -> Sequence[ChunkFacts]:
        return self.chunks[self.at : self.at + count]

    def order(self, number: int, chunks: Sequence[ChunkFacts], slots: Sequence[int], now: float) -> Order:
        return PullOrder(
            number,
            self.peer.id.instance,
            self.peer.id.epoch,
            tuple(chunks),
            tuple(self.slots[chunk.digest] for chunk in chunks),
            tuple(slots),
            now + min(self.peer.settings.load_deadline, max(0.0, self.seconds_left(now))),
            self.region,
        )

    def cancel(self, number: int) -> Order:
        return CancelOrder(number, "")

    def fetched(self, chunks: Sequence[ChunkFacts], result: OrderResult, now: float) -> None:
        self.owner.fetched(self, chunks, result, now)

    def release(self) -> None:
        self.owner.release(self)

    def until(self) -> float:
        """When nothing may be read any more, as far as is known now."""
        return self.deadline - self.peer.settings.guard_seconds

    def seconds_left(self, now: float) -> float:
        """For how long bytes may still be read."""
        return self.until() - now


def facts_of(chunk: LentChunk, salt: str, asked_at: float) -> ChunkFacts:
    """A chunk as the tier here knows it. What is left of its life is counted from the question, too."""
    return ChunkFacts(
        chunk.digest,
        chunk.parent,
        chunk.depth,
        chunk.tokens,
        chunk.aliases,
        salt,
        chunk.model,
        asked_at + chunk.seconds,
    )
