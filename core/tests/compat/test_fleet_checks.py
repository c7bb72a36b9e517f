"""Several instances together: pairs, fleets, waivers of either side, and core's own rules about them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.api import Check, Example, Fact, Known, Rule, Scope, Severity
from kvferry.compat import (
    ExitCode,
    FleetMember,
    Outcome,
    OwnedRule,
    Report,
    Waiver,
    WaiverState,
    check,
    check_fleet,
    core_rules,
    rule_faults,
)
from kvferry.config import DEFAULT_INSTANCE

GIB = 1 << 30
CORE = [OwnedRule(rule=rule, owner="core") for rule in core_rules()]


def member(label: str, values: dict[str, Any], *waived: str, rules: list[OwnedRule] = CORE) -> FleetMember:
    origin = f"{label}.yaml:1:1"
    facts = {path: Fact(path=path, value=value, origin=origin) for path, value in values.items()}
    waivers = [Waiver(rule_id=each, reason="known", origin=origin) for each in waived]
    report = check(rules, facts, waivers)
    return FleetMember(label=label, name=f"{label}.yaml", facts=facts, report=report, waivers=waivers)


def tier(capacity: int, *, instance: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "tiers.cpu.use": "cpu",
        "tiers.cpu.capacity": capacity * GIB,
        "tiers.cpu.capabilities.addressable": True,
        "instance": instance,
        "model_identity": None,
        "chunk_tokens": 256,
        "host.memory_bytes": 64 * GIB,
        **more,
    }


def host(memory: int = 64) -> dict[str, Fact]:
    path = "host.memory_bytes"
    return {path: Fact(path=path, value=memory * GIB, origin="probe")}


def together(*members: FleetMember, rules: list[OwnedRule] = CORE, memory: int = 64) -> Report:
    return check_fleet(rules, members, host(memory))


def violated(report: Report) -> list[str]:
    return [finding.rule.id for finding in report.select(Outcome.VIOLATED)]


def test_the_same_name_twice_is_an_error_that_shows_both_places() -> None:
    report = together(member("a", tier(4, instance="x")), member("b", tier(4, instance="x")))
    assert violated(report) == ["CORE060"]
    assert report.exit_code() is ExitCode.ERRORS
    text = report.text()
    assert "error[CORE060] a.yaml, b.yaml: both instances are called x" in text
    assert "instances.a.instance = 'x'  <- a.yaml:1:1" in text
    assert "instances.b.instance = 'x'  <- b.yaml:1:1" in text


@given(st.lists(st.sampled_from(["x", "y", "z", None]), min_size=2, max_size=5))
@settings(max_examples=40)
def test_every_two_are_compared_once(instances: list[str | None]) -> None:
    members = [member(f"m{at}", tier(1, instance=name)) for at, name in enumerate(instances)]
    report = together(*members)
    found = [f.instances for f in report.select(Outcome.VIOLATED) if f.rule.id == "CORE060"]
    expected = [
        (one.name, other.name)
        for (one, first), (other, second) in combinations(zip(members, instances, strict=True), 2)
        if first is not None and first == second
    ]
    assert found == sorted(expected)


KEYS = st.fixed_dictionaries(
    {
        "instance": st.sampled_from(["x", "y", DEFAULT_INSTANCE, None]),
        "model_identity": st.sampled_from(["m", "n", None]),
        "chunk_tokens": st.sampled_from([256, 512]),
    }
)
STORES = st.fixed_dictionaries(
    {
        "tiers.d.path": st.sampled_from(["/c", "/c/", "/d"]),
        "tiers.d.capabilities.persistent": st.booleans(),
        "tiers.d.capabilities.shared": st.booleans(),
    }
)


@given(st.tuples(KEYS, STORES), st.tuples(KEYS, STORES), st.integers(1, 80), st.integers(1, 80))
@settings(max_examples=80)
def test_which_file_is_named_first_does_not_matter(
    one: tuple[dict[str, Any], dict[str, Any]],
    other: tuple[dict[str, Any], dict[str, Any]],
    left: int,
    right: int,
) -> None:
    a = member("a", {**tier(left), **one[0], **one[1]})
    b = member("b", {**tier(right), **other[0], **other[1]})
    forth = {(f.rule.id, f.outcome) for f in together(a, b).findings}
    back = {(f.rule.id, f.outcome) for f in together(b, a).findings}
    assert forth == back
    same = one[1]["tiers.d.path"].rstrip("/") == other[1]["tiers.d.path"].rstrip("/")
    lone = all(
        each["tiers.d.capabilities.persistent"] and not each["tiers.d.capabilities.shared"]
        for each in (one[1], other[1])
    )
    named = [each[0]["instance"] for each in (one, other)]
    # A store keeps instances apart by name; those without one have the same.
    clash = same and lone and len({name or DEFAULT_INSTANCE for name in named}) == 1
    alike = None not in named and named[0] == named[1]
    assert (("CORE061", Outcome.VIOLATED) in forth) is (clash and not alike)
    assert (("CORE060", Outcome.VIOLATED) in forth) is alike
    # Nothing that a pair of files says may be left open.
    assert not [f for f in together(a, b).findings if f.outcome is Outcome.UNVERIFIED]


@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), st.none() | st.integers(1, 3))
@settings(max_examples=60)
def test_the_budget_is_the_sum_over_all_instances(capacities: list[int], workers: int | None) -> None:
    more = {} if workers is None else {"engine.workers": workers}
    members = [member(f"m{at}", {**tier(size), **more}) for at, size in enumerate(capacities)]
    report = together(*members)
    need = sum(capacities) * (workers or 1)
    alone = max(capacities) * (workers or 1)
    error, warning = ("CORE064", "CORE065") if workers is not None else ("CORE066", "CORE067")
    budget = set(violated(report)) & {"CORE064", "CORE065", "CORE066", "CORE067"}
    told = {f.rule.id for f in report.findings if f.not_judged}
    if alone > 64:
        # One instance alone breaks the budget, and its own report says so.
        assert (budget, error in told) == (set(), True)
    elif need > 64:
        assert (budget, warning in told) == ({error}, True)
    elif alone > 0.8 * 64:
        assert (budget, warning in told) == (set(), True)
    else:
        assert budget == ({warning} if need > 0.8 * 64 else set())


DISK = {
    "tiers.d.path": "/cache",
    "tiers.d.capabilities.persistent": True,
    "tiers.d.capabilities.shared": False,
}


def test_instances_without_a_name_cannot_share_a_folder() -> None:
    a, b = member("a", tier(4, **DISK)), member("b", tier(4, **DISK))
    report = together(a, b)
    assert violated(report) == ["CORE061"]
    assert "persistent tiers keep their chunks in one folder (/cache; /cache)" in report.text()
    assert "(instance: not set; not set)" in report.text()


@pytest.mark.parametrize(("name", "found"), [(DEFAULT_INSTANCE, ["CORE061"]), ("b", [])])
def test_an_instance_without_a_name_has_a_name_in_the_folder(name: str, found: list[str]) -> None:
    report = together(member("a", tier(4, **DISK)), member("b", tier(4, instance=name, **DISK)))
    assert violated(report) == found


def test_the_folder_is_judged_when_two_of_one_name_are_waived() -> None:
    a = member("a", tier(4, instance="x", **DISK), "CORE060")
    report = together(a, member("b", tier(4, instance="x", **DISK)))
    assert [f.rule.id for f in report.select(Outcome.VIOLATED) if f.troubles] == ["CORE061"]


def test_peers_that_cannot_share_are_told() -> None:
    a = member("a", tier(1, instance="x", model_identity="m"))
    b = member("b", tier(1, instance="y", model_identity="m", chunk_tokens=512))
    c = member("c", tier(1, instance="z"))
    assert violated(together(a, b)) == ["CORE062"]
    assert violated(together(a, c)) == ["CORE063"]
    assert together(a, c).exit_code(strict=True) is ExitCode.CLEAN


@pytest.mark.parametrize("waivers", [(("CORE060",), ()), ((), ("CORE060",))])
def test_a_waiver_in_either_file_lifts_what_is_about_both(
    waivers: tuple[tuple[str, ...], tuple[str, ...]],
) -> None:
    a = member("a", tier(4, instance="x"), *waivers[0])
    b = member("b", tier(4, instance="x"), *waivers[1])
    c = member("c", tier(4, instance="x"))
    assert together(a, b).exit_code() is ExitCode.CLEAN
    report = together(a, b, c)
    left = {f.instances for f in report.select(Outcome.VIOLATED)}
    waiving, other = ("a.yaml", "b.yaml") if waivers[0] else ("b.yaml", "a.yaml")
    assert left == {(other, "c.yaml")}
    assert f"waiver   known  <- {waiving}:1:1" in report.text()


def test_a_waiver_of_a_rule_about_several_is_silent_alone_and_told_together() -> None:
    a, b = member("a", tier(4), "CORE060"), member("b", tier(4))
    assert a.report.waivers == ()
    assert [judged.state for judged in together(a, b).waivers] == [WaiverState.NOT_APPLICABLE]


def test_a_waiver_of_a_rule_about_one_is_told_with_its_instance_only() -> None:
    a, b = member("a", tier(4), "CORE042"), member("b", tier(4))
    assert [judged.state for judged in a.report.waivers] == [WaiverState.HOLDS]
    assert together(a, b).waivers == ()


def test_rules_about_several_are_not_counted_for_one() -> None:
    found = {finding.rule.id for finding in member("a", tier(4)).report.findings}
    assert found.isdisjoint({rule.id for rule in core_rules() if rule.scope is not Scope.INSTANCE})


PEAK = Rule(
    id="ZOO001",
    severity=Severity.WARNING,
    scope=Scope.PAIR,
    when=Known("one.peak") & Known("other.peak"),
    require=Check("one.peak == other.peak", ("one.peak", "other.peak"), lambda a, b: bool(a == b)),
    message="{one.peak} and {other.peak}",
    fix="agree",
    source="design",
    requires=("ZOO002",),
    examples=(
        Example(facts={"one.peak": 1, "other.peak": 1}, passes=True),
        Example(facts={"one.peak": 1, "other.peak": 2}, passes=False),
    ),
)
LOW = Rule(
    id="ZOO002",
    severity=Severity.ERROR,
    when=Known("peak"),
    require=Check("peak < 9", ("peak",), lambda peak: bool(peak < 9)),
    message="{peak}",
    fix="lower",
    source="design",
    examples=(Example(facts={"peak": 1}, passes=True), Example(facts={"peak": 9}, passes=False)),
)
ZOO = [OwnedRule(rule=rule, owner="zoo") for rule in (PEAK, LOW)]


def test_a_plugins_rule_about_pairs_needs_nothing_but_data() -> None:
    assert rule_faults([PEAK, LOW], "ZOO") == ()
    members = [member(name, {"peak": peak}, rules=ZOO) for name, peak in (("a", 1), ("b", 2), ("c", 9))]
    report = together(*members, rules=[*ZOO, *ZOO])
    assert [(f.instances, f.message) for f in report.select(Outcome.VIOLATED)] == [
        (("a.yaml", "b.yaml"), "1 and 2")
    ]
    # Only pairs with the instance whose own rule is broken are left alone.
    assert {f.instances for f in report.findings if f.not_judged} == {
        ("a.yaml", "c.yaml"),
        ("b.yaml", "c.yaml"),
    }


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"scope": "pair"}, "not a kvferry.api.Scope"),
        ({"scope": Scope.INSTANCE}, "is about one instance and reads facts of several"),
        ({"scope": Scope.FLEET}, "is about a fleet and reads no fact below 'instances.*'"),
        ({"each": "tiers"}, "cannot be a template over 'tiers'"),
        (
            {"when": Known("one.peak"), "require": Known("one.peak"), "message": "m"},
            "does not read facts of both",
        ),
    ],
)
def test_a_scope_that_does_not_fit_the_paths_is_told(changes: dict[str, Any], fault: str) -> None:
    found = rule_faults([evolve(PEAK, requires=(), **changes)], "ZOO")
    assert any(fault in each for each in found), found
