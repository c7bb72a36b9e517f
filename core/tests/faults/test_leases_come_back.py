"""Whatever becomes of a request, a lease or a result: every slot comes back, once."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.data.plans import TransferResult
from kvferry.runtime import LoadMode
from kvferry.runtime.loads import NO_SLOT
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import InstanceSettings
from kvferry.testing.fake_requests import FakeRequest

CHUNK = 16
LEASE_SECONDS, WRITE_SECONDS = 10.0, 20.0


def text(name: int, chunks: int = 2) -> list[int]:
    """A prompt of its own, one token longer than its chunks."""
    return [name * 10_000 + position for position in range(chunks * CHUNK + 1)]


def test_a_thousand_matches_that_are_never_loaded_keep_nothing_for_ever(by_hand: Any) -> None:
    """The engine asks, and then needs nothing, aborts, or never gets to it (LMCache#1034)."""
    driven = by_hand(4)
    chance = random.Random(1)
    driven.store("a", text(1, 4))
    waiting = []
    for number in range(1000):
        name = f"r{number}"
        driven.add(name, text(1, 4), store=False)
        assert driven.match(name) == 4 * CHUNK
        fate = chance.randrange(4)
        if fate == 0:
            driven.runtime.allocated(name, 0, [[]])
        elif fate == 1:
            assert driven.match(name, 4 * CHUNK) == 0  # the engine has come by it otherwise
        elif fate == 2:
            driven.finish(name, computed=0)
        else:
            waiting.append(name)
    assert driven.manager.stats().leases == len(waiting) > 100
    driven.store("b", text(2, 4))
    assert driven.hit(text(2, 4)) == 0, "room was made under a lease"
    driven.wait(LEASE_SECONDS)
    driven.check(resident=4)
    driven.store("b", text(2, 4))
    assert driven.hit(text(2, 4)) == 4 * CHUNK


def test_a_request_that_waits_long_is_matched_again(by_hand: Any) -> None:
    driven = by_hand(4)
    driven.store("a", text(1))
    driven.add("b", text(1), store=False)
    for _ in range(3):
        assert driven.match("b") == 2 * CHUNK
        driven.wait(LEASE_SECONDS + 1)
        assert driven.manager.stats().leases == 0
    driven.store("c", text(2, 4))
    assert driven.match("b") == 0, "what it had matched is gone"
    driven.finish("b", computed=0)
    driven.check()


def test_a_lease_that_ended_before_the_load_began_reads_no_slot(by_hand: Any) -> None:
    """The slots may be another's by then, so the load fails and proves no chunk bad
    (LMCache-Ascend#191)."""
    driven = by_hand(4)
    driven.store("a", text(1))
    driven.add("b", text(1), store=False)
    found = driven.match("b")
    driven.wait(LEASE_SECONDS)
    driven.store("c", text(2, 4))  # into the same slots
    driven.allocate("b", found)
    (transfer,) = driven.plan().loads
    assert transfer.slot_numbers() == [NO_SLOT]
    driven.report(transfer, failed=[NO_SLOT])
    assert driven.runtime.statistics()[0].failed_loads == 1
    driven.finish("b", computed=0)
    assert driven.hit(text(2, 4)) == 4 * CHUNK
    driven.check(resident=4)


@pytest.mark.parametrize("load_mode", [LoadMode.ASYNC, LoadMode.SYNC])
def test_a_lease_that_ended_costs_the_hit_and_never_the_answer(
    open_instance: Any, load_mode: LoadMode
) -> None:
    """The engine compares every byte that it reads, and computes again what was not loaded."""
    engine = EngineSettings(prefix_cache=False, load_mode=load_mode)
    instance = open_instance(InstanceSettings(engine=engine, slots=4))
    ends = []

    def between_match_and_allocation(request: FakeRequest) -> bool:
        if not ends and instance.manager.stats().leases:
            ends.append(request.id)
            instance.manager.expire(float("inf"))
            assert instance.manager.evict(4) == 4
        return True

    # What was computed beside a load that failed may be stored by the next request only.
    for _ in range(4):
        request = instance.engine.add(text(1, 4))
        instance.engine.run()
        instance.settle()
        assert request.complete
        instance.engine.admit = between_match_and_allocation
    assert len(ends) == 1
    assert request.hits == [4 * CHUNK], "what was computed again is never stored again"
    assert instance.engine.failures == 1
    instance.check_idle()


def test_a_load_under_way_keeps_its_slots_however_long_it_takes(by_hand: Any) -> None:
    driven = by_hand(4)
    driven.store("a", text(1))
    state = driven.add("b", text(1), store=False)
    found = driven.match("b")
    driven.allocate("b", found)
    (transfer,) = driven.plan().loads
    driven.wait(1000 * LEASE_SECONDS)
    driven.finish("b", computed=0)
    for name in range(2, 9):
        driven.store("c", text(name, 4))
    driven.runtime.clear()
    driven.report(transfer)
    driven.check_loaded(state, 0, found)
    driven.check(resident=0)


@pytest.mark.parametrize("state", ["created", "matched", "loading", "loaded", "computing", "saving"])
@pytest.mark.parametrize("salt", ["", "tenant"])
def test_an_abort_in_any_state_gives_back_what_the_request_held(by_hand: Any, state: str, salt: str) -> None:
    """Nothing rebuilds a key to give something back: whoever took a lease with a salt gives it back
    by its number (LMCache#3770, vllm#44100)."""
    driven = by_hand(8, world_size=2)
    driven.store("a", text(1), salt=salt)
    driven.add("b", text(1, 4), salt=salt)
    reached = ["created", "matched", "loading", "loaded", "computing", "saving"].index(state)
    pending = []
    if reached >= 1:
        assert driven.match("b") == 2 * CHUNK
    if reached >= 2:
        driven.allocate("b", 2 * CHUNK)
        pending += driven.plan().loads
    if reached >= 3:
        driven.report(pending.pop())
    if reached >= 4:
        driven.compute("b", 2 * CHUNK, 3 * CHUNK)
    if reached >= 5:
        pending += driven.plan().saves
        driven.report(pending[0], ranks=[1])
    driven.finish("b", computed=0)
    pending += driven.plan().saves
    for transfer in pending:
        driven.report(transfer)
    driven.check()
    assert driven.hit(text(1), salt=salt) == 2 * CHUNK
    driven.manager.evict(8)
    driven.check(resident=0)


FATES = ["done", "failed", "half", "late", "late and failed", "twice", "lost", "cleared", "stranger"]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=6),
    world_size=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_results_of_any_number_in_any_order_free_every_slot_once(
    by_hand: Any, fates: list[str], world_size: int, seed: int
) -> None:
    """One owner per slot across submit and completion: success, failure, time-out, loss and doubled
    messages each free it exactly once (LMCache#1802)."""
    driven = by_hand(12, world_size=world_size)
    open_saves = []
    for number, fate in enumerate(fates):
        driven.add(str(number), text(number))
        driven.compute(str(number), 0, 2 * CHUNK)
        driven.finish(str(number))
        open_saves += [(fate, transfer) for transfer in driven.plan().saves]
    messages = []
    for fate, transfer in open_saves:
        slots = tuple(transfer.slot_numbers())
        bad = {"failed": slots, "late and failed": slots, "half": slots[:1]}.get(fate, ())
        ranks = range(world_size) if fate != "lost" else range(1, world_size)
        for rank in ranks:
            result = TransferResult(transfer.id, bad if rank == 0 else ())
            late = fate.startswith("late")
            messages += [(late, rank, result)] * (2 if fate == "twice" else 1)
        if fate == "stranger":
            messages.append((False, 0, TransferResult(transfer.id + 1000, slots)))
    random.Random(seed).shuffle(messages)
    for late, rank, result in messages:
        if not late:
            driven.tell(rank, result)
            driven.manager.check()
    if "cleared" in fates:
        driven.runtime.clear()
    driven.wait(WRITE_SECONDS)
    before = driven.manager.stats().stored
    for late, rank, result in messages:
        if late:
            driven.tell(rank, result)
            driven.manager.check()
    assert driven.manager.stats().stored == before, "a late result became visible"
    lost = sum(fate == "lost" for fate in fates)
    assert (driven.manager.stats().quarantined > 0) == (lost > 0), "given up, but not set aside"
    driven.leave()
    driven.check()
    for _, rank, result in messages:
        driven.tell(rank, result)
    driven.check()


def test_a_tier_full_of_leases_takes_no_harm_from_ten_thousand_stores_and_recovers(
    by_hand: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused stores are counted, never logged one by one (LMCache#3187)."""
    driven = by_hand(20)
    for number in range(10):
        driven.store("a", text(number))
    for number in range(10):
        driven.add(f"holder {number}", text(number), store=False)
        assert driven.match(f"holder {number}") == 2 * CHUNK
    with caplog.at_level(logging.INFO):
        for number in range(10_000):
            driven.add("b", [number + 10**6] * (CHUNK + 1), load=False)
            driven.compute("b", 0, CHUNK + 1)
            driven.finish("b")
            assert driven.plan().saves == ()
    assert not caplog.records
    stats = driven.manager.stats()
    assert (stats.leased, stats.free, stats.resident) == (20, 0, 20)
    assert driven.runtime.statistics()[0].refused_saves >= 10_000
    for number in range(10):
        driven.finish(f"holder {number}", computed=0)
    driven.store("b", text(99, 20))
    assert driven.hit(text(99, 20)) == 20 * CHUNK
    driven.check(resident=20)
