"""What becomes of a waiver that lifts nothing."""

from __future__ import annotations

import pytest

from kvferry.api import Example, Fact, Known, Path, Rule, Severity
from kvferry.compat import ExitCode, OwnedRule, Report, Waiver, WaiverState, check


def judge(
    value: bool | None, *, applies: bool = True, waivable: bool = True, waived: str = "ZOO001"
) -> Report:
    rule = Rule(
        id="ZOO001",
        severity=Severity.ERROR,
        when=Known("on"),
        require=Path("good") == True,  # noqa: E712
        message="it is not good",
        fix="make it good",
        source="design",
        examples=(Example(facts={}, passes=True),),
        waivable=waivable,
    )
    values = {"on": True if applies else None, "good": value}
    facts = {
        path: Fact(path=path, value=value, origin="c.yaml:1:1")
        for path, value in values.items()
        if value is not None
    }
    waiver = Waiver(rule_id=waived, reason="bench only", origin="c.yaml:9:3")
    return check([OwnedRule(rule=rule, owner="zoo")], facts, [waiver])


CASES = [
    # value, applies, waivable, waived -> state, plain, strict
    (False, True, True, "ZOO001", WaiverState.USED, ExitCode.CLEAN, ExitCode.CLEAN),
    (None, True, True, "ZOO001", WaiverState.USED, ExitCode.CLEAN, ExitCode.CLEAN),
    (True, True, True, "ZOO001", WaiverState.HOLDS, ExitCode.CLEAN, ExitCode.CLEAN),
    (False, False, True, "ZOO001", WaiverState.NOT_APPLICABLE, ExitCode.CLEAN, ExitCode.CLEAN),
    (False, True, False, "ZOO001", WaiverState.REFUSED, ExitCode.ERRORS, ExitCode.ERRORS),
    (None, True, False, "ZOO001", WaiverState.REFUSED, ExitCode.UNVERIFIED, ExitCode.UNVERIFIED),
    (True, True, False, "ZOO001", WaiverState.REFUSED, ExitCode.CLEAN, ExitCode.WARNINGS),
    (True, True, True, "ZOO009", WaiverState.UNKNOWN, ExitCode.CLEAN, ExitCode.WARNINGS),
]


@pytest.mark.parametrize(("value", "applies", "waivable", "waived", "state", "plain", "strict"), CASES)
def test_every_state_has_its_words_and_its_code(
    value: bool | None,
    applies: bool,
    waivable: bool,
    waived: str,
    state: WaiverState,
    plain: ExitCode,
    strict: ExitCode,
) -> None:
    report = judge(value, applies=applies, waivable=waivable, waived=waived)
    (judged,) = report.waivers
    assert judged.state is state
    assert report.exit_code() is plain
    assert report.exit_code(strict=True) is strict
    # Wherever the waiver ends up, the reader sees its reason and its place.
    assert "bench only" in report.text()
    assert "c.yaml:9:3" in report.text()
    assert report.to_json()["waivers"] == [
        {"rule": waived, "reason": "bench only", "origin": "c.yaml:9:3", "state": state.value}
    ]


def test_a_rule_that_cannot_be_waived_stays_an_error_and_the_waiver_is_told() -> None:
    text = judge(False, waivable=False).text()
    assert text.startswith("error[ZOO001] it is not good\n")
    assert "warning: the waiver of ZOO001 lifts nothing: this rule cannot be waived\n" in text
    assert text.endswith("1 check: 1 error, 1 warning")


def test_a_start_has_nothing_to_log_about_a_waiver_that_is_not_needed_here() -> None:
    assert not judge(True).remarkable
    assert not judge(False, applies=False).remarkable
    assert judge(False).remarkable
    assert judge(True, waived="ZOO009").remarkable
