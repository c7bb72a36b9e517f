"""One tier below the first: its index, its health, and what is on its way down to it."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Sequence

from attrs import define, evolve, field, frozen

from kvferry.config import StoreWhen
from kvferry.control.adoption import Adoption
from kvferry.control.clearing import QuotaCursor
from kvferry.control.consignment import Consignment
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
from kvferry.control.outcomes import ChunkFacts, Lent
from kvferry.control.stale import Stale

CHUNKS_PER_ORDER = 64
BYTES_PER_ORDER = 32 << 20
"""An order holds no more than either: enough for a deep queue, and little enough that the first
chunks are not kept waiting for the last."""
STORES_UNDER_WAY = 2
"""Orders to store, at one time: while the bytes of one are made durable, the next is being written."""
DELETED_PER_ORDER = 256
FAILURES_TO_CLOSE = 3
"""Orders in a row that the store failed, after which the tier is closed for a while."""
CLIMBED_AT_ONCE = 32
"""Chunks that one hold of the lock passes in search of the first that is not here."""
OFFERED_AT_ONCE = 4
"""Chunks that are reserved here under one hold of the lock."""
BACKLOG = 1024
"""Ends of chains that are remembered while what stands before them is copied."""
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
class _Store(Consignment):
    """An order to store. ``leases`` keep the chunks in the first tier."""

    leases: list[int] = field(factory=list)
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
        self._results: deque[OrderResult] = deque()
        """Of orders to store that ended, and whose chunks are not all visible yet."""
        self._writing: set[bytes] = set()
        """Chunks of all copies down, given up or not: a worker may be writing them."""
        self._deletes: dict[int, tuple[bytes, ...]] = {}
        self._leaving: set[bytes] = set()
        """Chunks that a worker may still be deleting."""
        self._doomed: dict[bytes, None] = {}
        """Chunks that are not in the index any more and perhaps in the store."""
        self._adopting: Adoption | None = None
        self._foreign: deque[bytes] = deque()
        """Full keys of chunks of other namespaces, which take room until it is needed."""
        self._backlog: deque[bytes] = deque()
        """Chunks of the first tier that are to be copied, too, once those before them have been."""
        self._later: list[bytes] = []
        """Chunks for the backlog, once what a worker may be writing or deleting is over."""
        self._lacking = 0
        """Slots that are withheld because the store had no room for so many."""
        self._more_at = NEVER
        """When one of them may be tried again."""
        self._failures = 0
        self._retry_at = NEVER
        self._renewing = False
        """Whether it is opened again as soon as it is closed."""
        self._clearing = 0
        """Clears under way."""
        self._stale = Stale()
        self._over_quota: QuotaCursor | None = None
        """Evicts what owners hold beyond their quotas after an opening."""

    def _new_index(self) -> CacheManager:
        index = self._make_index()
        index.copying.watch_freed()
        return index

    @property
    def usable(self) -> bool:
        return self.health is Health.OPEN

    @property
    def capacity(self) -> int:
        """Chunks that it is thought to hold."""
        return self.index.copying.usable - self._lacking

    @property
    def storing(self) -> int:
        """Chunks lent for copies down to this tier."""
        building = self._building
        under_way = sum(len(store.chunks) for store in self._stores.values())
        return under_way + (len(building.chunks) if building is not None else 0)

    @property
    def at_rest(self) -> bool:
        """Whether nothing is under way and nothing is left to do before something happens."""
        under_way = self._building or self._stores or self._deletes or self.fetching or self._adopting
        under_way = under_way or self._renewing or self.health is Health.OPENING
        to_do = self.usable and (self._backlog or self._has_doomed or self._over_quota is not None)
        return not (under_way or to_do or self.orders)

    def knows(self, digest: bytes) -> bool:
        """Whether the chunk needs no copy, or must not have one now: it is here, or a worker may be writing
        or deleting it."""
        copying = self.index.copying
        coming = copying.holds(digest) or digest in self._writing
        return coming or digest in self._leaving or digest in self._doomed or copying.freed(digest)

    # Copies down

    def offer(self, digest: bytes, now: float) -> None:
        """Copy a visible chunk of the first tier down, and with it those before it as far as they are not
        here, a few at once; not if too much is on its way already."""
        if self.knows(digest):
            self._offer_later(digest)
            return
        if not self.room_for(1) or len(self._backlog) >= BACKLOG:
            self.counts["skipped"] += 1
            return
        missing, every = self._first.copying.missing_before(digest, self.knows, CLIMBED_AT_ONCE)
        if not every:
            self._backlog.extendleft((digest, missing[0]))
            return
        room = self.settings.chunks_in_flight - self.storing
        wanted = missing[: min(OFFERED_AT_ONCE, room)]
        lent = self._first.copying.lend(f"tier {self.name}", wanted)
        if lent is None:
            return
        if not self.store([lent], now):
            self._offer_later(digest)
        elif len(wanted) < len(missing):
            self._backlog.appendleft(digest)

    def _offer_later(self, digest: bytes) -> None:
        """The chunk, or one before it, may be in the way of its own copy: a former one that goes."""
        goes = self._leaving or self._has_doomed or self._writing or self.index.copying.going
        if goes and not self.index.copying.holds(digest) and len(self._later) < BACKLOG:
            self._later.append(digest)

    def remember(self, digest: bytes) -> None:
        """A chunk above was used that is not here: it is copied when there is room."""
        if self.usable and len(self._backlog) < BACKLOG:
            self._backlog.append(digest)

    def room_for(self, chunks: int) -> bool:
        """Whether so many chunks more may be lent for copies down."""
        free = self.settings.chunks_in_flight - self.storing
        return self.usable and not self._clearing and chunks <= free

    def store(self, lent: Sequence[Lent], now: float) -> bool:
        """Copy lent chunks down, in chain order; their leases are this tier's from here on. Whether there is
        room for any of them."""
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
            return False
        if len(store.chunks) >= self.settings.chunks_per_order:
            self.flush(now)
        return True

    def _reserve(self, store: _Store, chunks: Sequence[ChunkFacts], slots: Sequence[int], now: float) -> None:
        head, end = chunks[0], chunks[0].end
        if end == NEVER and self.index.ttl is not None:
            end = now + self.index.ttl
        self._make_room(len(chunks))
        answer = self.index.reserve(
            f"tier {self.name}",
            head.salt,
            [chunk.write for chunk in chunks],
            now,
            model=head.model,
            ttl=None if end == NEVER else max(0.001, end - now),
        )
        # With the end that they have here, which a restart must find again.
        mortal = [evolve(chunk, end=end) for chunk in chunks] if end != head.end else chunks
        granted = store.add(answer, zip(mortal, slots, strict=True))
        self._writing.update(chunk.digest for chunk, _ in granted)

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
        """Some of them: more than any order stores, so that no order needs more room than it makes."""
        doomed = self._doomed
        taken = tuple(doomed.popitem()[0] for _ in range(min(len(doomed), DELETED_PER_ORDER)))
        self._leaving.update(taken)
        return taken

    # Results

    def report(self, result: OrderResult, now: float) -> bool:
        """The end of an order to store or to delete; ``False`` if it is none of this tier's."""
        deleted = self._deletes.pop(result.id, None)
        if deleted is not None:
            self._left(deleted, again=bool(result.faults))
            if result.faults:
                # To delete what is not there may go well on a disk that does nothing any more.
                self._learn(len(deleted), result)
            self.flush(now)
            return True
        if result.id not in self._stores or any(known.id == result.id for known in self._results):
            return False
        self._results.append(result)
        return True

    def settle(self, now: float) -> bool:
        """Let some chunks that were stored be found; whether there were any."""
        if not self._results:
            return False
        result = self._results[0]
        store = self._stores[result.id]
        if store.complete_one(result.faults):
            return True
        self._results.popleft()
        del self._stores[result.id]
        # If nothing was stored, perhaps because what was to make room did not go.
        self._left(store.leaving, again=len(result.faults) == len(store.chunks))
        self._ended(store)
        full = sum(fault is ItemFault.NO_SPACE for fault in result.faults.values())
        self.counts["stored"] += len(store.chunks) - len(result.faults)
        self.counts["failed_stores"] += len(result.faults) - full
        self.counts["no_space"] += full
        if store.into is self.index:
            self._learn(len(store.chunks), result)
        if store.into is self.index and self.usable:
            # What others left on the disk may change: now and then, try one chunk more.
            if full:
                self._lacking += self.index.copying.withhold(full)
                self._more_at = now + self.settings.retry_after
            elif self._lacking and not result.faults and now >= self._more_at:
                self._lacking -= 1
                self._more_at = now + self.settings.retry_after
                self.index.copying.restore(1)
        self.flush(now)
        return True

    def _left(self, digests: Sequence[bytes], *, again: bool) -> None:
        """An order to delete these ended; ``again`` if some of them may still be there."""
        self._leaving.difference_update(digests)
        self._backlog.extend(self._later)
        self._later.clear()
        if again and self.usable:
            self._doomed.update(dict.fromkeys(digests))

    def _ended(self, store: _Store) -> None:
        """Nobody reads or writes anything for it any more."""
        self._writing.difference_update(chunk.digest for chunk in store.chunks)
        for lease in store.leases:
            self._first.finish_load(lease)

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
            self.fail(reason or "nothing came of several orders in a row")

    # Openings

    def open(self) -> None:
        """Have it opened, unless it is; the workers are there."""
        if self.health is Health.PAUSED:
            self.health = Health.OPENING
            self.opening += 1
            self._retry_at = NEVER
            self.orders.append(OpenOrder(self.name, self.opening))

    def fail(self, reason: str) -> None:
        """The tier does not work: retract all that it held, and have it closed. Without a reason it is no
        failure: somebody closes it in order."""
        if self.health not in (Health.OPEN, Health.OPENING):
            return
        self._note_failure(reason)
        self.health = Health.CLOSING
        self._retract()
        self.orders.append(CloseOrder(self.name, self.opening))

    def closed(self, opening: int, now: float, reason: str = "") -> None:
        """No worker has the tier open any more, or could open it: ``reason`` says why."""
        if opening != self.opening or self.health is Health.PAUSED:
            return
        if self.health is not Health.CLOSING:
            self._note_failure(reason)
            self._retract()
        self.health = Health.PAUSED
        self._renewing = self._renewing and not reason
        self._retry_at = now + (0.0 if self._renewing else self.settings.retry_after)

    def renew(self) -> None:
        """What the store holds is nobody's from now on: have it closed, and opened again at once."""
        self._stale.clear()
        if self.health in (Health.OPEN, Health.OPENING):
            self._renewing = True
            self.fail("")

    def _note_failure(self, reason: str) -> None:
        if reason:
            self.counts["failures"] += 1
            self.reason = reason

    def _retract(self) -> None:
        self._failures = 0
        self._lacking = 0
        self._adopting = None
        self._backlog.clear()
        self._later.clear()
        self._doomed.clear()
        self._foreign.clear()
        self._drop_building()
        self._over_quota = None
        former, self.index = self.index, self._new_index()
        self.index.take_quotas_of(former)

    def _drop_building(self) -> None:
        store, self._building = self._building, None
        if store is not None:
            store.abort()
            self._ended(store)

    def opened(self, opening: int, found: Adoption) -> None:
        """Every worker has it open, and this is what they found."""
        if opening != self.opening or self.health is not Health.OPENING or self._adopting is not None:
            return
        self.counts["foreign"] += len(found.foreign)
        self._adopting = found

    def clear_begins(self, salt: str | None = None, model: str | None = None) -> None:
        """All that there is now is to go, or what is of a salt or a model: nothing is copied down before
        :meth:`clear_ended`, and what a store still holds of it is not taken in at any opening. The index is
        cleared by the caller."""
        self._clearing += 1
        self._stale.add(salt, model)
        self._backlog.clear()
        self._later.clear()
        self._drop_building()

    def clear_ended(self) -> None:
        """The first tier was cleared, too, if it was to be."""
        self._clearing -= 1

    def work(self, now: float) -> bool:
        """Do a little of what is left to do; whether there is more."""
        adopting = self._adopting
        if adopting is not None:
            if adopting.step(self.index.copying, now, self._doomed, self._foreign, self._stale.covers):
                return True
            self.counts["adopted"] += adopting.adopted
            self._adopting = None
            if self.index.has_quotas:
                self._over_quota = self.index.enforce_quotas()
            self.health = Health.OPEN
            self._renewing = False
            self._retry_at = NEVER
        if self._over_quota is not None:
            if not self._over_quota.advance():
                self._over_quota = None
            return True
        if self._backlog and self.room_for(1):
            self.offer(self._backlog.popleft(), now)
            return True
        if not self.usable:
            return False
        if self._has_doomed and len(self._deletes) < STORES_UNDER_WAY:
            # Of a large clear, a part at a time.
            self.flush(now)
            return self._has_doomed and self._building is None
        deleted = not (self._clearing or self._leaving or self._has_doomed)
        if self._stale and deleted and not self.index.copying.going:
            self._stale.clear()
        return False

    @property
    def _has_doomed(self) -> bool:
        return bool(self._doomed) or self.index.copying.has_freed

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
            self._ended(store)
        self._stores.clear()
        self._results.clear()
        self._deletes.clear()
        self._leaving.clear()
        self._retract()
        self.fetching = 0
        self.orders.clear()
        self._renewing = False
        self.health = Health.PAUSED
        self._retry_at = NEVER

    def report_of(self) -> LowerTierReport:
        counts = self.counts
        return LowerTierReport(
            name=self.name,
            health=self.health.value,
            chunks=self.index.copying.resident,
            capacity=self.capacity,
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


def _alike(lent: Sequence[Lent]) -> list[tuple[list[ChunkFacts], list[int]]]:
    """Chunks that can be reserved together, with their slots; each stands behind those before it."""
    found: dict[tuple[str, str, float], tuple[list[ChunkFacts], list[int]]] = {}
    for each in lent:
        for facts, slot in zip(each.chunks, each.slots, strict=True):
            chunks, slots = found.setdefault((facts.salt, facts.model, facts.end), ([], []))
            chunks.append(facts)
            slots.append(slot)
    return list(found.values())
