"""What a tier makes of the chunks that its store held when it was opened."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.control.adoption import Adoption
from kvferry.control.lower import Health, LowerTier, LowerTierSettings
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.orders import DeleteOrder, ItemFault, OpenOrder, OrderResult, StoreOrder
from kvferry.control.outcomes import ChunkFacts, ChunkWrite

CHUNK = 4
NEVER = float("inf")


def digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()


def facts_of(chain: int, depth: int, end: float = NEVER, salt: str = "") -> ChunkFacts:
    parent = digest(chain, depth - 1) if depth else None
    return ChunkFacts(digest(chain, depth), parent, depth, CHUNK, (), salt, "", end)


def manager(capacity: int) -> CacheManager:
    made = CacheManager(
        capacity=capacity,
        chunk_tokens=CHUNK,
        block_tokens=1,
        policy=LRU(),
        lease_seconds=60.0,
        write_seconds=60.0,
    )
    made.grow(capacity)
    return made


class Opened:
    """A tier, just opened over ``chunks``, the least recently used first."""

    def __init__(
        self,
        chunks: Sequence[ChunkFacts],
        capacity: int,
        *,
        useless: Sequence[bytes] = (),
        foreign: Sequence[bytes] = (),
        now: float = 0.0,
    ) -> None:
        self.now = now
        self.first = manager(32)
        self.first.copying.watch_published()
        numbers = iter(range(1, 10**6))
        made = LowerTierSettings(name="lower", slot_bytes=1)
        self.tier = LowerTier(made, self.first, lambda: manager(capacity), lambda: next(numbers))
        self.tier.open()
        (order,) = self.tier.orders
        assert isinstance(order, OpenOrder)
        self.tier.orders.clear()
        self.tier.opened(order.opening, Adoption.of(chunks, useless, foreign, capacity))
        self.deleted: list[bytes] = []
        self.stored: list[bytes] = []
        self.run()
        assert self.tier.health is Health.OPEN

    def work(self) -> list[StoreOrder | DeleteOrder]:
        """Orders that the tier gives before any other of its orders ends."""
        while self.tier.settle(self.now) or self.tier.work(self.now):
            self.tier.check()
        self.tier.flush(self.now)
        orders, self.tier.orders = self.tier.orders, []
        return [order for order in orders if isinstance(order, StoreOrder | DeleteOrder)]

    def run(self, fault: ItemFault | None = None) -> None:
        """Work until nothing is left to do; every store ends with ``fault``, if one is given."""
        while True:
            orders = self.work()
            for order in orders:
                gone = order.digests if isinstance(order, DeleteOrder) else order.evicted
                self.deleted += gone
                faults = {}
                if isinstance(order, StoreOrder):
                    self.stored += [] if fault else [chunk.digest for chunk in order.chunks]
                    faults = dict.fromkeys(range(len(order.chunks)), fault) if fault else {}
                self.tier.report(OrderResult(order.id, faults), self.now)
            self.tier.check()
            if not orders and self.tier.at_rest:
                return

    def save(self, chain: int, depth: int) -> bytes:
        """A chunk becomes visible above, and is offered below."""
        facts = facts_of(chain, depth)
        writes = [ChunkWrite(facts.digest, facts.parent, depth, CHUNK)]
        answer = self.first.reserve("engine", "", writes, self.now)
        assert answer.id is not None
        self.first.complete(answer.id, {0})
        self.tier.offer(facts.digest, self.now)
        return facts.digest

    def found(self) -> set[bytes]:
        entries = self.tier.index._residency.entries
        return {key for key, _ in entries.digests.listed()}


@st.composite
def found_chunks(draw: st.DrawFn) -> list[ChunkFacts]:
    """Chains with holes, in any order of use."""
    depths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    chunks = [facts_of(chain, depth) for chain, length in enumerate(depths) for depth in range(length)]
    lost = draw(st.sets(st.sampled_from(range(len(chunks))), max_size=3))
    return draw(st.permutations([chunk for place, chunk in enumerate(chunks) if place not in lost]))


@given(found_chunks(), st.integers(1, 30))
@settings(max_examples=80, deadline=None)
def test_what_fits_and_can_be_found_is_taken_in_and_the_rest_deleted(
    chunks: list[ChunkFacts], capacity: int
) -> None:
    opened = Opened(chunks, capacity)
    found = opened.found()
    assert found | set(opened.deleted) == {chunk.digest for chunk in chunks}
    assert not found & set(opened.deleted)
    whole = set()
    for chunk in sorted(chunks, key=lambda chunk: chunk.depth):
        if chunk.parent is None or chunk.parent in whole:
            whole.add(chunk.digest)
    assert found <= whole
    assert len(found) == min(capacity, len(whole))
    # Nothing that stays has a use older than all the uses of something that went for lack of room.
    used = {chunk.digest: place for place, chunk in enumerate(chunks)}
    behind = {chunk.digest: used[chunk.digest] for chunk in chunks}
    for chunk in sorted(chunks, key=lambda chunk: -chunk.depth):
        if chunk.parent in behind:
            behind[chunk.parent] = max(behind[chunk.parent], behind[chunk.digest])
    tips = {key: behind[key] for key in whole}
    if found and (gone := whole - found):
        assert max(tips[key] for key in gone) <= max(tips[key] for key in found)


@given(found_chunks())
@settings(max_examples=60, deadline=None)
def test_the_least_recently_used_goes_first_after_an_opening(chunks: list[ChunkFacts]) -> None:
    opened = Opened(chunks, 40)
    used = {chunk.digest: place for place, chunk in enumerate(chunks)}
    left = opened.found()
    parents = {chunk.digest: chunk.parent for chunk in chunks}
    while left:
        # A chunk with something behind it stays as long as that.
        leaves = left - {parents[key] for key in left}
        opened.tier.index.evict(1)
        (gone,) = left - opened.found()
        assert gone == min(leaves, key=lambda key: used[key])
        left.discard(gone)


def test_chunks_of_others_go_before_any_of_our_own() -> None:
    own = [facts_of(chain, 0) for chain in range(4)]
    foreign = [digest("foreign", number) * 2 for number in range(5)]
    opened = Opened(own, 10, foreign=foreign)
    assert opened.found() == {chunk.digest for chunk in own}
    assert opened.deleted == []
    new = [opened.save(100 + number, 0) for number in range(6)]
    opened.run()
    assert sorted(opened.deleted) == sorted(foreign)
    assert opened.found() == {*new, *(chunk.digest for chunk in own)}
    opened.save(200, 0)
    opened.run()
    assert opened.deleted[-1] == own[0].digest


def test_chunks_of_others_have_no_room_where_our_own_take_it_all() -> None:
    own = [facts_of(chain, 0) for chain in range(4)]
    foreign = [digest("foreign", number) * 2 for number in range(5)]
    opened = Opened(own, 6, foreign=foreign)
    assert opened.found() == {chunk.digest for chunk in own}
    assert len(opened.deleted) == 3
    assert set(opened.deleted) < set(foreign)


def test_what_has_ended_is_deleted_with_what_stands_behind_it() -> None:
    chunks = [facts_of(0, 0), facts_of(0, 1, end=5.0), facts_of(0, 2, end=5.0), facts_of(1, 0, end=50.0)]
    opened = Opened(chunks, 10, now=6.0)
    assert opened.found() == {chunks[0].digest, chunks[3].digest}
    assert set(opened.deleted) == {chunks[1].digest, chunks[2].digest}


def test_what_only_some_ranks_have_is_deleted_before_it_is_stored_again() -> None:
    key = digest(7, 0)
    opened = Opened([], 10, useless=[key])
    assert opened.deleted == [key]
    assert opened.save(7, 0) == key
    opened.run()
    assert opened.found() == {key}
    assert opened.stored == [key]


def test_a_store_with_less_room_is_given_less_until_it_goes_well_again() -> None:
    opened = Opened([], 4)
    for number in range(2):
        opened.save(number, 0)
        opened.run()
    opened.save(2, 0)
    opened.run(ItemFault.NO_SPACE)
    assert opened.tier.index.copying.free == 1
    before = opened.found()
    opened.save(3, 0)
    opened.run()
    assert opened.found() > before
    opened.tier.index.check()


def test_a_second_content_of_one_opening_changes_nothing() -> None:
    opened = Opened([facts_of(0, 0)], 4)
    opened.tier.opened(opened.tier.opening, Adoption.of([facts_of(5, 0)], (), (), 4))
    opened.run()
    assert opened.found() == {digest(0, 0)}


def test_a_chunk_that_was_cleared_while_it_is_written_is_written_again_only_after_its_deletion() -> None:
    opened = Opened([], 10)
    tier = opened.tier
    key = opened.save(1, 0)
    (store,) = opened.work()
    tier.clear_begins()
    tier.index.clear()
    opened.first.clear()
    tier.clear_ended()
    assert opened.save(1, 0) == key
    assert opened.work() == []
    tier.report(OrderResult(store.id, {}), opened.now)
    (delete,) = opened.work()
    assert isinstance(delete, DeleteOrder)
    assert delete.digests == (key,)
    assert key not in opened.found()
    tier.report(OrderResult(delete.id, {}), opened.now)
    (again,) = opened.work()
    assert isinstance(again, StoreOrder)
    tier.report(OrderResult(again.id, {}), opened.now)
    opened.run()
    assert opened.found() == {key}


def test_nothing_is_copied_down_during_a_clear() -> None:
    opened = Opened([], 10)
    opened.tier.clear_begins()
    opened.tier.index.clear()
    opened.save(1, 0)
    assert opened.work() == []
    opened.tier.clear_ended()
    key = opened.save(2, 0)
    opened.run()
    assert opened.found() == {key}


def test_what_was_cleared_while_a_tier_is_closed_is_deleted_when_it_is_opened() -> None:
    opened = Opened([facts_of(1, 0)], 10)
    tier = opened.tier
    tier.fail("a test")
    tier.closed(tier.opening, opened.now)
    tier.clear_begins()
    tier.clear_ended()
    tier.orders.clear()
    tier.open()
    tier.orders.clear()
    tier.opened(tier.opening, Adoption.of([facts_of(1, 0)], (), (), 10))
    opened.run()
    assert opened.found() == set()
    assert opened.deleted == [digest(1, 0)]
    opened.save(1, 0)
    opened.run()
    assert opened.found() == {digest(1, 0)}


def test_results_are_taken_in_a_few_chunks_at_a_time() -> None:
    opened = Opened([], 40)
    for number in range(24):
        opened.save(number, 0)
    (store,) = opened.work()
    opened.tier.report(OrderResult(store.id, {}), opened.now)
    most = 0
    before = opened.found()
    while opened.tier.settle(opened.now):
        most = max(most, len(opened.found() - before))
        before = opened.found()
    assert len(before) == 24
    assert 0 < most <= 4
