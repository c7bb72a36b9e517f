"""The tiers below the first as the scheduler's side drives them: orders out, results of all ranks in."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from kvferry.control.deadlines import NEVER
from kvferry.control.hierarchy import Hierarchy
from kvferry.control.lower import Health, LowerTier, LowerTierReport, LowerTierSettings
from kvferry.control.manager import CacheManager
from kvferry.control.matching import TailKeys
from kvferry.control.orders import (
    CancelOrder,
    CloseOrder,
    DeleteOrder,
    FetchOrder,
    ItemFault,
    OpenOrder,
    Order,
    OrderResult,
    StoreOrder,
)
from kvferry.control.outcomes import ChunkFacts
from kvferry.control.rises import Rises
from kvferry.data.wire import (
    Cancel,
    Chunk,
    CloseTier,
    DeleteChunks,
    FetchChunks,
    OpenTier,
    OrderDone,
    StoreChunks,
    TierClosed,
    TierContent,
    TierOrder,
)
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.windows import StoredWindows

logger = logging.getLogger(__name__)

TOUCHED_AT_ONCE = 128
"""Chunks that one hold of the lock counts as used."""
SLICES_PER_TURN = 64
"""Holds of the lock in a row, after which messages have their turn."""
_WORST = list(ItemFault)


@frozen(kw_only=True)
class StoreIdentity:
    """Whose chunks a tier holds; see :class:`kvferry.api.BackendContext`."""

    instance: str
    namespace: bytes
    header_bytes: int = 4096


@frozen(kw_only=True)
class LowerSetup:
    """The tiers below the first, fast to slow: their settings, each with what makes an empty index."""

    identity: StoreIdentity
    tiers: tuple[tuple[LowerTierSettings, Callable[[], CacheManager]], ...]

    def build(self, first: CacheManager, chunk_tokens: int, windows: StoredWindows) -> Hierarchy:
        """``windows`` says what slots of the first tier hold in part only, which is of use there alone."""
        numbers = itertools.count(1)
        lower = [
            LowerTier(settings, first, make_index, lambda: next(numbers), windows.whole)
            for settings, make_index in self.tiers
        ]
        rises = Rises(first, lambda: next(numbers), lambda slot: windows.granted(slot, ()))
        return Hierarchy(first, lower, rises, chunk_tokens)


@define
class _OrderOfAll:
    """An order under way on several ranks."""

    waiting: set[int]
    faults: dict[int, ItemFault] = field(factory=dict)
    reason: str = ""


@define
class _OpeningOfAll:
    """What the ranks found in a tier, until all have told."""

    chunks: dict[int, list[Chunk]] = field(factory=dict)
    foreign: dict[int, list[bytes]] = field(factory=dict)
    told: set[int] = field(factory=set)
    closed: dict[int, str] = field(factory=dict)


class LowerTiers:
    """Drives a :class:`~kvferry.control.hierarchy.Hierarchy` over the side channel.

    ``lock`` guards it, and is held for a slice at a time. ``post(rank, order)`` sends to a worker and
    does not wait; ``wake()`` has :meth:`work` called soon. ``on_change`` is called under the lock when
    chunks came or went above. ``clock`` is monotonic, ``wall_clock`` seconds since 1970.

    Threads: :meth:`seek`, :meth:`goes_on`, :meth:`leave` on the scheduler's, the rest on the service's;
    :meth:`reports` on any.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        lock: FairLock,
        identity: StoreIdentity,
        *,
        world_size: int,
        post: Callable[[int, TierOrder], None],
        wake: Callable[[], None],
        on_change: Callable[[], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.hierarchy = hierarchy
        self._lock = lock
        self._identity = identity
        self._ranks = range(world_size)
        self._post = post
        self._wake = wake
        self._on_change = on_change
        self._clock = clock
        self._wall_clock = wall_clock
        self._orders: dict[int, _OrderOfAll] = {}
        self._openings: dict[str, _OpeningOfAll] = {}
        self._numbers: dict[str, int] = {}
        """Of the opening that each tier's workers were last asked for."""

    # For requests

    def seek(
        self,
        request: str,
        salt: str,
        keys: Sequence[bytes],
        tail_keys: TailKeys,
        *,
        limit_tokens: int,
        held_tokens: int,
        local_tokens: int,
    ) -> tuple[int, float]:
        """Look below the first tier; the number of a rise to wait for and how long, or zeros."""
        with self._lock:
            seek = self.hierarchy.seek(
                request,
                salt,
                keys,
                tail_keys,
                limit_tokens=limit_tokens,
                held_tokens=held_tokens,
                local_tokens=local_tokens,
            )
        more = True
        while more:
            with self._lock:
                more = seek.advance(self._clock())
        if seek.rise:
            self._wake()
        return seek.rise, seek.wait_seconds

    def goes_on(self, rise: int) -> bool:
        """Whether something may still come of a rise."""
        with self._lock:
            return self.hierarchy.rises.goes_on(rise)

    def leave(self, request: str) -> None:
        """The request waits for nothing any more. Under the lock."""
        self.hierarchy.rises.leave(request)
        self._wake()

    def touch(self, keys: Sequence[bytes]) -> None:
        """The first tier had these chunks, a chain from its head."""
        for start in range(0, len(keys), TOUCHED_AT_ONCE):
            with self._lock:
                self.hierarchy.touch(keys[start : start + TOUCHED_AT_ONCE])

    def indexes(self) -> list[CacheManager]:
        """The managers of the lower tiers, the lowest first, and nothing rises meanwhile."""
        with self._lock:
            self.hierarchy.rises.stop_all()
            return [tier.index for tier in reversed(self.hierarchy.lower)]

    # On the service thread

    def open(self) -> None:
        """All workers are there."""
        with self._lock:
            self.hierarchy.open()

    def work(self) -> None:
        """Do what is to be done, a bounded part of it."""
        more = True
        for _ in range(SLICES_PER_TURN):
            now = self._clock()
            with self._lock:
                if now >= self.hierarchy.next_deadline():
                    self.hierarchy.expire(now)
                more = self.hierarchy.work(now)
                orders = self.hierarchy.take_orders()
            for order in orders:
                self._send(order)
            if not more:
                return
        self._wake()

    def on_message(self, message: TierContent | TierClosed | OrderDone) -> None:
        """Apply what a worker told."""
        match message:
            case OrderDone():
                self._on_done(message)
            case TierContent():
                self._on_content(message)
            case TierClosed():
                self._on_closed(message)

    def workers_lost(self) -> None:
        """No worker is left. Under the lock."""
        self._orders.clear()
        self._openings.clear()
        self.hierarchy.workers_lost()

    def reports(self) -> tuple[LowerTierReport, ...]:
        with self._lock:
            return self.hierarchy.reports()

    def _on_done(self, done: OrderDone) -> None:
        order = self._orders.get(done.id)
        if order is None or done.rank not in order.waiting:
            return
        order.waiting.discard(done.rank)
        for place, name in done.faults.items():
            faults = [ItemFault(name), *([order.faults[place]] if place in order.faults else [])]
            order.faults[place] = max(faults, key=_WORST.index)
        order.reason = order.reason or (f"rank {done.rank}: {done.reason}" if done.reason else "")
        if order.waiting:
            return
        del self._orders[done.id]
        if order.faults:
            logger.debug("kvferry: order %d: %d chunks failed: %s", done.id, len(order.faults), order.reason)
        now = self._clock()
        with self._lock:
            before = [tier.health for tier in self.hierarchy.lower]
            self.hierarchy.report(OrderResult(done.id, order.faults, order.reason), now)
            self._on_change()
        self._tell_of_failures(before)

    def _tell_of_failures(self, before: Sequence[Health]) -> None:
        for tier, health in zip(self.hierarchy.lower, before, strict=True):
            if health is Health.OPEN and tier.health is not Health.OPEN:
                logger.warning(
                    "kvferry: tier %s failed and is not used; it is opened again after %g s: %s",
                    *(tier.name, tier.settings.retry_after, tier.reason),
                )

    def _on_content(self, content: TierContent) -> None:
        opening = self._opening(content.tier, content.opening)
        if opening is None:
            return
        opening.chunks.setdefault(content.rank, []).extend(content.chunks)
        opening.foreign.setdefault(content.rank, []).extend(content.foreign)
        if content.last:
            opening.told.add(content.rank)
        self._open_if_all(content.tier, content.opening, opening)

    def _on_closed(self, closed: TierClosed) -> None:
        opening = self._opening(closed.tier, closed.opening)
        if opening is None:
            return
        opening.told.discard(closed.rank)
        opening.closed[closed.rank] = closed.reason
        self._open_if_all(closed.tier, closed.opening, opening)

    def _open_if_all(self, name: str, number: int, opening: _OpeningOfAll) -> None:
        tier = self.hierarchy.tier(name)
        if len(opening.closed) == len(self._ranks):
            reason = next((why for why in opening.closed.values() if why), "")
            del self._openings[name]
            with self._lock:
                tier.closed(number, self._clock(), reason)
            if reason:
                logger.warning(
                    "kvferry: tier %s is not used; it is opened again after %g s: %s",
                    *(name, tier.settings.retry_after, reason),
                )
            return
        if opening.closed and opening.told and len(opening.closed) + len(opening.told) == len(self._ranks):
            # Some could not open it: the others must not go on alone.
            reason = next((why for why in opening.closed.values() if why), "a rank has closed it")
            with self._lock:
                tier.fail(reason)
            opening.told.clear()
            return
        if len(opening.told) == len(self._ranks) and opening.chunks is not None:
            chunks, foreign = self._in_common(opening)
            opening.chunks, opening.foreign = {}, {}
            with self._lock:
                tier.opened(number, chunks, foreign)

    def _in_common(self, opening: _OpeningOfAll) -> tuple[list[ChunkFacts], list[bytes]]:
        """What every rank has, as the first rank tells it; the rest is of no use to anybody."""
        lists = [opening.chunks.get(rank, []) for rank in self._ranks]
        names = [{chunk.digest for chunk in chunks} for chunks in lists]
        common = set.intersection(*names)
        foreign = {key for keys in opening.foreign.values() for key in keys}
        foreign |= {self._identity.namespace + digest for digest in set.union(*names) - common}
        now, wall = self._clock(), self._wall_clock()
        facts = [
            ChunkFacts(
                chunk.digest,
                chunk.parent,
                chunk.depth,
                chunk.tokens,
                chunk.aliases,
                chunk.owner,
                chunk.model,
                now + (chunk.expires - wall) if chunk.expires else NEVER,
            )
            for chunk in lists[0]
            if chunk.digest in common
        ]
        return facts, sorted(foreign)

    def _opening(self, tier: str, number: int) -> _OpeningOfAll | None:
        if self._numbers.get(tier) != number:
            return None
        return self._openings.setdefault(tier, _OpeningOfAll())

    # Orders out

    def _send(self, order: Order) -> None:
        message = self._message(order)
        if isinstance(order, StoreOrder | FetchOrder | DeleteOrder):
            self._orders[order.id] = _OrderOfAll(set(self._ranks))
        if isinstance(order, OpenOrder):
            self._openings[order.tier] = _OpeningOfAll()
            self._numbers[order.tier] = order.opening
        for rank in self._ranks:
            self._post(rank, message)

    def _message(self, order: Order) -> TierOrder:
        match order:
            case StoreOrder(number, tier, opening, evicted, chunks, slots, seconds):
                parts = tuple(self._chunk(chunk) for chunk in chunks)
                return StoreChunks(number, tier, opening, evicted, parts, slots, seconds)
            case FetchOrder(number, tier, opening, chunks, slots, seconds):
                digests = tuple(chunk.digest for chunk in chunks)
                tokens = tuple(chunk.tokens for chunk in chunks)
                return FetchChunks(number, tier, opening, digests, tokens, slots, seconds)
            case DeleteOrder(number, tier, opening, digests, seconds):
                return DeleteChunks(number, tier, opening, digests, seconds)
            case CancelOrder(number, tier):
                return Cancel(number, tier)
            case OpenOrder(tier, opening):
                whose = self._identity
                return OpenTier(tier, opening, whose.instance, whose.namespace, whose.header_bytes)
            case CloseOrder(tier, opening):
                return CloseTier(tier, opening)

    def _chunk(self, facts: ChunkFacts) -> Chunk:
        ends = facts.end != NEVER
        return Chunk(
            facts.digest,
            facts.parent,
            facts.depth,
            facts.tokens,
            facts.salt,
            facts.model,
            facts.aliases,
            self._wall_clock() + (facts.end - self._clock()) if ends else 0.0,
        )
