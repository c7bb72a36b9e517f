"""Fault plans: data, drawn from a seed, printed as code."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import ErrorKind, Retry
from kvferry.testing import faults
from kvferry.testing.faults import (
    Crash,
    CrashBy,
    Delay,
    DoubleCompletion,
    Effect,
    Fail,
    Fault,
    FaultPlan,
    FaultPlayer,
    FlipBit,
    InjectedCrash,
    LoseCompletion,
    NoSpace,
    ReorderCompletion,
    ShortWrite,
    Stall,
    TornWrite,
)

EFFECTS: st.SearchStrategy[Effect] = st.one_of(
    st.builds(Fail, st.sampled_from(ErrorKind), st.sampled_from(Retry), st.integers(1, 130)),
    st.builds(Delay, st.floats(0, 1e6)),
    st.builds(TornWrite, st.integers(0, 1 << 40)),
    st.builds(ShortWrite, st.integers(1, 1 << 40)),
    st.builds(FlipBit, st.integers(0, 1 << 40)),
    st.builds(Crash, st.sampled_from(CrashBy)),
    st.sampled_from([Stall(), NoSpace(), LoseCompletion(), DoubleCompletion(), ReorderCompletion()]),
)
FAULTS = st.builds(
    Fault, st.text(max_size=9), EFFECTS, st.none() | st.integers(1, 1000), st.text(min_size=1, max_size=9)
)
PLANS = st.builds(FaultPlan, st.lists(FAULTS, max_size=4))


@given(PLANS)
def test_a_plan_printed_as_code_makes_the_same_plan(plan: FaultPlan) -> None:
    names: dict[str, object] = {}
    exec(plan.to_code(), names)
    assert names["plan"] == plan


def test_the_code_reads_well() -> None:
    plan = FaultPlan(
        [Fault("write", TornWrite(17), nth=3), Fault("read", Fail(retry=Retry.NEVER), subject="a*")]
    )
    assert plan.to_code() == (
        "from kvferry.api import Retry\n"
        "from kvferry.testing.faults import Fail, Fault, FaultPlan, TornWrite\n"
        "\n"
        "plan = FaultPlan(\n"
        "    (\n"
        "        Fault(operation='write', effect=TornWrite(keep=17), nth=3),\n"
        "        Fault(operation='read', effect=Fail(retry=Retry.NEVER), subject='a*'),\n"
        "    )\n"
        ")\n"
    )


@given(st.integers(), st.integers(1, 20), st.integers(1, 50))
def test_a_seed_always_draws_the_same_plan(seed: int, count: int, calls: int) -> None:
    effects = [Stall(), NoSpace(), Delay(1.0)]
    plan = FaultPlan.drawn(seed, ["read", "write"], effects, faults=count, calls=calls)
    assert plan == FaultPlan.drawn(seed, ["read", "write"], effects, faults=count, calls=calls)
    assert 1 <= len(plan.faults) <= count
    for fault in plan.faults:
        assert fault.operation in ("read", "write")
        assert fault.effect in effects
        assert fault.nth is not None
        assert 1 <= fault.nth <= calls


def test_other_seeds_draw_other_plans() -> None:
    drawn = {FaultPlan.drawn(seed, ["read"], [Stall()], faults=3, calls=100) for seed in range(20)}
    assert len(drawn) > 15


def test_the_nth_call_meets_its_fault_and_no_other() -> None:
    player = FaultPlayer(FaultPlan([Fault("write", NoSpace(), nth=2), Fault("read", Stall())]))
    met = [player.meet("write"), player.meet("read"), player.meet("write"), player.meet("write")]
    assert met == [None, Stall(), NoSpace(), None]
    assert [fault.operation for fault in player.fired] == ["read", "write"]


def test_calls_are_counted_among_those_of_the_subject() -> None:
    player = FaultPlayer(FaultPlan([Fault("write", NoSpace(), nth=2, subject="*.tmp")]))
    subjects = ["a.tmp", "b", "c", "d.tmp", "e.tmp"]
    assert [player.meet("write", subject) for subject in subjects] == [None, None, None, NoSpace(), None]


def test_of_several_faults_of_a_call_the_first_counts() -> None:
    player = FaultPlayer(FaultPlan([Fault("write", NoSpace()), Fault("write", Stall(), nth=1)]))
    assert player.meet("write") == NoSpace()
    assert player.unfired() == [Fault("write", Stall(), nth=1)]


def test_faults_that_never_came_to_pass_are_told() -> None:
    never = Fault("write", NoSpace(), nth=9)
    player = FaultPlayer(FaultPlan([never, Fault("read", Stall())]))
    player.meet("write")
    player.meet("read")
    assert player.unfired() == [never]


def test_a_failure_carries_the_plan_as_code() -> None:
    plan = FaultPlan([Fault("write", NoSpace(), nth=2)])
    with pytest.raises(ZeroDivisionError) as caught, plan.told():
        _ = 1 // 0
    assert plan.to_code() in "\n".join(caught.value.__notes__)


def test_a_crash_is_no_exception_that_a_handler_would_catch() -> None:
    def careless() -> None:
        with contextlib.suppress(Exception):
            faults.crash(Crash(), "here")

    with pytest.raises(InjectedCrash):
        careless()


def test_calls_are_counted_from_one() -> None:
    with pytest.raises(ValueError):
        Fault("write", Stall(), nth=0)
