"""The tiers below the first as the scheduler's side drives them: orders out, results of all ranks in."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from kvferry.api import DIGEST_BYTES
from kvferry.control.adoption import Adoption
from kvferry.control.borrowing import Borrowing
from kvferry.control.deadlines import NEVER
from kvferry.control.hierarchy import Hierarchy
from kvferry.control.loans import BorrowSettings
from kvferry.control.lower import LowerTier, LowerTierReport, LowerTierSettings
from kvferry.control.manager import CacheManager
from kvferry.control.orders import (
    CancelOrder,
    CloseOrder,
    DeleteOrder,
    FetchOrder,
    ForgetOrder,
    MeetOrder,
    OpenOrder,
    Order,
    PullOrder,
    StoreOrder,
    TierOrder,
)
from kvferry.control.outcomes import ChunkFacts
from kvferry.control.rises import Rises
from kvferry.control.seeking import Wanted
from kvferry.data.wire import (
    Cancel,
    Chunk,
    CloseTier,
    DeleteChunks,
    FetchChunks,
    ForgetPeer,
    MeetPeer,
    OpenTier,
    OrderDone,
    PullChunks,
    StoreChunks,
    TierClosed,
    TierContent,
    WorkerOrder,
)
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.orders_of_all import OrdersOfAll, told_by
from kvferry.runtime.tier_log import TierLog
from kvferry.runtime.waits import LowerStatistics, Waits
from kvferry.runtime.windows import StoredWindows

logger = logging.getLogger(__name__)

TOUCHED_AT_ONCE = 128
"""Chunks that one hold of the lock counts as used."""
SLICES_PER_TURN = 64
"""Holds of the lock in a row, after which messages have their turn."""


@frozen(kw_only=True)
class StoreIdentity:
    """Whose chunks a tier holds; see :class:`kvferry.api.BackendContext`."""

    instance: str
    namespace: bytes
    header_bytes: int = 4096
    fresh: Callable[[], bytes] = lambda: secrets.token_bytes(DIGEST_BYTES)
    """Makes a namespace that nobody ever had."""


@frozen(kw_only=True)
class LowerSetup:
    """The tiers below the first, fast to slow: their settings, each with what makes an empty index. With
    ``borrow``, what they do not have either is looked for at other instances."""

    identity: StoreIdentity
    tiers: tuple[tuple[LowerTierSettings, Callable[[], CacheManager]], ...]
    borrow: BorrowSettings | None = None

    def build(
        self,
        first: CacheManager,
        chunk_tokens: int,
        windows: StoredWindows,
        next_order: Callable[[], int],
    ) -> Hierarchy:
        """``windows`` says what slots of the first tier hold in part only, which is of use there alone.
        ``next_order()`` gives numbers that no other order of the workers has."""
        lower = [
            LowerTier(settings, first, make_index, next_order, windows.whole)
            for settings, make_index in self.tiers
        ]
        rises = Rises(first, next_order, lambda slot: windows.granted(slot, ()))
        borrowing = None if self.borrow is None else Borrowing(rises, self.borrow, chunk_tokens)
        return Hierarchy(first, lower, rises, chunk_tokens, borrowing)


@define
class _OpeningOfAll:
    """What the ranks found in a tier, until all have told."""

    chunks: dict[int, list[Chunk]] = field(factory=dict)
    foreign: dict[int, list[bytes]] = field(factory=dict)
    told: set[int] = field(factory=set)
    taken: bool = False
    """Whether what they told was handed on."""
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
        post: Callable[[int, WorkerOrder], None],
        wake: Callable[[], None],
        on_change: Callable[[], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.hierarchy = hierarchy
        self._lock = lock
        self._identity = identity
        self._namespace = identity.namespace
        self._forgotten: set[bytes] = set()
        """Namespaces of before."""
        self._ranks = range(world_size)
        self._post = post
        self._wake = wake
        self._on_change = on_change
        self._clock = clock
        self._wall_clock = wall_clock
        self._log = TierLog()
        self._orders = OrdersOfAll(self._ranks)
        self._openings: dict[str, _OpeningOfAll] = {}
        self._numbers: dict[str, int] = {}
        """Of the opening that each tier's workers were last asked for."""

    # For requests

    def seek(self, wanted: Wanted) -> tuple[int, float]:
        """Look below the first tier; the number of a rise to wait for and how long, or zeros."""
        with self._lock:
            seek = self.hierarchy.seek(wanted)
        more = True
        while more:
            with self._lock:
                more = seek.advance(self._clock())
        if seek.rise:
            self._wake()
        return seek.rise, seek.wait_seconds

    @property
    def seeks(self) -> bool:
        """Whether some answer of other instances is waited for. Any thread."""
        borrowing = self.hierarchy.borrowing
        return borrowing is not None and borrowing.seeks

    def goes_on(self, rise: int) -> bool:
        """Whether something may still come of a rise."""
        with self._lock:
            return self.hierarchy.rises.goes_on(rise)

    def leave(self, request: str, *, late: bool = False) -> None:
        """The request waits for nothing any more, or not as ``late`` as this. Under the lock."""
        self.hierarchy.rises.leave(request, late=late)
        self._wake()

    def touch(self, keys: Sequence[bytes]) -> None:
        """The first tier had these chunks, a chain from its head."""
        if not self.hierarchy.lower:
            return
        for start in range(0, len(keys), TOUCHED_AT_ONCE):
            with self._lock:
                self.hierarchy.touch(keys[start : start + TOUCHED_AT_ONCE])

    def clear_begins(
        self, salt: str | None = None, model: str | None = None, only: str | None = None
    ) -> list[tuple[str, CacheManager]]:
        """Nothing moves down until :meth:`clear_ended`, and nothing that a store holds by now, of the salt
        and the model, is ever found again. Answers with the managers to be cleared, the lowest first, each
        with its tier's name: all, or the one of the tier ``only``."""
        with self._lock:
            tiers = self.hierarchy.clear_begins(salt, model, only)
            return [(tier.name, tier.index) for tier in tiers]

    def renew(self) -> None:
        """Everything that was stored is forgotten, and what is stored from now on is not found by a later
        start either: only this process knows what it was computed with."""
        with self._lock:
            self._forgotten.add(self._namespace)
            self._namespace = self._identity.fresh()
            for tier in self.hierarchy.lower:
                tier.renew()
        self._wake()

    def clear_ended(self, only: str | None = None) -> None:
        """They were cleared, and so was the first tier unless it was about ``only`` one of the others."""
        with self._lock:
            self.hierarchy.clear_ended(only)
        self._wake()

    def names(self) -> tuple[str, ...]:
        """Of the lower tiers, fast to slow."""
        return tuple(tier.name for tier in self.hierarchy.lower)

    def index(self, name: str) -> CacheManager:
        """The manager of a lower tier as it is now: it has a new one after each failure. Under the lock.

        Raises ``KeyError`` if there is no lower tier of that name.
        """
        return self.hierarchy.tier(name).index

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
                settled = self.hierarchy.settled
                more = self.hierarchy.work(now)
                if self.hierarchy.settled != settled:
                    self._on_change()
                orders = self.hierarchy.take_orders()
            for order in orders:
                self._send(order)
            if not more:
                break
        self._log.tell(self.hierarchy.lower, self._clock())
        if more:
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
        self._log.tell(self.hierarchy.lower, self._clock())

    def workers_lost(self) -> None:
        """No worker is left. Under the lock."""
        self._orders.clear()
        self._openings.clear()
        self.hierarchy.workers_lost()

    def at_rest(self) -> bool:
        """Whether nothing moves between tiers, nor is about to."""
        with self._lock:
            return self.hierarchy.at_rest

    def reports(self) -> tuple[LowerTierReport, ...]:
        with self._lock:
            return self.hierarchy.reports()

    def statistics(self, waits: Waits) -> LowerStatistics:
        """How the tiers are, and what requests have of them."""
        with self._lock:
            rises = self.hierarchy.rises
            return LowerStatistics(
                tiers=self.hierarchy.reports(),
                risen_tokens=waits.risen_tokens,
                waits=waits.count,
                waits_expired=rises.late,
                wait_seconds=waits.seconds,
                rises_under_way=len(rises),
                rises_shared=rises.shared,
                rises_expired=rises.expired,
            )

    def _on_done(self, done: OrderDone) -> None:
        end = self._orders.done(done)
        if end is None:
            return
        result = end.result
        if result.faults:
            self._log.failed(end.name, result.reason)
            logger.debug(
                "kvferry: order %d: %d chunks failed: %s", result.id, len(result.faults), result.reason
            )
        now = self._clock()
        with self._lock:
            self.hierarchy.report(result, now)

    def _on_content(self, content: TierContent) -> None:
        opening = self._opening(content.tier, content.opening)
        if opening is None:
            return
        if content.rank in opening.told or opening.taken:
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
        opening.closed[closed.rank] = told_by(closed.rank, closed.reason)
        self._open_if_all(closed.tier, closed.opening, opening)

    def _open_if_all(self, name: str, number: int, opening: _OpeningOfAll) -> None:
        tier = self.hierarchy.tier(name)
        if len(opening.closed) == len(self._ranks):
            reason = next((why for why in opening.closed.values() if why), "")
            del self._openings[name]
            with self._lock:
                tier.closed(number, self._clock(), reason)
            return
        if opening.closed and opening.told and len(opening.closed) + len(opening.told) == len(self._ranks):
            # Some could not open it: the others must not go on alone.
            reason = next((why for why in opening.closed.values() if why), "")
            with self._lock:
                tier.fail(reason)
            opening.told.clear()
            return
        if len(opening.told) == len(self._ranks) and not opening.taken:
            opening.taken = True
            found = self._in_common(opening, tier.capacity)
            opening.chunks, opening.foreign = {}, {}
            with self._lock:
                tier.opened(number, found)

    def _in_common(self, opening: _OpeningOfAll, room: int) -> Adoption:
        """What every rank has, as the first rank tells it; the rest of our own is of no use to anybody, and
        would be in the way of who stores it again."""
        space = self._namespace
        lists = [opening.chunks.get(rank, []) for rank in self._ranks]
        names = [{chunk.digest for chunk in chunks} for chunks in lists]
        others = {key for keys in opening.foreign.values() for key in keys}
        spoilt = {key[len(space) :] for key in others if key.startswith(space)}
        common = set.intersection(*names) - spoilt
        useless = (set.union(*names) | spoilt) - common
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
        others = {key for key in others if not key.startswith(space)}
        forgotten = {key for key in others if key[: len(space)] in self._forgotten}
        return Adoption.of(facts, sorted(useless | forgotten), sorted(others - forgotten), room)

    def _opening(self, tier: str, number: int) -> _OpeningOfAll | None:
        if self._numbers.get(tier) != number:
            return None
        return self._openings.setdefault(tier, _OpeningOfAll())

    # Orders out

    def _send(self, order: Order) -> None:
        if isinstance(order, StoreOrder | FetchOrder | DeleteOrder):
            self._orders.begin(order.id, order.tier)
        if isinstance(order, PullOrder):
            self._orders.begin(order.id, f"of peer {order.peer}")
        if isinstance(order, OpenOrder):
            self._log.asked(order.tier, order.opening, self._clock())
            self._openings[order.tier] = _OpeningOfAll()
            self._numbers[order.tier] = order.opening
        if isinstance(order, MeetOrder):
            # Each rank reads from the same rank of the peer.
            for rank, export in zip(self._ranks, order.exports, strict=True):
                self._post(rank, MeetPeer(order.peer, order.epoch, export))
            return
        message = self._message(order)
        for rank in self._ranks:
            self._post(rank, message)

    def _message(self, order: TierOrder | PullOrder | ForgetOrder) -> WorkerOrder:
        match order:
            case StoreOrder(number, tier, opening, evicted, chunks, slots, seconds):
                parts = tuple(self._chunk(chunk) for chunk in chunks)
                return StoreChunks(number, tier, opening, evicted, parts, slots, seconds)
            case FetchOrder(number, tier, opening, chunks, slots, seconds):
                return FetchChunks(number, tier, opening, _digests(chunks), _tokens(chunks), slots, seconds)
            case PullOrder(number, peer, epoch, chunks, sources, slots, deadline, region):
                digests, tokens = _digests(chunks), _tokens(chunks)
                return PullChunks(number, peer, epoch, digests, tokens, sources, slots, deadline, region)
            case DeleteOrder(number, tier, opening, digests, seconds):
                return DeleteChunks(number, tier, opening, digests, seconds)
            case CancelOrder(number, tier):
                return Cancel(number, tier)
            case OpenOrder(tier, opening):
                whose = self._identity
                return OpenTier(tier, opening, whose.instance, self._namespace, whose.header_bytes)
            case CloseOrder(tier, opening):
                return CloseTier(tier, opening)
            case ForgetOrder(peer, epoch):
                return ForgetPeer(peer, epoch)

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


def _digests(chunks: Sequence[ChunkFacts]) -> tuple[bytes, ...]:
    return tuple(chunk.digest for chunk in chunks)


def _tokens(chunks: Sequence[ChunkFacts]) -> tuple[int, ...]:
    return tuple(chunk.tokens for chunk in chunks)
