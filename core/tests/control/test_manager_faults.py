"""Kinds of faults that caches of this sort have had: one test each, named after what should happen."""

from __future__ import annotations

import hashlib
import random

import pytest

from kvferry.api import KVFerryError
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite, LeaseOutcome, Match, Reservation, WriteOutcome
from kvferry.testing.eviction import NullEvictionPolicy

CHUNK, BLOCK = 256, 128


def key(name: str, depth: int) -> bytes:
    return hashlib.sha256(f"{name}/{depth}".encode()).digest()


def alias(name: str, depth: int) -> bytes:
    return hashlib.sha256(f"{name}/{depth}/half".encode()).digest()


def writes(name: str, start: int, stop: int) -> list[ChunkWrite]:
    return [
        ChunkWrite(
            key(name, depth),
            key(name, depth - 1) if depth else None,
            depth,
            CHUNK,
            ((alias(name, depth), BLOCK),),
        )
        for depth in range(start, stop)
    ]


def tail(name: str, depth: int) -> ChunkWrite:
    """The first block of a chunk, stored on its own."""
    return ChunkWrite(alias(name, depth), key(name, depth - 1) if depth else None, depth, BLOCK)


class Cache:
    """A manager with short ways to say what the tests need."""

    def __init__(self, slots: int) -> None:
        self.manager = CacheManager(
            capacity=slots,
            chunk_tokens=CHUNK,
            block_tokens=BLOCK,
            policy=LRU(),
            lease_seconds=10.0,
            write_seconds=20.0,
        )
        self.manager.grow(slots)
        self.now = 0.0

    def reserve(self, *items: ChunkWrite, salt: str = "") -> Reservation:
        answer = self.manager.reserve("writer", salt, items, self.now)
        self.manager.check()
        return answer

    def store(self, *items: ChunkWrite, salt: str = "") -> int:
        """Chunks that became visible."""
        answer = self.reserve(*items, salt=salt)
        if answer.id is None:
            return 0
        granted = [index for index, item in enumerate(answer.items) if item.outcome is WriteOutcome.GRANTED]
        visible = self.manager.complete(answer.id, granted).visible
        self.manager.check()
        return visible

    def match(self, name: str, chunks: int, owner: str = "reader") -> Match:
        found = self.manager.match(
            owner,
            [key(name, depth) for depth in range(chunks)],
            lambda index: [(alias(name, index), BLOCK)],
            self.now,
            chunks * CHUNK,
        )
        self.manager.check()
        return found

    def tokens(self, name: str, chunks: int) -> int:
        """What is found, without keeping a lease."""
        found = self.match(name, chunks)
        if found.lease is not None:
            assert self.manager.release(found.lease) is LeaseOutcome.OK
        return found.tokens


def outcomes(answer: Reservation) -> list[WriteOutcome]:
    return [item.outcome for item in answer.items]


def test_matches_that_are_never_loaded_do_not_pin_for_ever() -> None:
    cache = Cache(4)
    cache.store(*writes("a", 0, 4))
    keys = [key("a", depth) for depth in range(4)]
    for number in range(1000):
        found = cache.manager.match(f"request {number}", keys, lambda index: (), 0.0, 4 * CHUNK)
        assert found.tokens == 4 * CHUNK
    cache.manager.check()
    assert cache.store(*writes("b", 0, 4)) == 0
    assert len(cache.manager.expire(10.0).leases) == 1000
    assert cache.manager.stats().leased == 0
    assert cache.store(*writes("b", 0, 4)) == 4


