"""Two managers, one with the policy and one with its reference, live through the same and must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite, WriteOutcome
from plugins.eviction_policies.tests.subjects import REFERENCES, build, key

CHUNK, CAPACITY = 3, 10
LEASE, WRITE = 10.0, 14.0
Tokens = tuple[int, ...]
# Texts that part inside a chunk, at the end of one, and at once; a prompt is a beginning.
TEXTS = ((0,) * 13, (0,) * 4 + (1,) * 9, (0,) * 6 + (2,) * 7, (3,) * 13, (4,) * 13)

prompts = st.builds(lambda text, end: TEXTS[text][:end], st.integers(0, len(TEXTS) - 1), st.integers(1, 13))
salts = st.sampled_from(["a", "a", "b", "", "c"])
owners = st.sampled_from(["one", "two"])


def parts(prompt: Tokens) -> list[Tokens]:
    """The chunks of a prompt, each as all tokens up to its end."""
    return [prompt[: min(at + CHUNK, len(prompt))] for at in range(0, len(prompt), CHUNK)]


def writes(salt: str, prompt: Tokens) -> list[ChunkWrite]:
    found = []
    for depth, text in enumerate(parts(prompt)):
        start = depth * CHUNK
        found.append(
            ChunkWrite(
                key((salt, text)),
                key((salt, text[:start])) if depth else None,
                depth,
                len(text) - start,
                tuple((key((salt, text[:end])), end - start) for end in range(start + 1, len(text))),
            )
        )
    return found


class ManagerTwins(RuleBasedStateMachine):
    name: str

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.twins = [self.manager(build(self.name)), self.manager(REFERENCES[self.name]())]
        self.reservations: list[tuple[int, list[int]]] = []
        self.leases: list[int] = []
        self.grow(7)

    def manager(self, policy: Any) -> CacheManager:
        return CacheManager(
            capacity=CAPACITY,
            chunk_tokens=CHUNK,
            block_tokens=1,
            policy=policy,
            lease_seconds=LEASE,
            write_seconds=WRITE,
            quotas=policy if self.name == "isolated_lru" else None,
        )

    def both(self, call: Callable[[CacheManager], Any]) -> Any:
        one, other = (call(manager) for manager in self.twins)
        assert one == other
        return one

    @rule(slots=st.integers(7, CAPACITY))
    def grow(self, slots: int) -> None:
        self.both(lambda manager: manager.grow(slots))

    @rule(owner=owners, salt=salts, prompt=prompts)
    def store(self, owner: str, salt: str, prompt: Tokens) -> None:
        """The usual life of a request: a match, then the rest is saved."""
        self.match(owner, salt, prompt)
        self.begin_store(owner, salt, prompt)
        self.end_store(-1, "good")
        self.end_read(-1)

    @rule(owner=owners, salt=salts, prompt=prompts)
    def begin_store(self, owner: str, salt: str, prompt: Tokens) -> None:
        answer = self.both(lambda manager: manager.reserve(owner, salt, writes(salt, prompt), self.now))
        if answer.id is not None:
            granted = [n for n, item in enumerate(answer.items) if item.outcome is WriteOutcome.GRANTED]
            self.reservations.append((answer.id, granted))

    @rule(number=st.integers(0, 99), how=st.sampled_from(["good", "bad", "abandon"]))
    def end_store(self, number: int, how: str) -> None:
        if not self.reservations:
            return
        reservation, items = self.reservations[number % len(self.reservations)]
        if how == "abandon":
            self.both(lambda manager: manager.abandon(reservation))
            return
        self.reservations.remove((reservation, items))
        self.both(lambda manager: manager.complete(reservation, items if how == "good" else items[::2]))

    @rule(owner=owners, salt=salts, prompt=prompts)
    def match(self, owner: str, salt: str, prompt: Tokens) -> None:
        full = [key((salt, text)) for text in parts(prompt) if len(text) % CHUNK == 0]

        def tails(index: int) -> list[tuple[bytes, int]]:
            start = index * CHUNK
            last = min(len(prompt), start + CHUNK - 1)
            return [(key((salt, prompt[:end])), end - start) for end in range(last, start, -1)]

        found = self.both(lambda manager: manager.match(owner, full, tails, self.now, len(prompt)))
        if found.lease is not None:
            self.leases.append(found.lease)

    @rule(number=st.integers(0, 99))
    def end_read(self, number: int) -> None:
        if self.leases:
            lease = self.leases.pop(number % len(self.leases))
            self.both(lambda manager: manager.release(lease))

    @rule(salt=salts, prompt=prompts, seconds=st.sampled_from([1.0, 20.0]))
    def pin(self, salt: str, prompt: Tokens, seconds: float) -> None:
        chunk = key((salt, prompt))
        self.both(lambda manager: manager.pin(salt, "pin", chunk, seconds, self.now))

    @rule(seconds=st.sampled_from([1.0, 6.0, 12.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.both(lambda manager: manager.expire(self.now))

    @rule(owner=owners)
    def owner_ends(self, owner: str) -> None:
        self.both(lambda manager: manager.release_owner(owner))

    @rule(salt=salts, prompt=prompts)
    def drop(self, salt: str, prompt: Tokens) -> None:
        self.both(lambda manager: manager.drop([key((salt, prompt))]))

    @rule(salt=salts, prompt=prompts)
    def touch(self, salt: str, prompt: Tokens) -> None:
        full = [key((salt, text)) for text in parts(prompt) if len(text) % CHUNK == 0]
        self.both(lambda manager: manager.touch(full))

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        self.both(lambda manager: manager.evict(count))

    @precondition(lambda self: self.name == "isolated_lru")
    @rule(salt=salts, quota=st.sampled_from([None, 0, 2, 6]))
    def set_quota(self, salt: str, quota: int | None) -> None:
        self.both(lambda manager: manager.set_quota(salt, quota))

    @precondition(lambda self: self.name == "isolated_lru")
    @rule()
    def enforce_quotas(self) -> None:
        one, other = (manager.enforce_quotas() for manager in self.twins)
        more = True
        while more:
            more = one.advance()
            assert other.advance() == more
        assert one.evicted == other.evicted

    @invariant()
    def they_agree(self) -> None:
        self.both(lambda manager: manager.stats())
        if self.name == "isolated_lru":
            self.both(lambda manager: manager.quota_report())
        for manager in self.twins:
            manager.check()


@pytest.mark.parametrize("policy", list(REFERENCES))
def test_a_manager_decides_as_with_the_reference(policy: str) -> None:
    run_state_machine_as_test(
        type(f"Twins_{policy}", (ManagerTwins,), {"name": policy}),
        settings=settings(
            max_examples=40,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
