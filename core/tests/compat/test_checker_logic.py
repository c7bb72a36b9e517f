"""Three-valued logic, templates, order, waivers and exit codes of the checker."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.api import (
    Always,
    Check,
    Example,
    Expression,
    Fact,
    Known,
    Path,
    Rule,
    Severity,
    Truth,
)
from kvferry.compat import ExitCode, Outcome, OwnedRule, Report, Waiver, check

NAMES = ("a", "b", "c")


def facts_of(values: dict[str, object]) -> dict[str, Fact]:
    return {path: Fact(path=path, value=value, origin="test") for path, value in values.items()}


def rule(
    rule_id: str = "ZOO001",
    *,
    severity: Severity = Severity.ERROR,
    when: Expression | None = None,
    require: Expression | None = None,
    each: str | None = None,
    message: str = "message",
) -> OwnedRule:
    made = Rule(
        id=rule_id,
        severity=severity,
        when=when or Always(),
        require=require or Path("a") == True,  # noqa: E712
        message=message,
        fix="fix",
        source="design",
        examples=(Example(facts={}, passes=True),),
        each=each,
    )
    return OwnedRule(rule=made, owner="zoo", distribution="acme-zoo 1.0")


def at_least(path: str, least: int) -> Check:
    return Check(f"{path} >= {least}", (path,), lambda value: bool(value >= least))


def only(report: Report) -> Outcome:
    (finding,) = report.findings
    return finding.outcome


TRUTHS: dict[Truth, object] = {Truth.TRUE: True, Truth.FALSE: False, Truth.UNKNOWN: None}


@pytest.mark.parametrize(("when", "require"), list(itertools.product(Truth, Truth)))
def test_the_outcome_follows_from_the_two_truths(when: Truth, require: Truth) -> None:
    known = {"w": TRUTHS[when], "r": TRUTHS[require]}
    facts = facts_of({path: value for path, value in known.items() if value is not None})
    outcome = only(check([rule(when=Path("w") == True, require=Path("r") == True)], facts))  # noqa: E712
    if when is Truth.FALSE:
        assert outcome is Outcome.NOT_APPLICABLE
    elif require is Truth.TRUE:
        assert outcome is Outcome.OK
    elif (when, require) == (Truth.TRUE, Truth.FALSE):
        assert outcome is Outcome.VIOLATED
    else:
        assert outcome is Outcome.UNVERIFIED


def formulas() -> st.SearchStrategy[Expression]:
    leaves = st.sampled_from(NAMES).map(lambda name: Path(name) == True)  # noqa: E712
    return st.recursive(
        leaves | st.just(Always()),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
            st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
            inner.map(lambda one: ~one),
        ),
        max_leaves=6,
    )


@given(formulas(), formulas(), st.dictionaries(st.sampled_from(NAMES), st.booleans()))
@settings(max_examples=150)
def test_a_verdict_holds_whatever_the_missing_facts_turn_out_to_be(
    when: Expression, require: Expression, known: dict[str, bool]
) -> None:
    judged = [rule(when=when, require=require)]
    outcome = only(check(judged, facts_of(dict(known))))
    missing = [name for name in NAMES if name not in known]
    for values in itertools.product((True, False), repeat=len(missing)):
        complete = {**known, **dict(zip(missing, values, strict=True))}
        full = only(check(judged, facts_of(dict(complete))))
        assert full is not Outcome.UNVERIFIED
        # ``ok`` may become "does not apply" and stays harmless; the others are final.
        if outcome is Outcome.OK:
            assert full in (Outcome.OK, Outcome.NOT_APPLICABLE)
        elif outcome is not Outcome.UNVERIFIED:
            assert full is outcome


members = st.dictionaries(
    st.sampled_from(["cpu", "ssd-2", "far_away"]),
    st.fixed_dictionaries({}, optional={"use": st.just("x"), "size": st.integers(0, 3)}),
)


@given(members)
def test_a_template_judges_every_member_as_if_it_were_alone(
    tiers: dict[str, dict[str, object]],
) -> None:
    template = rule(each="tiers", when=Path("tiers.*.use") == "x", require=at_least("tiers.*.size", 2))
    values = {f"tiers.{tier}.{key}": value for tier, keys in tiers.items() for key, value in keys.items()}
    found = {f.member: f.outcome for f in check([template], facts_of(dict(values))).findings}
    expected: dict[str | None, Outcome] = {}
    for tier, keys in tiers.items():
        if keys:
            plain = rule(when=Path("use") == "x", require=at_least("size", 2))
            expected[tier] = only(check([plain], facts_of(dict(keys))))
    assert found == (expected or {None: Outcome.NOT_APPLICABLE})


@given(members)
def test_a_star_without_each_collects_all_members_or_is_unknown(
    tiers: dict[str, dict[str, object]],
) -> None:
    collected = rule(require=Check("sum", ("tiers.*.size",), lambda sizes: sum(sizes) <= 3))
    values = {f"tiers.{tier}.{key}": value for tier, keys in tiers.items() for key, value in keys.items()}
    outcome = only(check([collected], facts_of(dict(values))))
    shown = [keys for keys in tiers.values() if keys]
    if any("size" not in keys for keys in shown):
        assert outcome is Outcome.UNVERIFIED
    else:
        small = sum(int(str(keys["size"])) for keys in shown) <= 3
        assert outcome is (Outcome.OK if small else Outcome.VIOLATED)


def test_known_sees_through_templates() -> None:
    template = rule(each="tiers", require=Known("tiers.*.size"))
    report = check([template], facts_of({"tiers.a.size": 1, "tiers.b.use": "x"}))
    assert [(f.member, f.outcome) for f in report.findings] == [
        ("a", Outcome.OK),
        ("b", Outcome.VIOLATED),
    ]


@given(st.permutations([(s, n) for s in Severity for n in ("ZOO002", "ZOO001", "ABC001")]))
def test_the_order_is_severity_then_id_whatever_comes_first(
    rules: list[tuple[Severity, str]],
) -> None:
    report = check([rule(name, severity=severity) for severity, name in rules], {})
    order = [(f.rule.severity, f.rule.id) for f in report.findings]
    names = ["ABC001", "ZOO001", "ZOO002"]
    assert order == [(s, n) for s in (Severity.ERROR, Severity.WARNING, Severity.NOTE) for n in names]


def test_all_violations_come_at_once() -> None:
    report = check([rule(f"ZOO00{n}") for n in range(5)], facts_of({"a": False}))
    assert len(report.select(Outcome.VIOLATED)) == 5


def test_a_rule_that_raises_is_unverified_and_the_others_are_judged() -> None:
    def explode(value: object) -> bool:
        raise TypeError("no order between text and number")

    report = check(
        [rule("ZOO001", require=Check("a fits", ("a",), explode)), rule("ZOO002")],
        facts_of({"a": True}),
    )
    first, second = report.findings
    assert first.outcome is Outcome.UNVERIFIED
    assert "TypeError: no order" in first.broken
    assert second.outcome is Outcome.OK
    assert report.exit_code() is ExitCode.UNVERIFIED


def waiver(rule_id: str) -> Waiver:
    return Waiver(rule_id=rule_id, reason="bench only", origin="c.yaml:9:3")


@pytest.mark.parametrize("values", [{"a": False}, {}])
def test_a_waiver_lifts_a_rule_and_stays_visible(values: dict[str, object]) -> None:
    report = check([rule()], facts_of(values), [waiver("ZOO001")])
    assert report.exit_code(strict=True) is ExitCode.CLEAN
    assert not report.prevents_start
    assert "waived error[ZOO001]" in report.text()
    assert "bench only  <- c.yaml:9:3" in report.text()
    assert "1 waived" in report.summary()


def test_a_waiver_lifts_its_own_rule_only() -> None:
    report = check([rule("ZOO001"), rule("ZOO002")], facts_of({"a": False}), [waiver("ZOO001")])
    assert [f.rule.id for f in report.select(Outcome.VIOLATED)] == ["ZOO002"]


def test_a_waiver_of_a_rule_that_holds_changes_nothing() -> None:
    report = check([rule()], facts_of({"a": True}), [waiver("ZOO001")])
    assert only(report) is Outcome.OK
    assert "waived" not in report.text()
    assert "note: the waiver of ZOO001 lifts nothing: the rule holds" in report.text()
    assert report.exit_code(strict=True) is ExitCode.CLEAN
    assert not report.remarkable


def test_an_unknown_waiver_is_a_warning_with_the_nearest_id() -> None:
    report = check([rule()], facts_of({"a": True}), [waiver("ZOO01")])
    assert report.exit_code() is ExitCode.CLEAN
    assert report.exit_code(strict=True) is ExitCode.WARNINGS
    assert "did you mean 'ZOO001'?" in report.text()


CASES = [
    # severity, fact, plain, strict
    (Severity.ERROR, False, ExitCode.ERRORS, ExitCode.ERRORS),
    (Severity.ERROR, None, ExitCode.UNVERIFIED, ExitCode.UNVERIFIED),
    (Severity.ERROR, True, ExitCode.CLEAN, ExitCode.CLEAN),
    (Severity.WARNING, False, ExitCode.CLEAN, ExitCode.WARNINGS),
    (Severity.WARNING, None, ExitCode.CLEAN, ExitCode.WARNINGS),
    (Severity.NOTE, False, ExitCode.CLEAN, ExitCode.CLEAN),
    (Severity.NOTE, None, ExitCode.CLEAN, ExitCode.CLEAN),
]


@pytest.mark.parametrize(("severity", "value", "plain", "strict"), CASES)
def test_exit_codes(severity: Severity, value: bool | None, plain: ExitCode, strict: ExitCode) -> None:
    facts = facts_of({} if value is None else {"a": value})
    report = check([rule(severity=severity)], facts)
    assert report.exit_code() is plain
    assert report.exit_code(strict=True) is strict
    assert report.prevents_start is (plain is not ExitCode.CLEAN)


def test_the_numbers_of_the_exit_codes_are_a_promise() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "CLEAN": 0,
        "WARNINGS": 1,
        "ERRORS": 2,
        "UNVERIFIED": 3,
        "BROKEN_PLUGIN": 4,
    }
    assert ExitCode.worst(ExitCode.WARNINGS, ExitCode.UNVERIFIED) is ExitCode.UNVERIFIED
    assert ExitCode.worst(ExitCode.ERRORS, ExitCode.UNVERIFIED) is ExitCode.ERRORS
    assert ExitCode.worst(ExitCode.ERRORS, ExitCode.BROKEN_PLUGIN) is ExitCode.BROKEN_PLUGIN
    assert ExitCode.worst() is ExitCode.CLEAN


def test_the_report_as_json_says_the_same() -> None:
    report = check(
        [rule("ZOO001", message="a is {a}"), rule("ZOO002", require=Path("b") == (1, 2))],
        facts_of({"a": False, "b": (1, 3)}),
        [waiver("ZOO002"), waiver("XYZ001")],
    )
    data = json.loads(json.dumps(report.to_json()))
    first, second = data["findings"]
    assert first["outcome"] == "violated"
    assert first["message"] == "a is False"
    assert first["facts"] == [{"path": "a", "value": False, "origin": "test"}]
    assert second["waiver"] == {"reason": "bench only", "origin": "c.yaml:9:3"}
    assert second["facts"][0]["value"] == [1, 3]
    assert [(w["rule"], w["state"]) for w in data["waivers"]] == [("ZOO002", "used"), ("XYZ001", "unknown")]