@pytest.mark.parametrize("state", ["matched", "in flight", "writing"])
def test_the_end_of_an_owner_ends_all_it_had(state: str) -> None:
    cache = Cache(8)
    cache.store(*writes("a", 0, 2))
    lease = cache.match("a", 2, owner="writer").lease
    assert lease is not None
    reservation = cache.reserve(*writes("b", 0, 2)).id
    assert reservation is not None
    if state == "in flight":
        assert cache.manager.begin_load(lease) is LeaseOutcome.OK
    if state == "writing":
        assert cache.manager.release(lease) is LeaseOutcome.OK
    ended = cache.manager.release_owner("writer")
    cache.manager.check()
    assert ended.released == (state == "matched")
    assert ended.deferred == (state == "in flight")
    assert ended.quarantined == 1
    assert cache.manager.stats().quarantined == 2
    if state == "in flight":
        assert cache.manager.stats().leased == 2
        assert cache.manager.expire(1e9).leases == ()
        assert cache.manager.finish_load(lease) is LeaseOutcome.OK
    late = cache.manager.complete(reservation, {0, 1})
    assert (late.outcome, late.visible, late.freed) == (LeaseOutcome.LATE, 0, 2)
    assert cache.tokens("b", 2) == 0
    stats = cache.manager.stats()
    assert (stats.leases, stats.reservations, stats.leased, stats.free) == (0, 0, 0, 6)


def test_a_finished_request_may_leave_its_last_writes_behind() -> None:
    cache = Cache(4)
    reservation = cache.reserve(*writes("a", 0, 2)).id
    assert reservation is not None
    assert cache.manager.release_owner("writer", keep_writes=True).deferred == 1
    assert cache.manager.complete(reservation, {0, 1}).visible == 2
    assert cache.tokens("a", 2) == 2 * CHUNK


@pytest.mark.parametrize("first", [0, 1])
def test_two_matches_of_one_request_end_one_by_one(first: int) -> None:
    cache = Cache(2)
    cache.store(*writes("a", 0, 2))
    leases = [cache.match("a", 2, owner="same").lease for _ in range(2)]
    one, other = leases[first], leases[1 - first]
    assert one is not None
    assert other is not None
    assert cache.manager.release(one) is LeaseOutcome.OK
    assert cache.manager.release(one) is LeaseOutcome.ENDED
    cache.manager.check()
    assert cache.manager.evict(2) == 0
    assert cache.manager.release(other) is LeaseOutcome.OK
    assert cache.manager.release(other) is LeaseOutcome.ENDED
    assert cache.manager.release(99) is LeaseOutcome.UNKNOWN
    assert cache.manager.evict(2) == 2


def test_no_room_is_an_answer_and_never_a_wait() -> None:
    cache = Cache(4)
    cache.store(*writes("a", 0, 4))
    lease = cache.match("a", 4).lease
    assert lease is not None
    answer = cache.reserve(*writes("b", 0, 2))
    assert outcomes(answer) == [WriteOutcome.NO_ROOM] * 2
    assert answer.id is None
    cache.manager.release(lease)
    assert cache.store(*writes("b", 0, 2)) == 2


def test_a_policy_that_gives_nothing_up_fills_the_tier_and_no_more() -> None:
    manager = CacheManager(
        capacity=2,
        chunk_tokens=CHUNK,
        block_tokens=BLOCK,
        policy=NullEvictionPolicy(),
        lease_seconds=1.0,
        write_seconds=1.0,
    )
    manager.grow(2)
    answer = manager.reserve("writer", "", writes("a", 0, 3), 0.0)
    assert outcomes(answer) == [*[WriteOutcome.GRANTED] * 2, WriteOutcome.NO_ROOM]
    assert manager.evict(1) == 0


def test_a_tier_full_of_leases_recovers_when_they_end() -> None:
    cache = Cache(100)
    for number in range(100):
        cache.store(*writes(f"p{number}", 0, 1))
    leases = [cache.match(f"p{number}", 1).lease for number in range(95)]
    manager = cache.manager
    for number in range(1000):
        answer = manager.reserve("writer", "", writes(f"q{number}", 0, 1), 0.0)
        assert answer.id is not None
        manager.complete(answer.id, {0})
    assert manager.stats().leased == 95
    assert outcomes(cache.reserve(*writes("long", 0, 6)))[-1] is WriteOutcome.NO_ROOM
    for lease in leases:
        assert lease is not None
        manager.release(lease)
    manager.worker_lost()
    assert cache.store(*writes("long", 0, 100)) == 100


