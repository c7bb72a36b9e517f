"""What users rely on: which chunks stay, what it costs, and who is kept apart from whom."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterable

import pytest

from kvferry.api import (
    NO_PARENT,
    UNLIMITED,
    ByteLimit,
    Claim,
    EntryView,
    Evicted,
    EvictionPolicy,
    KVFerryError,
)
from kvferry_eviction_policies.isolated_lru import IsolatedLRU
from kvferry_eviction_policies.options import IsolatedLRUOptions
from kvferry_eviction_policies.ordered import LFU
from kvferry_eviction_policies.s3fifo import S3FIFO
from plugins.eviction_policies.tests.subjects import REFERENCES, build, key, opened
from plugins.eviction_policies.tests.test_heaps_and_ghosts import calls

ALL = list(REFERENCES)


def chain(policy: EvictionPolicy, ids: Iterable[int], owner: str = "") -> None:
    parent = NO_PARENT
    for depth, entry in enumerate(ids):
        policy.insert(EntryView(entry, parent, depth, 1, owner, key(entry)))
        parent = entry


def take(entry: int) -> Claim:
    return Claim.TAKEN


def victims(policy: EvictionPolicy, count: int) -> list[int]:
    answer = policy.evict(count, take)
    assert isinstance(answer, Evicted)
    policy.remove(answer.ids)
    return list(answer.ids)


@pytest.mark.parametrize("name", ALL)
def test_tails_go_before_heads_however_they_were_used(name: str) -> None:
    policy = opened(name, 40)
    for start in range(0, 40, 10):
        chain(policy, range(start, start + 10))
    for uses, start in enumerate((10, 0, 30)):
        for depth in range(1, 5 + uses):
            policy.touch(list(range(start, start + depth)))
    gone = victims(policy, 40)
    for start in range(0, 40, 10):
        assert [entry for entry in gone if start <= entry < start + 10] == list(
            range(start + 9, start - 1, -1)
        )


@pytest.mark.parametrize("name", ALL)
def test_chunks_in_use_make_no_eviction_dearer(name: str) -> None:
    """Every leased leaf is asked for once at most, and then left alone until it is free."""
    costs = []
    for leased in (50, 5000):
        policy = opened(name, leased + 200)
        for entry in range(leased + 200):
            policy.insert(EntryView(entry, NO_PARENT, 0, 1, "", key(entry)))
        held = set(range(leased // 2)) | set(range(200 + leased // 2, 200 + leased))
        asked: list[int] = []

        def claim(entry: int, held: set[int] = held, asked: list[int] = asked) -> Claim:
            asked.append(entry)
            return Claim.LEASED if entry in held else Claim.TAKEN

        first = policy.evict(100, claim)
        assert isinstance(first, Evicted)
        policy.remove(first.ids)
        policy.evict(1000, claim)
        assert len(asked) <= 100 + len(held) + 100
        assert len([entry for entry in asked if entry in held]) == len(set(asked) & held)
        del asked[:]

        def again(policy: EvictionPolicy = policy, claim=claim) -> None:  # type: ignore[no-untyped-def]
            for _ in range(20):
                answer = policy.evict(1, claim)
                assert isinstance(answer, Evicted)
                policy.remove(answer.ids)

        policy.release(sorted(set(range(leased + 200)) - held - set(first.ids)))
        costs.append(calls(again))
        assert len(asked) == 20
    assert costs[1] <= 2 * costs[0]


@pytest.mark.parametrize("name", ALL)
def test_a_use_of_a_long_prefix_is_not_paid_chunk_by_chunk(name: str) -> None:
    costs = []
    for length in (16, 4096):
        policy = opened(name, length)
        chain(policy, range(length))
        whole = list(range(length))
        costs.append(calls(lambda policy=policy, whole=whole: policy.touch(whole)))  # type: ignore[misc]
    assert costs[0] == costs[1]


def _never_used_before(policy: EvictionPolicy, ids: Iterable[int]) -> list[int]:
    """Single chunks come, each pushes out another; who went."""
    gone = []
    for entry in ids:
        (victim,) = victims(policy, 1)
        gone.append(victim)
        policy.insert(EntryView(victim, NO_PARENT, 0, 1, "", key(("scan", entry))))
    return gone


@pytest.mark.parametrize("name", ALL)
def test_a_scan_leaves_popular_chunks_alone_where_that_is_promised(name: str) -> None:
    policy = opened(name, 100)
    for entry in range(100):
        policy.insert(EntryView(entry, NO_PARENT, 0, 1, "", key(entry)))
    popular = list(range(20, 100, 2))
    for _ in range(3):
        for entry in popular:
            policy.touch([entry])
    gone = _never_used_before(policy, range(150))
    kept = set(popular) - set(gone)
    promised = {"s3fifo": 40, "lfu": 40, "mru": 39}
    assert len(kept) == promised.get(name, 0)


def test_lfu_forgets_old_popularity() -> None:
    policy = LFU()
    policy.open(4)
    for entry in range(4):
        policy.insert(EntryView(entry, NO_PARENT, 0, 1, "", key(entry)))
    for _ in range(20):
        policy.touch([0])
    seen = 0
    while 0 not in _never_used_before(policy, [seen]):
        seen += 1
        assert seen < 200
    assert seen > 20


def test_lfu_s_age_never_falls() -> None:
    """Not even when a chunk goes late that was in use for long and seldom used."""
    policy = LFU()
    policy.open(4)
    for entry, uses in ((0, 0), (1, 3), (2, 2)):
        policy.insert(EntryView(entry, NO_PARENT, 0, 1, "", key(entry)))
        for _ in range(uses):
            policy.touch([entry])
    answer = policy.evict(1, lambda entry: Claim.TAKEN if entry == 1 else Claim.LEASED)
    assert answer == Evicted((1,))
    policy.remove([1])
    policy.release([0])
    assert victims(policy, 1) == [0]
    policy.insert(EntryView(3, NO_PARENT, 0, 1, "", key(3)))
    policy.release([2])
    assert victims(policy, 2) == [2, 3]


def test_s3fifo_knows_what_it_threw_out_not_long_ago() -> None:
    """A chunk that comes back soon is past the small queue, under whatever id."""
    policy = S3FIFO()
    policy.open(20)
    for entry in range(20):
        policy.insert(EntryView(entry, NO_PARENT, 0, 1, "", key(entry)))
    assert victims(policy, 2) == [0, 1]
    policy.insert(EntryView(1, NO_PARENT, 0, 1, "", key(0)))
    policy.insert(EntryView(0, NO_PARENT, 0, 1, "", key("never seen")))
    gone = victims(policy, 18)
    assert gone == list(range(2, 20))
    assert victims(policy, 2) == [0, 1]


def test_s3fifo_takes_the_chunks_before_a_returning_one_to_the_main_queue() -> None:
    policy = S3FIFO()
    policy.open(30)
    chain(policy, [0, 1, 2])
    for entry in range(3, 30):
        policy.insert(EntryView(entry, NO_PARENT, 0, 1, "", key(entry)))
    assert victims(policy, 1) == [2]
    policy.insert(EntryView(2, 1, 2, 1, "", key(2)))
    assert victims(policy, 27) == list(range(3, 30))


def test_s3fifo_gives_no_more_than_32_second_chances_in_a_row() -> None:
    costs = []
    for entries in (100, 5000):
        policy = S3FIFO()
        policy.open(entries)
        for entry in range(entries):
            policy.insert(EntryView(entry, NO_PARENT, 0, 1, "", key(entry)))
        for _ in range(3):
            policy.touch(list(range(entries)))
        costs.append(calls(lambda policy=policy: policy.evict(1, take)))  # type: ignore[misc]
    assert costs[1] <= 2 * costs[0]


def isolated(default: int | None, entries: int = 100, **quotas: int) -> IsolatedLRU:
    limits = {owner: ByteLimit(quota) for owner, quota in quotas.items()}
    policy = IsolatedLRU(
        IsolatedLRUOptions(default=UNLIMITED if default is None else ByteLimit(default), quotas=limits)
    )
    policy.open(entries)
    return policy


def fill(policy: EvictionPolicy, start: int, count: int, owner: str) -> None:
    for entry in range(start, start + count):
        policy.insert(EntryView(entry, NO_PARENT, 0, 1, owner, key(entry)))


def test_room_comes_from_whoever_holds_most_of_what_it_may() -> None:
    policy = isolated(10, a=40, b=20)
    fill(policy, 0, 20, "a")
    fill(policy, 20, 12, "b")
    fill(policy, 40, 9, "stranger")
    assert victims(policy, 3) == [40, 41, 42]
    # b holds 12 of 20, the stranger 6 of 10, a 20 of 40: the first of equals is who came first.
    assert victims(policy, 2) == [20, 43]
    # Now all three hold half of what they may, and a came first, then b.
    assert victims(policy, 4) == [21, 0, 22, 44]


def test_who_has_no_limit_has_nothing_promised() -> None:
    policy = isolated(None, a=20)
    fill(policy, 0, 20, "a")
    fill(policy, 20, 5, "x")
    fill(policy, 30, 8, "y")
    gone = victims(policy, 13)
    assert gone[:4] == [30, 31, 32, 20]
    assert sorted(gone) == [*range(20, 25), *range(30, 38)]
    assert victims(policy, 1) == [0]


def test_who_may_hold_nothing_any_more_gives_first() -> None:
    policy = isolated(None, a=20, b=20)
    fill(policy, 0, 20, "a")
    fill(policy, 20, 2, "b")
    fill(policy, 30, 8, "y")
    policy.set_quota("b", 0)
    assert victims(policy, 3) == [20, 21, 30]


def test_an_owner_evicts_its_own_chunks_alone() -> None:
    policy = isolated(None, a=20)
    fill(policy, 0, 3, "a")
    fill(policy, 10, 3, "b")
    assert policy.evict_owned("nobody", 0, take) == Evicted(())
    answer = policy.evict_owned("a", 2, take)
    assert answer == Evicted((0, 1))
    policy.remove([0, 1])
    assert policy.evict_owned("b", 3, take) == Evicted((10, 11, 12))


def test_owners_that_hold_nothing_leave_nothing_behind() -> None:
    policy = isolated(5, entries=64)

    def many_owners(first: int) -> None:
        for number in range(first, first + 3000):
            policy.insert(EntryView(number % 50, NO_PARENT, 0, 1, f"salt {number}", key(number)))
            policy.touch([number % 50])
            policy.remove([number % 50])

    many_owners(0)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        many_owners(3000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 4000
    finally:
        tracemalloc.stop()
    assert policy.quotas() == {}


def test_quotas_are_told_and_cannot_be_written_from_outside() -> None:
    policy = isolated(5, a=7)
    policy.set_quota("b", None)
    assert dict(policy.quotas()) == {"a": 7, "b": None}
    assert [policy.quota(owner) for owner in ("a", "b", "c", "")] == [7, None, 5, 5]
    assert policy.forget_quota("a")
    assert not policy.forget_quota("a")
    assert policy.quota("a") == 5
    with pytest.raises(TypeError):
        policy.quotas()["a"] = 1  # type: ignore[index]


@pytest.mark.parametrize("change", ["set_quota", "set_default_quota"])
def test_a_negative_quota_is_refused_and_changes_nothing(change: str) -> None:
    policy = isolated(5, a=7)
    arguments = ("a", -1) if change == "set_quota" else (-1,)
    with pytest.raises(KVFerryError, match="-1 bytes"):
        getattr(policy, change)(*arguments)
    assert (policy.quota("a"), policy.default_quota()) == (7, 5)


@pytest.mark.parametrize("name", ALL)
def test_opening_again_starts_anew(name: str) -> None:
    policy = build(name)
    for _ in range(2):
        policy.open(8)
        chain(policy, range(8))
        assert victims(policy, 3) == [7, 6, 5]
