"""A process that runs for months: what it keeps is bounded by its settings, not by its history."""

from __future__ import annotations

import gc
import types
from typing import Any

import pytest

from kvferry.api import KVFerryErrors
from kvferry.config import ConfigSources, read_core

CHUNK = 16
WRITE_SECONDS = 20.0
_NOT_STATE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


def objects_behind(*roots: object) -> int:
    """How many objects these keep alive, apart from code."""
    seen: dict[int, object] = {}
    to_do = list(roots)
    while to_do:
        each = to_do.pop()
        if id(each) in seen or isinstance(each, _NOT_STATE):
            continue
        seen[id(each)] = each
        to_do += gc.get_referents(each)
    return len(seen)


def turn(driven: Any, number: int) -> None:
    """Conversations that grow by tails, fail, are aborted, and push each other out."""
    prompt = [number * 1000 + position for position in range(3 * CHUNK)]
    for length in (CHUNK + 4, 2 * CHUNK, 2 * CHUNK + 8):
        name = f"{number} {length}"
        driven.add(name, prompt[:length], salt=f"tenant {number}")
        found = driven.match(name)
        if found and number % 3:
            driven.allocate(name, found)
            (load,) = driven.plan().loads
            driven.report(load, failed=load.slot_numbers()[-1:] if number % 5 == 0 else [])
        driven.compute(name, 0, length)
        driven.finish(name, computed=length)
        for transfer in driven.plan().saves:
            driven.report(transfer, failed=transfer.slot_numbers() if number % 7 == 0 else [])
    if number % 11 == 0:
        driven.manager.clear(salt=f"tenant {number}")
    if number % 20 == 0:
        driven.wait(WRITE_SECONDS)
    # The test's own books are no part of what is measured.
    driven.engine[0].clear()
    driven.tables.clear()


def test_a_thousand_requests_leave_no_more_behind_than_a_hundred(by_hand: Any) -> None:
    """Queues, tables of requests, leases, owners and the order of eviction (LMCache#900)."""
    driven = by_hand(12)
    kept = []
    for number in range(1, 441):  # three requests each
        turn(driven, number)
        if number % 40 == 0:
            kept.append(objects_behind(driven.runtime, driven.manager))
    driven.check()
    early, late = kept[1:4], kept[-3:]
    assert max(late) <= max(early) * 1.1, kept


@pytest.mark.parametrize(
    "capacity", [None, "missing", "0", "0GiB", -1, "-1GiB", "inf", ".inf", "unlimited", ""]
)
def test_a_tier_without_a_finite_capacity_is_refused(capacity: object) -> None:
    """Nothing is unlimited by default or by accident (LMCache#649)."""
    tier = {"use": "cpu"} if capacity == "missing" else {"use": "cpu", "capacity": capacity}
    sources = ConfigSources(file=None, environment={}, overrides={"kvferry.tiers": {"cpu": tier}})
    with pytest.raises(KVFerryErrors) as caught:
        read_core(sources).structure(lambda _: None)
    assert any("capacity" in str(error) for error in caught.value.errors), str(caught.value)


def test_a_tier_that_is_not_full_grows_no_queue_from_what_comes_and_goes(by_hand: Any) -> None:
    """New weights clear the cache again and again, and nothing is ever evicted: nothing may wait for an
    eviction to be tidied up."""
    driven = by_hand(100)
    kept = []
    for number in range(300):
        for name in range(10):
            driven.store("a", [name] * (3 * CHUNK))
        driven.runtime.clear()
        if number % 50 == 49:
            driven.wait(WRITE_SECONDS)
            kept.append(objects_behind(driven.runtime, driven.manager))
    assert driven.manager.stats().evictions == 0
    assert max(kept[-2:]) <= max(kept[:2]) * 1.1, kept
