"""The tiers of an instance together, over stores that fail in every way a worker may report, against what
the stores really hold."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from attrs import define, field
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.config import StoreWhen
from kvferry.control.adoption import Adoption
from kvferry.control.entries import State
from kvferry.control.hierarchy import Hierarchy
from kvferry.control.lower import Health, LowerTier, LowerTierSettings
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.orders import (
    CancelOrder,
    CloseOrder,
    DeleteOrder,
    FetchOrder,
    ItemFault,
    OpenOrder,
    OrderResult,
    StoreOrder,
)
from kvferry.control.outcomes import ChunkFacts, ChunkWrite, WriteOutcome
from kvferry.control.rises import Rises
from kvferry.control.seeking import Wanted

CHUNK = 3
FIRST = 8
SLOT_BYTES = 10
LOAD_SECONDS, STORE_SECONDS, RETRY_SECONDS = 5.0, 9.0, 20.0
Tokens = tuple[int, ...]
Value = tuple[bytes, int]
"""The bytes of a chunk: whose they are, and which weights computed them."""
GARBAGE: Value = (b"", -1)
Work = StoreOrder | FetchOrder | DeleteOrder
WORST = list(ItemFault)
# Texts that part inside a chunk, at the end of one, and at once; a prompt is a beginning.
TEXTS = ((0,) * 13, (0,) * 4 + (1,) * 9, (0,) * 6 + (2,) * 7, (3,) * 13, (4,) * 13)
prompts = st.builds(lambda text, end: TEXTS[text][:end], st.integers(0, 4), st.integers(1, 13))
salts = st.sampled_from(["", "", "", "tenant"])
lives = st.sampled_from([None, None, None, 8.0, 30.0])
requests = st.sampled_from(["a", "b", "c"])
injected = st.sampled_from([None] * 12 + list(ItemFault))
foreign_key = st.integers(0, 5).map(lambda number: b"somebody else's chunk %d" % number)


def digest(salt: str, tokens: Tokens) -> bytes:
    return hashlib.blake2b(repr((salt, tokens)).encode(), digest_size=32).digest()


def keys_of(salt: str, prompt: Tokens) -> list[bytes]:
    return [digest(salt, prompt[:end]) for end in range(CHUNK, len(prompt) + 1, CHUNK)]


def writes_of(salt: str, prompt: Tokens) -> list[ChunkWrite]:
    """The chunks of a prompt, a tail included."""
    made = []
    for depth, start in enumerate(range(0, len(prompt), CHUNK)):
        end = min(start + CHUNK, len(prompt))
        aliases = tuple((digest(salt, prompt[:at]), at - start) for at in range(start + 1, end))
        parent = digest(salt, prompt[:start]) if depth else None
        made.append(ChunkWrite(digest(salt, prompt[:end]), parent, depth, end - start, aliases))
    return made


def visible(manager: CacheManager) -> dict[bytes, int]:
    """Slots of chunks that can be found."""
    residency = manager._residency
    entries = residency.entries
    return {
        entries.digests.digest(row): residency.tier.slot.view[row]
        for row in range(entries.rows)
        if entries.state.view[row] == State.VISIBLE
    }


@define
class Store:
    """What one rank really holds of a tier: by digest, or by full key what is others'. Least recently used
    first."""

    room: int
    chunks: dict[bytes, tuple[ChunkFacts | None, Value]] = field(factory=dict)


@define(eq=False)
class Begun:
    """An order that workers have. ``faults`` is what became of it; ``None`` before it was carried out."""

    order: Work
    faults: dict[int, ItemFault] | None = None
    cancelled: bool = False


@define(eq=False)
class Workers:
    """All ranks of one tier, carrying out orders in any order that a worker may."""

    stores: list[Store]
    opening: int = 0
    begun: list[Begun] = field(factory=list)
    asked: OpenOrder | None = None
    closing: bool = False
    damaged: set[bytes] = field(factory=set)
    """Chunks that got lost or spoilt under the index."""

    def may_run(self, begun: Begun) -> bool:
        """Stores wait for the deletions that were begun before them."""
        if begun.faults is not None:
            return False
        before = self.begun[: self.begun.index(begun)]
        deleting = any(isinstance(other.order, DeleteOrder) and other.faults is None for other in before)
        return not (deleting and isinstance(begun.order, StoreOrder))


class HierarchyMachine(RuleBasedStateMachine):
    """One first tier, one or two below it."""

    when = (StoreWhen.WRITE_THROUGH,)
    ranks = 1

    @initialize(
        capacities=st.tuples(st.integers(2, 12), st.integers(2, 12)),
        rooms=st.tuples(st.integers(1, 14), st.integers(1, 14)),
        in_flight=st.integers(1, 5),
        min_tokens=st.sampled_from([0, 0, 0, 4]),
        ttl=st.sampled_from([None, None, 40.0]),
    )
    def build(
        self,
        capacities: tuple[int, int],
        rooms: tuple[int, int],
        in_flight: int,
        min_tokens: int,
        ttl: float | None,
    ) -> None:
        self.now = 0.0
        self.weights = 0
        self.rise_of: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.memory: list[dict[int, Value]] = [{} for _ in range(self.ranks)]
        self.first = self._manager(FIRST)
        numbers = iter(range(1, 10**9))
        lower = []
        self.workers: dict[str, Workers] = {}
        for index, when in enumerate(self.when):
            name = f"lower{index}"
            capacity = capacities[index]

            def make_index(capacity: int = capacity) -> CacheManager:
                return self._manager(capacity, ttl)

            made = LowerTierSettings(
                name=name,
                slot_bytes=SLOT_BYTES,
                store=when,
                in_flight=in_flight * SLOT_BYTES,
                load_deadline=LOAD_SECONDS,
                store_deadline=STORE_SECONDS,
                min_load_tokens=min_tokens,
                retry_after=RETRY_SECONDS,
            )
            lower.append(LowerTier(made, self.first, make_index, lambda: next(numbers)))
            self.workers[name] = Workers([Store(rooms[index]) for _ in range(self.ranks)])
        rises = Rises(self.first, lambda: next(numbers))
        self.tiers = Hierarchy(self.first, lower, rises, CHUNK)
        self.tiers.open()
        self.send()
        self.all_open()

    def all_open(self) -> None:
        for name in self._names():
            if self.workers[name].asked and not self.workers[name].closing:
                self.open(name)
        self.work(30)

    def _manager(self, capacity: int, ttl: float | None = None) -> CacheManager:
        manager = CacheManager(
            capacity=capacity,
            chunk_tokens=CHUNK,
            block_tokens=1,
            policy=LRU(),
            lease_seconds=50.0,
            write_seconds=60.0,
            ttl=ttl,
        )
        manager.grow(capacity)
        return manager

    # The engine

    @rule(salt=salts, prompt=prompts, ttl=lives)
    def save(self, salt: str, prompt: Tokens, ttl: float | None) -> None:
        """The engine computed a prompt and stores it in the first tier."""
        writes = writes_of(salt, prompt)
        answer = self.first.reserve("engine", salt, writes, self.now, ttl=ttl)
        if answer.id is None:
            return
        good = []
        for item, (write, given) in enumerate(zip(writes, answer.items, strict=True)):
            if given.outcome is WriteOutcome.GRANTED:
                for memory in self.memory:
                    memory[given.slot] = (write.digest, self.weights)
                good.append(item)
        self.first.complete(answer.id, good)

    @rule(request=requests, salt=salts, prompt=prompts, work=st.booleans())
    def ask(self, request: str, salt: str, prompt: Tokens, work: bool) -> None:
        """A request looks for its prompt in all tiers, and waits for what comes up."""
        self.leave(request)
        keys = keys_of(salt, prompt)

        def tail_keys(index: int) -> list[tuple[bytes, int]]:
            start = index * CHUNK
            ends = range(min(len(prompt), start + CHUNK - 1), start, -1)
            return [(digest(salt, prompt[:end]), end - start) for end in ends]

        limit = len(prompt) - 1
        match = self.first.match(request, keys, tail_keys, self.now, limit)
        if match.lease is not None:
            self.first.release(match.lease)
        self.tiers.touch(keys[: match.tokens // CHUNK])
        seek = self.tiers.seek(
            Wanted(
                request=request,
                salt=salt,
                keys=keys,
                tail_keys=tail_keys,
                limit_tokens=limit,
                held_tokens=match.tokens,
                local_tokens=0,
            )
        )
        while seek.advance(self.now):
            if work:
                self.work(1)
        if seek.rise:
            assert 0 < seek.wait_seconds <= LOAD_SECONDS
            assert self.tiers.rises.goes_on(seek.rise)
            self.rise_of[request] = seek.rise

    @rule(
        request=requests,
        salt=salts,
        prompt=prompts,
        kept=st.integers(0, 2),
        well=st.booleans(),
        data=st.data(),
    )
    def ask_for_what_went(
        self, request: str, salt: str, prompt: Tokens, kept: int, well: bool, data: st.DataObject
    ) -> None:
        """A prompt that was copied down, and that the first tier has lost in part, is asked for again."""
        self.all_open()
        self.save(salt, prompt, None)
        self.work(30)
        self.all_goes_well(data)
        self.work(30)
        self.first.drop([write.digest for write in writes_of(salt, prompt)[kept:]])
        self.ask(request, salt, prompt, work=False)
        self.work(30)
        if well:
            self.all_goes_well(data)
            self.work(30)

    @rule(request=requests)
    def leave(self, request: str) -> None:
        if self.rise_of.pop(request, 0):
            self.tiers.rises.leave(request)

    @rule(
        what=st.sampled_from(["damage", "damage", "clear", "clear", "some", "lost"]),
        data=st.data(),
        how=st.booleans(),
        salt=salts,
    )
    def something_goes_wrong(self, what: str, data: st.DataObject, how: bool, salt: str) -> None:
        match what:
            case "damage":
                self.a_chunk_is_lost_or_spoilt(data, how)
            case "clear":
                self.clear(how)
            case "some":
                self.first.clear(salt)
            case _:
                self.workers_are_lost()

    def clear(self, interrupted: bool) -> None:
        """New weights: nothing that was stored before may be found again."""
        self.tiers.clear_begins()
        self.weights += 1
        for manager in [*(tier.index for tier in reversed(self.tiers.lower)), self.first]:
            manager.clear()
            if interrupted:
                self.work(3)
        self.tiers.clear_ended()

    # The service thread

    @rule(slices=st.integers(1, 30))
    def work(self, slices: int) -> None:
        for _ in range(slices):
            more = self.tiers.work(self.now)
            self.send()
            if not more:
                break

    @rule(seconds=st.sampled_from([0.5, 2.0, LOAD_SECONDS, 11.0, RETRY_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for manager in (self.first, self.tiers):
            for _ in range(100):
                if self.now < manager.next_deadline():
                    break
                manager.expire(self.now)
            else:
                raise AssertionError("expire() never comes to an end")
        self.send()

    def send(self) -> None:
        for order in self.tiers.take_orders():
            workers = self.workers[order.tier]
            match order:
                case OpenOrder():
                    workers.asked = order
                case CloseOrder():
                    assert order.opening == workers.opening or workers.asked is not None
                    workers.closing = True
                case CancelOrder():
                    for begun in workers.begun:
                        begun.cancelled |= begun.order.id == order.id
                case _:
                    items = order.digests if isinstance(order, DeleteOrder) else order.chunks
                    assert items
                    assert not isinstance(order, FetchOrder) or len(set(order.slots)) == len(order.slots)
                    workers.begun.append(Begun(order))

    # The workers

    def _names(self) -> list[str]:
        return sorted(self.workers)

    @precondition(lambda self: any(workers.asked for workers in self.workers.values()))
    @rule(data=st.data())
    def opens(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in self._names() if self.workers[n].asked]))
        strangers = data.draw(st.lists(foreign_key, max_size=3, unique=True))
        if data.draw(st.sampled_from([True, False, False, False])):
            self.cannot_open(name)
        else:
            self.open(name, strangers)

    def cannot_open(self, name: str) -> None:
        workers = self.workers[name]
        assert workers.asked is not None
        number, workers.asked, workers.closing = workers.asked.opening, None, False
        self.tiers.tier(name).closed(number, self.now, "the folder is gone")

    def open(self, name: str, strangers: Sequence[bytes] = ()) -> None:
        """What all ranks have is told in the order of its use; the rest of our own is of no use."""
        workers = self.workers[name]
        assert workers.asked is not None
        for store in workers.stores:
            for key in strangers:
                if len(store.chunks) < store.room:
                    store.chunks.setdefault(key, (None, GARBAGE))
        every = [set(store.chunks) for store in workers.stores]
        common = set.intersection(*every)
        chunks = [
            facts
            for key, (facts, _) in workers.stores[0].chunks.items()
            if facts is not None and key in common
        ]
        own = {facts.digest for facts in chunks}
        foreign = {key for store in workers.stores for key, (f, _) in store.chunks.items() if f is None}
        useless = set.union(*every) - own - foreign
        workers.opening, workers.asked = workers.asked.opening, None
        workers.damaged &= own
        tier = self.tiers.tier(name)
        tier.opened(workers.opening, Adoption.of(chunks, sorted(useless), sorted(foreign), tier.capacity))

    @precondition(lambda self: any(workers.closing for workers in self.workers.values()))
    @rule(data=st.data())
    def closes(self, data: st.DataObject) -> None:
        """What is under way ends first, one way or another."""
        name = data.draw(st.sampled_from([n for n in self._names() if self.workers[n].closing]))
        workers = self.workers[name]
        number = workers.asked.opening if workers.asked is not None else workers.opening
        while workers.begun:
            self._carry_out(workers, workers.begun[0], data)
            self._deliver(workers, workers.begun[0])
        workers.asked, workers.closing = None, False
        self.tiers.tier(name).closed(number, self.now)

    @precondition(lambda self: self._runnable())
    @rule(data=st.data(), times=st.integers(1, 4))
    def carry_out(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            if runnable := self._runnable():
                name, index = data.draw(st.sampled_from(runnable))
                workers = self.workers[name]
                self._carry_out(workers, workers.begun[index], data)

    @rule(data=st.data())
    def all_goes_well(self, data: st.DataObject) -> None:
        while runnable := self._runnable():
            name, index = runnable[0]
            self._carry_out(self.workers[name], self.workers[name].begun[index], None)
        self.results_come(data)

    def _runnable(self) -> list[tuple[str, int]]:
        return [
            (name, index)
            for name in self._names()
            for index, begun in enumerate(self.workers[name].begun)
            if self.workers[name].may_run(begun)
        ]

    @rule(data=st.data())
    def results_come(self, data: st.DataObject) -> None:
        """In any order."""
        for name in self._names():
            workers = self.workers[name]
            done = [begun for begun in workers.begun if begun.faults is not None]
            for begun in data.draw(st.permutations(done)) if len(done) > 1 else done:
                self._deliver(workers, begun)

    def _deliver(self, workers: Workers, begun: Begun) -> None:
        assert begun.faults is not None
        workers.begun.remove(begun)
        self.tiers.report(OrderResult(begun.order.id, begun.faults, "simulated"), self.now)
        self.tiers.report(OrderResult(begun.order.id, {}, "told twice"), self.now)
        self.send()

    def workers_are_lost(self) -> None:
        """Nobody carries anything out any more; a new set of workers comes."""
        self.first.worker_lost()
        self.tiers.workers_lost()
        for workers in self.workers.values():
            workers.begun.clear()
            workers.asked, workers.closing = None, False
        self.tiers.open()
        self.send()

    def a_chunk_is_lost_or_spoilt(self, data: st.DataObject, spoil: bool) -> None:
        workers = self.workers[data.draw(st.sampled_from(self._names()))]
        store = data.draw(st.sampled_from(range(self.ranks)).map(lambda rank: workers.stores[rank]))
        if own := [key for key, (facts, _) in store.chunks.items() if facts is not None]:
            key = data.draw(st.sampled_from(own))
            workers.damaged.add(key)
            if spoil:
                store.chunks[key] = (store.chunks[key][0], GARBAGE)
            else:
                del store.chunks[key]

    def _carry_out(self, workers: Workers, begun: Begun, data: st.DataObject | None) -> None:
        """On all ranks, each with faults of its own; of several, the worst counts."""
        if begun.faults is not None:
            return
        begun.faults = faults = {}
        for rank in range(self.ranks):
            for place, fault in self._on(rank, workers, begun, data).items():
                faults[place] = max(fault, faults.get(place, fault), key=WORST.index)

    def _on(
        self, rank: int, workers: Workers, begun: Begun, data: st.DataObject | None
    ) -> Mapping[int, ItemFault]:
        store, order = workers.stores[rank], begun.order

        def fault() -> ItemFault | None:
            if begun.cancelled:
                return ItemFault.CANCELLED
            return None if data is None else data.draw(injected)

        everything = None if data is None else data.draw(st.sampled_from([None] * 9 + WORST[2:]))
        items = order.digests if isinstance(order, DeleteOrder) else order.chunks
        faults = dict.fromkeys(range(len(items)), everything) if everything else {}
        match order:
            case DeleteOrder():
                for place, key in enumerate(order.digests):
                    if place not in faults and (found := fault()) not in (None, *WORST[:2], WORST[4]):
                        faults[place] = found
                    if place not in faults:
                        store.chunks.pop(key, None)
            case StoreOrder():
                if faults:
                    return faults
                for key in order.evicted:
                    store.chunks.pop(key, None)
                self._store(rank, workers, order, faults, fault)
            case FetchOrder():
                for place, (chunk, slot) in enumerate(zip(order.chunks, order.slots, strict=True)):
                    held = store.chunks.get(chunk.digest)
                    found = faults.get(place) or fault()
                    if found not in (None, ItemFault.GONE, ItemFault.NO_SPACE):
                        faults[place] = found
                        self.memory[rank][slot] = GARBAGE
                    elif held is None:
                        faults[place] = ItemFault.GONE
                    elif held[1] == GARBAGE:
                        faults[place] = ItemFault.CORRUPT
                        self.memory[rank][slot] = GARBAGE
                    else:
                        self.memory[rank][slot] = held[1]
                        store.chunks[chunk.digest] = store.chunks.pop(chunk.digest)
        return faults

    def _store(
        self,
        rank: int,
        workers: Workers,
        order: StoreOrder,
        faults: dict[int, ItemFault],
        fault: Callable[[], ItemFault | None],
    ) -> None:
        store = workers.stores[rank]
        for place, (chunk, slot) in enumerate(zip(order.chunks, order.slots, strict=True)):
            value = self.memory[rank][slot]
            assert value[0] == chunk.digest, "a slot that was lent holds other bytes"
            found = fault()
            if found in (ItemFault.GONE, ItemFault.CORRUPT, ItemFault.NO_SPACE):
                found = None
            known = chunk.digest in store.chunks
            if not known and len(store.chunks) >= store.room:
                found = ItemFault.NO_SPACE
            if found is not None:
                faults[place] = found
            # After a timeout it may be there all the same.
            if not known and found in (None, ItemFault.TIMEOUT):
                store.chunks[chunk.digest] = (chunk, value)
                workers.damaged.discard(chunk.digest)

    # What must hold

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "tiers"):
            self.tiers.check()

    @invariant()
    def no_more_is_on_its_way_than_may_be(self) -> None:
        for tier in self.tiers.lower if hasattr(self, "tiers") else ():
            most = tier.settings.chunks_in_flight
            assert 0 <= tier.storing <= most
            assert 0 <= tier.fetching <= most

    @invariant()
    def what_is_found_is_right(self) -> None:
        """In the first tier on every rank; below, on every rank's store."""
        if not hasattr(self, "tiers"):
            return
        for key, slot in visible(self.first).items():
            for memory in self.memory:
                assert memory[slot] == (key, self.weights)
        for tier in self.tiers.lower:
            workers = self.workers[tier.name]
            for key in visible(tier.index) if tier.usable else ():
                assert tier.knows(key)
                for store in workers.stores:
                    if key not in workers.damaged:
                        assert key in store.chunks, "the index has what the store has not"
                        assert store.chunks[key][1] == (key, self.weights)

    @invariant()
    def nobody_waits_beyond_the_deadline(self) -> None:
        rises = self.tiers.rises if hasattr(self, "tiers") else ()
        waiting = [rise for rise in rises._open.values() if not rise.cancelled] if rises else []
        assert all(rise.deadline > self.now for rise in waiting)
        for rise in waiting:
            assert rise.waiters, "nobody waits for a rise that goes on"

    def teardown(self) -> None:
        """Everything comes to its end, and all counts return."""
        if not hasattr(self, "tiers"):
            return
        for request in list(self.rise_of):
            self.leave(request)
        for _ in range(300):
            self.work(100)
            quiet = not any(w.begun or w.asked or w.closing for w in self.workers.values())
            if (
                quiet
                and all(tier.health is Health.OPEN for tier in self.tiers.lower)
                and not self.tiers.work(self.now)
            ):
                break
            if quiet:
                self.time_passes(RETRY_SECONDS)
            for name, workers in self.workers.items():
                while workers.begun:
                    begun = next(b for b in workers.begun if b.faults is not None or workers.may_run(b))
                    self._carry_out(workers, begun, None)
                    self._deliver(workers, begun)
                if workers.closing:
                    number = workers.asked.opening if workers.asked is not None else workers.opening
                    workers.asked, workers.closing = None, False
                    self.tiers.tier(name).closed(number, self.now)
                elif workers.asked:
                    self.open(name)
        else:
            raise AssertionError("it never comes to rest")
        self.what_is_found_is_right()
        self.first.expire(self.now)
        assert len(self.tiers.rises) == 0
        stats = self.first.stats()
        assert (stats.leases, stats.reservations, stats.leased, stats.retiring) == (0, 0, 0, 0)
        for tier in self.tiers.lower:
            assert (tier.storing, tier.fetching) == (0, 0)
            assert not tier._doomed
            assert not tier._leaving
            assert not tier._writing
            stats = tier.index.stats()
            assert (stats.leases, stats.reservations, stats.leased) == (0, 0, 0)
            workers = self.workers[tier.name]
            should = set(visible(tier.index))
            for store in workers.stores:
                assert set(store.chunks) | workers.damaged >= should
                known = should | workers.damaged | set(tier._foreign)
                assert set(store.chunks) <= known, "the store holds what nobody knows of"
                assert len(store.chunks) <= store.room


class ThroughTwoRanks(HierarchyMachine):
    ranks = 2


class OnEvict(HierarchyMachine):
    when = (StoreWhen.WRITE_ON_EVICT,)


class ThreeTiers(HierarchyMachine):
    when = (StoreWhen.WRITE_THROUGH, StoreWhen.WRITE_ON_EVICT)


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
HierarchyMachine.TestCase.settings = SETTINGS
ThroughTwoRanks.TestCase.settings = SETTINGS
OnEvict.TestCase.settings = SETTINGS
ThreeTiers.TestCase.settings = SETTINGS
TestTheTiersTogether = HierarchyMachine.TestCase
TestTheTiersOfTwoRanks = ThroughTwoRanks.TestCase
TestTiersWrittenOnEvict = OnEvict.TestCase
TestThreeTiersTogether = ThreeTiers.TestCase
