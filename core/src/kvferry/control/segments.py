"""Parts of a prefix that come up from one place each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attrs import define

from kvferry.control.brought import Source
from kvferry.control.lower import LowerTier
from kvferry.control.manager import CacheManager
from kvferry.control.orders import CancelOrder, FetchOrder, Order, OrderResult
from kvferry.control.outcomes import ChunkFacts


class OriginSettings(Protocol):
    """How much may be on its way from an origin, and for how long."""

    @property
    def load_deadline(self) -> float:
        """Seconds that one order may take, and that a request waits."""
        ...

    @property
    def chunks_in_flight(self) -> int: ...

    @property
    def chunks_per_order(self) -> int: ...


class Origin(Protocol):
    """Where chunks come up from: a lower tier, or a peer. Under the manager's lock."""

    fetching: int
    """Chunks on their way from it."""

    @property
    def settings(self) -> OriginSettings: ...

    @property
    def orders(self) -> list[Order]:
        """What is to be sent to the workers; who brings something up appends to it."""
        ...

    def failed_once(self, reason: str) -> None:
        """Nothing came of an order, or not in time."""
        ...


class Segment(Protocol):
    """Neighbouring chunks of one prefix at one origin, held there until :meth:`release`."""

    at: int
    """The next one to be sent for."""

    @property
    def stop(self) -> int:
        """The one behind the last."""
        ...

    @property
    def origin(self) -> Origin: ...

    @property
    def source(self) -> Source:
        """What kind of origin that is."""
        ...

    def stands(self, now: float) -> bool:
        """Whether it is of any use to send for more of it."""
        ...

    def facts(self, count: int) -> Sequence[ChunkFacts]:
        """The next ``count`` chunks; fewer when something went meanwhile."""
        ...

    def order(self, number: int, chunks: Sequence[ChunkFacts], slots: Sequence[int], now: float) -> Order:
        """What brings these up into slots of the first tier."""
        ...

    def cancel(self, number: int) -> Order: ...

    def fetched(self, chunks: Sequence[ChunkFacts], result: OrderResult, now: float) -> None:
        """The end of such an order."""
        ...

    def release(self) -> None:
        """Nothing more of it is sent for, and nothing is on its way. Called once."""
        ...


@define(eq=False)
class TierSegment:
    """A segment in a lower tier, held by a lease there."""

    tier: LowerTier
    index: CacheManager
    lease: int
    at: int
    stop: int

    @property
    def origin(self) -> Origin:
        return self.tier

    @property
    def source(self) -> Source:
        return Source.TIER

    def stands(self, now: float) -> bool:
        return self.tier.usable and self.tier.index is self.index

    def facts(self, count: int) -> Sequence[ChunkFacts]:
        return self.index.copying.leased(self.lease, self.at, self.at + count)

    def order(self, number: int, chunks: Sequence[ChunkFacts], slots: Sequence[int], now: float) -> Order:
        tier = self.tier
        seconds = tier.settings.load_deadline
        return FetchOrder(number, tier.name, tier.opening, tuple(chunks), tuple(slots), seconds)

    def cancel(self, number: int) -> Order:
        return CancelOrder(number, self.tier.name)

    def fetched(self, chunks: Sequence[ChunkFacts], result: OrderResult, now: float) -> None:
        self.tier.fetched(chunks, self.index, result, now)

    def release(self) -> None:
        self.index.finish_load(self.lease)
