"""Each policy against its reference, claim by claim, driven as the manager drives it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from attrs import define
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvferry.api import NO_PARENT, Claim, EntryView, Evicted, NotEnough
from plugins.eviction_policies.tests.subjects import REFERENCES, build, key

ENTRIES = 14
KEYS = 20
OWNERS = ("a", "b", "c", "", "d")


@define
class Node:
    """A chunk as the manager sees it."""

    view: EntryView
    leases: int = 0
    pending: int = 0
    """Chunks behind it that are reserved, of which the policy knows nothing."""


class PolicyMachine(RuleBasedStateMachine):
    """A tree of chunks, with leases and pending successors, and two policies that must agree."""

    name: str
    entries = ENTRIES

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[int, Node] = {}
        self.policy: Any = build(self.name)
        self.reference: Any = REFERENCES[self.name]()
        for policy in (self.policy, self.reference):
            policy.open(self.entries)

    def both(self, method: str, ids: list[int]) -> None:
        if ids:
            getattr(self.policy, method)(np.array(ids, np.int64).data)
            getattr(self.reference, method)(ids)

    def prefix(self, entry: int) -> list[int]:
        chain = [entry]
        while self.nodes[chain[-1]].view.parent != NO_PARENT:
            chain.append(self.nodes[chain[-1]].view.parent)
        return chain[::-1]

    def bare(self, entry: int) -> bool:
        """Whether the manager would let it go."""
        node = self.nodes[entry]
        followed = any(other.view.parent == entry for other in self.nodes.values())
        return not (node.leases or node.pending or followed)

    def pick(self, number: int) -> int:
        return sorted(self.nodes)[number % len(self.nodes)]

    @rule(
        number=st.integers(0, 1 << 16),
        root=st.integers(0, 2),
        size=st.sampled_from([1, 1, 1, 2, 3]),
        owner=st.sampled_from(OWNERS),
        content=st.integers(0, KEYS - 1),
    )
    def insert(self, number: int, root: int, size: int, owner: str, content: int) -> None:
        free = [entry for entry in range(self.entries) if entry not in self.nodes]
        if not free:
            return
        parent, depth = NO_PARENT, 0
        if root and self.nodes:
            parent = self.pick(number)
            owner, depth = self.nodes[parent].view.owner, self.nodes[parent].view.depth + 1
        entry = free[number % len(free)]
        view = EntryView(entry, parent, depth, size, owner, key(content))
        self.nodes[entry] = Node(view)
        self.policy.insert(view)
        self.reference.insert(view)

    @precondition(lambda self: self.nodes)
    @rule(number=st.integers(0, 1 << 16))
    def touch(self, number: int) -> None:
        self.both("touch", self.prefix(self.pick(number)))

    @precondition(lambda self: self.nodes)
    @rule(number=st.integers(0, 1 << 16), used=st.booleans())
    def lease(self, number: int, used: bool) -> None:
        """A match uses what it leases; a pin does not."""
        prefix = self.prefix(self.pick(number))
        for entry in prefix:
            self.nodes[entry].leases += 1
        if used:
            self.both("touch", prefix)

    @precondition(lambda self: any(node.leases for node in self.nodes.values()))
    @rule(number=st.integers(0, 1 << 16), every=st.booleans())
    def end_lease(self, number: int, every: bool) -> None:
        leased = [entry for entry in sorted(self.nodes) if self.nodes[entry].leases]
        for entry in leased if every else [leased[number % len(leased)]]:
            self.nodes[entry].leases -= 1
        self.both("release", [entry for entry in leased if self.bare(entry)])

    @precondition(lambda self: self.nodes)
    @rule(number=st.integers(0, 1 << 16))
    def reserve_behind(self, number: int) -> None:
        self.nodes[self.pick(number)].pending += 1

    @precondition(lambda self: any(node.pending for node in self.nodes.values()))
    @rule(number=st.integers(0, 1 << 16))
    def abort_behind(self, number: int) -> None:
        waiting = [entry for entry in sorted(self.nodes) if self.nodes[entry].pending]
        entry = waiting[number % len(waiting)]
        self.nodes[entry].pending -= 1
        if self.bare(entry):
            self.both("release", [entry])

    @precondition(lambda self: self.nodes)
    @rule(number=st.integers(0, 1 << 16))
    def drop(self, number: int) -> None:
        root = self.pick(number)
        parent = self.nodes[root].view.parent
        branch = [root]
        for entry in branch:
            branch += [other for other, node in self.nodes.items() if node.view.parent == entry]
        for entry in branch:
            del self.nodes[entry]
        self.both("remove", branch[::-1])
        if parent != NO_PARENT and self.bare(parent):
            self.both("release", [parent])

    @rule(need=st.integers(0, 6))
    def evict(self, need: int) -> None:
        self.evict_both("evict", (need,))

    def evict_both(self, method: str, arguments: tuple[Any, ...]) -> Evicted | NotEnough:
        answers, claims = [], []
        for policy in (self.policy, self.reference):
            gone: list[int] = []
            asked: list[tuple[int, Claim]] = []

            def claim(entry: int, gone: list[int] = gone, asked: list[tuple[int, Claim]] = asked) -> Claim:
                assert entry in self.nodes
                assert entry not in gone
                asked.append((entry, self.judge(entry, gone)))
                if asked[-1][1] is Claim.TAKEN:
                    gone.append(entry)
                return asked[-1][1]

            answers.append(getattr(policy, method)(*arguments, claim))
            claims.append(asked)
        assert claims[0] == claims[1]
        assert answers[0] == answers[1]
        answer = answers[0]
        if isinstance(answer, Evicted):
            self.leave(answer.ids)
        assert isinstance(answer, (Evicted, NotEnough))
        return answer

    def judge(self, entry: int, gone: list[int]) -> Claim:
        node = self.nodes[entry]
        if node.leases:
            return Claim.LEASED
        behind = [e for e, other in self.nodes.items() if other.view.parent == entry and e not in gone]
        return Claim.HAS_SUCCESSORS if behind or node.pending else Claim.TAKEN

    def leave(self, ids: tuple[int, ...]) -> None:
        for policy in (self.policy, self.reference):
            policy.remove(ids)
        parents = [self.nodes.pop(entry).view.parent for entry in ids]
        bared = [entry for entry in parents if entry in self.nodes and self.bare(entry)]
        self.both("release", bared)

    def teardown(self) -> None:
        """Once nobody uses anything, everything can go, and all of it is found."""
        for node in self.nodes.values():
            node.leases = node.pending = 0
        self.both("release", sorted(self.nodes))
        everything = sum(node.view.size for node in self.nodes.values())
        assert self.evict_both("evict", (everything + 1,)) == NotEnough(everything)
        self.evict_both("evict", (everything,))
        assert not self.nodes


class QuotaPolicyMachine(PolicyMachine):
    """With owners that differ, whose quotas change."""

    @rule(owner=st.sampled_from((*OWNERS, "e")), need=st.integers(0, 5))
    def evict_owned(self, owner: str, need: int) -> None:
        self.evict_both("evict_owned", (owner, need))

    @rule(owner=st.sampled_from((*OWNERS, "e")), quota=st.sampled_from([None, 0, 1, 4, 9]))
    def set_quota(self, owner: str, quota: int | None) -> None:
        for policy in (self.policy, self.reference):
            policy.set_quota(owner, quota)
        self.quotas_agree()

    @rule(owner=st.sampled_from((*OWNERS, "e")))
    def forget_quota(self, owner: str) -> None:
        assert self.policy.forget_quota(owner) == self.reference.forget_quota(owner)
        self.quotas_agree()

    @rule(quota=st.sampled_from([None, 0, 2]))
    def set_default_quota(self, quota: int | None) -> None:
        for policy in (self.policy, self.reference):
            policy.set_default_quota(quota)
        self.quotas_agree()

    def quotas_agree(self) -> None:
        assert dict(self.policy.quotas()) == self.reference.quotas()
        assert self.policy.default_quota() == self.reference.default_quota()
        for owner in (*OWNERS, "e"):
            assert self.policy.quota(owner) == self.reference.quota(owner)


@pytest.mark.parametrize("policy", list(REFERENCES))
def test_every_claim_is_the_reference_s(policy: str) -> None:
    base = QuotaPolicyMachine if policy == "isolated_lru" else PolicyMachine
    run_state_machine_as_test(
        type(f"Machine_{policy}", (base,), {"name": policy}),
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", ["lfu", "s3fifo", "isolated_lru"])
def test_long_lives_with_many_uses_agree_too(policy: str, seed: int) -> None:
    """Long enough for queues to fill, for ghosts to come back and for ages to rise."""
    base = QuotaPolicyMachine if policy == "isolated_lru" else PolicyMachine
    machine = type(f"Long_{policy}", (base,), {"name": policy, "entries": 40})()
    random_ = random.Random(seed)
    for _ in range(700):
        number = random_.randrange(1 << 16)
        what = random_.choice(("insert",) * 4 + ("touch",) * 6 + ("evict", "evict", "lease", "end", "quota"))
        if what == "insert" and len(machine.nodes) < 40:
            machine.insert(number, random_.randrange(2), 1, random_.choice(OWNERS), random_.randrange(60))
        elif what == "evict":
            machine.evict(random_.choice((1, 1, 2, 100)))
        elif what == "quota" and isinstance(machine, QuotaPolicyMachine):
            machine.set_default_quota(random_.choice([None, 0, 2]))
            machine.set_quota(random_.choice(OWNERS), random_.choice([None, 0, 1, 4, 9]))
            machine.forget_quota(random_.choice(OWNERS))
        elif what == "touch" and machine.nodes:
            machine.touch(number)
        elif what == "lease" and machine.nodes:
            machine.lease(number, False)
        elif what == "end" and any(node.leases for node in machine.nodes.values()):
            machine.end_lease(number, True)
    machine.teardown()
