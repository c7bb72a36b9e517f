"""One tier below the first: its index, its health, and what is on its way down to it."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from kvferry.config import StoreWhen
from kvferry.control.deadlines import NEVER
from kvferry.control.manager import CacheManager
from kvferry.control.orders import (
    CloseOrder,
    DeleteOrder,
    ItemFault,
    OpenOrder,
    Order,
    OrderResult,
    StoreOrder,
)
from kvferry.control.outcomes import ChunkFacts, Lent, WriteOutcome

CHUNKS_PER_ORDER = 64
BYTES_PER_ORDER = 32 << 20
"""An order holds no more than either: enough for a deep queue, and little enough that the first
chunks are not kept waiting for the last."""
STORES_UNDER_WAY = 2
"""Orders to store, at one time: while the bytes of one are made durable, the next is being written."""
DELETED_PER_ORDER = 256
FAILURES_TO_CLOSE = 3
"""Orders in a row that the store failed, after which the tier is closed for a while."""
ADOPTED_AT_ONCE = 8
"""Chunks found at an opening that are taken in under one hold of the lock."""
EXPIRED_AT_ONCE = 12


class Health(enum.Enum):
    """Whether a tier is used."""

    OPENING = "opening"
    """The workers were asked to open it, and what it holds is being taken in."""
    OPEN = "open"
    CLOSING = "closing"
    """It failed; orders under way are waited for."""
    PAUSED = "paused"
    """Nobody has it open: the workers are not there yet, or it failed and its time has not come."""


@frozen(kw_only=True)
class LowerTierSettings:
    """What an operator says about a tier below the first. Times are seconds, sizes bytes of one rank."""

    name: str
    slot_bytes: int
    store: StoreWhen = StoreWhen.WRITE_THROUGH
    in_flight: int = 256 << 20
    load_deadline: float = 5.0
    store_deadline: float = 30.0
    min_load_tokens: int = 0
    retry_after: float = 30.0

    @property
    def chunks_in_flight(self) -> int:
        return max(1, self.in_flight // self.slot_bytes)

    @property
    def chunks_per_order(self) -> int:
        return max(1, min(CHUNKS_PER_ORDER, BYTES_PER_ORDER // self.slot_bytes, self.chunks_in_flight))


@define(eq=False)
class _Store:
    """An order to store, being put together or under way.

    ``leases`` keep the chunks in the first tier; ``reservations`` are those of ``index``, each with the
    place in the order of every item that was granted.
    """

    index: CacheManager
    leases: list[int] = field(factory=list)
    reservations: list[tuple[int, dict[int, int]]] = field(factory=list)
    chunks: list[ChunkFacts] = field(factory=list)
    slots: list[int] = field(factory=list)
    leaving: tuple[bytes, ...] = ()
    overdue: float = NEVER
    """When something must be wrong with whoever carries it out."""


@frozen(kw_only=True)
class LowerTierReport:
    """How a tier is. Chunks since the start, except ``health`` and what is under way."""

    name: str
    health: str
    chunks: int
    capacity: int
    storing: int
    fetching: int
    stored: int
    skipped: int
    """Not copied down, because too much was on its way already or the tier was not open."""
    failed_stores: int
    no_space: int
    fetched: int
    failed_fetches: int
    corrupt: int
    adopted: int
    """Found in the store when it was opened."""
    foreign: int
    openings: int
    failures: int
    """How often it was closed because it failed."""
    reason: str
    """Why it failed last."""


COUNTED = (
    "stored",
    "skipped",
    "failed_stores",
    "no_space",
    "fetched",
    "failed_fetches",
    "corrupt",
    "adopted",
    "foreign",
    "failures",
)


class LowerTier:
    """The state machine of one tier below the first. Under the manager's lock, like everything here.

    ``first`` is the manager of the first tier. ``make_index`` makes an empty manager for this one: there
    is a new one at every opening, so nothing of a former one can linger. ``next_id`` numbers orders.
    """

    def __init__(
        self,
        settings: LowerTierSettings,
        first: CacheManager,
        make_index: Callable[[], CacheManager],
        next_id: Callable[[], int],
        whole: Callable[[int], bool] = lambda _slot: True,
    ) -> None:
        self.settings = settings
        self.name = settings.name
        self.health = Health.PAUSED
        self.opening = 0
        """Number of the opening under way, or of the last one."""
        self.orders: list[Order] = []
        """To be sent, in this order; whoever sends them empties the list."""
        self.counts: Counter[str] = Counter()
        self.reason = ""
        self.fetching = 0
        """Chunks under way from this tier."""
        self._first = first
        self._make_index = make_index
        self._next_id = next_id
        self._whole = whole
        self.index = self._new_index()
        self._building: _Store | None = None
        self._stores: dict[int, _Store] = {}
        self._deletes: dict[int, tuple[bytes, ...]] = {}
        self._leaving: set[bytes] = set()
        """Chunks that a worker may still be deleting."""
        self._doomed: dict[bytes, None] = {}
        """Chunks that are not in the index any more and perhaps in the store."""
        self._adopting: _Adoption | None = None
        self._foreign: deque[bytes] = deque()
        """Full keys of chunks of other namespaces, which take room until it is needed."""
        self._failures = 0
        self._retry_at = NEVER

    def _new_index(self) -> CacheManager:
        index = self._make_index()
        index.copying.watch_freed()
        return index

    @property
    def usable(self) -> bool:
        return self.health is Health.OPEN

    @property
    def storing(self) -> int:
        """Chunks lent for copies down to this tier."""
        building = self._building
        under_way = sum(len(store.chunks) for store in self._stores.values())
        return under_way + (len(building.chunks) if building is not None else 0)

    def knows(self, digest: bytes) -> bool:
        """Whether the chunk needs no copy: it is here, on its way, or a worker may be deleting it."""
        return self.index.copying.holds(digest) or digest in self._leaving or digest in self._doomed

    # Copies down

    def offer(self, digest: bytes, now: float) -> None:
        """Copy a visible chunk of the first tier down, and with it those before it as far as they are not
        here; not if too much is on its way already."""
        if self.knows(digest):
            return
        wanted = None
        if self.usable:
            wanted = self._first.copying.missing_before(digest, self.knows, self.settings.chunks_per_order)
        if wanted is None or self.storing + len(wanted) > self.settings.chunks_in_flight:
            self.counts["skipped"] += 1
            return
        lent = self._first.copying.lend(f"tier {self.name}", wanted)
        if lent is not None:
            self.store([lent], now)

    def room_for(self, chunks: int) -> bool:
        """Whether so many chunks more may be lent for copies down."""
        return self.usable and self.storing + chunks <= self.settings.chunks_in_flight

    def store(self, lent: Sequence[Lent], now: float) -> None:
        """Copy lent chunks down, in chain order; their leases are this tier's from here on."""
        store = self._building = self._building or _Store(self.index)
        store.leases += [each.lease for each in lent]
        before = len(store.chunks)
        for chunks, slots in _alike(lent):
            whole = [self._whole(slot) for slot in slots]
            if not all(whole):
                # What a window had left behind was never stored: such a chunk is of use here alone.
                self.counts["skipped"] += len(chunks)
                continue
            self._reserve(store, chunks, slots, now)
        if len(store.chunks) == before:
            for each in lent:
                store.leases.remove(each.lease)
                self._first.finish_load(each.lease)
        self.flush(now)

    def _reserve(self, store: _Store, chunks: Sequence[ChunkFacts], slots: Sequence[int], now: float) -> None:
        head = chunks[0]
        self._make_room(len(chunks))
        answer = self.index.reserve(
            f"tier {self.name}",
            head.salt,
            [chunk.write for chunk in chunks],
            now,
            model=head.model,
            ttl=None if head.end == NEVER else max(0.001, head.end - now),
        )
        if answer.id is None:
            return
        places = {}
        for item, (chunk, slot, given) in enumerate(zip(chunks, slots, answer.items, strict=True)):
            if given.outcome is WriteOutcome.GRANTED:
                places[item] = len(store.chunks)
                store.chunks.append(chunk)
                store.slots.append(slot)
        store.reservations.append((answer.id, places))

    def _make_room(self, chunks: int) -> None:
        """Chunks of other namespaces go before any of our own."""
        while self._foreign and self.index.copying.free < chunks:
            self._doomed[self._foreign.popleft()] = None
            self.index.copying.restore(1)

    def flush(self, now: float) -> None:
        """Send what has come together, unless enough is under way."""
        self._doomed.update(dict.fromkeys(self.index.copying.take_freed(DELETED_PER_ORDER)))
        store = self._building
        if store is not None and not store.chunks:
            self._building = store = None
        if store is not None:
            full = len(store.chunks) >= self.settings.chunks_per_order
            if not full and len(self._stores) >= STORES_UNDER_WAY:
                return
            number = self._next_id()
            store.leaving = self._take_doomed()
            store.overdue = now + 2 * self.settings.store_deadline
            self._stores[number] = store
            self._building = None
            self.orders.append(
                StoreOrder(
                    number,
                    self.name,
                    self.opening,
                    store.leaving,
                    tuple(store.chunks),
                    tuple(store.slots),
                    self.settings.store_deadline,
                )
            )
        elif self._doomed and self.usable:
            number = self._next_id()
            self._deletes[number] = leaving = self._take_doomed()
            self.orders.append(
                DeleteOrder(number, self.name, self.opening, leaving, self.settings.store_deadline)
            )

    def _take_doomed(self) -> tuple[bytes, ...]:
        taken = tuple(self._doomed)
        self._doomed.clear()
        self._leaving.update(taken)
        return taken

    # Results

    def report(self, result: OrderResult, now: float) -> bool:
        """The end of an order to store or to delete; ``False`` if it is none of this tier's."""
        deleted = self._deletes.pop(result.id, None)
        if deleted is not None:
            self._leaving.difference_update(deleted)
            self.flush(now)
            return True
        store = self._stores.pop(result.id, None)
        if store is None:
            return False
        self._leaving.difference_update(store.leaving)
        for reservation, places in store.reservations:
            good = [item for item, place in places.items() if place not in result.faults]
            store.index.complete(reservation, good)
        for lease in store.leases:
            self._first.finish_load(lease)
        full = sum(fault is ItemFault.NO_SPACE for fault in result.faults.values())
        self.counts["stored"] += len(store.chunks) - len(result.faults)
        self.counts["failed_stores"] += len(result.faults)
        self.counts["no_space"] += full
        if store.index is self.index:
            self._learn(len(store.chunks), result)
            if full and self.usable:
                self.index.copying.withhold(full)
        self.flush(now)
        return True

    def fetched(
        self, chunks: Sequence[ChunkFacts], index: CacheManager, result: OrderResult, now: float
    ) -> None:
        """The end of an order to fetch. What proved bad leaves the index, with what stands behind it."""
        self.fetching -= len(chunks)
        self.counts["fetched"] += len(chunks) - len(result.faults)
        self.counts["failed_fetches"] += len(result.faults)
        self.counts["corrupt"] += sum(fault is ItemFault.CORRUPT for fault in result.faults.values())
        if index is not self.index:
            return
        bad = [
            chunks[place].digest
            for place, fault in result.faults.items()
            if fault in (ItemFault.GONE, ItemFault.CORRUPT)
        ]
        index.drop(digest for digest in bad if index.copying.holds(digest))
        self._learn(len(chunks), result)
        self.flush(now)

    def _learn(self, chunks: int, result: OrderResult) -> None:
        """Close the tier when nothing works any more."""
        broken = sum(fault in (ItemFault.FAILED, ItemFault.TIMEOUT) for fault in result.faults.values())
        if broken == chunks:
            self.failed_once(result.reason)
        elif any(place not in result.faults for place in range(chunks)):
            self._failures = 0

    def failed_once(self, reason: str) -> None:
        """Nothing came of an order; after several in a row the tier is closed."""
        self._failures += 1
        if self._failures >= FAILURES_TO_CLOSE:
            self.fail(reason)

    # Openings

    def open(self) -> None:
        """Have it opened, unless it is; the workers are there."""
        if self.health is Health.PAUSED:
            self.health = Health.OPENING
            self.opening += 1
            self._retry_at = NEVER
            self.orders.append(OpenOrder(self.name, self.opening))

    def fail(self, reason: str) -> None:
        """The tier does not work: retract all that it held, and have it closed."""
        if self.health not in (Health.OPEN, Health.OPENING):
            return
        self.reason = reason
        self.counts["failures"] += 1
        self.health = Health.CLOSING
        self._retract()
        self.orders.append(CloseOrder(self.name, self.opening))

    def closed(self, opening: int, now: float, reason: str = "") -> None:
        """No worker has the tier open any more, or could open it: ``reason`` says why."""
        if opening != self.opening or self.health is Health.PAUSED:
            return
        if self.health is not Health.CLOSING:
            self.counts["failures"] += 1
            self.reason = reason
            self._retract()
        self.health = Health.PAUSED
        self._retry_at = now + self.settings.retry_after

    def _retract(self) -> None:
        self._failures = 0
        self._adopting = None
        self._doomed.clear()
        self._foreign.clear()
        store, self._building = self._building, None
        for lease in store.leases if store is not None else ():
            self._first.finish_load(lease)
        self.index = self._new_index()

    def opened(self, opening: int, chunks: Sequence[ChunkFacts], foreign: Sequence[bytes]) -> None:
        """Every worker has it open. ``chunks`` are those that all of them have, the least recently used
        first; ``foreign`` the full keys of what belongs to others, or that not all of them have."""
        if opening != self.opening or self.health is not Health.OPENING:
            return
        self._foreign.extend(foreign)
        self.index.copying.withhold(len(foreign))
        self.counts["foreign"] += len(foreign)
        self._adopting = _Adoption.of(chunks)

    def work(self, now: float) -> bool:
        """Do a little of what is left to do; whether there is more."""
        adopting = self._adopting
        if adopting is None:
            # Of a large clear, a part at a time.
            if not self.index.copying.has_freed or len(self._deletes) >= STORES_UNDER_WAY:
                return False
            self.flush(now)
            return self.index.copying.has_freed and self._building is None
        if adopting.first:
            part = adopting.first[-ADOPTED_AT_ONCE:]
            del adopting.first[-ADOPTED_AT_ONCE:]
            for facts in reversed(part):
                if facts.end > now and self.index.copying.adopt(facts):
                    self.counts["adopted"] += 1
                else:
                    self._doomed[facts.digest] = None
            return True
        if adopting.then:
            part_of = adopting.then[-4 * ADOPTED_AT_ONCE :]
            del adopting.then[-4 * ADOPTED_AT_ONCE :]
            self.index.copying.used(part_of[::-1])
            return True
        self._adopting = None
        self.health = Health.OPEN
        self._retry_at = NEVER
        self.flush(now)
        return False

    def expire(self, now: float) -> None:
        """Open the tier again when its pause is over, and end what has run out."""
        if now >= self._retry_at:
            self.open()
        if self.usable and any(store.overdue <= now for store in self._stores.values()):
            self.fail("a copy down has not ended long after its deadline")
        if now >= self.index.next_deadline():
            self.index.expire(now, EXPIRED_AT_ONCE)
            self.flush(now)

    def next_deadline(self) -> float:
        overdue = next((store.overdue for store in self._stores.values()), NEVER)
        return min(self._retry_at, overdue if self.usable else NEVER, self.index.next_deadline())

    def workers_lost(self) -> None:
        """No worker is left: no result comes any more."""
        for store in self._stores.values():
            for lease in store.leases:
                self._first.finish_load(lease)
        self._stores.clear()
        self._deletes.clear()
        self._leaving.clear()
        self._retract()
        self.fetching = 0
        self.orders.clear()
        self.health = Health.PAUSED
        self._retry_at = NEVER

    def report_of(self) -> LowerTierReport:
        counts = self.counts
        return LowerTierReport(
            name=self.name,
            health=self.health.value,
            chunks=self.index.stats().resident,
            capacity=self.index.stats().capacity,
            storing=self.storing,
            fetching=self.fetching,
            openings=self.opening,
            reason=self.reason,
            **{name: counts[name] for name in COUNTED},
        )

    def check(self) -> None:
        """Audit; for tests."""
        self.index.check()
        assert self.fetching >= 0, "fetches are miscounted"
        for digest in self._doomed:
            assert not self.index.copying.holds(digest), "a chunk of the index is about to be deleted"


@define(eq=False)
class _Adoption:
    """Chunks to be taken in. Lists are emptied from their ends."""

    first: list[ChunkFacts]
    """Each behind the one before it, the heads last."""
    then: list[bytes]
    """In the order of their use, the least recent last."""

    @classmethod
    def of(cls, chunks: Sequence[ChunkFacts]) -> _Adoption:
        by_depth = sorted(chunks, key=lambda facts: (facts.depth, facts.tokens), reverse=True)
        return cls(by_depth, [facts.digest for facts in reversed(chunks)])


def _alike(lent: Sequence[Lent]) -> list[tuple[list[ChunkFacts], list[int]]]:
    """Chunks that can be reserved together, with their slots; each stands behind those before it."""
    found: dict[tuple[str, str, float], tuple[list[ChunkFacts], list[int]]] = {}
    for each in lent:
        for facts, slot in zip(each.chunks, each.slots, strict=True):
            chunks, slots = found.setdefault((facts.salt, facts.model, facts.end), ([], []))
            chunks.append(facts)
            slots.append(slot)
    return list(found.values())