def test_a_prefix_stored_in_batches_loses_its_tail_first() -> None:
    cache = Cache(16)
    for start in range(0, 16, 4):
        assert cache.store(*writes("a", start, start + 4)) == 4
    for left in range(15, -1, -1):
        assert cache.manager.evict(1) == 1
        cache.manager.check()
        assert cache.tokens("a", 16) == left * CHUNK


def test_an_old_system_prompt_outlives_what_stands_behind_it() -> None:
    cache = Cache(10)
    cache.store(*writes("a", 0, 10))
    assert cache.store(*writes("b", 0, 4)) == 4
    assert cache.tokens("a", 10) == 6 * CHUNK


def test_storing_the_same_again_charges_nothing() -> None:
    cache = Cache(4)
    assert cache.store(*writes("a", 0, 2)) == 2
    answer = cache.reserve(*writes("a", 0, 2))
    assert outcomes(answer) == [WriteOutcome.RESIDENT] * 2
    assert answer.id is None
    assert cache.manager.stats().free == 2
    assert cache.store(*writes("b", 0, 2)) == 2
    assert cache.tokens("a", 2) == cache.tokens("b", 2) == 2 * CHUNK


def test_two_writers_of_one_chunk_are_one_write() -> None:
    cache = Cache(4)
    first = cache.reserve(*writes("a", 0, 2))
    second = cache.reserve(*writes("a", 0, 3))
    assert outcomes(second) == [WriteOutcome.BUSY, WriteOutcome.BUSY, WriteOutcome.GRANTED]
    assert first.id is not None
    assert second.id is not None
    done = cache.manager.complete(second.id, {2})
    assert (done.visible, done.waiting) == (0, 1)
    assert cache.tokens("a", 3) == 0
    assert cache.manager.complete(first.id, {0, 1}).visible == 3
    assert cache.tokens("a", 3) == 3 * CHUNK


def test_what_was_matched_can_be_loaded() -> None:
    cache = Cache(8)
    chance = random.Random(5)
    cache.store(*writes("a", 0, 4))
    for number in range(300):
        cache.store(*writes("a", 0, 4))
        found = cache.match("a", 4)
        for _ in range(chance.randrange(4)):
            cache.store(*writes(f"b{number}", 0, chance.randrange(1, 9)))
        other = cache.manager.reserve("x", "", writes(f"c{number}", 0, 8), 0.0)
        assert not {item.slot for item in other.items} & set(found.slots)
        if other.id is not None:
            cache.manager.abort(other.id)
        if found.lease is not None:
            assert cache.manager.begin_load(found.lease) is LeaseOutcome.OK
            assert cache.manager.finish_load(found.lease) is LeaseOutcome.OK


def test_making_room_takes_nothing_of_the_same_batch() -> None:
    cache = Cache(4)
    assert cache.store(*writes("a", 0, 1)) == 1
    assert cache.store(*writes("b", 0, 3)) == 3
    answer = cache.reserve(*writes("a", 0, 4))
    assert outcomes(answer) == [WriteOutcome.RESIDENT, *[WriteOutcome.GRANTED] * 3]
    assert answer.id is not None
    assert cache.manager.complete(answer.id, {1, 2, 3}).visible == 3
    assert cache.tokens("a", 4) == 4 * CHUNK


def test_making_room_does_not_take_the_chunk_that_the_batch_stands_on() -> None:
    cache = Cache(2)
    cache.store(*writes("a", 0, 1))
    cache.store(*writes("b", 0, 1))
    answer = cache.reserve(*writes("a", 1, 3))
    assert outcomes(answer) == [WriteOutcome.GRANTED, WriteOutcome.NO_ROOM]


