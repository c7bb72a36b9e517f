"""The eviction order against a reference that searches everything."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.api import NO_PARENT, Claim, EntryView, Evicted, EvictionPolicy, NotEnough
from kvferry.control.columns import Ids
from kvferry.control.lru import LRU
from kvferry.testing.eviction import ForwardingEvictionPolicy, NullEvictionPolicy

ENTRIES = 12


class Naive:
    """A tree with stamps and leases, which answers claims as the manager does."""

    def __init__(self) -> None:
        self.clock = 0
        self.parent: dict[int, int] = {}
        self.stamp: dict[int, int] = {}
        self.leased: set[int] = set()

    def prefix(self, entry: int) -> list[int]:
        chain = [entry]
        while self.parent[chain[-1]] != NO_PARENT:
            chain.append(self.parent[chain[-1]])
        return chain[::-1]

    def leaves(self) -> list[int]:
        return [entry for entry in self.parent if entry not in self.parent.values()]

    def use(self, entries: list[int]) -> None:
        self.clock += 1
        self.stamp.update(dict.fromkeys(entries, self.clock))

    def evict(self, need: int) -> list[int]:
        """Victims in order, fewer than ``need`` if there are no more. Removes them."""
        gone: list[int] = []
        while len(gone) < need:
            free = [entry for entry in self.leaves() if entry not in self.leased]
            if not free:
                break
            gone.append(min(free, key=self.stamp.__getitem__))
            del self.parent[gone[-1]]
        return gone


operations = st.lists(
    st.tuples(
        st.sampled_from(["insert"] * 4 + ["touch", "touch", "lease", "lease", "evict", "remove"]),
        st.integers(0, 1_000_000),
    ),
    max_size=80,
)


@given(operations)
@settings(max_examples=300, deadline=None)
def test_lru_takes_what_the_reference_takes(steps: list[tuple[str, int]]) -> None:
    naive, policy = Naive(), LRU()
    policy.open(ENTRIES)
    for what, number in steps:
        known = sorted(naive.parent)
        chosen = known[number % len(known)] if known else -1
        if what == "insert":
            free = [entry for entry in range(ENTRIES) if entry not in naive.parent]
            if free:
                entry = free[number % len(free)]
                naive.parent[entry] = [NO_PARENT, *known][number // 7 % (len(known) + 1)]
                naive.use([entry])
                policy.insert(EntryView(entry, naive.parent[entry], 0, 1, "", b""))
        elif what == "evict":
            _evict_both(naive, policy, number % 5)
        elif not known:
            continue
        elif what == "touch":
            naive.use(naive.prefix(chosen))
            policy.touch(naive.prefix(chosen))
        elif what == "lease" and chosen in naive.leased:
            naive.leased.discard(chosen)
            policy.release([chosen])
        elif what == "lease":
            naive.leased.add(chosen)
        else:
            branch = [chosen]
            for entry in branch:
                branch += [other for other, parent in naive.parent.items() if parent == entry]
            for entry in branch:
                del naive.parent[entry]
                naive.leased.discard(entry)
            policy.remove(branch[::-1])
    naive.leased.clear()
    policy.release(sorted(naive.parent))
    _evict_both(naive, policy, len(naive.parent))
    assert not naive.parent


def _evict_both(naive: Naive, policy: LRU, need: int) -> None:
    claimed: list[int] = []

    def claim(entry: int) -> Claim:
        assert entry in naive.parent
        assert entry not in claimed
        if entry in naive.leased:
            return Claim.LEASED
        if any(parent == entry and c not in claimed for c, parent in naive.parent.items()):
            return Claim.HAS_SUCCESSORS
        claimed.append(entry)
        return Claim.TAKEN

    before = dict(naive.parent)
    expected = naive.evict(need)
    now, naive.parent = naive.parent, before
    answer = policy.evict(need, claim)
    assert claimed == expected
    if len(expected) == need:
        assert answer == Evicted(tuple(expected))
        naive.parent = now
        policy.remove(answer.ids)
    else:
        assert answer == NotEnough(len(expected))


def _chain(policy: EvictionPolicy, entries: list[int]) -> None:
    for depth, entry in enumerate(entries):
        parent = entries[depth - 1] if depth else NO_PARENT
        policy.insert(EntryView(entry, parent, depth, 1, "", b""))


def test_a_long_idle_time_costs_no_claim_in_vain() -> None:
    """Whatever was touched since, only leaves are offered, and each at most once."""
    policy = LRU()
    policy.open(1000)
    for start in range(0, 1000, 100):
        _chain(policy, list(range(start, start + 100)))
    for start in random.Random(3).sample(range(0, 1000, 100), 10) * 20:
        policy.touch(list(range(start, start + 100)))
    asked: list[int] = []

    def claim(entry: int) -> Claim:
        asked.append(entry)
        return Claim.TAKEN

    assert isinstance(policy.evict(150, claim), Evicted)
    assert len(asked) == 150


def test_leased_chunks_are_asked_for_once() -> None:
    policy = LRU()
    policy.open(10)
    for entry in range(10):
        policy.insert(EntryView(entry, NO_PARENT, 0, 1, "", b""))
    asked: list[int] = []

    def claim(entry: int) -> Claim:
        asked.append(entry)
        return Claim.LEASED

    assert policy.evict(1, claim) == NotEnough(0)
    assert policy.evict(1, claim) == NotEnough(0)
    assert asked == list(range(10))
    policy.release([7, 3])
    assert policy.evict(2, lambda entry: Claim.TAKEN) == Evicted((3, 7))


def test_sizes_are_added_up() -> None:
    policy = LRU()
    policy.open(3)
    for entry in range(3):
        policy.insert(EntryView(entry, NO_PARENT, 0, 4, "", b""))
    assert policy.evict(5, lambda entry: Claim.TAKEN) == Evicted((0, 1))


def test_many_ids_may_come_as_a_memory_view() -> None:
    policy = LRU()
    policy.open(3)
    _chain(policy, [0, 1])
    _chain(policy, [2])
    ids: Ids = np.array([0, 1])
    policy.touch(ids.data)
    assert policy.evict(1, lambda entry: Claim.TAKEN) == Evicted((2,))


@pytest.mark.parametrize("inner", [LRU, NullEvictionPolicy])
def test_the_forwarding_policy_changes_nothing(inner: type[EvictionPolicy]) -> None:
    bare, wrapped = inner(), ForwardingEvictionPolicy(inner())
    answers = []
    for policy in (bare, wrapped):
        policy.open(4)
        _chain(policy, [0, 1, 2])
        policy.insert(EntryView(3, NO_PARENT, 0, 1, "", b""))
        policy.touch([0, 1, 2])
        policy.remove([3])
        leased = policy.evict(1, lambda entry: Claim.LEASED)
        policy.release([2])
        answers.append((leased, policy.evict(2, lambda entry: Claim.TAKEN)))
    assert answers[0] == answers[1]
    assert answers[0][0] == NotEnough(0)
