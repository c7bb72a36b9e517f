"""Rules that stand on rules: order, circles, and what is not judged."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import Always, Check, Example, Fact, Known, Path, Rule, Scope, Severity
from kvferry.compat import ExitCode, Outcome, OwnedRule, Waiver, check, rule_faults

IDS = tuple(f"ZOO00{number}" for number in range(7))


def rule(rule_id: str, *requires: str, each: str | None = None, **changes: object) -> Rule:
    path = rule_id if each is None else f"{each}.*.{rule_id}"
    values: dict[str, object] = {
        "when": Always(),
        "severity": Severity.ERROR,
        "examples": (Example(facts={path: True}, passes=True), Example(facts={path: False}, passes=False)),
        **changes,
    }
    return Rule(
        id=rule_id,
        require=Path(path) == True,  # noqa: E712
        message="message",
        fix="fix",
        source="design",
        requires=requires,
        each=each,
        **values,  # type: ignore[arg-type]
    )


def owned(*rules: Rule) -> list[OwnedRule]:
    return [OwnedRule(rule=each, owner="zoo") for each in rules]


def facts_of(**values: object) -> dict[str, Fact]:
    return {path: Fact(path=path, value=value, origin="test") for path, value in values.items()}


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, tuple[str, ...]]:
    """Each rule may require those before it in some order, so that there is no circle."""
    order = draw(st.permutations(IDS))
    return {
        each: tuple(draw(st.lists(st.sampled_from(order[:at]), unique=True, max_size=3))) if at else ()
        for at, each in enumerate(order)
    }


@given(graphs(), st.dictionaries(st.sampled_from(IDS), st.sampled_from([True, False, None])), st.randoms())
def test_a_rule_is_judged_exactly_when_nothing_below_it_is_in_trouble(
    graph: dict[str, tuple[str, ...]], values: dict[str, bool | None], random: object
) -> None:
    rules = owned(*(rule(each, *requires) for each, requires in graph.items()))
    random.shuffle(rules)  # type: ignore[attr-defined]
    known = {each: values.get(each, True) for each in IDS}
    facts = facts_of(**{each: value for each, value in known.items() if value is not None})
    found = {finding.rule.id: finding for finding in check(rules, facts).findings}

    def judged(each: str) -> bool:
        return all(judged(below) and known[below] is True for below in graph[each])

    for each, finding in found.items():
        assert bool(finding.not_judged) is not judged(each)
        if finding.not_judged:
            assert finding.outcome is Outcome.NOT_APPLICABLE
            # The reason names a rule that is itself in trouble, however far below.
            culprit, _, _ = finding.not_judged.partition(" ")
            assert found[culprit].troubles
        else:
            expected = {True: Outcome.OK, False: Outcome.VIOLATED, None: Outcome.UNVERIFIED}
            assert finding.outcome is expected[known[each]]


@given(graphs(), st.data())
def test_a_circle_is_a_fault_with_its_way_and_no_circle_is_none(
    graph: dict[str, tuple[str, ...]], data: st.DataObject
) -> None:
    assert rule_faults([rule(each, *requires) for each, requires in graph.items()], "ZOO") == ()
    start, *rest = data.draw(st.lists(st.sampled_from(IDS), unique=True, min_size=1, max_size=4))
    ring = [start, *rest]
    closed = {**graph}
    for each, following in zip(ring, [*rest, start], strict=True):
        closed[each] = (*closed[each], following)
    faults = rule_faults([rule(each, *requires) for each, requires in closed.items()], "ZOO")
    circles = [fault for fault in faults if "require each other in a circle" in fault]
    assert circles
    for circle in circles:
        way = circle.partition(": ")[2].split(" -> ")
        assert way[0] == way[-1]
        assert all(following in closed[each] for each, following in itertools.pairwise(way))


def test_a_required_rule_that_is_not_there_is_a_fault_with_the_nearest_id() -> None:
    (fault,) = rule_faults([rule("ZOO001"), rule("ZOO002", "ZOO01")], "ZOO")
    assert fault == "rule ZOO002 requires 'ZOO01', which is no rule; did you mean 'ZOO001'?"
    assert rule_faults([rule("ZOO002", "CORE001")], "ZOO") == ()
    (fault,) = rule_faults([rule("ZOO002", "OTHER001")], "ZOO")
    assert fault.startswith("rule ZOO002 requires 'OTHER001', which is no rule")


def test_a_rule_about_one_instance_cannot_stand_on_one_about_several() -> None:
    pair = rule(
        "ZOO001",
        scope=Scope.PAIR,
        when=Known("one.a") & Known("other.a"),
        examples=(Example(facts={}, passes=True), Example(facts={}, passes=False)),
    )
    (fault,) = rule_faults([pair, rule("ZOO002", "ZOO001")], "ZOO")
    assert fault == "rule ZOO002 is about one instance and requires ZOO001, which is about a pair"


def test_a_rule_that_does_not_apply_says_nothing_of_what_it_stands_on() -> None:
    rules = owned(rule("ZOO001"), rule("ZOO002", "ZOO001", when=Known("never")))
    found = check(rules, facts_of(ZOO001=False))
    assert [finding.not_judged for finding in found.findings] == ["", ""]


def test_a_waived_rule_is_settled_so_what_stands_on_it_is_judged() -> None:
    waiver = Waiver(rule_id="ZOO001", reason="known", origin="c.yaml:1:1")
    rules = owned(rule("ZOO001"), rule("ZOO002", "ZOO001"))
    report = check(rules, facts_of(ZOO001=False, ZOO002=False), [waiver])
    assert [finding.rule.id for finding in report.select(Outcome.VIOLATED)] == ["ZOO002"]


def test_members_of_one_section_stand_on_their_own_member_only() -> None:
    rules = owned(rule("ZOO001", each="tiers"), rule("ZOO002", "ZOO001", each="tiers"))
    values = {
        "tiers.a.ZOO001": False,
        "tiers.b.ZOO001": True,
        "tiers.a.ZOO002": True,
        "tiers.b.ZOO002": False,
    }
    report = check(rules, facts_of(**values))
    shown = {(f.rule.id, f.member): (f.outcome, f.not_judged) for f in report.findings}
    assert shown["ZOO002", "a"] == (Outcome.NOT_APPLICABLE, "ZOO001 is violated")
    assert shown["ZOO002", "b"] == (Outcome.VIOLATED, "")
    assert "not judged: ZOO002 a, because ZOO001 is violated" in report.text()
    assert report.summary() == "4 checks: 2 errors, 1 ok, 1 not judged"


def test_what_is_not_judged_is_told_once_and_changes_no_code() -> None:
    rules = owned(rule("ZOO001", severity=Severity.WARNING), rule("ZOO002", "ZOO001"))
    report = check(rules, {})
    assert report.text().count("not judged: ZOO002, because ZOO001 could not be verified") == 1
    assert report.exit_code() is ExitCode.CLEAN
    assert report.exit_code(strict=True) is ExitCode.WARNINGS


def test_a_condition_that_raises_is_not_asked_while_the_required_rule_is_in_trouble() -> None:
    def explode(value: object) -> bool:
        raise ValueError("odd")

    broken = Check("odd", ("ZOO001",), explode)
    report = check(owned(rule("ZOO001"), rule("ZOO002", "ZOO001", when=broken)), facts_of(ZOO001=False))
    assert [finding.outcome for finding in report.findings] == [Outcome.VIOLATED, Outcome.NOT_APPLICABLE]