def test_a_failed_part_leaves_whole_prefixes_only() -> None:
    """The result of a chunk is the AND over ranks; whatever fails, what is visible is a prefix."""
    chance = random.Random(7)
    for round_number in range(50):
        cache = Cache(12)
        waiting = []
        for start in (0, 4, 8):
            answer = cache.reserve(*writes("a", start, start + 4))
            assert answer.id is not None
            waiting.append((answer.id, start))
        failed = set(chance.sample(range(12), round_number % 4))
        chance.shuffle(waiting)
        for reservation, start in waiting:
            good = [item for item in range(4) if start + item not in failed]
            cache.manager.complete(reservation, good)
            cache.manager.check()
        whole = min(failed, default=12)
        assert cache.tokens("a", 12) == whole * CHUNK
        assert cache.manager.stats().resident == whole
        assert cache.manager.stats().free == 12 - whole


def test_a_bad_chunk_takes_along_what_stands_behind_it() -> None:
    cache = Cache(8)
    cache.store(*writes("a", 0, 6))
    pending = cache.reserve(*writes("a", 6, 8)).id
    assert pending is not None
    gone = cache.manager.drop([key("a", 2)])
    assert (gone.removed, gone.kept, gone.doomed) == (4, 0, 2)
    cache.manager.check()
    assert cache.tokens("a", 8) == 2 * CHUNK
    assert cache.manager.stats().quarantined == 2
    assert cache.manager.complete(pending, {0, 1}).visible == 0
    assert cache.manager.stats().free == 6


def test_clear_counts_what_it_removes() -> None:
    cache = Cache(12)
    for number in range(8):
        cache.store(*writes(f"p{number}", 0, 1))
    cache.store(*writes("pinned", 0, 2))
    cache.store(*writes("other", 0, 2), salt="tenant")
    lease = cache.match("pinned", 2).lease
    assert lease is not None
    gone = cache.manager.clear(salt="")
    cache.manager.check()
    assert (gone.removed, gone.kept) == (8, 2)
    assert cache.tokens("pinned", 2) == 0
    assert cache.tokens("other", 2) == 2 * CHUNK
    assert cache.manager.stats().retiring == 2
    assert cache.manager.release(lease) is LeaseOutcome.OK
    assert cache.manager.stats().free == 10
    gone = cache.manager.clear()
    assert (gone.removed, gone.kept) == (2, 0)
    assert cache.manager.stats().free == 12


def test_what_was_being_written_when_all_was_cleared_stays_away() -> None:
    cache = Cache(4)
    reservation = cache.reserve(*writes("a", 0, 2)).id
    assert reservation is not None
    assert cache.manager.clear().doomed == 2
    again = cache.reserve(*writes("a", 0, 2))
    assert outcomes(again) == [WriteOutcome.GRANTED] * 2
    assert cache.manager.complete(reservation, {0, 1}).visible == 0
    assert cache.tokens("a", 2) == 0


def test_a_full_tier_keeps_accepting_and_the_newest_stays() -> None:
    cache = Cache(100)
    for number in range(400):
        answer = cache.manager.reserve("writer", "", writes(f"p{number}", 0, 1), 0.0)
        assert answer.id is not None
        assert cache.manager.complete(answer.id, {0}).visible == 1
        assert cache.manager.stats().resident <= 100
    cache.manager.check()
    for number in range(300, 400):
        assert cache.tokens(f"p{number}", 1) == CHUNK


def test_storing_again_keeps_the_lease() -> None:
    cache = Cache(2)
    cache.store(*writes("a", 0, 2))
    lease = cache.match("a", 2).lease
    assert lease is not None
    cache.store(*writes("a", 0, 2))
    assert cache.manager.touch([key("a", 0), key("a", 1)]) == 2
    assert cache.manager.evict(2) == 0
    assert cache.store(*writes("b", 0, 1)) == 0
    assert cache.manager.release(lease) is LeaseOutcome.OK


