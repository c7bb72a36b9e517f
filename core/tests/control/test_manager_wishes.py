"""Pins, times to live and quotas: what each promises, by example."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest

from kvferry.control.deadlines import NEVER, Deadlines
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite, PinOutcome, WriteOutcome
from kvferry.control.pins import MAXIMUM_PINS

CHUNK, BLOCK = 256, 128


def key(name: str, depth: int) -> bytes:
    return hashlib.sha256(f"{name}/{depth}".encode()).digest()


def chain(name: str, start: int, stop: int) -> list[ChunkWrite]:
    return [
        ChunkWrite(
            key(name, depth),
            key(name, depth - 1) if depth else None,
            depth,
            CHUNK,
            ((key(name + "half", depth), BLOCK),),
        )
        for depth in range(start, stop)
    ]


def half(name: str, depth: int) -> ChunkWrite:
    """A tail: the first block of a chunk."""
    return ChunkWrite(key(name + "half", depth), key(name, depth - 1) if depth else None, depth, BLOCK)


def manager(slots: int, **more: Any) -> CacheManager:
    made = CacheManager(
        capacity=slots,
        chunk_tokens=CHUNK,
        block_tokens=BLOCK,
        policy=LRU(),
        lease_seconds=10.0,
        write_seconds=20.0,
        **more,
    )
    made.grow(slots)
    return made


def store(cache: CacheManager, writes: list[ChunkWrite], now: float = 0.0, **more: Any) -> list[WriteOutcome]:
    answer = cache.reserve("w", "", writes, now, **more)
    outcomes = [item.outcome for item in answer.items]
    if answer.id is not None:
        granted = [i for i, outcome in enumerate(outcomes) if outcome is WriteOutcome.GRANTED]
        cache.complete(answer.id, granted)
    cache.check()
    return outcomes


def found(cache: CacheManager, name: str, chunks: int, now: float = 0.0) -> int:
    """Tokens."""
    keys = [key(name, depth) for depth in range(chunks)]
    tails = lambda index: [(key(name + "half", index), BLOCK)]  # noqa: E731
    match = cache.match("r", keys, tails, now, chunks * CHUNK)
    if match.lease is not None:
        cache.release(match.lease)
    return match.tokens


# Pins


def test_a_pinned_prefix_outlives_any_pressure_until_its_pin_ends() -> None:
    cache = manager(10)
    store(cache, chain("system", 0, 3))
    assert cache.pin("", "p", key("system", 2), 60.0, 0.0) is PinOutcome.PINNED
    for number in range(20):
        store(cache, chain(f"scan{number}", 0, 4))
    assert found(cache, "system", 3) == 3 * CHUNK
    assert cache.next_deadline() <= 60.0
    assert cache.expire(60.0).pins == (("", "p"),)
    cache.check()
    for number in range(20):
        store(cache, chain(f"again{number}", 0, 4))
    assert found(cache, "system", 3) == 0


def test_the_later_of_two_pins_wins_and_ending_one_leaves_the_other() -> None:
    cache = manager(10)
    store(cache, chain("a", 0, 2))
    cache.pin("", "short", key("a", 1), 5.0, 0.0)
    cache.pin("", "long", key("a", 0), 50.0, 0.0)
    cache.expire(5.0)
    assert cache.evict(10) == 1
    assert found(cache, "a", 2) == CHUNK
    assert cache.unpin("long") == 1
    assert cache.unpin("long") == 0
    cache.expire(6.0)
    assert cache.evict(10) == 1


def test_no_more_than_the_share_is_pinned_and_the_head_comes_first() -> None:
    cache = manager(10, max_pinned=0.3)
    store(cache, chain("a", 0, 5))
    assert cache.pin("", "p", key("a", 4), 5.0, 0.0) is PinOutcome.NO_ROOM
    assert cache.stats().pinned == 3
    assert cache.stats().pins_refused == 2
    assert cache.pin("", "q", key("a", 4), 5.0, 0.0) is PinOutcome.NO_ROOM
    assert cache.pin("", "q", key("a", 2), 5.0, 0.0) is PinOutcome.PINNED
    cache.evict(10)
    assert found(cache, "a", 5) == 3 * CHUNK
    assert store(cache, chain("b", 0, 7))[-1] is WriteOutcome.GRANTED


def test_names_of_pins_are_bounded() -> None:
    cache = manager(10)
    store(cache, chain("a", 0, 1))
    outcomes = {cache.pin("", f"p{number}", key("a", 0), 5.0, 0.0) for number in range(MAXIMUM_PINS)}
    assert outcomes == {PinOutcome.PINNED}
    assert cache.pin("", "one more", key("a", 0), 5.0, 0.0) is PinOutcome.NO_ROOM
    assert len(cache.pins()) == MAXIMUM_PINS
    cache.expire(5.0)
    assert cache.pin("", "one more", key("a", 0), 5.0, 6.0) is PinOutcome.PINNED
    cache.check()


def test_a_pinned_chunk_that_is_cleared_goes_at_once_and_its_pin_holds_nobody_else() -> None:
    cache = manager(4)
    store(cache, chain("a", 0, 2))
    cache.pin("", "p", key("a", 1), 60.0, 0.0)
    assert cache.clear().removed == 2
    assert cache.stats().pinned == 0
    store(cache, chain("b", 0, 4))  # the same rows again
    assert cache.evict(4) == 4
    cache.expire(60.0)
    cache.check()


def test_what_grows_out_of_a_pinned_tail_is_pinned() -> None:
    cache = manager(6)
    store(cache, [*chain("a", 0, 1), half("a", 1)])
    assert cache.pin("", "p", key("ahalf", 1), 60.0, 0.0) is PinOutcome.PINNED
    store(cache, chain("a", 1, 2))
    assert cache.stats().pinned == 2
    cache.evict(6)
    assert found(cache, "a", 2) == 2 * CHUNK


def test_a_write_under_way_can_be_pinned_and_is_not_when_it_fails() -> None:
    cache = manager(6)
    answer = cache.reserve("w", "", chain("a", 0, 2), 0.0)
    assert cache.pin("", "p", key("a", 1), 60.0, 0.0) is PinOutcome.PINNED
    assert cache.pin("", "p", key("nobody", 1), 60.0, 0.0) is PinOutcome.ABSENT
    assert answer.id is not None
    cache.complete(answer.id, {0})
    cache.check()
    assert cache.stats().pinned == 1


# Time to live


@pytest.mark.parametrize("expire", [False, True])
def test_a_chunk_is_missed_from_the_moment_its_time_ends(expire: bool) -> None:
    cache = manager(10)
    store(cache, [*chain("a", 0, 2), half("a", 2)], ttl=5.0)
    for now, tokens in ((4.9, 2 * CHUNK + BLOCK), (5.0, 0)):
        if expire:
            cache.expire(now)
        assert found(cache, "a", 3, now) == tokens
    outcomes = store(cache, chain("a", 1, 2), now=5.0)
    assert outcomes == [WriteOutcome.NO_PARENT]


def test_what_is_before_a_chunk_lives_as_long_as_it() -> None:
    cache = manager(10)
    store(cache, chain("a", 0, 1), ttl=5.0)
    store(cache, chain("a", 1, 2), ttl=9.0)
    store(cache, chain("a", 2, 3), ttl=2.0)
    cache.expire(5.0)
    assert found(cache, "a", 3, 5.0) == 2 * CHUNK
    cache.expire(9.0)
    assert cache.stats().resident == 0
    assert cache.stats().ended == 3


def test_storing_again_without_a_time_to_live_lifts_it() -> None:
    cache = manager(10)
    store(cache, chain("a", 0, 2), ttl=5.0)
    assert store(cache, chain("a", 0, 2)) == [WriteOutcome.RESIDENT] * 2
    cache.expire(1e9)
    assert found(cache, "a", 2, 1e9) == 2 * CHUNK


def test_the_tiers_own_time_to_live_counts_where_none_is_asked_for() -> None:
    cache = manager(10, ttl=5.0)
    store(cache, chain("a", 0, 1))
    store(cache, chain("b", 0, 1), ttl=50.0)
    cache.expire(5.0)
    assert (found(cache, "a", 1, 5.0), found(cache, "b", 1, 5.0)) == (0, CHUNK)


def test_a_reader_keeps_what_ends_under_it() -> None:
    cache = manager(2)
    store(cache, chain("a", 0, 2), ttl=5.0)
    lease = cache.match("r", [key("a", 0), key("a", 1)], lambda index: (), 1.0, 2 * CHUNK).lease
    assert lease is not None
    assert cache.expire(5.0).ended.kept == 2
    assert store(cache, chain("b", 0, 1), now=5.0) == [WriteOutcome.NO_ROOM]
    cache.release(lease)
    cache.check()
    assert cache.stats().free == 2


def test_many_chunks_that_end_at_once_go_slice_by_slice() -> None:
    cache = manager(300)
    store(cache, chain("a", 0, 300), ttl=5.0)
    slices = 0
    while cache.next_deadline() <= 5.0:
        gone = cache.expire(5.0, limit=16).ended
        assert gone.removed <= 16
        slices += 1
    assert cache.stats().resident == 0
    assert slices >= 300 // 16


def test_ends_leave_no_garbage_whatever_is_done_to_them() -> None:
    chance = random.Random(7)
    deadlines, rows = Deadlines(50), {}
    for step in range(20_000):
        row, end = chance.randrange(50), chance.choice([NEVER, *range(step, step + 40)])
        deadlines.set(row, float(end))
        rows[row] = float(end)
        while (due := deadlines.due(step, 1000)) >= 0:
            assert rows[due] <= step
            deadlines.set(due, NEVER)
            rows[due] = NEVER
        assert not [row for row, end in rows.items() if end <= step]
        assert len(deadlines.records()) <= 50
    for place, (time, _) in enumerate(deadlines.records()):
        assert not place or deadlines.records()[(place - 1) // 2][0] <= time
