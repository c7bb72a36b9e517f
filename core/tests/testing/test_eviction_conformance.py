"""The laws of eviction policies can be broken: each wrong policy breaks the one that is meant for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvferry.api import Claim, EntryView, Evicted, EvictionSpec, NotEnough
from kvferry.control.lru import LRU
from kvferry.testing.conformance import EvictionConformance


class Laws(EvictionConformance):
    plugin = "core"
    policy = "lru"
    __test__ = False


class TakesMore(LRU):
    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        return super().evict(need + 1, claim)


class AsksForStrangers(LRU):
    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        claim(0)
        return super().evict(need, claim)


class CountsChunks(LRU):
    def insert(self, entry: EntryView) -> None:
        super().insert(EntryView(entry.id, entry.parent, entry.depth, 1, entry.owner, entry.key))


class ForgetsForGood(LRU):
    """What was in use once is never offered again."""

    def release(self, ids: Sequence[int]) -> None:
        pass


class KeepsVictims(LRU):
    """After too little, does not know any more what it had claimed."""

    def _put_back(self, taken: list[int]) -> None:
        super()._put_back(taken[1:])


class PunishesRefusals(LRU):
    """What it was refused in vain counts as new once it can go."""

    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        refused = []

        def noting(entry: int) -> Claim:
            answer = claim(entry)
            if answer is not Claim.TAKEN:
                refused.append(entry)
            return answer

        answer = super().evict(need, noting)
        if isinstance(answer, NotEnough):
            self.__dict__.setdefault("refused", set()).update(refused)
        return answer

    def release(self, ids: Sequence[int]) -> None:
        super().release(ids)
        refused = self.__dict__.get("refused", set())
        if again := [entry for entry in ids if entry in refused]:
            refused.difference_update(again)
            self.touch(again)


class TidiesWhenItEvicts(LRU):
    """Keeps something for each chunk until it has to look for a victim."""

    def remove(self, ids: Sequence[int]) -> None:
        super().remove(ids)
        self.__dict__.setdefault("gone", []).extend(bytes(40) for _ in ids)

    def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        self.__dict__.pop("gone", None)
        return super().evict(need, claim)


class UsesOnRelease(LRU):
    def release(self, ids: Sequence[int]) -> None:
        super().release(ids)
        self.touch(ids)


class PrefersSmallIds(LRU):
    def touch(self, ids: Sequence[int]) -> None:
        if ids[0] % 2:
            super().touch(ids)


class WantsLists(LRU):
    def touch(self, ids: Sequence[int]) -> None:
        if isinstance(ids, list):
            super().touch(ids)


class Waits(LRU):
    def insert(self, entry: EntryView) -> None:
        super().insert(entry)
        time.sleep(0)


class Threads(LRU):
    def insert(self, entry: EntryView) -> None:
        super().insert(entry)
        self.thread = threading.Timer(0.2, lambda: None)
        self.thread.start()


class Remembers(LRU):
    def insert(self, entry: EntryView) -> None:
        super().insert(entry)
        self.__dict__.setdefault("seen", []).append((entry.owner, entry.key))


class TooSmall(LRU):
    def open(self, entries: int) -> None:
        super().open(min(entries, 50))


class HasQuotas(LRU):
    def evict_owned(self, owner: str, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        return NotEnough(0)


SPEC = EvictionSpec(name="wrong", factory="nowhere:Wrong")

WRONG: list[tuple[type[LRU], str, dict[str, Any]]] = [
    (TakesMore, "test_every_claim_and_every_answer_keeps_the_contract", {"seed": 1}),
    (AsksForStrangers, "test_every_claim_and_every_answer_keeps_the_contract", {"seed": 1}),
    (ForgetsForGood, "test_what_is_in_use_stays_and_can_go_later", {}),
    (CountsChunks, "test_sizes_add_up", {"seed": 1}),
    (KeepsVictims, "test_too_little_changes_nothing", {}),
    (PunishesRefusals, "test_what_was_refused_in_vain_stands_where_it_stood", {}),
    (TidiesWhenItEvicts, "test_chunks_that_go_leave_nothing_behind", {}),
    (UsesOnRelease, "test_release_is_not_an_access", {}),
    (PrefersSmallIds, "test_ids_are_only_names", {}),
    (WantsLists, "test_many_ids_may_come_as_a_memory_view", {}),
    (Waits, "test_it_has_no_thread_and_waits_for_nothing", {}),
    (Remembers, "test_chunks_that_go_leave_nothing_behind", {}),
    (TooSmall, "test_it_has_room_for_every_id", {}),
    (HasQuotas, "test_quotas_that_are_not_claimed_are_not_there", {"spec": SPEC}),
]


@pytest.mark.parametrize(("wrong", "law", "more"), WRONG)
def test_a_wrong_policy_breaks_its_law(wrong: type[LRU], law: str, more: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, IndexError)):
        getattr(Laws(), law)(wrong, **more)


def test_a_policy_with_a_thread_breaks_the_law() -> None:
    made: list[Threads] = []

    def make() -> Threads:
        made.append(Threads())
        return made[-1]

    try:
        with pytest.raises(AssertionError):
            Laws().test_it_has_no_thread_and_waits_for_nothing(make)
    finally:
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.cancel()
                thread.join()


def test_a_poor_policy_has_to_say_so() -> None:
    class Stubborn(LRU):
        def evict(self, need: int, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
            return NotEnough(0)

    with pytest.raises(AssertionError):
        Laws().test_it_finds_its_share_of_what_lru_finds(Stubborn, SPEC)