def test_late_writers_cannot_reach_a_slot_that_was_given_to_another() -> None:
    cache = Cache(2)
    slow = cache.reserve(*writes("a", 0, 2))
    assert slow.id is not None
    assert cache.manager.expire(19.9).reservations == ()
    assert cache.manager.expire(20.0).reservations == (slow.id,)
    cache.manager.check()
    assert outcomes(cache.reserve(*writes("b", 0, 1))) == [WriteOutcome.NO_ROOM]
    assert cache.manager.renew(slow.id, 21.0) is LeaseOutcome.LATE
    assert cache.manager.complete(slow.id, {0, 1}).outcome is LeaseOutcome.LATE
    assert cache.tokens("a", 2) == 0
    assert cache.store(*writes("b", 0, 2)) == 2


def test_dead_workers_free_what_they_might_have_written() -> None:
    cache = Cache(4)
    cache.store(*writes("a", 0, 1))
    loading = cache.match("a", 1).lease
    assert loading is not None
    cache.manager.begin_load(loading)
    slow = cache.reserve(*writes("b", 0, 2)).id
    assert slow is not None
    cache.manager.abandon(slow)
    lost = cache.manager.worker_lost()
    cache.manager.check()
    assert (lost.reads, lost.writes) == (1, 1)
    assert cache.manager.stats().free == 3
    assert cache.manager.complete(slow, {0}).outcome is LeaseOutcome.ENDED


def test_a_full_chunk_takes_the_place_of_its_tail() -> None:
    cache = Cache(4)
    cache.store(*writes("a", 0, 1), tail("a", 1))
    assert cache.tokens("a", 2) == CHUNK + BLOCK
    leased = cache.match("a", 2)
    assert leased.pieces[1][1] == BLOCK
    cache.store(*writes("a", 1, 2))
    assert cache.manager.stats().retiring == 1
    assert cache.tokens("a", 2) == 2 * CHUNK
    assert leased.lease is not None
    cache.manager.release(leased.lease)
    assert cache.manager.stats().free == 2
    assert outcomes(cache.reserve(tail("a", 1))) == [WriteOutcome.RESIDENT]


def test_a_tail_that_comes_after_its_full_chunk_adds_nothing() -> None:
    cache = Cache(4)
    cache.store(*writes("a", 0, 1))
    late = cache.reserve(tail("a", 1)).id
    assert late is not None
    cache.store(*writes("a", 1, 2))
    done = cache.manager.complete(late, {0})
    cache.manager.check()
    assert (done.outcome, done.visible, done.freed) == (LeaseOutcome.OK, 0, 1)
    assert cache.manager.stats().free == 2
    assert cache.tokens("a", 2) == 2 * CHUNK


def test_a_prompt_that_ends_inside_a_chunk_hits_its_beginning() -> None:
    cache = Cache(4)
    cache.store(*writes("a", 0, 2))
    for limit, tokens in ((511, 384), (384, 384), (383, 256), (255, 128), (127, 0), (0, 0), (-5, 0)):
        found = cache.manager.match(
            "reader",
            [key("a", 0), key("a", 1)],
            lambda index: [(alias("a", index), BLOCK)],
            0.0,
            limit,
        )
        assert found.tokens == tokens
        assert (found.lease is None) == (tokens == 0)


def test_nothing_is_found_behind_a_key_of_another_chain() -> None:
    cache = Cache(4)
    cache.store(*writes("a", 0, 2))
    cache.store(*writes("b", 0, 2))
    found = cache.manager.match(
        "reader", [key("a", 0), key("b", 1)], lambda index: [(alias("b", 1), BLOCK)], 0.0, 9999
    )
    assert found.tokens == CHUNK
    foreign = cache.reserve(*writes("a", 2, 3), salt="tenant")
    assert outcomes(foreign) == [WriteOutcome.NO_PARENT]


