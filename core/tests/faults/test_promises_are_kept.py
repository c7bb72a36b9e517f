"""What was promised can be restored, and what was stored can be found: on every rank, in every order."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHUNK = 16

properties = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def text(name: int, chunks: int) -> list[int]:
    """A prompt of its own, one token longer than its chunks."""
    return [name * 10_000 + position for position in range(chunks * CHUNK + 1)]


def test_what_a_match_promised_is_restored_whatever_was_stored_meanwhile(by_hand: Any) -> None:
    """Between lookup and use the tier is filled several times over (LMCache#4133, vllm#39702)."""
    driven = by_hand(8, world_size=2)
    chance = random.Random(3)
    restored = 0
    for number in range(1000):
        prompt = text(chance.randrange(4), chance.randrange(1, 6))
        name = f"r{number}"
        state = driven.add(name, prompt)
        found = driven.match(name)
        for more in range(chance.randrange(3)):
            driven.store(f"{name} {more}", text(10 + chance.randrange(20), chance.randrange(1, 6)))
        if chance.random() < 0.3:
            found = driven.match(name)  # asked again before there was room
        if found:
            driven.allocate(name, found)
            (transfer,) = driven.plan().loads
            driven.store(f"{name} again", text(10 + chance.randrange(20), 6))
            driven.report(transfer)
            driven.check_loaded(state, 0, found)
            restored += found
        driven.compute(name, found, len(prompt))
        driven.finish(name)
        for transfer in driven.plan().saves:
            driven.report(transfer)
    driven.check()
    assert driven.runtime.statistics()[0].failed_loads == 0
    assert restored > 1000 * CHUNK / 2, "too little was ever found for this to mean anything"


def test_a_chunk_is_whole_on_all_ranks_or_absent_on_all(by_hand: Any) -> None:
    """Ranks report in any order and fail on their own; eviction takes whole chunks (LMCache#4832)."""
    world_size = 4
    driven = by_hand(100, world_size=world_size)
    chance = random.Random(7)
    whole = {}
    reports = []
    for name in range(25):
        driven.add(str(name), text(name, 4))
        driven.compute(str(name), 0, 4 * CHUNK + 1)
        driven.finish(str(name))
        (transfer,) = driven.plan().saves
        slots = transfer.groups[0].slot_column.tolist()[:: CHUNK // 4]
        failed = {rank: {slot for slot in slots if chance.random() < 0.05} for rank in range(world_size)}
        reports += [(transfer, rank, failed[rank]) for rank in range(world_size)]
        bad = set().union(*failed.values())
        whole[name] = next((at for at, slot in enumerate(slots) if slot in bad), 4)
    chance.shuffle(reports)
    for transfer, rank, failed_here in reports:
        driven.report(transfer, ranks=[rank], failed=failed_here)
        driven.manager.check()
    assert 0 < sum(count < 4 for count in whole.values()) < 25
    for name, count in whole.items():
        assert driven.hit(text(name, 4)) == count * CHUNK
    driven.check(resident=sum(whole.values()))
    assert driven.manager.evict(37) == 37
    left = [driven.hit(text(name, 4)) // CHUNK for name in whole]
    driven.check(resident=sum(left))
    assert all(have <= whole[name] for name, have in enumerate(left))


@properties
@given(chunks=st.integers(1, 12), fails=st.data(), world_size=st.integers(1, 2), load_before=st.booleans())
def test_a_store_that_failed_is_not_found_and_the_next_one_mends_it(
    by_hand: Any, chunks: int, fails: st.DataObject, world_size: int, load_before: bool
) -> None:
    """After a batch failed, what lies before it is found, and nothing of the rest is lost for good
    (vllm#53498, sglang#39444)."""
    bad = fails.draw(st.integers(0, chunks - 1), "the chunk that fails")
    driven = by_hand(16, world_size=world_size)
    prompt = text(1, chunks)
    driven.add("a", prompt)
    driven.compute("a", 0, len(prompt))
    driven.finish("a")
    stored_at = [
        (transfer, slot)
        for transfer in driven.plan().saves
        for slot in dict.fromkeys(transfer.groups[0].slot_column.tolist())
    ]
    assert len(stored_at) == chunks
    failing, slot = stored_at[bad]
    for transfer in dict.fromkeys(transfer.id for transfer, _ in stored_at):
        whole = next(each for each, _ in stored_at if each.id == transfer)
        if whole is failing:
            driven.report(whole, ranks=range(world_size - 1))
            driven.report(whole, ranks=[world_size - 1], failed=[slot])
        else:
            driven.report(whole)
    driven.check(resident=bad)
    assert driven.hit(prompt) == bad * CHUNK
    assert driven.runtime.statistics()[0].failed_saves == 1
    driven.store("b", prompt, load=load_before)
    driven.check(resident=chunks)
    assert driven.hit(prompt) == chunks * CHUNK


@properties
@given(chunks=st.integers(1, 8), bad=st.integers(0, 7))
def test_a_running_request_offers_what_failed_once_more(by_hand: Any, chunks: int, bad: int) -> None:
    driven = by_hand(16)
    bad = min(bad, chunks - 1)
    prompt = text(1, chunks)
    driven.add("a", prompt)
    for at in range(chunks):
        driven.compute("a", at * CHUNK, (at + 1) * CHUNK)
        for transfer in driven.plan().saves:
            first = transfer.slot_numbers()[:1]
            fails = at == bad and driven.runtime.statistics()[0].failed_saves == 0
            driven.report(transfer, failed=first if fails else [])
    driven.compute("a", chunks * CHUNK, len(prompt))
    driven.finish("a")
    for transfer in driven.plan().saves:
        driven.report(transfer)
    driven.check(resident=chunks)
    assert driven.hit(prompt) == chunks * CHUNK


def test_the_same_prompt_stored_again_takes_no_room(by_hand: Any) -> None:
    """Chunks, tails and the tail's longer successors are charged by what they hold (LMCache#4655)."""
    driven = by_hand(6)
    for _ in range(3):
        for length in (CHUNK + 4, CHUNK + 8, 2 * CHUNK, 2 * CHUNK + 4):
            driven.store("a", text(1, 3)[:length])
            driven.store("a", text(1, 3)[:length])
    driven.check(resident=3)
    driven.store("b", text(2, 3))
    driven.check(resident=6)
    assert driven.hit(text(1, 3)) == 2 * CHUNK + 4
    assert driven.hit(text(2, 3)) == 3 * CHUNK
    assert driven.manager.stats().evictions == 0


def test_what_a_tenant_stored_is_nobody_elses_and_goes_with_its_salt(by_hand: Any) -> None:
    """The salt that the keys were made with is the one that the chunks are kept under (LMCache#4825)."""
    driven = by_hand(16)
    salts = ["", "x", "y", "x\x00", "tenant-é"]
    for salt in salts:
        driven.store("a", text(1, 2), salt=salt)
    driven.check(resident=2 * len(salts))
    assert driven.hit(text(1, 2), salt="z") == 0
    for gone, salt in enumerate(salts, 1):
        assert driven.hit(text(1, 2), salt=salt) == 2 * CHUNK
        assert driven.manager.clear(salt=salt).removed == 2
        assert driven.hit(text(1, 2), salt=salt) == 0
        driven.check(resident=2 * (len(salts) - gone))


@pytest.mark.parametrize("failing", [False, True])
def test_slow_and_failing_saves_never_make_a_load_fail(by_hand: Any, failing: bool) -> None:
    """Stores that pile up may cost hits, but never a load that was promised; what finds no room is
    dropped at once (LMCache#1285)."""
    slots = 12
    driven = by_hand(slots)
    driven.store("a", text(0, 4))
    piled = []
    found = 0
    for number in range(1, 60):
        driven.add("writer", text(number, 4), load=False)
        driven.compute("writer", 0, 4 * CHUNK + 1)
        driven.finish("writer")
        piled += driven.plan().saves
        assert len(piled) <= slots, "work piles up without bound"
        found += driven.hit(text(0, 4))
        found += driven.hit(text(number - 1, 4))
        if number % 3 == 0:
            transfer = piled.pop(0)
            driven.report(transfer, failed=transfer.slot_numbers()[2:] if failing else [])
            driven.store("a", text(0, 4))
    for transfer in piled:
        driven.report(transfer)
    totals = driven.runtime.statistics()[0]
    assert totals.refused_saves > 0
    assert totals.loaded_tokens == found > 10 * CHUNK
    assert totals.failed_loads == 0
    driven.check()