def test_a_match_in_slices_keeps_what_it_found() -> None:
    cache = Cache(8)
    cache.store(*writes("a", 0, 8))
    keys = [key("a", depth) for depth in range(8)]
    cursor = cache.manager.match_in_slices("reader", keys, lambda index: (), 8 * CHUNK, 3)
    assert cursor.advance(0.0)
    assert cache.manager.evict(8) == 5
    assert not cursor.advance(0.0)
    assert cursor.match.tokens == 3 * CHUNK
    assert not cursor.advance(0.0)


def test_a_match_whose_owner_ends_between_slices_comes_out_empty() -> None:
    cache = Cache(8)
    cache.store(*writes("a", 0, 8))
    keys = [key("a", depth) for depth in range(8)]
    cursor = cache.manager.match_in_slices("reader", keys, lambda index: (), 8 * CHUNK, 3)
    assert cursor.advance(0.0)
    cache.manager.release_owner("reader")
    assert not cursor.advance(0.0)
    cache.manager.check()
    assert (cursor.match.lease, cursor.match.tokens) == (None, 0)
    assert cache.manager.stats().leased == 0


def test_slots_come_into_use_as_they_are_announced() -> None:
    manager = CacheManager(
        capacity=4,
        chunk_tokens=CHUNK,
        block_tokens=BLOCK,
        policy=LRU(),
        lease_seconds=1.0,
        write_seconds=1.0,
    )
    assert outcomes(manager.reserve("w", "", writes("a", 0, 1), 0.0)) == [WriteOutcome.NO_ROOM]
    manager.grow(2)
    answer = manager.reserve("w", "", writes("a", 0, 4), 0.0)
    assert [item.slot for item in answer.items] == [0, 1, -1, -1]
    manager.grow(1)
    manager.grow(99)
    assert manager.stats().capacity == 4
    answer = manager.reserve("w", "", writes("a", 2, 4), 0.0)
    assert [item.slot for item in answer.items] == [2, 3]


def test_renewing_moves_the_deadline() -> None:
    cache = Cache(2)
    cache.store(*writes("a", 0, 1))
    lease = cache.match("a", 1).lease
    assert lease is not None
    assert cache.manager.next_deadline() == 10.0
    assert cache.manager.renew(lease, 5.0) is LeaseOutcome.OK
    assert cache.manager.next_deadline() == 15.0
    assert cache.manager.expire(14.0).leases == ()
    assert cache.manager.expire(15.0).leases == (lease,)
    assert cache.manager.next_deadline() == float("inf")
    assert cache.manager.begin_load(lease) is LeaseOutcome.ENDED


HEAD = hashlib.sha256(b"head").digest()


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (ChunkWrite(HEAD, None, 0, 100), "blocks of 128"),
        (ChunkWrite(HEAD, None, 0, 0), "blocks of 128"),
        (ChunkWrite(HEAD, None, 0, 512), "blocks of 128"),
        (ChunkWrite(HEAD, None, 0, 256, ((key("x", 0), 256),)), "aliases of"),
        (ChunkWrite(HEAD, None, 0, 256, ((HEAD, 128),)), "two aliases"),
        (ChunkWrite(b"short", None, 0, 256), "32 bytes"),
        (ChunkWrite(HEAD, None, 1, 256), "contradict"),
        (ChunkWrite(HEAD, HEAD, 0, 256), "contradict"),
    ],
)
def test_writes_against_the_geometry_change_nothing(write: ChunkWrite, words: str) -> None:
    cache = Cache(4)
    with pytest.raises(KVFerryError, match=words):
        cache.reserve(*writes("a", 0, 1), write)
    assert cache.manager.stats().free == 4
    cache.manager.check()


def test_a_result_for_items_that_were_not_granted_changes_nothing() -> None:
    cache = Cache(4)
    cache.store(*writes("a", 0, 1))
    answer = cache.reserve(*writes("a", 0, 2))
    assert answer.id is not None
    with pytest.raises(KVFerryError, match="not granted"):
        cache.manager.complete(answer.id, {0, 1})
    cache.manager.check()
    assert cache.manager.complete(answer.id, {1}).visible == 1
